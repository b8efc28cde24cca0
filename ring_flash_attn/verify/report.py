"""The report of `rfa verify`: a table, what went wrong, and a summary line."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .checker import Result, Status
from .groups import SHORT_DTYPES, TENSORS, groups, name_of, point, what
from .measure import Error
from .precision import accepted_in_words

_STYLES = {
    Status.ERROR: "bold red",
    Status.FAIL: "bold red",
    Status.LEFT_OUT: "red",
    Status.PASS: "green",
    Status.CANNOT: "yellow",
}


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
    for line in accepted_in_words(results):
        console.print(line)


def _table(results: Iterable[Result], each: bool) -> Table:
    """A row for each function, point and dtype with its worst errors; or for each single case."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("function", overflow="fold")
    table.add_column("layout × route × kernel", overflow="fold")
    table.add_column("dtype")
    table.add_column("case" if each else "cases", justify="left" if each else "right")
    for tensor in TENSORS:
        table.add_column(tensor, justify="right", no_wrap=True)
    table.add_column("worst\nrank", justify="right")
    table.add_column("")
    for group in groups(results):
        for rows in [[result] for result in group] if each else [group]:
            table.add_row(*_row(rows, each))
    return table


def _row(rows: Sequence[Result], each: bool) -> list[str]:
    errors = [error for result in rows for error in result.errors]
    worst = {
        tensor: max((e.relative for e in errors if e.tensor == tensor), default=None)
        for tensor in TENSORS
    }
    return [
        rows[0].case.function,
        point(rows[0]),
        SHORT_DTYPES[rows[0].case.question.dtype],
        what(rows[0]) if each else str(len(rows)),
        *("" if value is None else _brief(value) for value in worst.values()),
        str(max(errors, key=_use).rank) if errors else "",
        ", ".join(_verdicts(rows)),
    ]


def _brief(value: float) -> str:
    """2.3e-03 → "2e-3"."""
    digits, _, power = f"{value:.0e}".partition("e")
    return f"{digits}e{int(power)}" if power else digits


def _verdicts(rows: Sequence[Result]) -> Iterator[str]:
    found = counts(rows)
    for status, count in found.items():
        number = f"{count} " if len(found) > 1 else ""
        yield f"[{_STYLES[status]}]{number}{status.value}[/]"


def counts(results: Iterable[Result]) -> dict[Status, int]:
    """How many of each status, the worst first."""
    found = Counter(result.status for result in results)
    return {status: found[status] for status in _STYLES if found[status]}


def _use(error: Error) -> float:
    """How much of its limit an error uses up."""
    return error.max / error.limit if error.limit else (math.inf if error.max else 0.0)


def _details(results: Iterable[Result]) -> Table:
    """A row for each case, tensor and rank."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("case", overflow="fold")
    for name in ("tensor", "rank", "max", "mean", "rmse", "relative", "plain torch", "limit", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for group in groups(results):
        for result in group:
            for i, error in enumerate(result.errors):
                numbers = (error.max, error.mean, error.rmse, error.relative)
                table.add_row(
                    name_of(result) if i == 0 else "",
                    error.tensor,
                    str(error.rank),
                    *(f"{x:.1e}" for x in (*numbers, error.plain, error.limit)),
                    "[green]pass[/]" if error.passed else "[bold red]fail[/]",
                )
    return table


def _complaint(result: Result) -> Iterator[str]:
    """What went wrong in a case."""
    yield f"[bold red]{result.status.value}[/] {escape(name_of(result))}"
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
    parts = [f"[{_STYLES[s]}]{n} {s.value}[/]" for s, n in counts(results).items()]
    return f"{len(results)} cases: {', '.join(parts)}   ({seconds:.1f} s)"
