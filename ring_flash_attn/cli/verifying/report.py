"""The report of `rfa verify`: a table, what went wrong, a summary line, and everything as JSON."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...bench.machine import versions
from ...layout import layout_names
from ...plan import route_names
from ..info import devices, variables
from .cases import Choice, function_names
from .checker import Result, Status
from .measure import Error

_TENSORS = ("out", "lse", "dq", "dk", "dv", "dsink")
_STYLES = {
    Status.ERROR: "bold red",
    Status.FAIL: "bold red",
    Status.LEFT_OUT: "red",
    Status.PASS: "green",
    Status.CANNOT: "yellow",
}
_DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def exit_code(results: Sequence[Result]) -> int:
    """1 if anything failed, or nothing could be run."""
    ran = any(result.status is Status.PASS for result in results)
    return int(any(result.bad for result in results) or not ran)


def print_report(console: Console, results: Sequence[Result], verbose: int, seconds: float) -> None:
    """The table (verbose 1: a row for each case, 2: for each tensor and rank), and the summary."""
    console.print(_details(results) if verbose > 1 else _table(results, each=verbose == 1))
    for result in results:
        if result.bad:
            console.print("\n".join(_complaint(result)))
    reasons = Counter(result.reason for result in results if result.status is Status.CANNOT)
    for reason, count in reasons.items():
        console.print(f"[yellow]cannot[/] ({count} cases): {escape(reason)}")
    console.print(_summary(results, seconds))


def write_json(path: Path, results: Sequence[Result], choice: Choice, seconds: float) -> None:
    """Everything: configuration, versions, and every case, tensor and rank."""
    everything = {
        "configuration": asdict(choice),
        "versions": versions(),
        "devices": devices(),
        "variables": variables(),
        "seconds": round(seconds, 3),
        "summary": {status.value: n for status, n in _counts(results).items()},
        "cases": [_as_json(result) for result in results],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(everything, indent=1, allow_nan=False) + "\n")


def _as_json(result: Result) -> dict[str, Any]:
    return {
        **asdict(result.case),
        "status": result.status.value,
        "used_kernel": result.kernel,
        "reason": result.reason,
        "tensors": [
            {name: _finite(value) for name, value in asdict(error).items()}
            | {"passed": error.passed}
            for error in result.errors
        ],
    }


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _table(results: Iterable[Result], each: bool) -> Table:
    """A row for each function, point and dtype with its worst errors; or for each single case."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("function", overflow="fold")
    table.add_column("layout × route × kernel", overflow="fold")
    table.add_column("dtype")
    table.add_column("case" if each else "cases", justify="left" if each else "right")
    for tensor in _TENSORS:
        table.add_column(tensor, justify="right", no_wrap=True)
    table.add_column("worst\nrank", justify="right")
    table.add_column("")
    for group in _groups(results):
        for rows in [[result] for result in group] if each else [group]:
            table.add_row(*_row(rows, each))
    return table


def _groups(results: Iterable[Result]) -> list[list[Result]]:
    """Results of one function, point and dtype."""
    groups: dict[tuple[int, int, int, str, int], list[Result]] = {}
    functions, layouts, routes = function_names(prefixes=True), layout_names(), route_names()
    for result in results:
        case = result.case
        place = (
            functions.index(case.function),
            layouts.index(case.layout) if case.layout else -1,
            routes.index(case.route) if case.route else -1,
            result.kernel or case.kernel,
            list(_DTYPES).index(case.question.dtype),
        )
        groups.setdefault(place, []).append(result)
    return [groups[place] for place in sorted(groups)]


def _row(rows: Sequence[Result], each: bool) -> list[str]:
    errors = [error for result in rows for error in result.errors]
    worst = {
        tensor: max((e.relative for e in errors if e.tensor == tensor), default=None)
        for tensor in _TENSORS
    }
    return [
        rows[0].case.function,
        _point(rows[0]),
        _DTYPES[rows[0].case.question.dtype],
        _what(rows[0]) if each else str(len(rows)),
        *("" if value is None else _brief(value) for value in worst.values()),
        str(max(errors, key=_use).rank) if errors else "",
        ", ".join(_verdicts(rows)),
    ]


def _brief(value: float) -> str:
    """2.3e-03 → "2e-3"."""
    digits, _, power = f"{value:.0e}".partition("e")
    return f"{digits}e{int(power)}" if power else digits


def _verdicts(rows: Sequence[Result]) -> Iterator[str]:
    counts = _counts(rows)
    for status, count in counts.items():
        number = f"{count} " if len(counts) > 1 else ""
        yield f"[{_STYLES[status]}]{number}{status.value}[/]"


def _counts(results: Iterable[Result]) -> dict[Status, int]:
    """How many of each status, the worst first."""
    counts = Counter(result.status for result in results)
    return {status: counts[status] for status in _STYLES if counts[status]}


def _use(error: Error) -> float:
    """How much of its limit an error uses up."""
    return error.max / error.limit if error.limit else (math.inf if error.max else 0.0)


def _point(result: Result) -> str:
    parts = (result.case.layout, result.case.route, result.kernel or result.case.kernel)
    return " × ".join(part for part in parts if part)


def _what(result: Result) -> str:
    """The feature, and whether it is a batch or packed documents."""
    packed = result.case.question.batch is None
    return f"{result.case.feature}, {'packed' if packed else 'batch'}"


def _name(result: Result) -> str:
    dtype = _DTYPES[result.case.question.dtype]
    return f"{result.case.function} ({_point(result)}), {dtype}, {_what(result)}"


def _details(results: Iterable[Result]) -> Table:
    """A row for each case, tensor and rank."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("case", overflow="fold")
    for name in ("tensor", "rank", "max", "mean", "rmse", "relative", "plain torch", "limit", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for group in _groups(results):
        for result in group:
            for i, error in enumerate(result.errors):
                numbers = (error.max, error.mean, error.rmse, error.relative)
                table.add_row(
                    _name(result) if i == 0 else "",
                    error.tensor,
                    str(error.rank),
                    *(f"{x:.1e}" for x in (*numbers, error.plain, error.limit)),
                    "[green]pass[/]" if error.passed else "[bold red]fail[/]",
                )
    return table


def _complaint(result: Result) -> Iterator[str]:
    """What went wrong in a case."""
    yield f"[bold red]{result.status.value}[/] {escape(_name(result))}"
    if result.reason:
        yield "  " + escape(result.reason).replace("\n", "\n  ")
    for error in result.errors:
        if not error.passed:
            yield (
                f"  {error.tensor} on rank {error.rank}: largest error {error.max:.2e}, allowed "
                f"{error.limit:.2e} (plain torch {error.plain:.2e}); relative {error.relative:.2e}"
            )


def _summary(results: Sequence[Result], seconds: float) -> str:
    if not results:
        return "[bold red]nothing to check[/]"
    parts = [f"[{_STYLES[s]}]{n} {s.value}[/]" for s, n in _counts(results).items()]
    return f"{len(results)} cases: {', '.join(parts)}   ({seconds:.1f} s)"
