"""`rfa diff`: which rows of two files of results moved; for regressions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from ..bench.diff import BAD, Change, Outcome, compare
from ..bench.results import Results, Row, cell, check_output, load, make_table
from . import options as o
from .console import screen, usage_errors, write

_NOISY_CODE = 3
_STYLES = {
    **dict.fromkeys(BAD, "bold red"),
    Outcome.MISSING: "yellow",
    Outcome.NOISY: "yellow",
    Outcome.NEW: "yellow",
    Outcome.FASTER: "green",
    Outcome.WORKS: "green",
    Outcome.SAME: "",
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
    fail_on_noisy: Annotated[
        bool,
        typer.Option(
            "--fail-on-noisy",
            help=f"Exit code {_NOISY_CODE} if nothing is worse, but a row is too noisy to tell.",
        ),
    ] = False,
    show_same: Annotated[
        bool, typer.Option("--all", help="Show rows that did not move as well.")
    ] = False,
    json_file: o.JsonFile = None,
) -> None:
    """Compare two files of results, row by row.

    The interval of a change is after / before, times and divided by exp(3 standard errors), from
    the spread of the rounds. A row is slower or faster if its median changed by more than
    --fail-above and the interval excludes 0; it is the same if the interval lies within
    --fail-above. Any other is too noisy to tell, as is one with fewer than 4 rounds: measure again
    with more --repeats.

    Exit code 1: something is slower, needs more memory, fails, or is wrong: beyond its limit, or
    four times as far from fp64 as before. 3: only with --fail-on-noisy. 2: wrong arguments.

    \b
    rfa bench --preset llama3-8b --json before.json
    rfa bench --preset llama3-8b --json after.json
    rfa diff before.json after.json --fail-above 3% --fail-on-noisy
    """
    with usage_errors():
        check_output(json_file)
        limit = _percent(fail_above)
        old, new = load(before), load(after)
        changes = compare(old, new, limit)
    console = screen()
    for line in _differences(old, new):
        console.print(line, style="yellow", markup=False)
    shown = [each for each in changes if show_same or each.verdict is not Outcome.SAME]
    if shown:
        console.print(_table(shown))
    console.print(_summary(changes))
    write(console, [_plain(each) for each in changes], json_file)
    bad = {*BAD, Outcome.MISSING} if require_all else {*BAD}
    found = {each.verdict for each in changes}
    noisy = Outcome.NOISY in found
    if noisy:
        console.print("too noisy to tell: measure again with more --repeats", markup=False)
    raise typer.Exit(1 if found & bad else _NOISY_CODE if fail_on_noisy and noisy else 0)


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
    if old.device != new.device:
        yield f"not the same device: {old.device}, {new.device}"
    for name in old.versions:
        if name in new.versions and old.versions[name] != new.versions[name]:
            yield f"not the same {name}: {old.versions[name]}, {new.versions[name]}"


def _table(changes: Sequence[Change]) -> Table:
    table = make_table(("what",), ("A ms", "B ms", "change", "interval", "memory"))
    table.add_column("", no_wrap=True)
    for each in changes:
        table.add_row(escape(_describe(each.row)), *_cells(each), _styled(each.verdict))
    return table


def _cells(change: Change) -> Iterator[str]:
    """Times, change, interval and memory; empty where there is none."""
    yield cell(change.before, missing="")
    yield cell(change.after, missing="")
    yield cell(change.percent, "+.1f", "", " %")
    known = "" if change.percent is None else "unknown"
    yield known if change.interval is None else "{:+.1f} to {:+.1f} %".format(*change.interval)
    yield cell(change.memory_percent, "+.1f", "", " %")


def _styled(verdict: Outcome, count: str = "") -> str:
    text, style = f"{count}{verdict.value}", _STYLES[verdict]
    return f"[{style}]{text}[/]" if style else text


def _describe(row: Row) -> str:
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
    counts = {verdict: sum(each.verdict is verdict for each in changes) for verdict in Outcome}
    parts = [_styled(verdict, f"{count} ") for verdict, count in counts.items() if count]
    return f"{len(changes)} rows: {', '.join(parts)}"


def _plain(change: Change) -> dict[str, Any]:
    derived = {"interval": change.interval, "verdict": change.verdict.value}
    return {**asdict(change), "row": change.row.to_dict(), **derived}
