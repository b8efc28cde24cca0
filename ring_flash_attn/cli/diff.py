"""`rfa diff`: which rows of two files of results moved; for regressions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from ..bench.diff import BAD, Change, Verdict, compare
from ..bench.results import Results, Row, check_output, load
from .measuring import write_json
from .screen import screen

_STYLES = {
    **dict.fromkeys(BAD, "bold red"),
    Verdict.MISSING: "yellow",
    Verdict.NEW: "yellow",
    Verdict.FASTER: "green",
    Verdict.WORKS: "green",
    Verdict.SAME: "",
}


def diff(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="Results to start from.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="Results of today.")],
    fail_above: Annotated[
        str, typer.Option(help="Exit code 1 if a row is slower, or needs more memory, by more.")
    ] = "5%",
    require_all: Annotated[
        bool, typer.Option("--require-all", help="A row that is missing in B is a failure.")
    ] = False,
    show_same: Annotated[
        bool, typer.Option("--all", help="Show rows that did not move as well.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write every row's change to this file.")
    ] = None,
) -> None:
    """Compare two files of results, row by row.

    A row moved if its median changed by more than --fail-above, and by more than three standard
    errors of it. Exit code 1: something is slower, needs more memory, fails, or is wrong: beyond
    its limit, or four times as far from fp64 as before.

    \b
    rfa bench --preset llama3-8b --json before.json
    rfa bench --preset llama3-8b --json after.json
    rfa diff before.json after.json --fail-above 3%
    """
    try:
        check_output(json_file)
        limit = _percent(fail_above)
        old, new = load(before), load(after)
        changes = compare(old, new, limit)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    console = screen()
    for line in _differences(old, new):
        console.print(f"[yellow]{escape(line)}[/]")
    shown = [each for each in changes if show_same or each.verdict is not Verdict.SAME]
    if shown:
        console.print(_table(shown))
    console.print(_summary(changes))
    write_json(console, [_plain(each) for each in changes], json_file)
    bad = {*BAD, Verdict.MISSING} if require_all else {*BAD}
    raise typer.Exit(int(any(each.verdict in bad for each in changes)))


def _percent(text: str) -> float:
    try:
        found = float(text.strip().removesuffix("%"))
    except ValueError:
        raise ValueError(f"--fail-above must be a percentage, as 5%; not {text!r}") from None
    if not 0 <= found < float("inf"):
        raise ValueError(f"--fail-above must be 0 % or more, not {text!r}")
    return found


def _differences(old: Results, new: Results) -> Iterator[str]:
    """What makes the comparison doubtful."""
    devices = [each.machine.get("device") for each in (old, new)]
    if devices[0] != devices[1]:
        yield f"not the same device: {devices[0]}, {devices[1]}"
    for name in old.versions:
        if name in new.versions and old.versions[name] != new.versions[name]:
            yield f"not the same {name}: {old.versions[name]}, {new.versions[name]}"


def _table(changes: Sequence[Change]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("what", overflow="fold")
    for name in ("A ms", "B ms", "change", "± (1 s.e.)", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for each in changes:
        style = _STYLES[each.verdict]
        verdict = f"[{style}]{each.verdict.value}[/]" if style else each.verdict.value
        table.add_row(escape(describe(each.row)), *_cells(each), verdict)
    return table


def _cells(change: Change) -> list[str]:
    times = ["" if time is None else f"{time:.3f}" for time in (change.before, change.after)]
    moves = [
        "" if value is None else f"{value:+.1f} %"
        for value in (change.percent, change.memory_percent)
    ]
    spread = "unknown" if change.spread is None else f"{change.spread:.1f} %"
    return [*times, moves[0], spread if change.percent is not None else "", moves[1]]


def describe(row: Row) -> str:
    """Its key in words."""
    work = row.workload
    heads = f"{work.get('nheads')}/{work.get('nheads_k')}"
    seen = "causal" if work.get("causal") else "full"
    if tuple(work.get("window", (-1, -1))) != (-1, -1):
        seen += f", window {work['window']}"
    what = f"{work.get('batch')} × {work.get('seqlen')}, {heads} × {work.get('headdim')}, {seen}"
    place = ", ".join(f"{name} {value}" for name, value in row.placement.items())
    parts = (f"{row.kind} {row.implementation} {row.passes}", f"{what}, {work.get('dtype')}", place)
    return "; ".join(part for part in parts if part)


def _summary(changes: Sequence[Change]) -> str:
    counts = {verdict: sum(each.verdict is verdict for each in changes) for verdict in Verdict}
    parts = [
        f"[{_STYLES[verdict]}]{count} {verdict.value}[/]"
        if _STYLES[verdict]
        else f"{count} {verdict.value}"
        for verdict, count in counts.items()
        if count
    ]
    return f"{len(changes)} rows: {', '.join(parts)}"


def _plain(change: Change) -> dict[str, Any]:
    return {**asdict(change), "row": change.row.to_dict(), "verdict": change.verdict.value}
