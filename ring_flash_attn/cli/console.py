"""What commands print with, and the files that they write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..bench.results import MEMORY, SPEED, THEORY, Limits, Row, cell, make_table, misses, save

Report = Callable[[str], None]
Advance = Callable[[], None]
_WIDTH = 150  # where there is no terminal
_ITERATIONS = 100  # of which the original documents give the seconds
FAILED = "[bold red]failed[/]"


@contextmanager
def usage_errors() -> Iterator[None]:
    """What the library refuses in here was typed by the user: exit code 2, and its message."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        raise typer.BadParameter(str(error)) from None


def screen(quiet: bool = False) -> Console:
    """A terminal as it is, or wide enough for tables where there is none."""
    console = Console(highlight=False, quiet=quiet)
    return console if console.is_terminal else Console(highlight=False, quiet=quiet, width=_WIDTH)


@contextmanager
def status(console: Console, what: str) -> Iterator[Report]:
    """Show what is being done, on a terminal; call what it yields with news."""
    with console.status(what) as shown:
        yield lambda line: shown.update(f"{what}: {line}")


@contextmanager
def running(console: Console, what: str, total: int) -> Iterator[tuple[Report, Advance]]:
    """Show a progress bar on a terminal; yields what tells it news, and what ends a part."""
    bar = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    quiet = not console.is_terminal
    news = TextColumn("{task.description}", markup=False)
    with Progress(*bar, news, console=console, transient=True, disable=quiet) as progress:
        task = progress.add_task("", total=total)
        yield (
            lambda line: progress.update(task, description=line),
            lambda: progress.advance(task),
        )


def print_lines(console: Console, lines: Iterable[object]) -> None:
    """Plain text: brackets are no markup."""
    for line in lines:
        console.print(str(line), markup=False)


def write(console: Console, value: Any, path: Path | None) -> None:
    """Write results, plain values or a text to the file that the user named, if any."""
    if path is None:
        return
    try:
        save(value, path)
    except OSError as error:
        console.print(f"cannot write {path}: {error.strerror}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    console.print(f"wrote {path}", markup=False, soft_wrap=True)


# Several kernels: the table of the original documents, and the verdict of a gate.


def print_versus(
    console: Console,
    groups: Sequence[tuple[Row, Sequence[Row]]],
    versus: str,
    labels: Mapping[str, Callable[[Row], str]],
    limits: Limits | None,
) -> bool:
    """Print the table of the original documents; whether the gate lets everything through.

    Groups are rows of the baseline, each with those that are compared with it; `labels` make the
    first columns.
    """
    ranks = any("theoretic_ms" in base.values for base, _ in groups)
    shares = {THEORY: "rel. eff. %"} if ranks else {}
    shares |= {SPEED: f"vs {versus} %", MEMORY: "memory %"}
    columns = ("passes", "iter/s", "s", "GB", *shares.values())
    table = make_table(labels, columns, f"versus {versus}")
    if limits is not None:
        table.add_column("gate")
    complaints = []

    def add(row: Row, *gate: str) -> str:
        names = [*(label(row) for label in labels.values()), row.passes]
        numbers = [FAILED, "", "", *("" for _ in shares)]
        if row.ms is not None:
            numbers = [f"{1e3 / row.ms:.2f}", f"{_ITERATIONS * row.ms / 1e3:.4f}"]
            numbers += [cell(row.peak_bytes, per=1e9)]
            numbers += (cell(row.values.get(name), ".1f") for name in shares)
        table.add_row(*names, *numbers, *gate)
        return ", ".join(names)

    for base, others in groups:
        if "theoretic_ms" in base.values:
            names = [label(base) for label in labels.values()][:-1]
            theory = f"{1e3 / base.values['theoretic_ms']:.2f}"
            table.add_row(*names, f"{versus} on one device", base.passes, theory)
        add(base)
        for row in others:
            if limits is None:
                add(row)
                continue
            reasons = "; ".join(misses(row, limits))
            name = add(row, "[bold red]miss[/]" if reasons else "[green]pass[/]")
            complaints += [f"  {name}: {reasons}"] if reasons else []
    console.print(table)
    if ranks:
        console.print(
            f"{versus} on one device: its iter/s on a rank's own tokens / number of ranks.\n"
            f"rel. eff.: iter/s in percent of those of {versus} on one device.",
            markup=False,
        )
    console.print(
        "s: of 100 iterations, as in the original documents.\n"
        f"vs {versus}: iter/s in percent of {versus}'s. memory: GB in percent of {versus}'s.",
        markup=False,
    )
    if limits is None:
        return True
    judged = sum(len(others) for _, others in groups)
    memory = "memory is not measured on the CPU"
    if limits.max_memory is not None:
        memory = f"memory < {100 * limits.max_memory:g} %"
    verdict = f"all {judged} rows pass" if judged else "there is nothing to judge"
    if complaints:
        verdict = f"{len(complaints)} of {judged} rows miss it"
    console.print(f"gate: speed > {100 * limits.min_speed:g} % of {versus}'s, {memory}: {verdict}")
    for line in complaints:
        console.print(line, style="bold red", markup=False, soft_wrap=True)
    return judged > len(complaints) == 0
