"""`measure`: implementations on one device, in turns; one that fails does not stop the rest."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from ..attention import QKV
from .exact import TENSORS, Exact, exact
from .peers import Attention, Implementation, find_implementation
from .results import BACKWARD, BOTH, FORWARD, PASSES, Row
from .timing import Prepared, Samples, Stopwatch, Work, interleaved, peak_bytes
from .workload import BACKWARD_FLOPS, Workload

FLOPS = {FORWARD: 1.0, BACKWARD: BACKWARD_FLOPS, BOTH: 1.0 + BACKWARD_FLOPS}
_FAILURES = (RuntimeError, ValueError, NotImplementedError, TypeError, AssertionError, ImportError)
Report = Callable[[str], None]
Result = TypeVar("Result")


def measure(
    names: Sequence[str],
    workload: Workload,
    device: torch.device,
    *,
    kind: str,
    repeats: int = 30,
    grad: bool = True,
    errors: bool = False,
    report: Report = lambda line: None,
) -> list[Row]:
    """Time implementations in interleaved rounds.

    Args:
        names: of `peers.implementation_names()`, or "auto" and "native".
        workload, device: what is computed, and where.
        kind: of the rows.
        repeats: rounds; short passes have several runs in each.
        grad: backward, and forward and backward together, as well.
        errors: compare out (and gradients) with fp64.
        report: is told what is being done.

    Returns:
        A row for each implementation and pass; for one that cannot do it, or fails, one row that
        says why.

    Raises:
        ValueError: there is no such implementation, or repeats is no positive number.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be positive, not {repeats}")
    found = [find_implementation(name, workload, device) for name in dict.fromkeys(names)]
    passes = PASSES if grad else (FORWARD,)
    with _on(device):
        stage = _Stage(workload, device, passes, report)
        contenders = [stage.enter(each) for each in found]
        able = [each for each in contenders if each.failed is None]
        samples = _time(able, Stopwatch(device), passes, repeats, report) if able else {}
        if errors and able:
            stage.compare(able)
    return [row for each in contenders for row in each.rows(kind, workload, passes, samples)]


@dataclass
class _Contender:
    """One implementation at work.

    Attributes:
        name: of it.
        failed: why it cannot go on.
        works: by pass.
        peaks: memory by pass.
        errors: by tensor.
    """

    name: str
    failed: str | None = None
    works: dict[str, Work] = field(default_factory=dict)
    peaks: dict[str, int | None] = field(default_factory=dict)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)

    def guarded(self, work: Work) -> Work:
        """The work, until it fails; then nothing."""
        if not isinstance(work, Prepared):
            return lambda: self.attempt(work)

        def prepare() -> Work:
            ready = self.attempt(work.prepare)
            return _nothing if ready is None else self.guarded(ready)

        return Prepared(prepare)

    def attempt(self, work: Callable[[], Result]) -> Result | None:
        """What it returns; None if it fails or has failed before."""
        if self.failed is not None:
            return None
        try:
            return work()
        except _FAILURES as error:
            self.failed = _reason(error)
            return None

    def rows(
        self,
        kind: str,
        workload: Workload,
        passes: Sequence[str],
        samples: dict[tuple[str, str], Samples],
    ) -> Iterator[Row]:
        """One for each pass, or one that says why there is none."""
        if self.failed is not None:
            yield Row(kind, self.name, passes[-1], workload.to_dict(), failed=self.failed)
            return
        for each in passes:
            runs = samples[self.name, each]
            yield Row(
                kind,
                self.name,
                each,
                workload.to_dict(),
                {},
                runs.device,
                FLOPS[each] * workload.flops / runs.median.device / 1e9,
                self.peaks[each],
                {"host_ms": runs.median.host},
                self.errors if each == passes[-1] else {},
            )


class _Stage:
    """Tensors that all contenders share."""

    def __init__(
        self, workload: Workload, device: torch.device, passes: Sequence[str], report: Report
    ) -> None:
        self._workload, self._device, self._passes = workload, device, passes
        self._report = report
        qkv, self._dout = workload.tensors(device)
        q, k, v = (x.requires_grad_(len(passes) > 1) for x in qkv)
        self._leaves: QKV = (q, k, v)
        self._attentions: dict[str, Attention] = {}

    def enter(self, implementation: Implementation) -> _Contender:
        """Warm it up and find its memory; it has failed if it cannot."""
        contender = _Contender(implementation.name)
        reasons = implementation.why_not(self._workload, self._device)
        if reasons:
            contender.failed = "; ".join(reasons)
            return contender
        self._report(f"preparing {implementation.name}")
        contender.attempt(lambda: self._prepare(implementation, contender))
        if contender.failed is not None:
            _clear(self._device)
        return contender

    def _prepare(self, implementation: Implementation, contender: _Contender) -> None:
        attention = implementation.make(self._workload, self._device)
        self._attentions[implementation.name] = attention
        works = self._works(attention)
        for each in self._passes:
            contender.peaks[each] = peak_bytes(works[each], self._device)
            if self._device.type != "cuda":
                works[each]()
            contender.works[each] = contender.guarded(works[each])

    def _works(self, attention: Attention) -> dict[str, Work]:
        leaves, dout = self._leaves, self._dout

        def forward() -> Tensor:
            with torch.no_grad():
                return attention(*leaves)

        def backward() -> Work:
            out = attention(*leaves)
            return lambda: torch.autograd.grad(out, leaves, dout)

        return {
            FORWARD: forward,
            BACKWARD: Prepared(backward),
            BOTH: lambda: torch.autograd.grad(attention(*leaves), leaves, dout),
        }

    def compare(self, contenders: Sequence[_Contender]) -> None:
        """Find the errors of those that have not failed."""
        self._report("computing in fp64")
        with torch.no_grad():
            right = exact(self._workload, *self._leaves, self._dout)
        for each in contenders:
            self._report(f"comparing {each.name} with fp64")
            each.attempt(partial(self._errors, each, right))

    def _errors(self, contender: _Contender, right: Exact) -> None:
        out = self._attentions[contender.name](*self._leaves)
        got = {"out": out.detach()}
        if len(self._passes) > 1:
            grads = torch.autograd.grad(out, self._leaves, self._dout)
            got |= dict(zip(TENSORS[1:], grads, strict=True))
        contender.errors = right.errors(got)


def _time(
    contenders: Sequence[_Contender],
    watch: Stopwatch,
    passes: Sequence[str],
    repeats: int,
    report: Report,
) -> dict[tuple[str, str], Samples]:
    """By name and pass."""
    works = {(each.name, way): each.works[way] for way in passes for each in contenders}
    return interleaved(works, watch, repeats, report)


def _nothing() -> None:
    return None


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of memory: {text}"
    return f"{type(error).__name__}: {text}"


def _clear(device: torch.device) -> None:
    """Give back what a failure left."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
