"""The Triton kernels as machine code for GPUs that need not be there: registers, spills, memory.

Nothing runs on a GPU; see `machine_code.py`.
"""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import pytest
from machine_code import Code, compilers, overwritten, read_nvidia

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
]

GPUS: dict[str, tuple[str, int | str, int]] = {  # (backend, architecture, threads of a warp)
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
LARGE = ("sm_90", "sm_100")  # with bulk copies
SHARED = {"sm_80": 99, "sm_90": 227, "sm_100": 227, "gfx942": 64}  # KiB; 99 is that of sm_86
PRODUCTS = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx942": "v_mfma"}
LOOPS = {"forward": 2, "keys": 3, "queries": 2}  # with and without a mask
HEADDIMS = (64, 128)

# What a launch passes: causal, bf16, grouped heads, one step, contiguous tensors.
FLAGS = {
    "EVEN": True,
    "SHORT_DOCS": False,
    "WINDOW": False,
    "SOFTCAP": False,
    "ALIBI": False,
    "DROPOUT": False,
    "SINK": False,
    "RESULT": True,
    "FRESH": True,
    "UPCAST": False,
}
POINTERS = {
    **dict.fromkeys(("out_ptr", "lse_ptr", "stats_ptr"), "*fp32"),
    **dict.fromkeys(("result_ptr", "dq_ptr", "dk_ptr", "dv_ptr"), "*bf16"),
    **dict.fromkeys(("slopes_ptr", "seed_ptr", "blocks_ptr", "tiles_ptr"), "*i32"),
}
NUMBERS: dict[str, float] = {
    "scale": 0.125,
    "softcap": 1.0,
    "keep_scale": 1.0,
    "threshold": 0,
    "head_start": 0,
    "nheads": 20,
    "nheads_k": 5,
    "group": 4,
    "count": 100,
    "section": 4,
    "l_row": 1,
    "s_row": 2,
}
MULTIPLES = re.compile(  # of 16: head dimensions and strides
    r"dv?|[qkvo]_(stride|[bh](row|col))|(o|l|r|s|dq|dk|dv)_(batch|row|head)|slopes_stride"
)


@dataclass(frozen=True)
class Case:
    """One kernel for one GPU.

    Attributes:
        registers: instead of those of the block sizes, if not 0.
        to_state: a step that is not the last one.
        fp32: in place of bf16.
    """

    gpu: str
    kernel: str
    headdim: int
    registers: int = 0
    to_state: bool = False
    fp32: bool = False

    def __str__(self) -> str:
        words = ["to_state"] * self.to_state + ["fp32"] * self.fp32
        return "-".join([self.gpu, self.kernel, str(self.headdim), *words])


CASES = [
    *(Case(gpu, kernel, d) for gpu in GPUS for kernel in LOOPS for d in HEADDIMS),
    *(Case("sm_90", "forward", d, to_state=True) for d in HEADDIMS),
]
FP32 = [
    Case(gpu, kernel, d, fp32=True)
    for gpu in ("sm_80", "sm_90")
    for kernel, d in (("forward", 64), ("forward", 128), ("forward", 256), ("keys", 128))
]
STARVED = Case("sm_90", "keys", 128, registers=96)


def _signature(
    names: list[str], constants: dict[str, Any], tensors: dict[str, str], hip: bool
) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[list[Any]]]]:
    """Types, constants and attributes as Triton derives them from a launch's arguments."""
    from ring_flash_attn.kernels.triton.scores import ANY_NUMBER

    types: dict[str, str] = {}
    values: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    aligned: list[Any] = ["tt.divisibility", 16]
    near: list[Any] = ["tt.pointer_range", 32]  # AMD: a tensor of less than 2 GiB
    for i, name in enumerate(names):
        if name in constants:
            types[name], values[name] = "constexpr", constants[name]
        elif name in tensors:
            types[name] = tensors[name]
            if types[name].startswith("*"):
                attributes[i,] = [aligned, near] if hip else [aligned]
        else:
            assert name in NUMBERS or MULTIPLES.fullmatch(name), f"what is {name}?"
            number = NUMBERS.get(name, 16)
            if isinstance(number, float):
                types[name] = "fp32"
            elif number == 1 and name not in ANY_NUMBER:
                types[name], values[name] = "constexpr", 1
            else:
                types[name] = "i32"
                if number % 16 == 0 and name not in ANY_NUMBER:
                    attributes[i,] = [aligned]
    return types, values, attributes


def _compile(case: Case) -> Code:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ring_flash_attn.kernels.triton import backward, forward
    from ring_flash_attn.kernels.triton.config import _FP32, _HOPPER, _SMALL

    kernel = getattr(forward if case.kernel == "forward" else backward, f"{case.kernel}_kernel")
    assert isinstance(kernel, triton.JITFunction), "interpreted"
    tma = case.gpu in LARGE and not case.fp32
    blocks = (_FP32 if case.fp32 else _HOPPER if tma else _SMALL)[case.kernel, case.headdim]
    blocks = replace(blocks, registers=case.registers or blocks.registers)
    constants = {
        **FLAGS,
        "D": case.headdim,
        "DV": case.headdim,
        "TMA": tma,
        "BLOCK_M": blocks.rows,
        "BLOCK_N": blocks.columns,
        "STAGES": blocks.stages,
    }
    dtype = "*fp32" if case.fp32 else "*bf16"
    heights = {"q": blocks.rows, "k": blocks.columns, "v": blocks.columns, "dout": blocks.rows}
    matrices = {
        f"{name}_mat": f"tensordesc<bf16[{rows},{case.headdim}]>" if tma else dtype
        for name, rows in heights.items()
    }
    target = GPUTarget(*GPUS[case.gpu])
    names = kernel.arg_names
    if case.to_state:
        constants["RESULT"] = False
    pointers = {name: dtype if kind == "*bf16" else kind for name, kind in POINTERS.items()}
    signature = _signature(names, constants, pointers | matrices, target.backend == "hip")
    options: dict[str, int] = {"num_warps": blocks.warps}
    if blocks.registers and target.backend == "cuda":
        options["maxnreg"] = blocks.registers
    compiled = triton.compile(ASTSource(kernel, *signature), target=target, options=options)
    read = _read_amd if target.backend == "hip" else read_nvidia
    return read(compiled)


def _read_amd(compiled: Any) -> Code:
    text = compiled.asm["amdgcn"]

    def number(name: str) -> int:
        (found,) = re.findall(rf"^\s*\.{name}:\s*(\d+)$", text, re.MULTILINE)
        return int(found)

    return Code(
        compiled.metadata.shared,
        0,
        number("vgpr_count"),
        number("private_segment_fixed_size"),
        number("vgpr_spill_count"),  # scalar ones are kept in vector registers
        Counter(re.findall(r"^\s+(v_mfma)", text, re.MULTILINE)),
        [],
        [],
    )


@pytest.fixture(scope="module")
def compiled() -> Iterator[dict[Case, Future[Code]]]:
    with compilers() as pool:
        yield {case: pool.submit(_compile, case) for case in [*CASES, *FP32, STARVED]}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled(compiled: dict[Case, Future[Code]], case: Case) -> None:
    code = compiled[case].result()
    assert code.counts[PRODUCTS[case.gpu]] > 0
    assert code.shared <= SHARED[case.gpu] * 1024
    assert code.tensor <= 512
    if case.gpu == "gfx942":
        assert (code.spills, code.stack) == (0, 0)
        return
    assert code.registers <= 255
    assert len(code.loops) >= LOOPS[case.kernel]
    assert code.stores == 0, code.loops
    assert not code.overwritten
    if case.gpu == "sm_90":  # one product does not wait for the other
        assert code.counts["WARPGROUP.ARRIVE"] * 2 < code.counts["HGMMA"]


@pytest.mark.parametrize("case", FP32, ids=str)
def test_fp32_uses_the_registers_that_there_are(
    compiled: dict[Case, Future[Code]], case: Case
) -> None:
    """Few of the multiply-adds wait for a number from the stack."""
    code = compiled[case].result()
    assert code.shared <= SHARED[case.gpu] * 1024
    assert code.registers >= 160
    assert code.counts["LDL"] * 4 < code.counts["FFMA"]


@pytest.mark.parametrize("to_state", [False, True])
def test_products_and_copies_run_during_the_softmax(
    compiled: dict[Case, Future[Code]], to_state: bool
) -> None:
    """On sm_90 the whole blocks' p · v and the next copies are under way before it begins.

    A fifth of the speed depends on it, and small changes of the kernel undo it.
    """
    loops = compiled[Case("sm_90", "forward", 128, to_state=to_state)].result().loops
    whole = min(loops, key=len)  # without a mask
    softmax = whole.index("MUFU.EX2")
    assert "HGMMA" not in whole[softmax:]
    assert "UTMALDG" not in whole[softmax:]
    assert whole[:softmax].count("HGMMA") == 12
    assert whole[:softmax].count("UTMALDG") == 2


def test_overwritten_operands_are_seen() -> None:
    """The rounded p of the next block, in the registers of one that is still being multiplied."""
    loop = [
        "F2FP.BF16.F32.PACK_AB R120, R22, R15",
        "HGMMA.64x64x16.F32.BF16 R88, gdesc[UR36], R88, gsb0",
        "WARPGROUP.DEPBAR.LE gsb0, 0x0",
        "HGMMA.64x128x16.F32.BF16 R24, R120, gdesc[UR12].tnspB, R24, gsb0",
        "@!P0 BRA 0x0",
        "WARPGROUP.DEPBAR.LE gsb0, 0x0",
        "EXIT",
    ]
    assert overwritten([(16 * i, x) for i, x in enumerate(loop)]) == loop[:1]
    loop[0], loop[1], loop[2] = loop[1], loop[2], loop[0]
    assert overwritten([(16 * i, x) for i, x in enumerate(loop)]) == []


def test_spills_are_seen(compiled: dict[Case, Future[Code]]) -> None:
    """With too few registers the loops spill, and every product waits for the one before."""
    code = compiled[STARVED].result()
    assert all("STL" in loop for loop in code.loops)
    assert code.stores > 0
    assert code.counts["WARPGROUP.ARRIVE"] >= code.counts["HGMMA"]
