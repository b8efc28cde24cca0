"""The commands of `rfa`, put together."""

from __future__ import annotations

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
from .verify import verify

app = typer.Typer(
    name="rfa",
    help="Exact attention over many GPUs: verify it, measure it, compare it, profile it, draw it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(verify)
app.command()(info)
app.command()(draw)
app.command()(tune)
app.command()(replay)
app.command()(bench)
app.command()(compare)
app.command()(ring)
app.command()(profile)
app.command()(diff)
app.command()(report)
