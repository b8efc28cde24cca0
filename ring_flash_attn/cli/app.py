"""The commands of `rfa`, put together; none imports torch before its options are parsed."""

from __future__ import annotations

from typing import Annotated

import typer

from .bench import bench
from .compare import compare
from .diff import diff
from .draw import draw
from .info import info
from .profile import profile
from .replay import replay
from .report import report
from .ring import ring
from .tune import tune
from .usage import Command
from .verify import verify

app = typer.Typer(
    name="rfa",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(cls=Command)(verify)
app.command(cls=Command)(info)
app.command(cls=Command)(draw)
app.command(cls=Command)(tune)
app.command(cls=Command)(replay)
app.command(cls=Command)(bench)
app.command(cls=Command)(compare)
app.command(cls=Command)(ring)
app.command(cls=Command)(profile)
app.command(cls=Command)(diff)
app.command(cls=Command)(report)


def _show_versions(wanted: bool) -> None:
    if wanted:
        from .version import version_lines

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
