"""Two sets of results: which rows moved, and by how much against their spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from .results import Results, Row

_SURE = 3.0  # standard errors beyond which a change is no chance
_SIGMA = 1.349  # of a normal distribution: distance of its quartiles
_MEDIAN = 1.2533  # standard error of a median, against that of a mean


class Verdict(Enum):
    """What became of a row."""

    FAILED = "fails now"
    SLOWER = "slower"
    FATTER = "more memory"
    WRONG = "wrong now"
    MISSING = "missing"
    NEW = "new"
    FASTER = "faster"
    SAME = "same"


BAD = (Verdict.FAILED, Verdict.WRONG, Verdict.SLOWER, Verdict.FATTER)


@dataclass(frozen=True, slots=True)
class Change:
    """One row, before and after.

    Attributes:
        row: what it is about; after, where there is one.
        before, after: medians in ms.
        percent: by which the time changed; positive: slower.
        spread: standard error of that in percent; None if there are too few runs to tell.
        memory_percent: by which the memory changed.
        verdict: what became of it.
    """

    row: Row
    before: float | None
    after: float | None
    percent: float | None
    spread: float | None
    memory_percent: float | None
    verdict: Verdict

    @property
    def is_sure(self) -> bool:
        """Whether the change is larger than chance; so it is where chance is not known."""
        return self.percent is not None and (
            self.spread is None or abs(self.percent) > _SURE * self.spread
        )


def compare(before: Results, after: Results, limit: float) -> list[Change]:
    """Every row of both, the worst first; those that changed by no more than `limit` % are same.

    Raises:
        ValueError: they have no row in common.
    """
    old, new = _by_key(before.rows), _by_key(after.rows)
    if not set(old) & set(new):
        raise ValueError("the two files have no row in common: nothing to compare")
    changes = [_change(old.get(key), new.get(key), limit) for key in {**old, **new}]
    order = list(Verdict)
    return sorted(changes, key=lambda each: (order.index(each.verdict), -(each.percent or 0.0)))


def _by_key(rows: Sequence[Row]) -> dict[tuple[str, ...], Row]:
    return {row.key: row for row in rows}


def _change(old: Row | None, new: Row | None, limit: float) -> Change:
    if old is None or new is None:
        row = new or old
        assert row is not None
        times = (None if old is None else old.ms, None if new is None else new.ms)
        return Change(row, *times, None, None, None, Verdict.NEW if new else Verdict.MISSING)
    percent = _percent(old.ms, new.ms)
    memory = _percent(old.peak_bytes, new.peak_bytes)
    change = Change(new, old.ms, new.ms, percent, _spread(old, new), memory, Verdict.SAME)
    verdict = _verdict(old, new, change, limit)
    return Change(new, old.ms, new.ms, percent, change.spread, memory, verdict)


def _verdict(old: Row, new: Row, change: Change, limit: float) -> Verdict:
    if new.failed is not None:
        return Verdict.SAME if old.failed is not None else Verdict.FAILED
    if any(_is_wrong(new, name) and not _is_wrong(old, name) for name in new.errors):
        return Verdict.WRONG
    if change.percent is not None and change.is_sure and abs(change.percent) > limit:
        return Verdict.SLOWER if change.percent > 0 else Verdict.FASTER
    if change.memory_percent is not None and change.memory_percent > limit:
        return Verdict.FATTER
    return Verdict.SAME


def _is_wrong(row: Row, tensor: str) -> bool:
    return row.errors.get(tensor, {}).get("passed", True) is False


def _percent(old: float | None, new: float | None) -> float | None:
    return 100 * (new / old - 1) if old and new is not None else None


def _spread(old: Row, new: Row) -> float | None:
    """Standard error of the ratio of both medians, in percent."""
    parts = [_relative_error(row.samples_ms) for row in (old, new)]
    known = [part for part in parts if part is not None]
    return 100 * math.hypot(*known) if len(known) == len(parts) else None


def _relative_error(samples: Sequence[float]) -> float | None:
    """Of a median, from the quartiles of its runs."""
    if len(samples) < 4:
        return None
    low, middle, high = statistics.quantiles(samples, n=4)
    return _MEDIAN * (high - low) / _SIGMA / math.sqrt(len(samples)) / middle
