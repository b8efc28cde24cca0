"""The measurements of a profile as plain text: one kernel alone, and all implementations."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from ..results import Results, Row

_WIDTHS = (28, 14, 14, 14)


def baseline_lines(results: Results) -> Iterator[str]:
    """Times, rates and memory of each pass."""
    yield f"{results.rows[0].implementation} on {results.machine['device']}"
    for row in results.rows:
        yield from ("", f"{row.passes.capitalize()}:")
        if row.ms is None or row.tflops is None:
            yield f"  failed: {row.failed}"
            continue
        runs, work = row.samples_ms, row.tflops * row.ms
        fastest, average = min(runs), statistics.fmean(runs)
        times = {"min": fastest, "avg": average, "median": row.ms, "max": max(runs)}
        for name, ms in times.items():
            yield f"  {f'Time ({name}):':<20}{ms:.3f} ms"
        for name, ms in (("peak", fastest), ("avg", average)):
            yield f"  {f'TFLOP/s ({name}):':<20}{work / ms:.4g} TFLOP/s"
        yield f"  {'Memory (MiB):':<20}{_mib(row)}"


def comparison_lines(results: Results, base: str) -> Iterator[str]:
    """Of each pass a table; speed-ups are against the implementation `base`."""
    yield f"On {results.machine['device']}; speed-up against {base}"
    for passes in dict.fromkeys(row.passes for row in results.rows):
        rows = [row for row in results.rows if row.passes == passes]
        yield from (
            "",
            f"{passes.capitalize()}:",
            _line("Implementation", "Time (ms)", "Memory (MiB)", "Speed-up"),
        )
        yield "-" * sum(_WIDTHS)
        own = next((row.ms for row in rows if row.implementation == base), None)
        ran = [row for row in rows if row.ms is not None]
        for row in ran:
            assert row.ms is not None
            speed = "n/a" if own is None else f"{own / row.ms:.2f}x"
            yield _line(row.implementation, f"{row.ms:.3f}", _mib(row), speed)
        yield from _best(ran)
    missing = {row.implementation: row.failed for row in results.rows if row.failed is not None}
    if missing:
        yield ""
        yield from (f"{name}: {why}" for name, why in missing.items())


def _best(rows: Sequence[Row]) -> Iterator[str]:
    times = {row.implementation: row.ms for row in rows if row.ms is not None}
    sizes = {row.implementation: row.peak_bytes for row in rows if row.peak_bytes is not None}
    for what, found in (("Fastest", times), ("Lowest memory", sizes)):
        if found:
            yield f"{what}: {min(found, key=lambda name: found[name])}"


def _line(name: str, *cells: str) -> str:
    first, *others = _WIDTHS
    return name.ljust(first) + "".join(c.rjust(w) for c, w in zip(cells, others, strict=True))


def _mib(row: Row) -> str:
    return "n/a" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.1f}"
