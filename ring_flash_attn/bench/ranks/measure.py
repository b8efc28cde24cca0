"""`measure_rings`: distributed functions on real ranks, timed in turns with one device."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...comm import launch
from ..results import BOTH, FORWARD
from .on_rank import Round, Trial, measure_on_rank
from .target import Finding, Target, Timed

MOST_CRASHES = 3  # after so many the rest is left out


@dataclass(frozen=True, slots=True)
class Settings:
    """How and where.

    Attributes:
        world_size, device, backend: of the ranks.
        repeats: rounds.
        grad: backward as well.
        timeout: seconds that a new rank may take for a trial or a round.
    """

    world_size: int
    device: str
    backend: str
    repeats: int
    grad: bool = True
    timeout: float = 300.0

    @property
    def passes(self) -> tuple[str, ...]:
        """What is timed."""
        return (FORWARD, BOTH) if self.grad else (FORWARD,)


def measure_rings(
    targets: Sequence[Target], settings: Settings, report: Callable[[str], None]
) -> list[Finding]:
    """Time the targets on the ranks that torchrun has started, or on new ones.

    A target that raises on all ranks alike gets a finding that says so. One that ends a rank does,
    too, if the ranks are new: the others go on with yet newer ones.

    Args:
        targets: what to time.
        settings: how.
        report: is told what is being done.

    Raises:
        launch.RanksFailed: a new rank died in the middle of the rounds.
    """
    left, failed, crashes = list(targets), dict[str, str](), 0
    while True:
        run = _Run(left, settings, report)
        try:
            run.collect()
            break
        except launch.RanksFailed as failure:
            blamed = run.under_way
            if blamed is None:
                raise launch.RanksFailed(f"while timing, {failure}") from None
            crashes += 1
            failed |= {**run.failed(), blamed.name: str(failure)}
            left = [each for each in left if each.name not in failed]
        if crashes == MOST_CRASHES:
            failed |= {each.name: f"not run after {crashes} crashes" for each in left}
            left = []
    failed |= run.failed()
    return [_finding(each, run, failed.get(each.name)) for each in targets]


def _finding(target: Target, run: _Run, failed: str | None) -> Finding:
    return Finding(target, failed=failed) if failed else Finding(target, run.timed(target))


class _Run:
    """What one set of ranks says about its targets."""

    def __init__(
        self, targets: Sequence[Target], settings: Settings, report: Callable[[str], None]
    ) -> None:
        self._targets, self._settings, self._report = tuple(targets), settings, report
        self._trials: list[list[Trial]] = []  # of each target, of each rank
        self._rounds: list[list[Round]] = []

    @property
    def under_way(self) -> Target | None:
        """The target that is being tried; None during the rounds."""
        done = len(self._trials)
        return self._targets[done] if done < len(self._targets) else None

    def collect(self) -> None:
        """Run the ranks to the end; none for no targets."""
        if not self._targets:
            return
        self._say()
        for items in self._items():
            if self.under_way is not None:
                self._trials.append(items)
            else:
                self._rounds.append(items)
            self._say()

    def _say(self) -> None:
        if self.under_way is not None:
            self._report(f"trying {self.under_way.name}")
        elif len(self._rounds) < self._settings.repeats:
            self._report(f"round {len(self._rounds) + 1} of {self._settings.repeats}")

    def _items(self) -> Iterator[list[Any]]:
        s = self._settings
        args = (self._targets, s.passes, s.repeats, s.device)
        if launch.torchrun_rank():
            return launch.run_joined(measure_on_rank, args, s.device, s.backend)
        return launch.run_spawned(
            measure_on_rank, args, s.world_size, s.device, s.backend, s.timeout
        )

    def failed(self) -> dict[str, str]:
        """Why targets could not be timed."""
        reasons = {}
        for target, trials in zip(self._targets, self._trials):
            reason = next((trial.failed for trial in trials if trial.failed), None)
            if reason is not None:
                reasons[target.name] = reason
        return reasons

    def timed(self, target: Target) -> dict[str, Timed]:
        """By passes."""
        trials = self._trials[self._targets.index(target)]
        found = {}
        for passes in self._settings.passes:
            alone = [ms[target.base, passes] for items in self._rounds for ms in items]
            slowest = (max(ms[target.name, passes] for ms in items) for items in self._rounds)
            peaks = [size for trial in trials if (size := trial.peaks[passes]) is not None]
            theoretic = statistics.median(alone) * self._settings.world_size
            found[passes] = Timed(tuple(slowest), theoretic, max(peaks, default=None))
        return found
