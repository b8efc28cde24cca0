"""`time_targets`: distributed functions on real ranks or by replay, as rows of results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ...comm import launch
from ...plan.build import make_plan
from ..inputs import problem_of
from ..replays.results import replay_rows
from ..replays.run import replay_ranks
from ..results import RING, Row
from ..versus import beside
from ..workload import BOTH, FORWARD, Link, Placement, Workload
from .on_rank import Round, Trial, measure_on_rank, reason_of
from .target import Target

if TYPE_CHECKING:
    from .. import Replay

MOST_CRASHES = 3  # after so many the rest is left out
Report = Callable[[str], None]
Rows = dict[tuple[str, str], Row]  # by the target's name and the passes


@dataclass(frozen=True, slots=True)
class Settings:
    """Where ranks run, and how they are timed.

    Attributes:
        world_size, device: number of ranks, and the device of this process.
        backend: of the process group; None: a replay on one device.
        link: what a replay emulates; None: communication is removed.
        repeats: rounds.
        grad: backward as well.
        timeout: seconds that a new rank may take for a trial or a round.
    """

    world_size: int
    device: torch.device
    backend: str | None = None
    link: Link | None = None
    repeats: int = 9
    grad: bool = True
    timeout: float = 300.0

    @property
    def is_replay(self) -> bool:
        """One rank at a time, on one device."""
        return self.backend is None

    @property
    def passes(self) -> tuple[str, ...]:
        """What is timed."""
        return (FORWARD, BOTH) if self.grad else (FORWARD,)

    @property
    def used_backend(self) -> str | None:
        """Of a group with one for each kind of device, the one that is used."""
        parts = dict(part.split(":") for part in (self.backend or "").split(",") if ":" in part)
        return parts.get(self.device.type, self.backend)


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


def _measure(
    targets: Sequence[Target], settings: Settings, report: Report
) -> tuple[Rows, dict[str, str]]:
    """Time targets on the ranks that torchrun has started, or on new ones; rows, or reasons.

    A target that raises on all ranks alike gets the reason. One that ends a rank does, too, if the
    ranks are new: the others go on with yet newer ones.
    """
    left, failed, crashes = list(targets), dict[str, str](), 0
    items: list[list[Any]] = []  # of all ranks: a trial of each target, then the rounds
    while left:
        items = []
        try:
            _collect(left, settings, report, items)
            failed |= _failures(left, items)
            break
        except launch.RanksFailed as failure:
            if len(items) >= len(left):
                raise launch.RanksFailed(f"while timing, {failure}") from None
            failed |= {**_failures(left, items), left[len(items)].name: str(failure)}
        left = [each for each in left if each.name not in failed]
        crashes += 1
        if crashes == MOST_CRASHES:
            failed |= {each.name: f"not run after {crashes} crashes" for each in left}
            break
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
    """Run the ranks to the end."""
    args = (targets, settings.passes, settings.repeats, settings.device.type)
    where = (settings.device.type, settings.backend or "")
    if launch.torchrun_rank():
        arriving = launch.run_joined(measure_on_rank, args, *where)
    else:
        size, timeout = settings.world_size, settings.timeout
        arriving = launch.run_spawned(measure_on_rank, args, size, *where, timeout)
    rounds = (f"round {number + 1} of {settings.repeats}" for number in range(settings.repeats))
    for line in (*(f"trying {target.name}" for target in targets), *rounds):
        report(line)
        items.append(next(arriving))
    for _ in arriving:  # until the ranks have ended
        pass


def _failures(targets: Sequence[Target], items: Sequence[Sequence[Trial]]) -> dict[str, str]:
    """Why targets could not be timed, in the words of the first rank that failed."""
    return {
        target.name: trial
        for target, trials in zip(targets, items)
        for trial in reversed(trials)
        if isinstance(trial, str)
    }


def slowest_rank(
    target: Target,
    settings: Settings,
    passes: str,
    trials: Sequence[Trial],
    rounds: Sequence[Sequence[Round]],
) -> Row:
    """What the slowest rank of each round took, beside the median of one device."""
    single = statistics.median(ms[target.base, passes] for ranks in rounds for ms in ranks)
    slowest = tuple(max(ms[target.name, passes] for ms in ranks) for ranks in rounds)
    sizes = [trial[passes] for trial in trials if not isinstance(trial, str)]
    return _row(target, settings, passes, slowest, single * settings.world_size, sizes)


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
            samples, theoretic = slowest.samples_ms, slowest.values["theoretic_ms"]
            sizes = [row.peak_bytes for row in ranks]
            rows[target.name, passes] = _row(target, settings, passes, samples, theoretic, sizes)
    return rows, failed


def _replay_ranks(target: Target, settings: Settings, report: Report) -> Replay:
    """Replay three ranks: the first, which receives most, the last, and the one with most pairs.

    Of several with as many pairs it is the last, which merges most.
    """
    workload, placement = target.workload, target.placement
    problem, last = problem_of(workload, placement), placement.world_size - 1
    pairs = {r: make_plan(placement.route, problem, r).pairs for r in range(last + 1)}
    busiest = max(pairs, key=lambda rank: (pairs[rank], rank))
    return replay_ranks(
        workload,
        placement,
        device=settings.device,
        ranks=sorted({0, busiest, last}),
        repeats=settings.repeats,
        report=lambda line: report(f"{target.name}: {line}"),
    )


def _row(
    target: Target,
    settings: Settings,
    passes: str,
    samples: tuple[float, ...] = (),
    theoretic: float = 0.0,
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
    }
    if settings.is_replay:
        values["slowest"] = 1.0
    tflops = target.flops(passes) / row.ms / 1e9
    peak = max((size for size in sizes if size is not None), default=None)
    return replace(row, tflops=tflops, peak_bytes=peak, values=values)
