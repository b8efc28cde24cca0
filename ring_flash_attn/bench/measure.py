"""`measure`: implementations on one device, in turns; one that fails does not stop the rest."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ..engine.attention import QKV
from .implementations import Implementation, find_implementation
from .results import CANNOT, Row
from .timing import WARM_UP, Prepared, Samples, Stopwatch, Work, interleaved, on_device, peak_bytes
from .workload import BACKWARD, BOTH, FORWARD, PASSES, Workload

if TYPE_CHECKING:
    from .implementations import Attention

_SCORES = 1 << 27  # entries of the fp64 matrices that are held at a time: 1 GiB each
_MEASURED = ("headdim_v", "softcap")  # features that all that are compared know, or refuse
_NO_ROOM = ("CUDA out of memory", "CUDA error: out of memory")  # in errors of other kinds
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
    """Time implementations in interleaved rounds: a row for each implementation and pass.

    Rows of one that cannot do it, or fails, say why. `grad`: backward, and both passes together, as
    well; `errors`: compare out (and gradients) with fp64; `graphs`: time CUDA graphs, which are
    free of the host's time. ValueError for names that there are not, and for other features than
    softcap and values of another width.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be positive, not {repeats}")
    check_graphs(graphs, device)
    left_out = [name for name in workload.features if name not in _MEASURED]
    left_out += ["cu_seqlens_k"] if workload.cu_seqlens_k is not None else []
    if left_out:
        raise ValueError(f"{', '.join(left_out)}: not measured on one device")
    passes = PASSES if grad else (FORWARD,)
    trials = [_Trial(each) for each in find_all(names, workload, device, grad)]
    samples: dict[tuple[str, str], Samples] = {}
    clear(device)
    with on_device(device):
        try:
            inputs = Inputs(workload, device, grad)
            for each in trials:
                reasons = each.implementation.why_not(workload, device, grad)
                if reasons:
                    each.failed = CANNOT + "; ".join(reasons)
                    continue
                report(f"preparing {each.implementation.name}")
                each.attempt(partial(_prepare, each, inputs, graphs))
                if each.failed is not None:
                    clear(device)
            able = [each for each in trials if each.failed is None]
            works = {
                (each.implementation.name, name): each.works[name]
                for name in passes
                for each in able
            }
            if works:
                samples = interleaved(works, Stopwatch(device), repeats, report)
            if errors:
                _find_errors([each for each in able if each.failed is None], inputs, report)
        except Exception as error:  # whatever it is: the next workload may do
            for each in trials:
                each.failed = each.failed or reason(error)
        finally:
            for each in trials:
                each.works.clear()  # they hold the tensors, and the trial itself
    return [row for each in trials for row in each.rows(kind, workload, passes, samples)]


def check_graphs(graphs: bool, device: torch.device) -> None:
    """Raise ValueError if there are to be some, and can be none."""
    if graphs and device.type != "cuda":
        raise ValueError(f"CUDA graphs need a GPU, not {device}")


def find_all(
    names: Sequence[str], workload: Workload, device: torch.device, grad: bool = True
) -> tuple[Implementation, ...]:
    """Each once, whatever it was called."""
    found = (find_implementation(name, workload, device, grad) for name in names)
    return tuple({each.name: each for each in found}.values())


class Inputs:
    """Tensors that all implementations share, and the passes that they are for."""

    def __init__(self, workload: Workload, device: torch.device, grad: bool) -> None:
        self.workload, self.device, self.passes = workload, device, PASSES if grad else (FORWARD,)
        qkv, self.dout = workload.tensors(device)
        q, k, v = (x.requires_grad_(grad) for x in qkv)
        self.leaves: QKV = (q, k, v)

    def gradients(self, out: Tensor, retain_graph: bool = False) -> tuple[Tensor, ...]:
        """Of q, k and v."""
        return torch.autograd.grad(out, self.leaves, self.dout, retain_graph=retain_graph)


@dataclass(kw_only=True)
class Guard:
    """What may fail, until it does: the reason is kept, and nothing runs any more."""

    failed: str | None = None  # why it cannot go on

    def attempt(self, work: Callable[[], Result]) -> Result | None:
        """What it returns; None if it fails or has failed before."""
        if self.failed is None:
            try:
                return work()
            except Exception as error:  # of any library
                self.failed = reason(error)
        return None

    def guarded(self, work: Work) -> Work:
        """The work, until it fails; then nothing."""
        if isinstance(work, Prepared):
            prepare = work.prepare
            return Prepared(lambda: self.guarded(self.attempt(prepare) or (lambda: None)))
        return lambda: self.attempt(work)


@dataclass
class _Trial(Guard):
    """One implementation, until it fails."""

    implementation: Implementation
    attention: Attention | None = None  # for the workload
    note: str | None = None  # why there are no errors
    works: dict[str, Work] = field(default_factory=dict)  # by pass
    peaks: dict[str, int | None] = field(default_factory=dict)  # bytes, by pass
    errors: dict[str, dict[str, float]] = field(default_factory=dict)  # by tensor

    def attempt(self, work: Callable[[], Result]) -> Result | None:
        """The same; one that has failed lets go of what it holds."""
        found = super().attempt(work)
        if self.failed is not None:
            self.attention = None
        return found

    def rows(
        self,
        kind: str,
        workload: Workload,
        passes: Sequence[str],
        samples: Mapping[tuple[str, str], Samples],
    ) -> Iterator[Row]:
        """One for each pass; with what was found, or why there is nothing."""
        for each in passes:
            row = Row(kind, self.implementation.name, each, workload.to_dict(), failed=self.failed)
            if self.failed is None:
                runs, last = samples[self.implementation.name, each], each == passes[-1]
                row = replace(
                    row,
                    samples_ms=runs.device,
                    tflops=workload.flops(each) / runs.median.device / 1e9,
                    peak_bytes=self.peaks[each],
                    values={"host_ms": runs.median.host},
                    errors=self.errors if last else {},
                    note=self.note if last else None,
                )
            yield row


def _prepare(trial: _Trial, inputs: Inputs, graphs: bool) -> None:
    """Warm it up and find its memory, that of the backward pass with the forward pass."""
    attention = trial.attention = trial.implementation.make(inputs.workload, inputs.device)
    works = make_works(attention, inputs)
    for each in inputs.passes:
        trial.peaks[each] = peak_bytes(works[BOTH if each == BACKWARD else each], inputs.device)
        if inputs.device.type != "cuda":
            works[each]()
    if graphs:
        works = _captured(attention, inputs)
    trial.works = {each: trial.guarded(works[each]) for each in inputs.passes}


def make_works(attention: Attention, inputs: Inputs) -> dict[str, Work]:
    """What is timed, by pass."""

    def forward() -> Tensor:
        with torch.no_grad():
            return attention(*inputs.leaves)

    def backward() -> Work:
        out = attention(*inputs.leaves)
        return lambda: inputs.gradients(out)

    def both() -> object:
        out = attention(*inputs.leaves)
        return out, inputs.gradients(out)

    return {FORWARD: forward, BACKWARD: Prepared(backward), BOTH: both}


def _captured(attention: Attention, inputs: Inputs) -> dict[str, Work]:
    """The same as CUDA graphs."""
    stream = torch.cuda.Stream(inputs.device)
    stream.wait_stream(torch.cuda.current_stream(inputs.device))
    works, captured = make_works(attention, inputs), {}
    with torch.cuda.stream(stream):  # gradients are computed where the forward pass was
        out = attention(*inputs.leaves)
    works[BACKWARD] = lambda: inputs.gradients(out, retain_graph=True)
    for each in inputs.passes:
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                works[each]()
        captured[each] = _capture(works[each], stream)
    return captured


def _capture(work: Work, stream: torch.cuda.Stream) -> Work:
    """A graph of it, with the tensors that it reads, which the work holds, and writes to."""
    graph = torch.cuda.CUDAGraph()
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        results = work()
    held = work, results

    def replay() -> object:
        graph.replay()
        return held

    return replay


def reason(error: BaseException) -> str:
    """In one line; what ran out of memory begins with these words."""
    text = " ".join(str(error).split())
    memory = isinstance(error, torch.OutOfMemoryError) or any(words in text for words in _NO_ROOM)
    return f"{'out of memory' if memory else type(error).__name__}: {text}"


def clear(device: torch.device) -> None:
    """Give back what is left of other workloads, or of a failure."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# Errors against fp64. It shares no code with the library. Heads do not depend on each other, so
# that one KV head and its query heads of one sequence stand for all.


@contextmanager
def _noted(trials: Sequence[_Trial]) -> Iterator[None]:
    """Times stay if there can be no errors: out of memory, say."""
    try:
        yield
    except Exception as error:  # of any library
        for each in trials:
            each.note = f"no errors: {reason(error)}"


def _find_errors(trials: Sequence[_Trial], inputs: Inputs, report: Report) -> None:
    with _noted(trials):
        report("computing in fp64")
        right = exact(inputs.workload, *inputs.leaves, inputs.dout)
        for each in trials:
            with _noted([each]):
                report(f"comparing {each.implementation.name} with fp64")
                assert each.attention is not None
                out = each.attention(*inputs.leaves)
                found = {"out": out.detach()}
                if len(inputs.passes) > 1:
                    found |= zip(("dq", "dk", "dv"), inputs.gradients(out), strict=True)
                each.errors = errors_of(found, right)


def errors_of(
    found: Mapping[str, Tensor], right: Mapping[str, Tensor]
) -> dict[str, dict[str, float]]:
    """Of whole tensors against `exact`: max, mean, rmse, and max relative to the largest entry."""
    errors = {}
    for name, value in found.items():
        want = right[name]
        apart = (value[0, :, : want.shape[1]].to(torch.float64) - want).abs()
        worst = apart.max().item()
        errors[name] = {
            "max": worst,
            "mean": apart.mean().item(),
            "rmse": apart.square().mean().sqrt().item(),
            "relative": worst / (want.abs().max().item() or 1.0),
        }
    return errors


@torch.no_grad()
def exact(workload: Workload, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """out and the gradients in fp64, a few queries at a time; documents one by one.

    They are (seqlen, heads, headdim) of the first KV head.
    """
    group = workload.nheads // workload.nheads_k
    q, dout = (x[0, :, :group].to(torch.float64) for x in (q, dout))
    k, v = (x[0, :, 0].to(torch.float64) for x in (k, v))
    found = dict(zip(("out", "dq", "dk", "dv"), map(torch.zeros_like, (dout, q, k, v))))
    parts = (x.split(workload.lengths) for x in (q, k, v, dout, *found.values()))
    for document in zip(*parts, strict=True):
        _exact_document(workload, *document)
    return {name: x if x.dim() == 3 else x[:, None] for name, x in found.items()}


def _exact_document(
    workload: Workload,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    out: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Fill in those of one; (rows, heads, headdim), and (rows, headdim) of its KV head."""
    group, scale = q.shape[1], workload.headdim**-0.5
    (left, right), causal = workload.window, workload.causal
    columns = torch.arange(len(k), device=q.device)
    for rows in columns.split(max(1, _SCORES // max(1, len(k)))):
        distance = columns - rows[:, None]
        for head in range(group):
            mine, above = q[rows, head], dout[rows, head]
            scores = (mine @ k.T) * scale
            if workload.softcap:
                capped = (scores / workload.softcap).tanh()
                scores = workload.softcap * capped
            if left >= 0:
                scores.masked_fill_(distance < -left, -torch.inf)
            if causal or right >= 0:
                scores.masked_fill_(distance > (0 if causal else right), -torch.inf)
            p = scores.softmax(dim=-1)
            out[rows, head] = p @ v
            ds = p * (above @ v.T - (above * out[rows, head]).sum(-1, keepdim=True)) * scale
            if workload.softcap:
                ds *= 1 - capped.square()
            dq[rows, head] = ds @ k
            dk += ds.T @ mine
            dv += p.T @ above
