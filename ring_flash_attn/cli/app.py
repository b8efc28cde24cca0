"""The commands of `rfa`, put together; none imports torch before its options are parsed."""

from __future__ import annotations

from typing import Annotated

import typer

from .bench import bench
from .compare import compare
from .diff import diff
from .draw import draw
from .info import info, version_lines
from .profile import profile
from .replay import replay
from .report import report
from .ring import ring
from .tune import tune
from .usage import Command
from .verify import verify

app = typer.Typer(
    name="rfa", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
for command in (verify, info, draw, tune, replay, bench, compare, ring, profile, diff, report):
    app.command(cls=Command)(command)


def _show_versions(wanted: bool) -> None:
    if wanted:
        typer.echo("\n".join(version_lines()))
        raise typer.Exit


@app.callback()
def rfa(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_versions,
            is_eager=True,
            help="Versions of rfa, Python, torch, triton and CUDA.",
        ),
    ] = False,
) -> None:
    """Exact attention over many GPUs: verify it, measure it, compare it, profile it, draw it."""
