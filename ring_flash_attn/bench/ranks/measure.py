"""`time_targets`: distributed functions on real ranks or by replay, as rows of results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...comm import launch
from ...plan.build import make_plan
from ..inputs import problem_of
from ..link import Link
from ..replays.results import replay_rows
from ..replays.run import replay_ranks
from ..results import RING, Row
from ..versus import beside
from ..workload import BOTH, FORWARD, Placement, Workload
from .on_rank import FirstRuns, Round, measure_on_rank, reason_of
from .target import Selection, Target

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


class Timed(NamedTuple):
    """Times of one target and one of PASSES.

    Attributes:
        samples_ms: of each run the slowest rank's; for a replay the runs of the slowest rank.
        theoretic_ms: world size times what one device takes for a rank's own tokens.
        peak_bytes: above inputs, outputs and gradients, on the rank that holds most; None on CPUs.
    """

    samples_ms: tuple[float, ...]
    theoretic_ms: float
    peak_bytes: int | None


Result = dict[str, Timed] | str  # by passes, or why the target could not be timed


def time_targets(
    selection: Selection, settings: Settings, report: Report
) -> tuple[Rows, dict[str, Replay]]:
    """Rows of all targets, and replays by the name of the first target that they are for.

    Args:
        selection: what to time.
        settings: how.
        report: is called with what is being done.

    Raises:
        launch.RanksFailed: a new rank died in the middle of the rounds.
    """
    replays: dict[str, Replay] = {}
    if settings.is_replay:
        found, replays = _replay(selection.targets, settings, report)
    else:
        found = _measure(selection.targets, settings, report)
    rows = {
        (target.name, passes): _row(target, settings, passes, result)
        for target, result in (*found.items(), *selection.impossible.items())
        for passes in settings.passes
    }
    for (name, passes), row in rows.items():
        if name in selection.baselines:
            rows[name, passes] = beside(row, rows[selection.baselines[name], passes])
    return rows, replays


def _measure(targets: Sequence[Target], settings: Settings, report: Report) -> dict[Target, Result]:
    """Time targets on the ranks that torchrun has started, or on new ones.

    A target that raises on all ranks alike gets the reason. One that ends a rank does, too, if the
    ranks are new: the others go on with yet newer ones.
    """
    left, failed, crashes = list(targets), dict[Target, str](), 0
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
            failed |= {**_failures(left, items), left[len(items)]: str(failure)}
        left = [each for each in left if each not in failed]
        crashes += 1
        if crashes == MOST_CRASHES:
            failed |= dict.fromkeys(left, f"not run after {crashes} crashes")
            break
    rounds = items[len(left) :]
    return {
        each: failed.get(each) or slowest_rank(each, settings, items[left.index(each)], rounds)
        for each in targets
    }


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


def _failures(targets: Sequence[Target], items: Sequence[Sequence[FirstRuns]]) -> dict[Target, str]:
    """Why targets could not be timed, in the words of the first rank that failed."""
    return {
        target: trial.failed
        for target, trials in zip(targets, items)
        for trial in reversed(trials)
        if trial.failed is not None
    }


def slowest_rank(
    target: Target,
    settings: Settings,
    trials: Sequence[FirstRuns],
    rounds: Sequence[Sequence[Round]],
) -> dict[str, Timed]:
    """What the slowest rank of each round took, by passes."""
    found = {}
    for passes in settings.passes:
        single = [ms[target.base, passes] for ranks in rounds for ms in ranks]
        slowest = (max(ms[target.name, passes] for ms in ranks) for ranks in rounds)
        peaks = [size for trial in trials if (size := trial.peaks[passes]) is not None]
        theoretic = statistics.median(single) * settings.world_size
        found[passes] = Timed(tuple(slowest), theoretic, max(peaks, default=None))
    return found


def _replay(
    targets: Sequence[Target], settings: Settings, report: Report
) -> tuple[dict[Target, Result], dict[str, Replay]]:
    """Replay ranks of each target, one at a time; targets of one workload share a replay."""
    known: dict[tuple[Workload, Placement], Result] = {}
    replays: dict[str, Replay] = {}
    for target in targets:
        key = (target.workload, target.placement)
        if key in known:
            continue
        try:
            replay = replays[target.name] = _replay_ranks(target, settings, report)
            known[key] = {passes: _slowest(replay, passes) for passes in settings.passes}
        except Exception as error:  # of any library: the other functions go on
            known[key] = reason_of(error)
        if isinstance(known[key], str) and settings.device.type == "cuda":
            torch.cuda.empty_cache()
    return {each: known[each.workload, each.placement] for each in targets}, replays


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


def _slowest(replay: Replay, passes: str) -> Timed:
    ranks = [row for row in replay_rows(replay) if row.passes == passes]
    slowest = next(row for row in ranks if row.values["slowest"])
    peaks = [row.peak_bytes for row in ranks if row.peak_bytes is not None]
    theoretic = slowest.values["theoretic_ms"]
    return Timed(slowest.samples_ms, theoretic, max(peaks, default=None))


def _row(target: Target, settings: Settings, passes: str, result: Result) -> Row:
    """For tables and files."""
    workload = target.placement.describe(target.workload)
    spread = {**target.placement.to_dict(), "function": target.function.name}
    if settings.is_replay:
        spread["link"] = target.placement.link_name
    else:
        spread["backend"] = settings.used_backend
    row = Row(RING, target.placement.kernel, passes, workload, spread)
    if isinstance(result, str):
        return replace(row, failed=result)
    samples, theoretic, peak = result[passes]
    ms = statistics.median(samples)
    values = {
        "theoretic_ms": theoretic,
        "efficiency_percent": 100 * theoretic / ms,
        "iterations_per_second": 1e3 / ms,
    }
    if settings.is_replay:
        values["slowest"] = 1.0
    tflops = target.flops(passes) / ms / 1e9
    return replace(row, samples_ms=samples, tflops=tflops, peak_bytes=peak, values=values)
