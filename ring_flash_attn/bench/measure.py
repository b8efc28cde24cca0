"""`measure`: implementations on one device, in turns; one that fails does not stop the rest."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from ..engine.attention import QKV
from .exact import TENSORS, Exact, exact
from .implementations import Attention, Implementation, find_implementation
from .results import BACKWARD, BOTH, FORWARD, PASSES, Row
from .timing import WARM_UP, Prepared, Samples, Stopwatch, Work, interleaved, on_device, peak_bytes
from .workload import Workload

CANNOT = "cannot: "  # begins the reasons of one that was not tried
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
    graphs: bool = False,
    report: Report = lambda line: None,
) -> list[Row]:
    """Time implementations in interleaved rounds.

    Args:
        names: of `implementations.implementation_names()`, or "auto" and "native".
        workload, device: what is computed, and where.
        kind: of the rows.
        repeats: rounds; short passes have several runs in each.
        grad: backward, and forward and backward together, as well.
        errors: compare out (and gradients) with fp64.
        graphs: time CUDA graphs, which are free of the host's time and its disturbances.
        report: is told what is being done.

    Returns:
        A row for each implementation and pass; of one that cannot do it, or fails, they say why.

    Raises:
        ValueError: there is no such implementation, repeats is no positive number, or there are
            no graphs on the device.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be positive, not {repeats}")
    check_graphs(graphs, device)
    found = {each.name: each for each in find_all(names, workload, device)}
    passes = PASSES if grad else (FORWARD,)
    contenders = [_Contender(name) for name in found]
    _clear(device)
    with on_device(device):
        try:
            stage = _Stage(workload, device, passes, graphs, report)
            samples = stage.run(contenders, found, repeats, errors)
        except Exception as error:  # whatever it is: the next workload may do
            samples = {}
            for each in contenders:
                each.failed = each.failed or _reason(error)
        finally:
            for each in contenders:
                each.works.clear()  # they hold the tensors, and the contender itself
    return [row for each in contenders for row in each.rows(kind, workload, passes, samples)]


def check_graphs(graphs: bool, device: torch.device) -> None:
    """Raise ValueError if there are to be some, and can be none."""
    if graphs and device.type != "cuda":
        raise ValueError(f"CUDA graphs need a GPU, not {device}")


def find_all(
    names: Sequence[str], workload: Workload, device: torch.device
) -> tuple[Implementation, ...]:
    """Each once, whatever it was called."""
    found = (find_implementation(name, workload, device) for name in names)
    return tuple({each.name: each for each in found}.values())


@dataclass
class _Contender:
    """One implementation at work.

    Attributes:
        name: of it.
        failed: why it cannot go on.
        works: by pass.
        peaks: memory by pass.
        errors: by tensor.
        note: why there are none.
    """

    name: str
    failed: str | None = None
    note: str | None = None
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
        except Exception as error:  # of any library
            self.failed = _reason(error)
            return None

    def rows(
        self,
        kind: str,
        workload: Workload,
        passes: Sequence[str],
        samples: dict[tuple[str, str], Samples],
    ) -> Iterator[Row]:
        """One for each pass; with what was found, or why there is nothing."""
        for each in passes:
            if self.failed is not None:
                yield Row(kind, self.name, each, workload.to_dict(), failed=self.failed)
                continue
            runs = samples[self.name, each]
            yield Row(
                kind,
                self.name,
                each,
                workload.to_dict(),
                {},
                runs.device,
                workload.flops(each) / runs.median.device / 1e9,
                self.peaks[each],
                {"host_ms": runs.median.host},
                self.errors if each == passes[-1] else {},
                note=self.note if each == passes[-1] else None,
            )


class _Stage:
    """Tensors that all contenders share."""

    def __init__(
        self,
        workload: Workload,
        device: torch.device,
        passes: Sequence[str],
        graphs: bool,
        report: Report,
    ) -> None:
        self._workload, self._device, self._passes = workload, device, passes
        self._graphs, self._report = graphs, report
        qkv, self._dout = workload.tensors(device)
        q, k, v = (x.requires_grad_(len(passes) > 1) for x in qkv)
        self._leaves: QKV = (q, k, v)
        self._attentions: dict[str, Attention] = {}

    def run(
        self,
        contenders: Sequence[_Contender],
        found: Mapping[str, Implementation],
        repeats: int,
        errors: bool,
    ) -> dict[tuple[str, str], Samples]:
        """Times by name and pass; memory and errors are put down with the contenders."""
        for each in contenders:
            self._enter(each, found[each.name])
        able = [each for each in contenders if each.failed is None]
        works = {(each.name, way): each.works[way] for way in self._passes for each in able}
        if not works:
            return {}
        samples = interleaved(works, Stopwatch(self._device), repeats, self._report)
        if errors:
            self._compare([each for each in able if each.failed is None])
        return samples

    def _enter(self, contender: _Contender, implementation: Implementation) -> None:
        """Warm it up and find its memory; it has failed if it cannot."""
        reasons = implementation.why_not(self._workload, self._device)
        if reasons:
            contender.failed = CANNOT + "; ".join(reasons)
            return
        self._report(f"preparing {implementation.name}")
        contender.attempt(lambda: self._prepare(implementation, contender))
        if contender.failed is not None:
            self._attentions.pop(implementation.name, None)
            _clear(self._device)

    def _prepare(self, implementation: Implementation, contender: _Contender) -> None:
        """Memory of the backward pass is not told apart from that of both."""
        attention = implementation.make(self._workload, self._device)
        self._attentions[implementation.name] = attention
        works = self._works(attention)
        for each in self._passes:
            whole = works[BOTH if each == BACKWARD else each]
            contender.peaks[each] = peak_bytes(whole, self._device)
            if self._device.type != "cuda":
                works[each]()
            contender.works[each] = contender.guarded(works[each])
        if self._graphs:
            captured = self._captured(attention)
            contender.works = {each: contender.guarded(work) for each, work in captured.items()}

    def _works(self, attention: Attention) -> dict[str, Work]:
        leaves, dout = self._leaves, self._dout

        def forward() -> Tensor:
            with torch.no_grad():
                return attention(*leaves)

        def backward() -> Work:
            out = attention(*leaves)
            return lambda: torch.autograd.grad(out, leaves, dout)

        def both() -> object:
            out = attention(*leaves)
            return out, torch.autograd.grad(out, leaves, dout)

        return {FORWARD: forward, BACKWARD: Prepared(backward), BOTH: both}

    def _captured(self, attention: Attention) -> dict[str, Work]:
        """The same as graphs."""
        leaves, dout = self._leaves, self._dout
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        works, captured = self._works(attention), {}
        with torch.cuda.stream(stream):  # gradients are computed where the forward pass was
            out = attention(*leaves)
        works[BACKWARD] = lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
        for each in self._passes:
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    works[each]()
            captured[each] = _capture(works[each], stream)
        return captured

    def _compare(self, contenders: Sequence[_Contender]) -> None:
        """Find the errors; times stay if that fails."""
        self._report("computing in fp64")
        trial = _Contender("fp64")
        right = trial.attempt(lambda: exact(self._workload, *self._leaves, self._dout))
        for each in contenders:
            if right is not None:
                trial = _Contender(each.name)
                self._report(f"comparing {each.name} with fp64")
                each.errors = trial.attempt(partial(self._errors, each.name, right)) or {}
            each.note = None if trial.failed is None else f"no errors: {trial.failed}"

    def _errors(self, name: str, right: Exact) -> dict[str, dict[str, float]]:
        out = self._attentions[name](*self._leaves)
        got = {"out": out.detach()}
        if len(self._passes) > 1:
            grads = torch.autograd.grad(out, self._leaves, self._dout)
            got |= dict(zip(TENSORS[1:], grads, strict=True))
        return right.errors(got)


def _capture(work: Work, stream: torch.cuda.Stream) -> Work:
    """A graph of it, with the tensors that it reads, which the work holds, and writes to."""
    graph = torch.cuda.CUDAGraph()
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        results = work()
    kept = work, results

    def replay() -> object:
        graph.replay()
        return kept

    return replay


def _nothing() -> None:
    return None


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of memory: {text}"
    return f"{type(error).__name__}: {text}"


def _clear(device: torch.device) -> None:
    """Give back what is left of other workloads, or of a failure."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
