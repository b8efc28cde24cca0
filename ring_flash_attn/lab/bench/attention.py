"""Attention alone, a single head: forward and backward times, and memory before the backward."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...bench.measure import Guard, clear, reason
from ...bench.results import CANNOT, Row
from ...bench.timing import Prepared, Samples, Stopwatch, Work, interleaved, on_device, synchronize
from ...bench.workload import BACKWARD, FORWARD, Workload
from .. import device as where
from .config import COMPILED, OURS, STANDARD, TILED, TRITON

KIND = "lab attention"
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
    function = _course_function(name, device)
    return lambda q, k, v: function.apply(q, k, v, causal)


def _course_function(name: str, device: torch.device) -> Any:
    """The torch.autograd.Function that the course asks for."""
    if name == TRITON:
        interpreted = where.interpreted()
        if device.type == "cpu" and not interpreted:
            text = "Triton compiles for the GPU here; with TRITON_INTERPRET=1 it runs on the CPU"
            raise NotImplementedError(text)
        if device.type == "cuda" and interpreted:
            raise NotImplementedError("TRITON_INTERPRET=1 would interpret it: unset it on a GPU")
    kind = {TILED: "pytorch", TRITON: "triton"}[name]
    try:
        adapters = import_module("ring_flash_attn.lab.adapters")
        return getattr(adapters, f"get_flashattention_autograd_function_{kind}")()
    except ImportError as error:
        text = f"ring_flash_attn.lab.adapters has no {name} attention here: {error}"
        raise NotImplementedError(text) from None


def measure_attention(
    names: Sequence[str],
    workload: Workload,
    device: torch.device,
    passes: int = 100,
    report: Report = lambda line: None,
) -> list[Row]:
    """Two rows for each implementation, which take turns; what fails says why, the rest go on.

    Forward passes keep what backward needs, as in training. One that is far slower than the others
    runs fewer times than `passes`; `total_ms` is the time of `passes` runs of the median.
    """
    if TRITON in names:
        where.device()  # without a GPU it asks for the interpreter, before anyone imports triton
    trials = {name: _HeadTrial(name, device) for name in names}
    samples: dict[tuple[str, str], Samples] = {}
    clear(device)
    with on_device(device):
        held = allocated(device)
        try:
            qkv, dout = workload.tensors(device)
            leaves = [x[:, :, 0].detach().requires_grad_() for x in qkv]
            for each in trials.values():
                report(f"preparing {each.name}")
                each.prepare(workload.causal, leaves, dout[:, :, 0], held)
                clear(device)
            works = {
                (each.name, way): work
                for way in (FORWARD, BACKWARD)
                for each in trials.values()
                if (work := each.works.get(way)) is not None
            }
            if works:
                samples = interleaved(works, Stopwatch(device), passes, report)
        except Exception as error:  # whatever it is: the next cell may do
            for each in trials.values():
                for guard in each.guards.values():
                    guard.failed = guard.failed or reason(error)
        finally:
            for each in trials.values():
                each.works.clear()  # they hold the tensors
    return [row for each in trials.values() for row in each.rows(workload, passes, samples)]


class _HeadTrial:
    """One implementation: a guard for each pass, since backward may fail where forward runs."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self.guards = {FORWARD: Guard(), BACKWARD: Guard()}
        self.works: dict[str, Work] = {}
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

        def find_memory() -> None:
            run()  # compiles, and fills caches
            self.before_backward = memory_in_use(run, (*leaves, dout), self.device, held)

        def find_peak() -> None:
            gradients(run())
            self.peak = peak_in_use(lambda: gradients(run()), self.device, held)

        forward.attempt(find_memory)
        clear(self.device)
        backward.failed = forward.failed
        backward.attempt(find_peak)

        def prepared() -> Work:
            out = run()
            return lambda: gradients(out)

        works: dict[str, Work] = {FORWARD: run, BACKWARD: Prepared(prepared)}
        self.works = {
            way: guard.guarded(works[way])
            for way, guard in self.guards.items()
            if guard.failed is None
        }

    def rows(
        self, workload: Workload, passes: int, samples: dict[tuple[str, str], Samples]
    ) -> list[Row]:
        found = []
        for way, guard in self.guards.items():
            row: dict[str, Any] = {"failed": guard.failed}
            values: dict[str, float] = {}
            if guard.failed is None:
                runs = samples[self.name, way]
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


# Memory.


def allocated(device: torch.device) -> int:
    """Bytes on a GPU; the CPU does not count them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


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
    gc.collect()
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - held
