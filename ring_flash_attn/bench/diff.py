"""Two sets of results: which rows moved, and whether their spread allows to tell."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from .results import Results, Row

_SURE = 3.0  # standard errors on either side of a change: 99.7 % of intervals hold the true one
_LARGEST = 700.0  # of which exp is finite
_MUCH = 1 << 20  # bytes; less is no growth
_WORSE = 4.0  # times as large an error is wrong
_SIGMA = 1.349  # of a normal distribution: distance of its quartiles
_MEDIAN = 1.2533  # standard error of a median, against that of a mean


class Outcome(Enum):
    """What became of a row."""

    FAILED = "fails now"
    WRONG = "wrong now"
    SLOWER = "slower"
    FATTER = "more memory"
    MISSING = "missing"
    NOISY = "too noisy to tell"
    NEW = "new"
    WORKS = "works now"
    FASTER = "faster"
    SAME = "same"


BAD = (Outcome.FAILED, Outcome.WRONG, Outcome.SLOWER, Outcome.FATTER)


@dataclass(frozen=True, slots=True)
class Change:
    """One row, before and after.

    Attributes:
        row: what it is about; after, where there is one.
        before, after: medians in ms.
        percent: by which the time changed; positive: slower.
        spread: standard error of after / before, in percent of it; None with fewer than 4 runs.
        memory_percent: by which the memory changed.
        verdict: what became of it.
    """

    row: Row
    before: float | None
    after: float | None
    percent: float | None
    spread: float | None
    memory_percent: float | None
    verdict: Outcome

    @property
    def interval(self) -> tuple[float, float] | None:
        """Within which the true change lies, in percent; None if nothing is known about it.

        Ratios of times vary by factors, so it is one of factors: further up than down.
        """
        if self.percent is None or self.spread is None:
            return None
        ratio = 1 + self.percent / 100
        factor = math.exp(min(_SURE * self.spread / 100, _LARGEST))
        return 100 * (ratio / factor - 1), 100 * (ratio * factor - 1)


def compare(before: Results, after: Results, limit: float) -> list[Change]:
    """Every row of both, the worst first.

    A row is slower (faster) if its median changed by more than `limit` % and the interval of the
    change excludes 0; it is the same if that interval lies within ± `limit` %. Otherwise, and where
    there is no interval, it is too noisy to tell.

    Raises:
        ValueError: they have no row in common.
    """
    old, new = ({row.key: row for row in each.rows} for each in (before, after))
    if not set(old) & set(new):
        raise ValueError("the two files have no row in common: nothing to compare")
    repeats = (each.settings.get("repeats") for each in (before, after))
    rounds = [each if isinstance(each, int) else 0 for each in repeats]
    changes = [_change(old.get(key), new.get(key), rounds, limit) for key in {**old, **new}]
    order = list(Outcome)
    return sorted(changes, key=lambda each: (order.index(each.verdict), -(each.percent or 0.0)))


def _change(old: Row | None, new: Row | None, rounds: Sequence[int], limit: float) -> Change:
    if old is None or new is None:
        if new is not None:
            return Change(new, None, new.ms, None, None, None, Outcome.NEW)
        assert old is not None
        return Change(old, old.ms, None, None, None, None, Outcome.MISSING)
    percent, memory = _percent(old.ms, new.ms), _percent(old.peak_bytes, new.peak_bytes)
    change = Change(new, old.ms, new.ms, percent, _spread(old, new, rounds), memory, Outcome.SAME)
    return replace(change, verdict=_verdict(old, new, change, limit))


def _verdict(old: Row, new: Row, change: Change, limit: float) -> Outcome:
    """The worst that can be said."""
    if new.failed is not None:
        return Outcome.FAILED if old.failed is None else Outcome.SAME
    if old.failed is not None:
        return Outcome.WORKS
    if any(_is_worse(old.errors.get(name, {}), new.errors[name]) for name in new.errors):
        return Outcome.WRONG
    time = _time_verdict(change, limit)
    if time is Outcome.SLOWER:
        return time
    growth = (new.peak_bytes or 0) - (old.peak_bytes or 0)
    if old.peak_bytes is not None and growth > max(_MUCH, limit / 100 * old.peak_bytes):
        return Outcome.FATTER
    return time


def _time_verdict(change: Change, limit: float) -> Outcome:
    """SLOWER, FASTER, SAME or NOISY; SAME where nothing was timed."""
    if change.percent is None:
        return Outcome.SAME
    low, high = change.interval or (-math.inf, math.inf)
    if change.percent > limit and low > 0:
        return Outcome.SLOWER
    if change.percent < -limit and high < 0:
        return Outcome.FASTER
    return Outcome.SAME if -limit <= low and high <= limit else Outcome.NOISY


def _is_worse(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Beyond its limit now; or, where there is none, much larger, or no number any more."""
    if "passed" in new:
        return new["passed"] is False and old.get("passed", True) is not False
    if old.get("relative") is None or new.get("relative") is None:
        return False
    before, after = float(old["relative"]), float(new["relative"])  # files have words for NaN
    return math.isfinite(before) and not after <= _WORSE * before


def _percent(old: float | None, new: float | None) -> float | None:
    return 100 * (new / old - 1) if old and new is not None else None


def _spread(old: Row, new: Row, rounds: Sequence[int]) -> float | None:
    """Standard error of the ratio of both medians, in percent; drift between runs is not in it."""
    before, after = map(_relative_error, (old.samples_ms, new.samples_ms), rounds)
    return None if before is None or after is None else 100 * math.hypot(before, after)


def _relative_error(samples: Sequence[float], rounds: int) -> float | None:
    """Of a median, from the quartiles of the rounds' medians: runs of one round are alike."""
    if 0 < rounds < len(samples) and len(samples) % rounds == 0:
        each = len(samples) // rounds
        starts = range(0, len(samples), each)
        samples = [statistics.median(samples[start : start + each]) for start in starts]
    if len(samples) < 4:
        return None
    low, middle, high = statistics.quantiles(samples, n=4)
    return _MEDIAN * (high - low) / _SIGMA / math.sqrt(len(samples)) / middle
