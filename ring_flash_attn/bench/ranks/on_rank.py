"""One rank's part: it calls each function a few times, then times all of them in rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import api
from ...comm import agree, check_mode, gather_shards, launch, rank_and_size, resolve_group
from ...plan.steps import Side
from ..functions import PublicFunction, find_functions
from ..timing import WARM_UP, Stopwatch, Timing, Work, peak_bytes
from ..workload import BOTH, FORWARD, Placement, Workload, problem_of
from .arguments import own_arguments, packed_leaves
from .target import Target

# After these a rank can go on if all ranks had the same; anything else ends it.
EXPECTED = (torch.OutOfMemoryError, NotImplementedError, ValueError)
DONE = "done"
Key = tuple[str, str]  # name of a target or of its base, passes
Round = dict[Key, float]  # ms
Trial = dict[str, int | None] | str  # most memory by passes, or why it cannot be timed
Calls = dict[str, Callable[[], Any]]  # by passes; they return the output, and the gradients of both


def call_on_rank(target: Target, rank: int, device: torch.device) -> Calls:
    """The function itself, on this rank of the default group."""
    tokens = problem_of(target.workload, target.placement).size(Side.QUERY, rank)
    return _calls(target.function, target.workload, target.placement, rank, tokens, device)


def call_on_one_device(target: Target, device: torch.device) -> Calls:
    """The same kernel on a rank's own tokens."""
    (function,) = find_functions((target.single,))
    placement = Placement(1, kernel=target.placement.kernel)
    return _calls(function, target.share, placement, 0, target.share.seqlen, device)


def _calls(
    function: PublicFunction,
    workload: Workload,
    placement: Placement,
    rank: int,
    tokens: int,
    device: torch.device,
) -> Calls:
    """Calls of a public function with random q, k and v, forward without saving for gradients."""
    arguments = own_arguments(function.signature, workload, placement, rank, device)
    if not function.prefix:
        arguments["kernel"] = placement.kernel
    (q, k, v), dout = workload.tensors(device, tokens)
    if workload.packed:
        q, k, v, dout = (x.squeeze(0) for x in (q, k, v, dout))
    leaves = packed_leaves(function.form, q, k, v)
    run = partial(getattr(api, function.name), **leaves, **arguments, **workload.options)

    def both() -> tuple[Tensor, ...]:
        out = run()
        return out, *torch.autograd.grad(out, list(leaves.values()), dout)

    return {FORWARD: torch.no_grad()(run), BOTH: both}


class Group:
    """The default group, in which ranks wait for each other and agree on what failed.

    With NCCL they wait on the current stream of their device, not on the host.
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
            ValueError: outcomes differ, or a rank does not answer within the group's timeout.
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


def measure_on_rank(
    rank: int,
    world_size: int,
    targets: Sequence[Target],
    passes: tuple[str, ...],
    repeats: int,
    device: str,
) -> Iterator[Trial | Round]:
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

    def attempt(self, target: Target) -> Trial:
        """Make the target ready and run it a few times; all ranks come to the same end."""
        trial: Trial
        outcome = DONE
        try:
            trial = self._make_ready(target)
        except EXPECTED as error:
            trial, outcome = reason_of(error), type(error).__name__
        try:
            self._group.agree_on(target.name, outcome)
        except (ValueError, RuntimeError):
            if outcome == DONE:
                raise
            who = f"{target.name} on rank {self._group.rank}"
            raise RuntimeError(f"{who}, and not alike on all ranks: {trial}") from None
        if outcome != DONE:
            self._works = {k: each for k, each in self._works.items() if k[0] != target.name}
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
        return trial

    def _make_ready(self, target: Target) -> Trial:
        """One device works as often in a row as it takes to equal a rank, at the same clocks."""
        if any((target.base, passes) not in self._works for passes in self._passes):
            self._add(target.base, call_on_one_device(target, self._device), self._group.size)
        calls = call_on_rank(target, self._group.rank, self._device)
        self._add(target.name, calls, 1)
        return {each: peak_bytes(calls[each], self._device) for each in self._passes}

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

        def run() -> None:
            for _ in range(often):
                work()

        host = self._host.get(key, 1.0) * often
        timing = self._watch.time(run, host, ready=self._group.wait_for_all)
        return Timing(timing.device / often, timing.host / often)


def reason_of(error: Exception) -> str:
    """Why something cannot be timed."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return str(error).strip() or type(error).__name__
