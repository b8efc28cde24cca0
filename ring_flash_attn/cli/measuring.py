"""What commands that measure share: options, a progress bar, and their results as a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..bench.results import Results, Row

if TYPE_CHECKING:
    import torch


ON_CPU = "On the CPU these are times of the host, and say little about GPUs."
_REPEATS = {"cuda": 30, "cpu": 5}

Report = Callable[[str], None]
Advance = Callable[[], None]
Repeats = Annotated[
    int | None, typer.Option(min=1, help="Rounds; by default 30 on a GPU, 5 on the CPU.")
]
Graphs = Annotated[
    bool, typer.Option("--graphs", help="Time CUDA graphs: the GPU alone, whatever the host does.")
]
NoGrad = Annotated[bool, typer.Option("--no-grad", help="Forward only.")]
Device = Annotated[
    str | None, typer.Option(help="cpu or cuda; by default cuda where there is a GPU.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")]


def repeats_on(device: torch.device, repeats: int | None) -> int:
    """What the user said, or the default."""
    return _REPEATS[device.type] if repeats is None else repeats


@contextmanager
def running(console: Console, what: str, total: int) -> Iterator[tuple[Report, Advance]]:
    """A progress bar on a terminal; yields what tells it news, and what ends a part."""
    bar = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    quiet = not console.is_terminal
    news = TextColumn("{task.description}", markup=False)
    with Progress(*bar, news, console=console, transient=True, disable=quiet) as progress:
        task = progress.add_task("", total=total)
        yield (
            lambda line: progress.update(task, description=line),
            lambda: progress.advance(task),
        )


def print_failures(console: Console, rows: Sequence[Row]) -> None:
    """Why some have no times or no errors, once for each reason."""
    from ..bench.measure import CANNOT

    reasons = [(row.implementation, row.failed or row.note) for row in rows]
    for name, why in dict.fromkeys(reasons):
        if why is not None:
            said = f" {why}" if why.startswith(CANNOT) else f": {why}"
            console.print(f"[yellow]{escape(name)}[/]{escape(said)}", soft_wrap=True)


def mib(size: int | None) -> str:
    """In a table."""
    return "n/a" if size is None else f"{size / 2**20:.1f}"


def write(console: Console, results: Results, path: Path | None) -> None:
    """To the file that the user named, if any; exit code 1 if that fails."""
    if path is None:
        return
    try:
        results.save(path)
    except OSError as error:
        console.print(f"cannot write {path}: {error.strerror}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    console.print(f"wrote {path}", markup=False, soft_wrap=True)


def write_json(console: Console, value: Any, path: Path | None) -> None:
    """The same for what is no measurement."""
    if path is not None:
        path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
