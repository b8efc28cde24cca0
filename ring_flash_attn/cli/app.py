"""The commands of `rfa`, put together; none imports torch before its options are parsed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from . import lab, lab_bench
from .bench import bench, compare
from .diff import diff
from .draw import draw
from .info import info, version_lines
from .link import link
from .plan import plan
from .profile import profile
from .replay import replay
from .report import report
from .ring import ring
from .tune import tune
from .verify import verify

_PHRASES = {  # what the library says where the command line has an option
    "the number of query heads": "--nheads (query heads)",
    "the number of KV heads": "--nheads-k (KV heads)",
    "CUDA graphs need": "--graphs: CUDA graphs need",
    "the baseline:": "--baseline:",
    "a bandwidth of": "--link-gbps",
    "the link's bandwidth": "--link-gbps",
    "the link's latency": "--latency-us",
}


def as_options(message: str, options: Mapping[str, str], files: Mapping[str, str]) -> str:
    """Write the arguments that a message of the library names as the options that set them.

    `options` are by the name of the parameter, `files` are options by the file that they got.
    """
    for name, option in options.items():
        if "_" in name:
            message = re.sub(rf"(?<![\w-]){name}(?!\w)", option, message)
        else:  # a word, such as device: where the message begins, with a value
            message = re.sub(rf"^{name}(?= ['\"(\d-]| must )", option, message)
    for phrase, words in _PHRASES.items():
        if re.split("[ :]", words)[0] in options.values():
            message = message.replace(phrase, words)
    for file, option in files.items():
        if message.startswith((f"{file} ", f"cannot write {file}")):
            message = f"{option}: {message}"
    return message


class Command(TyperCommand):
    """A command whose errors name the option that has to be set."""

    def invoke(self, ctx: Any) -> Any:
        """Run it; what it refuses, it refuses by the names of options."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            options = {p.name or "": p.opts[0] for p in self.params if p.opts[0].startswith("--")}
            values = ((option, ctx.params.get(name)) for name, option in options.items())
            files = {str(value): option for option, value in values if isinstance(value, Path)}
            error.message = as_options(error.message, options, files)
            raise


app = typer.Typer(
    name="rfa", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
_ALL = (verify, info, draw, plan, tune, replay, link, bench, compare, ring, profile, diff, report)
for command in _ALL:
    app.command(cls=Command)(command)

_lab = typer.Typer(name="lab", invoke_without_command=True, callback=lab.lab)
_lab.command(cls=Command)(lab.start)
_lab.command(cls=Command)(lab.run)
_lab.command(cls=Command)(lab.check)
_bench = typer.Typer(
    name="bench", no_args_is_help=True, help="Measure attention alone, and a Transformer with it."
)
_bench.command()(lab_bench.attention)  # their errors name keys of a TOML file, too
_bench.command()(lab_bench.model)
_lab.add_typer(_bench)
app.add_typer(_lab)


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
            help="Versions of rfa, Python, torch, triton, CuTe DSL and CUDA.",
        ),
    ] = False,
) -> None:
    """Exact attention over many GPUs: verify it, measure it, compare it, profile it, draw it."""
