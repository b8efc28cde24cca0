"""`time_targets`: distributed functions on real ranks or by replay, as rows of results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import api
from ...api.families import Function
from ...comm import agree, check_mode, gather_shards, launch, rank_and_size, resolve_group
from ...plan.steps import Side
from ..functions import find_functions, own_arguments, packed_leaves
from ..links import Link, Topology
from ..replays.results import replay_rows
from ..replays.run import busiest_rank, repeated, replay_ranks
from ..results import RING, Row, beside
from ..timing import WARM_UP, Stopwatch, Timing, Work, peak_bytes
from ..workload import BOTH, FORWARD, Placement, Workload, problem_of
from .target import Target

if TYPE_CHECKING:
    from .. import Replay

MOST_CRASHES = 3  # after so many the rest is left out
# After these a rank can go on if all ranks had the same; anything else ends it.
EXPECTED = (torch.OutOfMemoryError, NotImplementedError, ValueError)
DONE = "done"
Report = Callable[[str], None]
Key = tuple[str, str]  # name of a target or of its base, passes
Rows = dict[Key, Row]
Round = dict[Key, Timing]
Trial = dict[str, int | None] | str  # most memory by passes, or why it cannot be timed
Calls = dict[str, Callable[[], Any]]  # by passes; they return the output, and the gradients of both


@dataclass(frozen=True, slots=True)
class Settings:
    """Where ranks run, and how they are timed."""

    world_size: int
    device: torch.device  # of this process
    backend: str | None = None  # of the process group; None: a replay on one device
    link: Link | Topology | None = None  # what a replay emulates; None: communication is removed
    repeats: int = 9
    grad: bool = True
    timeout: float = 300.0  # seconds that a new rank may take for a trial or a round

    @property
    def is_replay(self) -> bool:
        return self.backend is None

    @property
    def passes(self) -> tuple[str, ...]:
        return (FORWARD, BOTH) if self.grad else (FORWARD,)

    @property
    def used_backend(self) -> str | None:
        """Of a group with one for each kind of device, the one that is used."""
        parts = dict(part.split(":") for part in (self.backend or "").split(",") if ":" in part)
        return parts.get(self.device.type, self.backend)

    def start(self, body: launch.Body, args: Sequence[Any]) -> Iterator[list[Any]]:
        """Run it on the ranks that torchrun has started, or on new ones; see `launch`."""
        where = self.device.type, self.backend or ""
        if launch.torchrun_rank():
            return launch.run_joined(body, args, *where)
        return launch.run_spawned(body, args, self.world_size, *where, self.timeout)


def time_targets(
    targets: Sequence[Target], settings: Settings, report: Report
) -> tuple[Rows, dict[str, Replay]]:
    """Rows of all targets, and replays by the name of the first target that they are for.

    Raises:
        launch.RanksFailed: a new rank died in the middle of the rounds.
    """
    able = [target for target in targets if not target.refused]
    replays: dict[str, Replay] = {}
    if settings.is_replay:
        found, failed = _replay(able, settings, report, replays)
    else:
        found, failed = _measure(able, settings, report)
    rows = {}
    for target in targets:
        reason = target.refused or failed.get(target.name)
        for passes in settings.passes:
            key = target.name, passes
            rows[key] = found.get(key) or replace(_row(target, settings, passes), failed=reason)
    for target in targets:
        for passes in settings.passes if target.baseline else ():
            base = rows[target.baseline, passes]
            rows[target.name, passes] = beside(rows[target.name, passes], base)
    return rows, replays


def _row(
    target: Target,
    settings: Settings,
    passes: str,
    samples: tuple[float, ...] = (),
    theoretic: float = 0.0,
    host: float = 0.0,
    sizes: Sequence[int | None] = (),
) -> Row:
    """For tables and files; of samples the slowest rank's, of sizes those of all ranks."""
    workload = target.placement.describe(target.workload)
    spread = {**target.placement.to_dict(), "function": target.function.name}
    if settings.is_replay:
        spread["link"] = target.placement.link_name
    else:
        spread["backend"] = settings.used_backend
    row = Row(RING, target.placement.kernel, passes, workload, spread, samples)
    if row.ms is None:
        return row
    values = {
        "theoretic_ms": theoretic,
        "efficiency_percent": 100 * theoretic / row.ms,
        "iterations_per_second": 1e3 / row.ms,
        "host_ms": host,
    }
    if settings.is_replay:
        values["slowest"] = 1.0
    tflops = target.flops(passes) / row.ms / 1e9
    peak = max((size for size in sizes if size is not None), default=None)
    return replace(row, tflops=tflops, peak_bytes=peak, values=values)


def reason_of(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return str(error).strip() or type(error).__name__


# By replay.


def _replay(
    targets: Sequence[Target], settings: Settings, report: Report, replays: dict[str, Replay]
) -> tuple[Rows, dict[str, str]]:
    """Replay ranks of each target, one at a time; targets of one workload share a replay."""
    known: dict[tuple[Workload, Placement], Replay | str] = {}
    rows, failed = Rows(), dict[str, str]()
    for target in targets:
        key = (target.workload, target.placement)
        if key not in known:
            try:
                known[key] = replays[target.name] = _replay_ranks(target, settings, report)
            except Exception as error:  # of any library: the other functions go on
                known[key] = reason_of(error)
                if settings.device.type == "cuda":
                    torch.cuda.empty_cache()
        replay = known[key]
        if isinstance(replay, str):
            failed[target.name] = replay
            continue
        for passes in settings.passes:
            ranks = [row for row in replay_rows(replay) if row.passes == passes]
            slowest = next(row for row in ranks if row.values["slowest"])
            times = slowest.values["theoretic_ms"], slowest.values["host_ms"]
            sizes = [row.peak_bytes for row in ranks]
            found = _row(target, settings, passes, slowest.samples_ms, *times, sizes)
            rows[target.name, passes] = found
    return rows, failed


def _replay_ranks(target: Target, settings: Settings, report: Report) -> Replay:
    """Replay three ranks: the first, which receives most, the last, and the busiest."""
    workload, placement = target.workload, target.placement
    ranks = {0, busiest_rank(workload, placement), placement.world_size - 1}
    return replay_ranks(
        workload,
        placement,
        device=settings.device,
        ranks=sorted(ranks),
        repeats=settings.repeats,
        report=lambda line: report(f"{target.name}: {line}"),
    )


# On real ranks.


def _measure(
    targets: Sequence[Target], settings: Settings, report: Report
) -> tuple[Rows, dict[str, str]]:
    """Time targets on the ranks that torchrun has started, or on new ones; rows, or reasons.

    A target that raises on all ranks alike gets the reason. One that ends a rank does, too, if the
    ranks are new: the others go on with yet newer ones.
    """
    left, failed, crashes = list(targets), dict[str, str](), 0
    items: list[list[Any]] = []  # of all ranks: a trial of each target, then the rounds
    while left and crashes < MOST_CRASHES:
        items, crash = [], ""
        try:
            _collect(left, settings, report, items)
        except launch.RanksFailed as error:
            crash = str(error)
        if crash and len(items) >= len(left):
            raise launch.RanksFailed(f"while timing, {crash}")
        failed |= {
            target.name: trial  # in the words of the first rank that failed
            for target, trials in zip(left, items)
            for trial in reversed(trials)
            if isinstance(trial, str)
        }
        if not crash:
            break
        failed[left[len(items)].name] = crash
        left = [each for each in left if each.name not in failed]
        crashes += 1
    else:
        failed |= {each.name: f"not run after {crashes} crashes" for each in left}
    rounds = items[len(left) :]
    rows = {
        (target.name, passes): slowest_rank(target, settings, passes, trials, rounds)
        for target, trials in zip(left, items)
        for passes in settings.passes
        if target.name not in failed
    }
    return rows, failed


def _collect(
    targets: Sequence[Target], settings: Settings, report: Report, items: list[list[Any]]
) -> None:
    args = (targets, settings.passes, settings.repeats, settings.device.type)
    arriving = settings.start(measure_on_rank, args)
    rounds = (f"round {number + 1} of {settings.repeats}" for number in range(settings.repeats))
    for line in (*(f"trying {target.name}" for target in targets), *rounds):
        report(line)
        items.append(next(arriving))
    for _ in arriving:  # until the ranks have ended
        pass


def slowest_rank(
    target: Target,
    settings: Settings,
    passes: str,
    trials: Sequence[Trial],
    rounds: Sequence[Sequence[Round]],
) -> Row:
    """What the slowest rank of each round took, beside the median of one device."""
    base, own = (target.base, passes), (target.name, passes)
    single = statistics.median(each[base].device for ranks in rounds for each in ranks)
    slowest = tuple(max(each[own].device for each in ranks) for ranks in rounds)
    host = statistics.median(max(each[own].host for each in ranks) for ranks in rounds)
    sizes = [trial[passes] for trial in trials if not isinstance(trial, str)]
    return _row(target, settings, passes, slowest, single * settings.world_size, host, sizes)


# One rank's part.


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
    function: Function,
    workload: Workload,
    placement: Placement,
    rank: int,
    tokens: int,
    device: torch.device,
) -> Calls:
    """Calls of a public function with random q, k and v, forward without saving for gradients."""
    arguments = own_arguments(function, workload, placement, rank, device)
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
        return {key: self._time(key) for key in order[first:] + order[:first]}

    def _time(self, key: Key) -> Timing:
        """One run of all ranks together, the lead and the wait for the others not counted."""
        work, often = self._works[key]
        host = self._host.get(key, 1.0) * often
        timing = self._watch.time(repeated(work, often), host, ready=self._group.wait_for_all)
        return Timing(timing.device / often, timing.host / often)
