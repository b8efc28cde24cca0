"""Attention alone, a single head: forward and backward times, and memory before the backward."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...bench.measure import Guard, clear
from ...bench.results import CANNOT, Row
from ...bench.timing import (
    Prepared,
    Samples,
    Stopwatch,
    Timing,
    Work,
    interleaved,
    on_device,
    synchronize,
)
from ...bench.workload import BACKWARD, FORWARD, Workload
from .. import device as where
from .config import COMPILED, OURS, STANDARD, TILED, TRITON

KIND = "lab attention"
_TILE = 256  # of tiles in PyTorch on a GPU: each one costs launches, and memory is no limit
BEFORE_BACKWARD = "before_backward_bytes"
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # (batch, rows, d)
Report = Callable[[str], None]


def make_attention(name: str, causal: bool, device: torch.device) -> Attention:
    """One of `IMPLEMENTATIONS`; NotImplementedError with the reason if it is not there."""
    if name in (STANDARD, COMPILED):
        from ..steps.s03_standard_attention import standard_attention

        def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return standard_attention(q, k, v, causal)[0]

        if name == STANDARD:
            return standard
        torch.compiler.reset()  # after 8 shapes torch would give up, and run it uncompiled
        compiled: Any = torch.compile(standard, dynamic=False)
        return compiled
    if name == OURS:
        from ...api import flash_attn_func

        kernel = "auto" if device.type == "cuda" else "reference"  # and no interpreted one

        def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x[:, :, None] for x in (q, k, v))
            found: Any = flash_attn_func(q, k, v, causal=causal, kernel=kernel)
            return found[:, :, 0]

        return ours
    if name == TILED:
        return _tiled(causal, _TILE if device.type == "cuda" else 64)
    interpreted = where.interpreted()
    if device.type == "cpu" and not interpreted:
        text = "Triton compiles for the GPU here; with TRITON_INTERPRET=1 it runs on the CPU"
        raise NotImplementedError(text)
    if device.type == "cuda" and interpreted:
        raise NotImplementedError("TRITON_INTERPRET=1 would interpret it: unset it on a GPU")
    try:
        from ..steps.s08_triton_backward import TritonAttention
    except ImportError as error:
        raise NotImplementedError(str(error)) from None
    return lambda q, k, v: TritonAttention.apply(q, k, v, causal)


def _tiled(causal: bool, block: int) -> Attention:
    """Steps 5 and 6, with tiles of `block` × `block`."""
    from ..steps.s05_tiled_forward import tiled_forward
    from ..steps.s06_backward import tiled_backward

    class Tiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, lse = tiled_forward(q, k, v, causal, block, block)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
            q, k, v, out, lse = ctx.saved_tensors
            return tiled_backward(q, k, v, out, lse, grads[0], causal, block)

    return Tiled.apply


def measure_attention(
    names: Sequence[str],
    workload: Workload,
    device: torch.device,
    passes: int = 100,
    seconds: float = 10.0,
    report: Report = lambda line: None,
) -> list[Row]:
    """Two rows for each implementation; what fails says why, and the rest go on.

    Forward passes keep what backward needs, as in training. If `passes` would take more than
    `seconds`, fewer are timed; `total_ms` is the time of `passes` runs of the median.
    """
    if TRITON in names:
        where.device()  # without a GPU it asks for the interpreter, before anyone imports triton
    clear(device)
    rows: list[Row] = []
    with on_device(device):
        watch = Stopwatch(device)
        held = held_before(device, workload.torch_dtype)
        making = Guard()
        qkv, dout = making.attempt(lambda: workload.tensors(device)) or ((), None)
        leaves = [x[:, :, 0].detach().requires_grad_() for x in qkv]
        for name in names:
            trial = _HeadTrial(name, device, making.failed)
            if dout is not None:
                report(f"preparing {name}")
                trial.prepare(workload.causal, leaves, dout[:, :, 0], held)
                report(f"timing {name}")
                trial.time(watch, passes, seconds)
            rows += trial.rows(workload, passes)
            clear(device)
    return rows


class _HeadTrial:
    """One implementation: a guard for each pass, since backward may fail where forward runs."""

    def __init__(self, name: str, device: torch.device, failed: str | None) -> None:
        self.name, self.device = name, device
        self.guards = {FORWARD: Guard(failed=failed), BACKWARD: Guard(failed=failed)}
        self.works: dict[str, Work] = {}
        self.samples: dict[str, Samples] = {}
        self.before_backward: int | None = None  # bytes
        self.peak: int | None = None

    def prepare(self, causal: bool, leaves: Sequence[Tensor], dout: Tensor, held: int) -> None:
        """Compile it, find its memory, make what is timed."""
        forward, backward = self.guards.values()
        try:
            attention = make_attention(self.name, causal, self.device)
        except NotImplementedError as error:
            forward.failed = backward.failed = f"{CANNOT}{error}"
            return

        def run() -> Tensor:
            return attention(leaves[0], leaves[1], leaves[2])

        def gradients(out: Tensor) -> object:
            return torch.autograd.grad(out, leaves, dout)

        def prepared() -> Work:
            out = run()
            return lambda: gradients(out)

        def find_memory() -> None:
            if self.name != TILED:  # which compiles nothing, and takes long
                run()  # compiles, and fills caches
            self.before_backward = memory_in_use(run, (*leaves, dout), self.device, held)

        def find_peak() -> None:
            if self.name != TILED:
                gradients(run())
            self.peak = peak_in_use(lambda: gradients(run()), self.device, held)

        forward.attempt(find_memory)
        clear(self.device)
        backward.failed = forward.failed
        backward.attempt(find_peak)
        clear(self.device)
        self.works = {FORWARD: run, BACKWARD: Prepared(prepared)}

    def time(self, watch: Stopwatch, passes: int, seconds: float) -> None:
        """Each pass that did not fail."""
        for way, guard in self.guards.items():
            work = self.works.pop(way, None)
            if work is not None:
                found = guard.attempt(partial(_time, way, work, watch, passes, seconds))
                self.samples |= {way: found} if found else {}

    def rows(self, workload: Workload, passes: int) -> list[Row]:
        """Of both passes."""
        found = []
        for way, guard in self.guards.items():
            row: dict[str, Any] = {"failed": guard.failed}
            values: dict[str, float] = {}
            if way in self.samples:
                runs = self.samples[way]
                median = runs.median
                values = {"total_ms": passes * median.device, "host_ms": median.host}
                row["samples_ms"] = runs.device
                row["tflops"] = workload.flops(way) / median.device / 1e9
            if way == BACKWARD:
                row["peak_bytes"] = self.peak
                if self.before_backward is not None:
                    values[BEFORE_BACKWARD] = self.before_backward
            found.append(Row(KIND, self.name, way, workload.to_dict(), values=values, **row))
        return found


def _time(way: str, work: Work, watch: Stopwatch, passes: int, seconds: float) -> Samples:
    """As many runs as wanted, if there is time for them; one in any case."""
    first = watch.time(work)
    runs = int(seconds * 1e3 / max(first.device, 1e-6))
    if runs >= passes:
        return interleaved({way: work}, watch, passes, lambda line: None)[way]
    return _time_each(work, watch, runs, first)


def _time_each(work: Work, watch: Stopwatch, runs: int, tried: Timing) -> Samples:
    """One run after the other, with no more warm-up than the run that was tried."""
    timed = [watch.time(work, tried.host) for _ in range(runs)] or [tried]
    return Samples(tuple(each.device for each in timed), tuple(each.host for each in timed))


# Memory.


def allocated(device: torch.device) -> int:
    """Bytes on a GPU; the CPU does not count them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def held_before(device: torch.device, dtype: torch.dtype) -> int:
    """Bytes that are allocated before anything is measured, with the workspaces of cuBLAS.

    At the first product of a thread, cuBLAS takes one out of torch's allocator (32 MiB on Hopper)
    and keeps it. So there is a product in this thread and one in autograd's, of either kind.
    """
    _multiply(device, dtype)
    gc.collect()
    synchronize(device)
    return allocated(device)


def _multiply(device: torch.device, dtype: torch.dtype) -> None:
    for shape in ((16, 16), (1, 16, 16)):  # mm, bmm
        x = torch.ones(shape, dtype=dtype, device=device, requires_grad=True)
        torch.autograd.grad((x @ x).sum(), x)


def memory_in_use(
    forward: Callable[[], Tensor], inputs: Sequence[Tensor], device: torch.device, held: int = 0
) -> int:
    """Bytes between forward and backward: inputs, output, and what is kept for backward.

    On a GPU what is allocated, less what was `held` before the inputs were made. On the CPU, which
    does not count, every tensor that autograd keeps; two that share their memory count once.
    """
    if device.type == "cuda":
        gc.collect()
        synchronize(device)
        out = forward()
        synchronize(device)
        found = allocated(device) - held
        del out
        return found
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = forward()
    for x in (*inputs, out):
        keep(x)
    return sum(kept.values())


def peak_in_use(work: Work, device: torch.device, held: int) -> int | None:
    """Most that is allocated at a time, inputs and results with it; None on the CPU."""
    if device.type != "cuda":
        return None
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - held
