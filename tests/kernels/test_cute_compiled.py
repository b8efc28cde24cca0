"""The CuTe DSL kernel as machine code for sm_90a; nothing runs on a GPU, see `machine_code.py`."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest
from machine_code import Code, compilers, read_nvidia

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("cutlass", "tvm_ffi", "triton")  # triton disassembles
]

CARRIED = {"single": False, "sink": True, "window": True, "short": True, "even": False}


@dataclass(frozen=True)
class Case:
    """A kernel; flags that differ from those of a plain call."""

    d: int
    dv: int = 0
    flags: dict[str, Any] = field(default_factory=dict, hash=False, compare=False)

    def __str__(self) -> str:
        return "-".join([f"{self.d}-{self.dv or self.d}", *self.flags])


PLAIN = [Case(64), Case(80), Case(96), Case(128), Case(192, 128), Case(192), Case(256)]
THREE = {"consumers": 3}
FEATURES = [
    *(
        Case(d, flags={**THREE, **more})
        for d in (64, 80, 96)
        for more in ({}, CARRIED, {"softcap": True, "window": True})
    ),
    *(Case(each.d, each.dv, CARRIED) for each in PLAIN),
    *(Case(each.d, each.dv, {"softcap": True, "window": True}) for each in PLAIN),
    *(Case(each.d, each.dv, {"dropout": True, **CARRIED}) for each in PLAIN),
    *(Case(each.d, each.dv, {"alibi": True, "single": False, "result": False}) for each in PLAIN),
    Case(128, flags={"alibi": True, "dropout": True, "softcap": True, **CARRIED}),
    Case(128, flags={"dtype": "fp16"}),
    Case(128, 64),
]
CASES = PLAIN + FEATURES
# Where an item begins and ends, three registers go to memory; never in a loop.
WIDE_AND_CARRIED = [str(case) for case in FEATURES if case.d == 256 and "single" in case.flags]


def _compile(case: Case) -> Code:
    os.environ["CUTE_DSL_ARCH"] = "sm_90a"
    from ring_flash_attn.kernels.cute.compiled import compile_forward
    from ring_flash_attn.kernels.cute.sizes import forward_sizes, width_of
    from ring_flash_attn.kernels.cute.traits import Traits

    d, dv = case.d, case.dv or case.d
    many = "dropout" in case.flags, "alibi" in case.flags
    wanted = case.flags.get("consumers", 2)
    found = (each for each, _ in forward_sizes(d, dv, *many) if each.consumers == wanted)
    sizes = next(found)
    traits = Traits(d=d, dv=dv, width=width_of(d), **{**sizes._asdict(), **case.flags})
    with tempfile.TemporaryDirectory() as folder:
        compile_forward(traits, f"--keep-cubin --dump-dir {folder}")
        (cubin,) = Path(folder).glob("*.cubin")
        metadata = SimpleNamespace(shared=traits.shared, tmem_size=0)
        return read_nvidia(SimpleNamespace(asm={"cubin": cubin.read_bytes()}, metadata=metadata))


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Code]]]:
    wanted = {item.callspec.id for item in request.session.items if hasattr(item, "callspec")}
    with compilers() as pool:
        yield {str(case): pool.submit(_compile, case) for case in CASES if str(case) in wanted}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "case", [*PLAIN, *(pytest.param(each, marks=pytest.mark.slow) for each in FEATURES)], ids=str
)
def test_compiled(compiled: dict[str, Future[Code]], case: Case) -> None:
    code = compiled[str(case)].result()
    assert code.shared <= 227 * 1024
    share = 128 if "consumers" in case.flags else 168
    assert code.registers == share, "groups of warps exchange them later"
    assert code.stack <= (16 if str(case) in WIDE_AND_CARRIED else 0), (
        "registers that went to memory"
    )
    assert code.stores == 0
    assert not code.overwritten
    assert code.counts["WARPGROUP.ARRIVE"] * 3 < code.counts["HGMMA"], (
        "products wait for each other"
    )
    assert code.counts["UTMALDG"] > 0
    loops = 3 if case.flags.get("window") else 2
    assert len(code.loops) == loops, "all consumers run the same code"
    lazy = not {"dropout", "alibi"} & set(case.flags)
    votes = [loop[loop.index("VOTE") :] for loop in code.loops if "VOTE" in loop]
    assert len(votes) == lazy
    for behind in votes:  # where warps of a group go different ways
        assert not {"BAR", "LDS", "STS", "STSM"} & set(behind)


def test_stored_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process takes the object file; one that is broken is compiled again."""
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    monkeypatch.setenv("RFA_CUTE_CACHE", str(tmp_path))
    from ring_flash_attn.kernels.cute import compiled
    from ring_flash_attn.kernels.cute.traits import Traits

    traits = Traits(d=64, dv=64, width=64, block=64)
    compiled._forward_kernel.cache_clear()
    compiled.forward_kernel(traits)
    (stored,) = tmp_path.rglob("*.o")
    made = stored.stat().st_mtime_ns
    monkeypatch.setattr(compiled, "compile_forward", None)  # may not be called
    compiled._forward_kernel.cache_clear()
    launch = compiled.forward_kernel(traits)
    with pytest.raises(TypeError, match="46 parameters"):
        launch(1)
    assert stored.stat().st_mtime_ns == made
    stored.write_bytes(b"nothing")
    assert compiled._load(stored, "rfa_forward") is None


def test_a_folder_that_may_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user, say, whose HOME is root's: kernels are compiled, and not stored."""
    from ring_flash_attn.kernels.cute import compiled, stored

    def denied(*arguments: Any, **options: Any) -> None:
        raise PermissionError("permission denied")

    stored.fingerprint()  # reads the kernels' sources, which may be read
    monkeypatch.setenv("RFA_CUTE_CACHE", "/not-ours")
    monkeypatch.setattr(os, "stat", denied)
    monkeypatch.setattr(stored.Path, "mkdir", denied)
    assert compiled.load_or_compile("forward", "traits", lambda: "compiled") == "compiled"


def test_one_thread_compiles_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each kernel once: two threads in CuTe DSL end the process."""
    from ring_flash_attn.kernels.cute import compiled

    monkeypatch.setenv("RFA_CUTE_CACHE", "")
    compiling = Lock()
    made: list[Any] = []

    def compile_one(traits: Any) -> str:
        assert compiling.acquire(blocking=False), "two at a time"
        made.append(traits)
        time.sleep(0.02)
        compiling.release()
        return f"kernel of {traits}"

    monkeypatch.setattr(compiled, "compile_forward", compile_one)
    monkeypatch.setattr(compiled, "compile_backward", compile_one)
    kernels = compiled.forward_kernel, compiled.backward_kernel
    wanted = [(kernel, f"{n} of this test") for kernel in kernels for n in range(3)] * 2
    with ThreadPoolExecutor(len(wanted)) as pool:
        found = list(pool.map(lambda each: each[0](each[1]), wanted))
    assert found == [f"kernel of {traits}" for _, traits in wanted]
    assert len(made) == 6


@pytest.mark.parametrize("columns", [80, 96, 128, 176, 256])
def test_order_of_registers(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """A fragment as a flat list is what WGMMA reads and writes, of the rows and columns named."""
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    import cutlass
    import cutlass.cute as cute

    from ring_flash_attn.kernels.cute import primitives as ours

    found: list[str] = []

    @cute.kernel
    def kernel() -> None:
        qk = ours.product_of(cutlass.BFloat16, columns, False, False)
        pv = ours.product_of(cutlass.BFloat16, columns, True, True)
        c = cute.make_rmem_tensor(qk.get_slice(0).partition_shape_C((64, columns)), cutlass.Float32)
        a = pv.get_slice(0).make_fragment_A(pv.get_slice(0).partition_shape_A((64, 32)))
        mine = ours.as_c(ours.accumulators(columns), columns)
        left = [ours.as_a(ours.operand(32, cutlass.BFloat16), n) for n in range(2)]
        found.extend(str(each.layout) for each in (c, mine, a[None, None, 1], left[1]))
        found.extend(str(each) for each in (qk.tv_layout_C_tiled, pv.tv_layout_A_tiled))

    @cute.jit
    def launch() -> None:
        kernel().launch(grid=(1, 1, 1), block=(128, 1, 1))

    cute.compile(launch, options="--gpu-arch sm_90a")
    c, mine, a, left, threads_c, threads_a = found
    assert c == mine
    assert a == left
    # (lane % 4, lane // 4, warp) and (e, r, g), as row + 64 · column
    assert threads_c == f"((4,8,4),((2,2,{columns // 8}),(1,1))):((128,1,16),((64,8,512),(0,0)))"
    assert threads_a == "((4,8,4),((2,2,2),(1,1))):((128,1,16),((64,8,512),(0,0)))"


def test_it_says_that_the_compiler_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once."""
    from ring_flash_attn.kernels.cute import compiled

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    compiled.warn_of_old_libraries.cache_clear()
    monkeypatch.setattr(compiled, "version", missing)
    with pytest.warns(UserWarning, match=r"libs-cu13 is not installed.*ring-flash-attn\[cute\]"):
        compiled.warn_of_old_libraries()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled.warn_of_old_libraries()
    monkeypatch.setattr(compiled, "version", lambda name: "4.8.1")
    compiled.warn_of_old_libraries.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled.warn_of_old_libraries()
