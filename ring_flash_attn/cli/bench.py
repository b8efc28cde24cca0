"""`rfa bench`: one implementation, at one size or several."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..bench.names import implementation_names
from ..bench.results import BENCH, Results, Row, check_output
from ..kernels.base import AUTO, NATIVE
from .measuring import (
    ON_CPU,
    Device,
    JsonFile,
    NoGrad,
    Repeats,
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
    from ..bench.machine import find_device, make_results, measure_peak
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
            say("measuring the peak")
            peak = measure_peak(where, workloads[0].dtype)
            for name, each in zip(names, workloads, strict=True):
                rows += measure(
                    [name], each, where, kind=BENCH, repeats=rounds, grad=grad, report=say
                )
                advance()
    finally:  # what is there is shown and written, even if the user has had enough
        if rows:
            peak_of = (peak, workloads[0].dtype)
            found = make_results(rows, where, {"repeats": rounds}, peak_of)
            _show(console, found, workloads, names, peak)
            write(console, found, json_file)
    raise typer.Exit(int(all(row.failed is not None for row in rows)))


def _show(
    console: Console,
    results: Results,
    workloads: Sequence[Workload],
    names: Sequence[str],
    peak: Peak | None,
) -> None:
    device = str(results.machine["device"])
    console.print(f"{', '.join(dict.fromkeys(names))} on {device}", markup=False)
    console.print(_common(workloads), markup=False)
    console.print(_table(results.rows, workloads, device, peak))
    print_failures(console, results.rows)
    for line in _notes(results, workloads[0].dtype, peak):
        console.print(line, markup=False)


def _able(name: str, workload: Workload, device: torch.device) -> str:
    """The name of the implementation; NotImplementedError with every reason if it cannot."""
    from ..bench.implementations import find_implementation

    found = find_implementation(name, workload, device)
    reasons = found.why_not(workload, device)
    if reasons:
        raise NotImplementedError(
            f"--kernel {found.name} cannot do {workload}: {'; '.join(reasons)}"
        )
    return found.name


def _common(workloads: Sequence[Workload]) -> str:
    return str(workloads[0]) if len(workloads) == 1 else f"{len(workloads)} workloads"


def _table(
    rows: Sequence[Row], workloads: Sequence[Workload], device: str, peak: Peak | None
) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    varying = differences(workloads)
    for name in varying:
        table.add_column(name, justify="right")
    table.add_column("pass")
    shares = () if peak is None else ("% of matmul", "verdict")
    times = ("min ms", "avg ms", "median ms", "max ms", "TFLOP/s peak", "avg")
    for name in (*times, *shares, "MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        values = (str(row.workload[name]) for name in varying)
        table.add_row(*values, row.passes, *_cells(row, workloads[0].dtype, device, peak))
    return table


def _cells(row: Row, dtype: str, device: str, peak: Peak | None) -> list[str]:
    """Times, rates of the fastest run and on average, share of the peak, verdict, memory."""
    if row.failed is not None or row.ms is None or row.tflops is None:
        return ["[red]failed[/]"]
    runs = row.samples_ms
    times = (min(runs), statistics.fmean(runs), row.ms, max(runs))
    work = row.tflops * row.ms
    cells = [*(f"{each:.3f}" for each in times), *(f"{work / each:.4g}" for each in times[:2])]
    if peak is not None:
        from ..bench.verdicts import rate_verdict

        verdict = rate_verdict(row.passes, row.tflops, device, dtype, peak)
        cells += [f"{100 * row.tflops / peak.tflops:.1f}", verdict.word]
    return [*cells, mib(row.peak_bytes)]


def _notes(results: Results, dtype: str, peak: Peak | None) -> Iterator[str]:
    """How to read it."""
    from ..bench.verdicts import machine_verdicts, rate_verdict

    yield (
        f"{results.settings['repeats']} rounds; short passes have several runs in each. TFLOP/s: "
        "of the fastest run, and on average."
    )
    if peak is not None:
        yield (
            f"% of matmul: the median run against {peak.tflops:.4g} TFLOP/s, measured here with a "
            f"product of large matrices in {dtype}."
        )
        limits = rate_verdict("", 0.0, str(results.machine["device"]), dtype, peak).limits
        yield f"verdict, of the median run: {limits}."
    yield (
        "MiB: most memory above inputs, outputs and gradients (backward: with the forward pass); "
        "n/a on the CPU."
    )
    yield from map(str, machine_verdicts(results.machine))
    if results.machine["kind"] == "cpu":
        yield ON_CPU
