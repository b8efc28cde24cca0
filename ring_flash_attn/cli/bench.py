"""`rfa bench`: one implementation, at one size or several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from ..bench.cells import run_times
from ..bench.results import BENCH, Results, Row, check_output
from ..kernels.base import AUTO
from . import options as o
from .console import (
    ON_CPU,
    make_table,
    mib,
    print_failures,
    print_lines,
    repeats_on,
    running,
    screen,
    usage_errors,
    write,
)
from .workloads import differences, make_workloads, without_gradients

if TYPE_CHECKING:
    import torch

    from ..bench.machine import Peak
    from ..bench.workload import Workload


def bench(
    batch: o.Batch = None,
    seqlen: o.Seqlen = None,
    nheads: o.Nheads = None,
    nheads_k: o.NheadsK = None,
    headdim: o.Headdim = None,
    causal: o.Causal = None,
    window: o.Window = None,
    dtype: o.Dtype = None,
    preset: o.Preset = None,
    kernel: o.Implementation = AUTO,
    repeats: o.Repeats = None,
    no_grad: o.NoGrad = False,
    device: o.Device = None,
    json_file: o.JsonFile = None,
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

    numbers = {"batch": batch, "seqlen": seqlen, "nheads": nheads}
    numbers |= {"nheads_k": nheads_k, "headdim": headdim}
    with usage_errors():
        check_output(json_file)
        where = find_device(device, "a benchmark")
        workloads = make_workloads(preset, causal, window, dtype, **numbers)
        names = [_find_able(kernel, each, where) for each in workloads]
    console, rounds = screen(), repeats_on(where, repeats)
    grad = not without_gradients(preset, no_grad)
    rows: list[Row] = []
    peak = None
    try:
        with running(console, "bench", len(workloads)) as (report, advance):
            report("measuring the peak")
            peak = measure_peak(where, workloads[0].dtype)
            for name, each in zip(names, workloads, strict=True):
                rows += measure(
                    [name], each, where, kind=BENCH, repeats=rounds, grad=grad, report=report
                )
                advance()
    finally:  # after Ctrl-C, too: show and write what is there
        if rows:
            results = make_results(rows, where, {"repeats": rounds}, peak)
            _show(console, results, workloads, peak)
            write(console, results, json_file)
    raise typer.Exit(int(all(row.failed is not None for row in rows)))


def _find_able(name: str, workload: Workload, device: torch.device) -> str:
    """The name of the implementation; NotImplementedError with every reason if it cannot."""
    from ..bench.implementations import find_implementation

    found = find_implementation(name, workload, device)
    reasons = found.why_not(workload, device)
    if reasons:
        raise NotImplementedError(
            f"--kernel {found.name} cannot do {workload}: {'; '.join(reasons)}"
        )
    return found.name


def _show(
    console: Console, results: Results, workloads: Sequence[Workload], peak: Peak | None
) -> None:
    names = dict.fromkeys(row.implementation for row in results.rows)
    what = workloads[0] if len(workloads) == 1 else f"{len(workloads)} workloads"
    print_lines(console, (f"{', '.join(names)} on {results.device}", what))
    varying = differences(workloads)
    shares = () if peak is None else ("% of matmul", "verdict")
    times = ("min ms", "avg ms", "median ms", "max ms", "TFLOP/s peak", "avg")
    table = make_table((*varying, "pass"), (*times, *shares, "MiB"))
    for column in table.columns[: len(varying)]:
        column.justify = "right"
    for row in results.rows:
        values = (str(row.workload[name]) for name in varying)
        table.add_row(*values, row.passes, *_cells(row, results.device, peak))
    console.print(table)
    print_failures(console, results.rows)
    print_lines(console, _notes(results, peak))


def _cells(row: Row, device: str, peak: Peak | None) -> list[str]:
    """Times, rates of the fastest run and on average, share of the peak, verdict, memory."""
    if row.failed is not None or row.ms is None or row.tflops is None:
        return ["[red]failed[/]"]
    times, work = run_times(row), row.tflops * row.ms
    cells = [f"{ms:.3f}" for ms in times.values()]
    cells += [f"{work / times[name]:.4g}" for name in ("min", "avg")]
    if peak is not None:
        from ..bench.verdicts import rate_verdict

        verdict = rate_verdict(row.passes, row.tflops, device, peak)
        cells += [f"{100 * row.tflops / peak.tflops:.1f}", verdict.word]
    return [*cells, mib(row.peak_bytes)]


def _notes(results: Results, peak: Peak | None) -> Iterator[str]:
    """How to read it."""
    from ..bench.verdicts import machine_verdicts, rate_verdict

    yield (
        f"{results.settings['repeats']} rounds; short passes have several runs in each. TFLOP/s: "
        "of the fastest run, and on average."
    )
    if peak is not None:
        yield (
            f"% of matmul: the median run against {peak.tflops:.4g} TFLOP/s, measured here with a "
            f"product of large matrices in {peak.dtype}."
        )
        limits = rate_verdict("", 0.0, results.device, peak).limits
        yield f"verdict, of the median run: {limits}."
    yield (
        "MiB: most memory above inputs, outputs and gradients (backward: with the forward pass); "
        "n/a on the CPU."
    )
    yield from map(str, machine_verdicts(results.machine))
    if results.machine["kind"] == "cpu":
        yield ON_CPU
