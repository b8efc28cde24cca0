"""The Hopper kernels as machine code; nothing runs on a GPU, see `machine_code.py`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
from machine_code import Code, compilers, read_nvidia

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

SHARED = 226 * 1024  # of 227 KiB one is for barriers of warps
FORWARD = {"WINDOW": False, "SOFTCAP": False, "SINK": False, "SHORT_DOCS": False}
FORWARD |= {"RESULT": True, "SINGLE_LAUNCH": True, "HALVES": False, "PACK_GQA": 1}
FORWARD |= {"PIECES": False}
CARRIED = {"RESULT": False, "SINGLE_LAUNCH": False}
BACKWARD = {"SOFTCAP": False, "SHORT_DOCS": False, "FRESH": True}


@dataclass(frozen=True)
class Case:
    """One kernel; flags that differ from those of a plain causal call."""

    kernel: str
    headdim: int
    headdim_v: int = 0
    dtype: str = "bf16"
    flags: dict[str, Any] = field(default_factory=dict, hash=False, compare=False)

    def __str__(self) -> str:
        name = f"{self.kernel}-{self.headdim}-{self.headdim_v or self.headdim}-{self.dtype}"
        return "-".join([name, *self.flags])


CASES = [
    *(Case("forward", d) for d in (32, 64, 128, 256)),
    Case("forward", 256, 128),
    Case("forward", 128, dtype="fp16", flags={"WINDOW": True, "SINK": True, **CARRIED}),
    Case("forward", 128, flags={"SINGLE_LAUNCH": False}),
    Case("forward", 128, flags={"SHORT_DOCS": True, "HALVES": True, **CARRIED}),
    Case("forward", 64, flags={"SOFTCAP": True, "SHORT_DOCS": True}),
    *(Case("forward", d, flags={"PACK_GQA": 8}) for d in (64, 256)),
    Case("forward", 128, flags={"PACK_GQA": 8, "WINDOW": True, "SHORT_DOCS": True, **CARRIED}),
    Case("forward", 128, flags={"PIECES": True, "PACK_GQA": 2, "SINGLE_LAUNCH": False}),
    Case("forward", 64, flags={"PIECES": True, "PACK_GQA": 8, "SHORT_DOCS": True, **CARRIED}),
    Case("forward", 256, flags={"PIECES": True, "SOFTCAP": True, **CARRIED}),
    *(Case("backward", d) for d in (32, 64, 128)),
    Case("backward", 256, flags={"DQ": False}),
    Case("backward", 256, 128),
    Case("backward", 128, 64, "fp16", {"FRESH": False}),
    *(Case("backward", d, flags={"SHORT_DOCS": True}) for d in (64, 128)),
    Case("backward", 256, 128, flags={"SHORT_DOCS": True}),
    Case("backward", 64, flags={"SOFTCAP": True, "SHORT_DOCS": True, "DQ": False}),
    *(Case("queries", d) for d in (64, 128, 256)),
    Case("queries", 64, 32, "fp16", {"SHORT_DOCS": True, "FRESH": False}),
]
# The backward pass of large heads needs all registers there are: blocks that need a mask have to
# put some away, and those that need none have the branch in their loop all the same. Of both
# consumers:
STORES = {
    ("backward", 64): 2,
    ("backward", 256): 24,
    ("queries", 256): 16,
}


def _compile(case: Case) -> Code:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from ring_flash_attn.kernels.triton.hopper import (
        backward,
        backward_wide,
        forward,
        host,
        queries,
    )
    from ring_flash_attn.kernels.triton.hopper.primitives import ANY_NUMBER

    elements = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32}
    d, dv = case.headdim, case.headdim_v or case.headdim
    sizes = host.backward_sizes(d, dv, "SOFTCAP" in case.flags)
    if case.kernel != "backward":
        tables = {"forward": host._FORWARD, "queries": host._QUERIES}
        sizes = tables[case.kernel][max(64, d, dv)]
    constants = {"D": d, "DV": dv, "STAGES": sizes.stages, "EVEN": True}

    def blocks(*shape: int, dtype: str = case.dtype) -> str:
        whole = [1] * (4 - len(shape)) + list(shape)
        layout = gl.NVMMASharedLayout.get_default_for(whole, elements[dtype])
        return f"tensordesc<{dtype}{whole},{layout!r}>"

    if case.kernel == "backward":
        wide = d > 128
        kernel = backward_wide.backward_wide_kernel if wide else backward.backward_kernel
        constants |= {"BLOCK_M": sizes.block, "DQ": True, **BACKWARD}
        constants |= {} if wide else {"OWN": True}
        types = {"q_desc": blocks(sizes.block, d), "do_desc": blocks(sizes.block, dv)}
        types |= {"k_desc": blocks(64, d), "v_desc": blocks(64, dv)}
        types |= {"dq_desc": blocks(*host.added(d, sizes.block), dtype="fp32")}
        types |= dict.fromkeys(("lse_desc", "delta_desc"), blocks(1, sizes.block, dtype="fp32"))
    else:
        heads = case.flags.get("PACK_GQA", 1)
        types = {"q_desc": blocks(heads, 64 // heads, d), "do_desc": blocks(64, dv)}
        types |= {"k_desc": blocks(sizes.block, d), "v_desc": blocks(sizes.block, dv)}
        constants |= {"BLOCK_N": sizes.block}
    if case.kernel == "forward":
        kernel = forward.forward_kernel
        constants |= {"ITEMS": 2 if d <= 128 else 1, **FORWARD}
    elif case.kernel == "queries":
        kernel = queries.queries_kernel
        constants |= BACKWARD
    constants |= case.flags
    grads = f"*{case.dtype}" if constants.get("FRESH", True) else "*fp32"
    types |= dict.fromkeys(("dq_ptr", "dk_ptr", "dv_ptr"), grads)
    types |= {"result_ptr": f"*{case.dtype}", "delta_ptr": "*fp32"}
    types |= {"out_ptr": "*fp32", "lse_ptr": "*fp32", "blocks_ptr": "*i32", "tiles_ptr": "*i32"}
    types |= {"counter_ptr": "*i32", "progress_ptr": "*i32"}
    types |= {"scale": "fp32", "softcap": "fp32"}
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        if signature[name][0] == "*" or (signature[name] == "i32" and name not in ANY_NUMBER):
            attributes[i,] = [["tt.divisibility", 16]]
    source = GluonASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": 4, "maxnreg": host._REGISTERS}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return read_nvidia(compiled)


@pytest.fixture(scope="module")
def compiled() -> Iterator[dict[str, Future[Code]]]:
    with compilers() as pool:
        yield {str(case): pool.submit(_compile, case) for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled(compiled: dict[str, Future[Code]], case: Case) -> None:
    code = compiled[str(case)].result()
    assert code.shared <= SHARED
    assert code.stores <= STORES.get((case.kernel, case.headdim), 0)
    assert not code.overwritten
    assert code.counts["WARPGROUP.ARRIVE"] * 3 < code.counts["HGMMA"], (
        "products wait for each other"
    )
    assert code.counts["UTMALDG"] > 0
    adds = case.kernel == "backward" and case.flags.get("DQ", True)
    assert (code.counts["UTMAREDG"] > 0) == adds
    votes = [loop[loop.index("VOTE") :] for loop in code.loops if "VOTE" in loop]
    assert len(votes) == (2 if case.kernel == "forward" else 0), "one of each consumer"
    for behind in votes:  # where warps of a group go different ways
        assert not {"BAR", "LDS", "STS", "STSM"} & set(behind)
