"""`time_targets`: distributed functions on real ranks or by replay, as rows of results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...comm import launch
from ...plan.build import make_plan
from ..inputs import problem_of
from ..link import Link
from ..replay_results import replay_rows
from ..report import Replay
from ..results import RING, Row
from ..run import replay_ranks
from ..versus import beside
from ..workload import BOTH, FORWARD, Placement, Workload
from .on_rank import Round, Trial, measure_on_rank, reason_of
from .target import Selection, Target

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
        rows, replays = _replay(selection.targets, settings, report)
    else:
        rows = _measure(selection.targets, settings, report)
    for target, why in selection.impossible.items():
        rows |= _failed(target, settings, why)
    baselines = selection.baselines
    compared = {
        (name, passes): beside(row, rows[baselines[name], passes]) if name in baselines else row
        for (name, passes), row in rows.items()
    }
    return compared, replays


# On ranks.


def _measure(targets: Sequence[Target], settings: Settings, report: Report) -> Rows:
    """On the ranks that torchrun has started, or on new ones.

    A target that raises on all ranks alike gets rows that say so. One that ends a rank does, too,
    if the ranks are new: the others go on with yet newer ones.
    """
    left, failed, crashes = list(targets), dict[str, str](), 0
    items: list[list[Any]] = []  # of each rank: a trial of each target, then the rounds
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
    rows: Rows = {}
    for target in targets:
        if target.name in failed:
            rows |= _failed(target, settings, failed[target.name])
        else:
            trials = items[left.index(target)]
            rows |= timed_rows(target, settings, trials, items[len(left) :])
    return rows


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
    names = [f"trying {target.name}" for target in targets]
    rounds = [f"round {number + 1} of {settings.repeats}" for number in range(settings.repeats)]
    for doing in (*names, *rounds):
        report(doing)
        items.append(next(arriving))
    for _ in arriving:  # until the ranks have ended
        pass


def _failures(targets: Sequence[Target], items: Sequence[Sequence[Trial]]) -> dict[str, str]:
    """Why targets could not be timed."""
    tried = zip(targets, items)
    reasons = {
        target.name: next(filter(None, (t.failed for t in of)), None) for target, of in tried
    }
    return {name: why for name, why in reasons.items() if why is not None}


def timed_rows(
    target: Target, settings: Settings, trials: Sequence[Trial], rounds: Sequence[Sequence[Round]]
) -> Rows:
    """Rows of a target, of which each round's slowest rank counts."""
    rows: Rows = {}
    for passes in settings.passes:
        single = [ms[target.base, passes] for ranks in rounds for ms in ranks]
        slowest = tuple(max(ms[target.name, passes] for ms in ranks) for ranks in rounds)
        peaks = [size for trial in trials if (size := trial.peaks[passes]) is not None]
        theoretic = statistics.median(single) * settings.world_size
        peak = max(peaks, default=None)
        rows[target.name, passes] = _row(target, settings, passes, slowest, theoretic, peak)
    return rows


# By replay.


def _replay(
    targets: Sequence[Target], settings: Settings, report: Report
) -> tuple[Rows, dict[str, Replay]]:
    """Replay ranks of each target, one at a time; targets of one workload share a replay."""
    known: dict[tuple[Workload, Placement], Replay | str] = {}
    rows: Rows = {}
    replays: dict[str, Replay] = {}
    for target in targets:
        key = (target.workload, target.placement)
        is_new = key not in known
        found = known[key] = _replay_target(target, settings, report) if is_new else known[key]
        if isinstance(found, str):
            rows |= _failed(target, settings, found)
            continue
        if is_new:
            replays[target.name] = found
        for passes in settings.passes:
            ranks = [row for row in replay_rows(found) if row.passes == passes]
            slowest = next(row for row in ranks if row.values["slowest"])
            peaks = [row.peak_bytes for row in ranks if row.peak_bytes is not None]
            times = (slowest.samples_ms, slowest.values["theoretic_ms"])
            peak = max(peaks, default=None)
            rows[target.name, passes] = _row(target, settings, passes, *times, peak)
    return rows, replays


def _replay_target(target: Target, settings: Settings, report: Report) -> Replay | str:
    """The replay, or why there is none.

    Of all ranks these three: the first, which receives most, the last, and the one with most pairs;
    of several with as many the last, which merges most.
    """
    workload, placement = target.workload, target.placement
    problem, last = problem_of(workload, placement), placement.world_size - 1
    try:
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
    except Exception as error:  # of any library: the other functions go on
        reason = reason_of(error)
    if settings.device.type == "cuda":
        torch.cuda.empty_cache()
    return reason


# Rows.


def _row(
    target: Target,
    settings: Settings,
    passes: str,
    samples_ms: tuple[float, ...],
    theoretic_ms: float,
    peak_bytes: int | None,
) -> Row:
    """A row of a target that was timed.

    Args:
        target, settings, passes: what, and how.
        samples_ms: of the slowest rank.
        theoretic_ms: world size times what one device takes for a rank's own tokens.
        peak_bytes: above inputs, outputs and gradients, on the rank that holds most; None on CPUs.
    """
    ms = statistics.median(samples_ms)
    values = {
        "theoretic_ms": theoretic_ms,
        "efficiency_percent": 100 * theoretic_ms / ms,
        "iterations_per_second": 1e3 / ms,
    }
    if settings.is_replay:
        values["slowest"] = 1.0
    tflops = target.flops(passes) / ms / 1e9
    where = _where(target, settings)
    kernel = target.placement.kernel
    return Row(RING, kernel, passes, *where, samples_ms, tflops, peak_bytes, values)


def _failed(target: Target, settings: Settings, why: str) -> Rows:
    """Rows of a target that could not be timed."""
    kernel, where = target.placement.kernel, _where(target, settings)
    return {
        (target.name, passes): Row(RING, kernel, passes, *where, failed=why)
        for passes in settings.passes
    }


def _where(target: Target, settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """The workload and the placement of a row."""
    placement = {**target.placement.to_dict(), "function": target.function.name}
    if settings.is_replay:
        placement["link"] = target.placement.link_name
    else:
        placement["backend"] = settings.used_backend
    return target.placement.describe(target.workload), placement
