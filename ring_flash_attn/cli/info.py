"""`rfa info`: versions, devices, and which kernels can run here, with every reason why not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..bench.results import check_output
from ..kernels.base import AUTO, NATIVE, Call, candidates, load_kernel, why_not
from ..plan.tiles import Mask
from .measuring import JsonFile, write_json


def tuned() -> str:
    """Which file the Triton kernel's block sizes come from, in words."""
    if isinstance(load_kernel("triton"), str):
        return "no triton here"
    from ..kernels.triton.config import read_tuned, tuned_file

    path = tuned_file()
    if path is None:
        return "the defaults"
    try:
        gpus = read_tuned(path)
    except ValueError as error:
        return str(error)
    lines = [f"for {gpu}: {'; '.join(names) or 'the defaults'}" for gpu, names in gpus.items()]
    return "\n".join([str(path), *lines])


def triton_kernels(call: Call) -> str:
    """Which kernels the Triton kernel consists of, in words."""
    if isinstance(load_kernel("triton"), str):
        return "no triton here"
    from ..kernels.triton.hopper import host

    reasons = host.why_not(call)
    if not reasons:
        return "kernels for Hopper"
    return f"portable kernels, not those for Hopper ({'; '.join(reasons)})"


def default_device() -> str:
    """ "cuda" where there is a GPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def plain_call(device: str, dtype: str, headdim: int) -> Call:
    """A causal call without any feature."""
    import torch

    from ..bench.workload import find_dtype

    return Call(
        device=torch.device(device),
        dtype=find_dtype(dtype),
        nheads=8,
        nheads_k=8,
        headdim=headdim,
        headdim_v=headdim,
        softmax_scale=headdim**-0.5,
        mask=Mask.of(causal=True),
    )


def kernel_reasons(device: str, dtype: str, headdim: int) -> dict[str, list[str]]:
    """Each kernel's reasons why it cannot do a plain causal call, in the order of `auto`."""
    call = plain_call(device, dtype, headdim)
    return {name: why_not(name, call) for name in candidates(AUTO, call)}


def info(
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; by default cuda where there is a GPU.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of the call that kernels are asked about.")
    ] = "bfloat16",
    headdim: Annotated[int, typer.Option(min=1, help="Of that call.")] = 128,
    json_file: JsonFile = None,
) -> None:
    """Show versions, devices, and which kernels can run here.

    \b
    rfa info
    rfa info --dtype float32 --headdim 256 --json info.json
    """
    from ..bench.machine import devices, find_device, variables, versions

    device = device or default_device()
    try:
        check_output(json_file)
        find_device(device, "a kernel")
        reasons = kernel_reasons(device, dtype, headdim)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    console = Console(highlight=False)
    console.print(_facts())
    console.print(f"Kernels for a causal call in {dtype}, headdim {headdim}, on {device}:")
    console.print(_kernels(reasons))
    picks = _picks(reasons, plain_call(device, dtype, headdim))
    for choice, first in picks.items():
        console.print(f"{choice} picks: [bold]{first or 'nothing'}[/]")
    console.print(
        f"triton has: {triton_kernels(plain_call(device, dtype, headdim))}",
        markup=False,
        soft_wrap=True,
    )
    facts = {"versions": versions(), "devices": devices(), "variables": variables()}
    write_json(console, {**facts, "why_not": reasons, "picks": picks}, json_file)


def _picks(reasons: dict[str, list[str]], call: Call) -> dict[str, str | None]:
    """What `auto` and `native` choose for the call; None if there is nothing."""
    able = [name for name, why in reasons.items() if not why]
    return {
        choice: next((name for name in able if name in candidates(choice, call)), None)
        for choice in (AUTO, NATIVE)
    }


def _facts() -> Table:
    from ..bench.machine import devices, variables, versions

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for title, rows in (
        ("versions", _pairs(versions())),
        ("devices", iter(devices())),
        ("variables", _pairs(variables())),
        ("block sizes", iter([tuned()])),
    ):
        table.add_row(f"[bold]{title}[/]", "\n".join(rows) or "none set")
    return table


def _pairs(values: dict[str, str]) -> Iterator[str]:
    return (f"{name} {value}" for name, value in values.items())


def _kernels(reasons: dict[str, list[str]]) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1))
    for column in ("kernel", "can run", "why not"):
        table.add_column(column)
    for name, why in reasons.items():
        table.add_row(name, "[red]no[/]" if why else "[green]yes[/]", "\n".join(why))
    return table
