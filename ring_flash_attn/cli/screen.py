"""What commands print on: a terminal as it is, or wide enough for tables where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

_WIDTH = 150  # where there is no terminal


def screen(quiet: bool = False) -> Console:
    """Where to print."""
    console = Console(highlight=False, quiet=quiet)
    return console if console.is_terminal else Console(highlight=False, quiet=quiet, width=_WIDTH)


@contextmanager
def status(console: Console, what: str) -> Iterator[Callable[[str], None]]:
    """A line that says what is being done, on a terminal; call what it yields with news."""
    with console.status(what) as shown:
        yield lambda line: shown.update(f"{what}: {line}")
