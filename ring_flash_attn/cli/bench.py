"""`rfa bench`: one implementation, at one size or several."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..bench.names import implementation_names
from ..bench.results import BENCH, Row, check_output
from ..kernels.base import AUTO, NATIVE
from .measuring import (
    ON_CPU,
    Device,
    JsonFile,
    NoGrad,
    Repeats,
    make_results,
    mib,
    print_failures,
    repeats_on,
    running,
    write,
)
from .screen import screen
from .workloads import (
    Batch,
    Causal,
    Dtype,
    Headdim,
    Nheads,
    NheadsK,
    Preset,
    Seqlen,
    Window,
    differences,
    make_workloads,
    without_gradients,
)

if TYPE_CHECKING:
    import torch

    from ..bench.machine import Peak
    from ..bench.workload import Workload

_NAMES = ", ".join((AUTO, NATIVE, *implementation_names()))


def bench(
    batch: Batch = None,
    seqlen: Seqlen = None,
    nheads: Nheads = None,
    nheads_k: NheadsK = None,
    headdim: Headdim = None,
    causal: Causal = None,
    window: Window = None,
    dtype: Dtype = None,
    preset: Preset = None,
    kernel: Annotated[str, typer.Option(help=f"One of {_NAMES}.")] = AUTO,
    repeats: Repeats = None,
    no_grad: NoGrad = False,
    device: Device = None,
    json_file: JsonFile = None,
) -> None:
    """Time attention on one device: forward, backward, and both.

    Without options: batch 2, seqlen 1024, 8 heads of 64, full, bf16. Lists of numbers make a sweep.

    \b
    rfa bench --preset llama3-8b
    rfa bench --seqlen 512,1024,2048,4096 --nheads 16 --headdim 128 --causal
    rfa bench --preset 8k --kernel "SDPA cuDNN" --no-grad --json 8k.json
    """
    from ..bench.machine import find_device, measure_peak
    from ..bench.measure import measure

    numbers = {"batch": batch, "seqlen": seqlen, "headdim": headdim}
    numbers |= {"nheads": nheads, "nheads_k": nheads_k}
    try:
        check_output(json_file)
        where = find_device(device, "a benchmark")
        workloads = make_workloads(preset, numbers, causal, window, dtype)
        names = [_able(kernel, each, where) for each in workloads]
    except (ValueError, NotImplementedError) as error:
        raise typer.BadParameter(str(error)) from None
    console, rounds = screen(), repeats_on(where, repeats)
    grad = not without_gradients(preset, no_grad)
    rows: list[Row] = []
    peak = None
    try:
        with running(console, "bench", len(workloads)) as (say, advance):
            say("what the device does at best")
            peak = measure_peak(where, workloads[0].dtype)
            for name, each in zip(names, workloads, strict=True):
                rows += measure(
                    [name], each, where, kind=BENCH, repeats=rounds, grad=grad, report=say
                )
                advance()
    finally:  # what is there is shown and written, even if the user has had enough
        if peak is not None and rows:
            dtype_peak = (peak, workloads[0].dtype)
            _show(console, rows, workloads, names, where, dtype_peak, rounds)
            write(console, make_results(rows, where, {"repeats": rounds}, dtype_peak), json_file)
    raise typer.Exit(int(all(row.failed is not None for row in rows)))


def _show(
    console: Console,
    rows: Sequence[Row],
    workloads: Sequence[Workload],
    names: Sequence[str],
    device: torch.device,
    peak: tuple[Peak, torch.dtype],
    rounds: int,
) -> None:
    from ..bench.machine import device_name

    console.print(f"{', '.join(dict.fromkeys(names))} on {device_name(device)}", markup=False)
    console.print(_common(workloads), markup=False)
    console.print(_table(rows, workloads, peak[0]))
    print_failures(console, rows)
    for line in _notes(device, *peak, rounds):
        console.print(line, markup=False)


def _able(name: str, workload: Workload, device: torch.device) -> str:
    """The name of the implementation; NotImplementedError with every reason if it cannot."""
    from ..bench.peers import find_implementation

    found = find_implementation(name, workload, device)
    reasons = found.why_not(workload, device)
    if reasons:
        raise NotImplementedError(
            f"--kernel {found.name} cannot do {workload}: {'; '.join(reasons)}"
        )
    return found.name


def _common(workloads: Sequence[Workload]) -> str:
    return str(workloads[0]) if len(workloads) == 1 else f"{len(workloads)} workloads"


def _table(rows: Sequence[Row], workloads: Sequence[Workload], peak: Peak) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    varying = differences(workloads)
    for name in varying:
        table.add_column(name, justify="right")
    table.add_column("pass")
    for name in ("min ms", "avg ms", "median ms", "max ms", "TFLOP/s peak", "avg"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("% of matmul", justify="right", no_wrap=True)
    table.add_column("MiB", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            *(str(row.workload[name]) for name in varying), row.passes, *_cells(row, peak)
        )
    return table


def _cells(row: Row, peak: Peak) -> list[str]:
    """Times, rates of the fastest run and on average, share of the peak, memory."""
    if row.failed is not None or row.ms is None or row.tflops is None:
        return ["[red]failed[/]"]
    runs = row.samples_ms
    times = (min(runs), statistics.fmean(runs), row.ms, max(runs))
    work = row.tflops * row.ms
    rates = (
        f"{work / times[0]:.4g}",
        f"{work / times[1]:.4g}",
        f"{100 * row.tflops / peak.tflops:.1f}",
    )
    return [*(f"{each:.3f}" for each in times), *rates, mib(row.peak_bytes)]


def _notes(device: torch.device, peak: Peak, dtype: torch.dtype, rounds: int) -> list[str]:
    """How to read it."""
    from ..bench.workload import dtype_name

    lines = [
        f"{rounds} rounds; short passes have several runs in each. TFLOP/s: of the fastest run, "
        "and on average.",
        f"% of matmul: the median run against {peak.tflops:.4g} TFLOP/s, measured here with a "
        f"product of large matrices in {dtype_name(dtype)}.",
        "MiB: most memory above inputs, outputs and gradients (backward: with the forward pass); "
        "n/a on the CPU.",
    ]
    return lines + ([ON_CPU] if device.type == "cpu" else [])
