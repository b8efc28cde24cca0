"""Files of `rfa verify`: results as JSON, and the precision report as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..bench.machine import command, devices, find_device, machine, variables, versions
from ..bench.machine import make_results as measured
from ..bench.results import Results
from ..bench.verify_results import verify_rows
from .cases import Choice
from .checker import Result, Status
from .groups import name_of
from .measure import Error
from .precision import (
    COLUMNS,
    READING,
    READING_DIFFERENCES,
    Line,
    accepted_in_words,
    by_place,
    difference_lines,
    precision_lines,
)


def make_results(results: Sequence[Result], choice: Choice, seconds: float) -> Results:
    """Everything: a row for each case and rank, and the cases themselves under "verify"."""
    everything = {
        "configuration": asdict(choice),
        "versions": versions(),
        "devices": devices(),
        "variables": variables(),
        "seconds": round(seconds, 3),
        "summary": _counts(results),
        "cases": [_plain(result) for result in results],
    }
    settings = {"seconds": round(seconds, 3), "seed": choice.seed}
    rows = tuple(verify_rows(everything))
    return measured(rows, find_device(choice.device), settings, details={"verify": everything})


def _counts(results: Sequence[Result]) -> dict[str, int]:
    statuses = [result.status for result in results]
    return {each.value: statuses.count(each) for each in Status if each in statuses}


def _plain(result: Result) -> dict[str, Any]:
    return {
        **asdict(result.case),
        "status": result.status.value,
        "used_kernel": result.kernel,
        "reason": result.reason,
        "tensors": _errors(result.errors),
        "differences": {name: _errors(each) for name, each in result.differences.items()},
    }


def _errors(errors: Iterable[Error]) -> list[dict[str, Any]]:
    return [
        {name: _finite(value) for name, value in asdict(error).items()} | {"passed": error.passed}
        for error in errors
    ]


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_markdown(
    path: Path, results: Sequence[Result], choice: Choice, seconds: float, by_rank: bool
) -> None:
    """The precision report."""
    text = "\n".join(_markdown(results, choice, seconds, by_rank)) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _markdown(
    results: Sequence[Result], choice: Choice, seconds: float, by_rank: bool
) -> Iterator[str]:
    device = machine(find_device(choice.device))["device"]
    counts = ", ".join(f"{number} {what}" for what, number in _counts(results).items())
    yield "# Precision"
    yield ""
    yield f"`{command()}`"
    yield ""
    yield f"- {len(results)} cases: {counts} ({seconds:.1f} s)"
    yield f"- device: {device}; " + ", ".join(f"{a} {b}" for a, b in versions().items())
    yield from (f"- {line}" for line in accepted_in_words(results))
    yield ""
    yield READING
    for title, lines in by_place(precision_lines(results, choice.world_size, by_rank)):
        yield from ("", f"## {title}", "")
        yield from _table(lines)
    differences = list(difference_lines(results, choice.world_size, by_rank))
    if differences:
        yield from ("", READING_DIFFERENCES)
    for title, lines in differences:
        yield from ("", f"## {title}", "")
        yield from _table(lines)
    unmeasured = [result for result in results if result.reason]
    if unmeasured:
        yield from ("", "## Not measured", "")
    for result in unmeasured:
        yield f"- {name_of(result)}: {result.status.value}: {result.reason.splitlines()[-1]}"


def _table(lines: Sequence[Line]) -> Iterator[str]:
    heads = ("function", "layout × route × kernel", "dtype", "cases", *COLUMNS)
    yield f"| {' | '.join(heads)} |"
    yield f"|{'|'.join(['---'] * 3 + ['---:'] * (len(heads) - 3))}|"
    for line in lines:
        cells = (f"`{line.function}`", line.point, line.dtype, str(line.cases), *line.cells())
        yield f"| {' | '.join(cells)} |"
