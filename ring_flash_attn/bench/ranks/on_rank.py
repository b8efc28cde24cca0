"""One rank's part: it calls each function a few times, then times all of them in rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import api
from ...comm import agree, check_mode, gather_shards, launch, rank_and_size, resolve_group
from ...plan.steps import Side
from ..inputs import problem_of
from ..timing import WARM_UP, Stopwatch, Timing, Work, peak_bytes
from ..workload import BOTH, FORWARD, Placement, Workload
from .arguments import own_arguments
from .target import Target

# After these a rank can go on if all ranks had the same; anything else ends it.
EXPECTED = (torch.OutOfMemoryError, NotImplementedError, ValueError)
DONE = "done"
Key = tuple[str, str]  # name of a target or of its base, passes
Round = dict[Key, float]  # ms
Calls = dict[str, Callable[[], Any]]  # by passes; they return the output, and the gradients of both


def call_on_rank(target: Target, rank: int, device: torch.device) -> Calls:
    """The function itself, on this rank of the default group."""
    function, workload, placement = target.function, target.workload, target.placement
    arguments = own_arguments(function.signature, workload, placement, rank, device)
    if not function.prefix:
        arguments["kernel"] = placement.kernel
    tokens = problem_of(workload, placement).size(Side.QUERY, rank)
    return _calls(function.name, function.form, workload, tokens, device, arguments)


def call_on_one_device(target: Target, device: torch.device) -> Calls:
    """The same kernel on a rank's own tokens."""
    form, share, signature = target.function.form, target.share, "single"
    if share.packed:
        signature = "single_documents_qkv" if form.startswith("qkv") else "single_documents"
    arguments = own_arguments(signature, share, Placement(1), 0, device)
    arguments["kernel"] = target.placement.kernel
    return _calls(target.single, form, share, share.seqlen, device, arguments)


def _calls(
    name: str,
    form: str,
    workload: Workload,
    tokens: int,
    device: torch.device,
    arguments: dict[str, Any],
) -> Calls:
    """Calls of a public function with random q, k and v, forward without saving for gradients."""
    (q, k, v), dout = workload.tensors(device, tokens)
    if workload.packed:
        q, k, v, dout = (x.squeeze(0) for x in (q, k, v, dout))
    leaves: dict[str, Tensor] = {"q": q, "k": k, "v": v}
    if form.startswith("qkv"):
        leaves = {"qkv": torch.stack([q, k, v], -3)}
    elif form.startswith("kv"):
        leaves = {"q": q, "kv": torch.stack([k, v], -3)}
    for leaf in leaves.values():
        leaf.requires_grad_()
    run = partial(getattr(api, name), **leaves, **arguments, causal=workload.causal)

    def both() -> tuple[Tensor, ...]:
        out = run()
        return out, *torch.autograd.grad(out, list(leaves.values()), dout)

    return {FORWARD: torch.no_grad()(run), BOTH: both}


class Group:
    """The default group, in which ranks wait for each other and agree on what failed.

    Args:
        device: of this rank; with NCCL ranks wait on its current stream, not on the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._group, self._device = resolve_group(None), device
        self.rank, self.size = rank_and_size(self._group)
        self._trials = 0
        self._token = torch.tensor([self.rank], device=device)  # made now: a copy to a GPU waits

    def wait_for_all(self) -> None:
        """Go on when all ranks are here."""
        gather_shards(self._token, [(1,)] * self.size, self._group)

    def agree_on(self, what: str, outcome: str) -> None:
        """Return if the trial had the same outcome on all ranks, and messages still arrive.

        Raises:
            ValueError: outcomes differ, or a rank does not answer within a minute; says which.
            RuntimeError: the trial failed, and it cannot be known whether the others failed, too;
                or its messages are still under way.
        """
        self._trials += 1
        if check_mode() == "off" and outcome != DONE and self.size > 1:
            raise RuntimeError(f"{what}: {outcome} on rank {self.rank}; RFA_CHECK is off")
        fields = (("trial", self._trials), ("function", what), ("outcome", outcome))
        agree(fields, self._group)
        mine = torch.tensor([self._trials, self.rank], device=self._device)
        found = gather_shards(mine, [(2,)] * self.size, self._group)
        if [part.tolist() for part in found] != [[self._trials, r] for r in range(self.size)]:
            raise RuntimeError(f"{what}: {outcome}, and the ranks are out of step after it")


@dataclass(frozen=True, slots=True)
class FirstRuns:
    """What came of a target's first runs: most memory by passes, or why it cannot be timed."""

    peaks: dict[str, int | None] = field(default_factory=dict)
    failed: str | None = None


def measure_on_rank(
    rank: int,
    world_size: int,
    targets: Sequence[Target],
    passes: tuple[str, ...],
    repeats: int,
    device: str,
) -> Iterator[FirstRuns | Round]:
    """A trial for each target, then `repeats` rounds with all that can be timed."""
    timer = _Timer(launch.rank_device(device, rank), passes)
    for target in targets:
        yield timer.attempt(target)
    for number in range(repeats):
        yield timer.round(number)


class _Timer:
    """Everything that this rank can run and time."""

    def __init__(self, device: torch.device, passes: tuple[str, ...]) -> None:
        self._device, self._passes = device, passes
        self._group, self._watch = Group(device), Stopwatch(device)
        self._works: dict[Key, tuple[Work, int]] = {}  # and how often in a row
        self._host: dict[Key, float] = {}  # ms that queueing takes

    def attempt(self, target: Target) -> FirstRuns:
        """Make the target ready and run it a few times; all ranks come to the same end."""
        trial, outcome = FirstRuns(), DONE
        try:
            trial = self._make_ready(target)
        except EXPECTED as error:
            trial, outcome = FirstRuns(failed=reason_of(error)), type(error).__name__
        try:
            self._group.agree_on(target.name, outcome)
        except (ValueError, RuntimeError):
            if trial.failed is None:
                raise
            who = f"{target.name} on rank {self._group.rank}"
            raise RuntimeError(f"{who}, and not alike on all ranks: {trial.failed}") from None
        if trial.failed is not None:
            self._works = {k: each for k, each in self._works.items() if k[0] != target.name}
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
        return trial

    def _make_ready(self, target: Target) -> FirstRuns:
        """One device works as often in a row as it takes to equal a rank, at the same clocks."""
        if any((target.base, passes) not in self._works for passes in self._passes):
            self._add(target.base, call_on_one_device(target, self._device), self._group.size)
        calls = call_on_rank(target, self._group.rank, self._device)
        self._add(target.name, calls, 1)
        return FirstRuns({each: peak_bytes(calls[each], self._device) for each in self._passes})

    def _add(self, name: str, calls: Calls, often: int) -> None:
        for passes in self._passes:
            key, work = (name, passes), calls[passes]
            for _ in range(WARM_UP):
                work()
            self._works[key] = work, often
            self._host[key] = self._time(key).host

    def round(self, number: int) -> Round:
        """Everything once, beginning with another one each time."""
        order = list(self._works)
        first = number % max(1, len(order))
        return {key: self._time(key).device for key in order[first:] + order[:first]}

    def _time(self, key: Key) -> Timing:
        """One run of all ranks together, the lead and the wait for the others not counted."""
        work, often = self._works[key]

        def run() -> float:
            start = time.perf_counter()
            for _ in range(often):
                work()
            return (time.perf_counter() - start) * 1e3 / often

        self._watch.lead(self._host.get(key, 1.0) * often)
        self._group.wait_for_all()
        if self._device.type != "cuda":
            host = run()
            return Timing(host, host)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        host = run()
        end.record()
        end.synchronize()
        return Timing(begin.elapsed_time(end) / often, host)


def reason_of(error: Exception) -> str:
    """Why something cannot be timed."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return str(error).strip() or type(error).__name__
