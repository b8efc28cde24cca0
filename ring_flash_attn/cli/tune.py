"""`rfa tune`: times block sizes of the Triton kernel on this GPU and writes down the best ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..kernels.base import why_not
from .info import plain_call
from .verifying.answers import torch_dtype

if TYPE_CHECKING:
    from ..kernels.triton.tuning import Choice

_WIDTH = 150  # of the table where there is no terminal


def tune(
    headdim: Annotated[
        list[int] | None, typer.Option(min=1, help="Each of these; by default 64 and 128.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    seqlen: Annotated[int, typer.Option(min=1, help="Tokens of the calls.")] = 8192,
    causal: Annotated[
        bool, typer.Option("--causal/--full", help="Queries see no later keys, or all.")
    ] = True,
    output: Annotated[
        Path | None, typer.Option(help="The file; by default the one that the library reads.")
    ] = None,
) -> None:
    """Time block sizes of the Triton kernel on this GPU, once; later runs use the best ones.

    Takes a few minutes. Without it, and wherever it finds nothing that is 3 % faster, the library
    uses its defaults. Removing the file undoes it. Entries of other GPUs, head dimensions and
    dtypes stay; a file that makes no sense is kept as NAME.old.
    """
    headdims = headdim or [64, 128]
    try:
        _check(headdims, dtype)
        path = _output(output)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    from ..kernels.triton import config, tuning

    device = torch.device("cuda", torch.cuda.current_device())
    gpu = config.gpu_name(device)
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=_WIDTH)
    found: dict[str, Choice] = {}
    for each in headdims:
        with console.status(f"headdim {each}"):
            choices = tuning.tune(
                each,
                torch_dtype(dtype),
                device,
                seqlen,
                causal,
                report=lambda line: console.print(line, style="dim", markup=False),
            )
        tuning.save(path, gpu, choices)  # what is done stays if the next one is interrupted
        found |= choices
    console.print(f"{gpu}, {seqlen} tokens, {'causal' if causal else 'full'}", markup=False)
    console.print(_table(found))
    console.print(f"wrote {path}{_how_to_use(path)}", markup=False, soft_wrap=True)


def _check(headdims: list[int], dtype: str) -> None:
    """ValueError where there is nothing to time."""
    if not torch.cuda.is_available():
        raise ValueError("rfa tune times kernels on a GPU, and there is none that torch can use")
    for each in headdims:
        reasons = why_not("triton", plain_call("cuda", dtype, each))
        if reasons:
            raise ValueError(f"headdim {each}: {'; '.join(reasons)}")
    from ..kernels.triton.config import limit_of
    from ..kernels.triton.launcher import INTERPRETED

    if INTERPRETED:
        raise ValueError("TRITON_INTERPRET is set: kernels would run on the CPU; unset it")
    limits = [limit_of(each) for each in headdims]
    for i, limit in enumerate(limits):
        if limit in limits[:i]:
            first = headdims[limits.index(limit)]
            raise ValueError(
                f"--headdim {first} and {headdims[i]} share one entry (up to {limit}): choose one"
            )


def _output(output: Path | None) -> Path:
    """The file to write; ValueError now rather than after minutes if that will not work."""
    from ..kernels.triton.config import VARIABLE, tuned_path

    path = output or tuned_path()
    if path is None:
        raise ValueError(f"{VARIABLE} is empty, so that no file is read: unset it or pass --output")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error}") from None
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"cannot write {path}")
    return path


def _how_to_use(path: Path) -> str:
    from ..kernels.triton.config import VARIABLE, tuned_path

    read = tuned_path()
    if read is not None and path.absolute() == read.absolute():
        return ": from now on it is used"
    return f": to use it, set {VARIABLE}={path.absolute()}"


def _table(choices: Mapping[str, Choice]) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1))
    for column in ("kernel, headdim up to, dtype", "default", "chosen"):
        table.add_column(column)
    for column in ("ms before", "ms after"):
        table.add_column(column, justify="right")
    for name, choice in choices.items():
        kept = choice.chosen == choice.default
        chosen = "the default" if kept else f"[green]{choice.chosen}[/]"
        times = (f"{time:.4f}" for time in (choice.before, choice.after))
        table.add_row(name, str(choice.default), chosen, *times)
    return table
