"""Cells of tables and sentences that terminals and files share; without torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .results import Row

if TYPE_CHECKING:
    from rich.table import Table

ON_CPU = "On the CPU these are times of the host, and say little about GPUs."
MISSING = "n/a"


def make_table(texts: Iterable[str], numbers: Iterable[str], title: str | None = None) -> Table:
    """A table without columns' lines; numbers come last, to the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title)
    table.title_justify = "left"
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def cell(value: float | None, form: str = ".3f", missing: str = MISSING, unit: str = "") -> str:
    """A number with its unit, or what stands for none."""
    return missing if value is None else format(value, form) + unit


def mib(size: int | None, missing: str = MISSING) -> str:
    """Bytes in MiB."""
    return cell(None if size is None else size / 2**20, ".1f", missing)


def run_times(row: Row) -> dict[str, float]:
    """The fastest, mean, median and slowest run of a row that was timed, in ms."""
    runs = row.samples_ms
    middle = statistics.median(runs)
    return {"min": min(runs), "avg": statistics.fmean(runs), "median": middle, "max": max(runs)}


def speed_up(row: Row, base_ms: float | None) -> str:
    """Against a baseline, if that ran."""
    return MISSING if base_ms is None or not row.ms else f"{base_ms / row.ms:.2f}x"


def fastest(rows: Sequence[Row]) -> Row | None:
    """Of those that were timed."""
    return min((row for row in rows if row.ms is not None), key=lambda r: r.ms or 0.0, default=None)


def leanest(rows: Sequence[Row]) -> Row | None:
    """The one with the lowest peak of memory."""
    measured = (row for row in rows if row.peak_bytes is not None)
    return min(measured, key=lambda row: row.peak_bytes or 0, default=None)
