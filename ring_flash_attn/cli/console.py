"""What commands print with, and the files that they write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..bench.cells import ON_CPU as ON_CPU
from ..bench.cells import make_table as make_table
from ..bench.cells import mib as mib
from ..bench.results import Results, Row, save_json

if TYPE_CHECKING:
    import torch

Report = Callable[[str], None]
Advance = Callable[[], None]
_WIDTH = 150  # where there is no terminal
_REPEATS = {"cuda": 30, "cpu": 5}


@contextmanager
def usage_errors() -> Iterator[None]:
    """What the library refuses in here was typed by the user: exit code 2, and its message."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        raise typer.BadParameter(str(error)) from None


def repeats_on(device: torch.device, repeats: int | None) -> int:
    """What the user said, or the default."""
    return _REPEATS[device.type] if repeats is None else repeats


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


def print_failures(console: Console, rows: Sequence[Row]) -> None:
    """Why some have no times or no errors, once for each reason."""
    from ..bench.measure import CANNOT

    reasons = [(row.implementation, row.failed or row.note) for row in rows]
    for name, why in dict.fromkeys(reasons):
        if why is not None:
            text = f" {why}" if why.startswith(CANNOT) else f": {why}"
            console.print(f"[yellow]{escape(name)}[/]{escape(text)}", soft_wrap=True)


def write(console: Console, value: Any, path: Path | None) -> None:
    """Write results or plain values to the file that the user named, if any; or exit code 1."""
    if path is not None:
        plain = value.to_dict() if isinstance(value, Results) else value
        _write(console, path, lambda: save_json(plain, path))


def write_text(console: Console, text: str, path: Path) -> None:
    """Write a text likewise."""
    _write(console, path, lambda: path.write_text(text, encoding="utf-8", newline="\n"))


def _write(console: Console, path: Path, save: Callable[[], object]) -> None:
    try:
        save()
    except OSError as error:
        console.print(f"cannot write {path}: {error.strerror}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    console.print(f"wrote {path}", markup=False, soft_wrap=True)
