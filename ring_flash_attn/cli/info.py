"""`rfa info`: versions, devices, and which kernels can run here, with every reason why not."""

from __future__ import annotations

import platform
import runpy
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..bench.results import check_output, make_table
from ..bench.workload import Workload, call_of, size_of_workload
from ..kernels import costs
from ..kernels.base import (
    AUTO,
    NATIVE,
    Call,
    candidates,
    choose_kernels,
    kernel_names,
    load_kernel,
    why_not,
)
from . import options as o
from .console import print_lines, usage_errors, write


def info(
    device: o.Device = None,
    dtype: o.OneDtype = "bfloat16",
    headdim: Annotated[int, typer.Option(min=1, help="Head dimension.")] = 128,
    no_grad: o.NoGrad = False,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="What auto takes for a call of --batch, --seqlen, …"),
    ] = False,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of it.")] = 1,
    seqlen: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 8192,
    nheads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    nheads_k: Annotated[int, typer.Option(min=1, help="KV heads.")] = 8,
    causal: o.IsCausal = True,
    json_file: o.JsonFile = None,
) -> None:
    """Show versions, devices, and which kernels can run here.

    \b
    rfa info
    rfa info --dtype float32 --headdim 256 --json info.json
    rfa info --explain --headdim 64 --seqlen 2048 --nheads 16 --nheads-k 16
    """
    from ..bench.machine import devices, find_device, variables, versions

    with usage_errors():
        check_output(json_file)
        where = find_device(device, "a kernel")
        workload = Workload(batch, seqlen, nheads, nheads_k, headdim, causal, dtype=dtype)
    call = call_of(workload, where, grad=not no_grad)
    if explain:
        _explain(workload, call, json_file)
        return
    names = dict.fromkeys((*candidates(AUTO, call), *kernel_names()))
    reasons = {name: why_not(name, call) for name in names}
    able = [name for name, why in reasons.items() if not why]
    picks = {
        choice: next((name for name in able if name in candidates(choice, call)), None)
        for choice in (AUTO, NATIVE)
    }
    facts: dict[str, Any] = {"versions": versions(), "devices": devices(), "variables": variables()}
    console = Console(highlight=False)
    tuned, triton = _triton(call)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for title, values in {**facts, "block sizes": [tuned]}.items():
        lines = map(" ".join, values.items()) if isinstance(values, dict) else values
        table.add_row(f"[bold]{title}[/]", "\n".join(lines) or "none set")
    console.print(table)
    passes = "without gradients" if no_grad else "with gradients"
    console.print(
        f"Kernels for a causal call in {dtype}, headdim {headdim}, {passes}, on "
        f"{device or where.type}:"
    )
    table = make_table(("kernel", "can run", "why not"), ())
    for name, why in reasons.items():
        table.add_row(name, "[red]no[/]" if why else "[green]yes[/]", "\n".join(why))
    console.print(table)
    for choice, first in picks.items():
        console.print(f"{choice} picks: [bold]{first or 'nothing'}[/]")
    console.print(f"triton has: {triton}", markup=False, soft_wrap=True)
    write(console, {**facts, "why_not": reasons, "picks": picks}, json_file)


def _explain(workload: Workload, call: Call, json_file: Path | None) -> None:
    """What auto takes for a call, and why."""
    with usage_errors():
        slower = costs.estimate(call, size_of_workload(workload))
        kernels = choose_kernels(AUTO, call, size_of_workload(workload))
    found: dict[str, dict[str, Any]] = {}
    for name in candidates(AUTO, call):
        times = {} if slower is None else dict(zip(costs.PASSES, (x.get(name) for x in slower)))
        found[name] = {**times, "why not": why_not(name, call)}
    console = Console(highlight=False)
    print_lines(console, [f"auto, for {workload}, on {costs.gpu_name(call.device)}:"])
    heads = [f"{name}, of the fastest" for name in costs.PASSES] if slower else []
    table = make_table(("kernel", *heads, "why not"), ())
    for name, values in found.items():
        ratios = [values[each] for each in costs.PASSES] if slower else []
        cells = ["not measured" if x is None else f"{x:.2f} ×" for x in ratios]
        table.add_row(name, *cells, "\n".join(values["why not"]))
    console.print(table)
    path = costs.costs_file()
    source = f"by the calls in {path} that are most like it"
    if slower is None:
        source = "in this order: nothing like it was measured here; `rfa tune --kernels` does that"
    taken = {name: getattr(kernels, name).name for name in costs.PASSES[: 1 + call.needs_grad]}
    picks = ", ".join(f"{name} [bold]{kernel}[/]" for name, kernel in taken.items())
    console.print(f"auto takes {picks}, {escape(source)}", soft_wrap=True)
    write(console, {"call": workload.to_dict(), "kernels": found, "takes": taken}, json_file)


def _triton(call: Call) -> tuple[str, str]:
    """Which file the Triton kernel's block sizes come from, and which kernels it has."""
    if isinstance(load_kernel("triton"), str):
        return "no triton here", "no triton here"
    from ..kernels.triton.config import read_tuned, tuned_file
    from ..kernels.triton.hopper import host

    reasons = host.why_not(call)
    portable = f"portable kernels, not those for Hopper ({'; '.join(reasons)})"
    path, tuned = tuned_file(), "the defaults"
    if path is not None:
        try:
            gpus = read_tuned(path).items()
            lines = (f"for {gpu}: {'; '.join(names) or 'the defaults'}" for gpu, names in gpus)
            tuned = "\n".join([str(path), *lines])
        except ValueError as error:
            tuned = str(error)
    return tuned, portable if reasons else "kernels for Hopper"


# `rfa --version`: from the metadata of what is installed, without importing torch.


def version_lines() -> list[str]:
    """This library, and what it runs on."""
    lines = []
    for package in ("ring-flash-attn", "torch", "triton", "nvidia-cutlass-dsl"):
        try:
            lines.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            lines.append(f"{package}: not installed")
    return [*lines, _cuda(), f"Python {platform.python_version()}"]


def _cuda() -> str:
    """The CUDA (or ROCm) that torch was built for."""
    try:
        built = runpy.run_path(str(distribution("torch").locate_file("torch/version.py")))
    except (PackageNotFoundError, OSError):
        return "CUDA: unknown"
    if built.get("hip"):
        return f"ROCm {built['hip']}"
    return f"CUDA {built['cuda']}" if built.get("cuda") else "CUDA: none, this torch is for the CPU"
