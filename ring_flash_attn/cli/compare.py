"""`rfa compare`: our kernels beside every other implementation that is here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..bench.cells import MISSING, fastest, leanest, speed_up
from ..bench.results import COMPARE, FORWARD, Row, check_output, implementation_names
from ..bench.versus import Limits, beside
from ..kernels.base import NATIVE
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
from .versus import compared, find_limits, print_versus
from .workloads import make_workloads, without_gradients

if TYPE_CHECKING:
    import torch

    from ..bench.implementations import Implementation
    from ..bench.workload import Workload

_BASE = "torch standard"


def compare(
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"Only these of {', '.join(implementation_names())}; auto, native."),
    ] = None,
    batch: o.Batch = None,
    seqlen: o.Seqlen = None,
    nheads: o.Nheads = None,
    nheads_k: o.NheadsK = None,
    headdim: o.Headdim = None,
    causal: o.Causal = None,
    window: o.Window = None,
    dtype: o.Dtype = None,
    preset: o.Preset = None,
    versus: Annotated[
        str | None,
        typer.Option(
            help="Whose time speed-ups are against; native if you name it, "
            f"else {_BASE}, else the first that ran."
        ),
    ] = None,
    gate: o.Gate = False,
    min_speed: o.MinSpeed = None,
    max_memory: o.MaxMemory = None,
    errors: Annotated[
        bool, typer.Option("--errors/--no-errors", help="Compare results with fp64.")
    ] = True,
    repeats: o.Repeats = None,
    graphs: o.Graphs = False,
    no_grad: o.NoGrad = False,
    device: o.Device = None,
    json_file: o.JsonFile = None,
) -> None:
    """Compare implementations on one device, in interleaved rounds of one run.

    What is not installed, or cannot do it, is listed with the reason; one that fails gets a row
    that says so, and the rest go on. With --gate, those that you name (or all that ran) have to be
    within --min-speed and --max-memory of --versus.

    \b
    rfa compare --preset llama3-8b
    rfa compare triton fa2 "SDPA cuDNN" --seqlen 1024,4096 --causal --versus "SDPA cuDNN"
    rfa compare --batch 4 --seqlen 2048 --no-grad --json compare.json
    rfa compare triton native --preset 8k --gate
    """
    from ..bench.implementations import find_implementation
    from ..bench.machine import device_name, find_device, make_results, measure_peak
    from ..bench.measure import check_graphs, find_all, measure

    left_out = ""
    numbers = {"batch": batch, "seqlen": seqlen, "nheads": nheads}
    numbers |= {"nheads_k": nheads_k, "headdim": headdim}
    with usage_errors():
        check_output(json_file)
        where = find_device(device, "a comparison")
        check_graphs(graphs, where)
        workloads = make_workloads(preset, causal, window, dtype, **numbers)
        if versus is None and names and NATIVE in names:
            others = [name for name in names if name != NATIVE]
            gated = gate or min_speed is not None or max_memory is not None
            try:
                find_implementation(NATIVE, workloads[0], where)
                versus = NATIVE
            except NotImplementedError as error:
                if gated or not others:
                    raise
                names, left_out = others, str(error)
        limits = find_limits(gate, min_speed, max_memory, versus or "", where)
        everyone = [*(names or implementation_names()), *([versus] if versus else [])]
        for each in workloads:
            found = find_all(everyone, each, where)
            if limits is not None and versus is not None:
                _check_gate(found, find_implementation(versus, each, where), each, where)
    console, rounds = screen(), repeats_on(where, repeats)
    grad = not without_gradients(preset, no_grad)
    rows: list[Row] = []
    peak, passed = None, True
    on = f"On {device_name(where)}, {rounds} round{'s' * (rounds > 1)}."
    print_lines(console, [left_out, on] if left_out else [on])
    try:
        with running(console, "compare", len(workloads)) as (report, advance):
            report("measuring the peak")
            peak = measure_peak(where, workloads[0].dtype)
            for each in workloads:
                how: Any = {"repeats": rounds, "grad": grad, "errors": errors, "graphs": graphs}
                measured = measure(everyone, each, where, kind=COMPARE, report=report, **how)
                base = find_implementation(versus, each, where).name if versus else None
                bases = {row.passes: row for row in measured if row.implementation == base}
                if bases:
                    measured = [beside(row, bases[row.passes]) for row in measured]
                _show(console, each, measured, base)
                if base is not None:
                    ran = [r for r in measured if r.failed is None or r.implementation == base]
                    passed &= _gated(console, measured if names else ran, base, limits)
                rows += measured
                advance()
    finally:  # after Ctrl-C, too: write what is there
        if rows:
            settings = {"repeats": rounds, "graphs": graphs, **compared(versus, limits)}
            write(console, make_results(rows, where, settings, peak), json_file)
    if where.type == "cpu":
        console.print(ON_CPU)
    raise typer.Exit(int(not passed or all(row.failed is not None for row in rows)))


def _check_gate(
    found: Sequence[Implementation], base: Implementation, workload: Workload, device: torch.device
) -> None:
    """ValueError if there is nothing to compare, or nothing to compare with."""
    reasons = base.why_not(workload, device)
    if reasons:
        raise ValueError(f"--versus {base.name}: it cannot do this here: {'; '.join(reasons)}")
    if all(each.name == base.name for each in found):
        raise ValueError(f"--versus {base.name}: nothing else is named to compare with it")


def _gated(console: Console, rows: Sequence[Row], versus: str, limits: Limits | None) -> bool:
    """The table of kernels beside the baseline; whether the gate lets all of them through."""
    groups = [
        (base, [row for row in rows if row.passes == base.passes and row is not base])
        for base in rows
        if base.implementation == versus
    ]
    labels = {"implementation": lambda row: row.implementation}
    return print_versus(console, groups, versus, labels, limits)


def _show(console: Console, workload: Workload, rows: Sequence[Row], versus: str | None) -> None:
    """A table of those that ran, who was best, and why the others did not run."""
    from ..bench.measure import CANNOT

    print_lines(console, ("", workload))
    ran = [row for row in rows if row.failed is None]
    if ran:
        names = [row.implementation for row in ran]
        base = versus or (_BASE if _BASE in names else names[0])
        tried = [row for row in rows if not (row.failed or "").startswith(CANNOT)]
        console.print(_table(tried, base))
        print_lines(console, (f"speed-up: against {base}", *_best(ran)))
    print_failures(console, rows)


def _table(rows: Sequence[Row], versus: str) -> Table:
    """A row for each implementation that was tried; columns for each pass."""
    passes = list(dict.fromkeys(row.passes for row in rows))
    compared = any(row.errors for row in rows)
    columns = [name for each in passes for name in (f"{each} ms", "TFLOP/s", "speed-up")]
    errors = ("error of out", "of gradients") if compared else ()
    table = make_table(("implementation",), (*columns, "MiB", *errors))
    table.columns[0].no_wrap = True
    base = {row.passes: row.ms for row in rows if row.implementation == versus}
    for name in dict.fromkeys(row.implementation for row in rows):
        mine = {row.passes: row for row in rows if row.implementation == name}
        last = mine[passes[-1]]
        if last.failed is not None:
            what = "out of memory" if last.failed.startswith("out of memory") else "failed"
            table.add_row(name, f"[red]{what}[/]")
            continue
        cells = [
            cell
            for each in passes
            for row in (mine[each],)
            for cell in (f"{row.ms:.3f}", f"{row.tflops:.4g}", speed_up(row, base.get(each)))
        ]
        table.add_row(name, *cells, mib(last.peak_bytes), *(_errors(last) if compared else ()))
    return table


def _errors(row: Row) -> list[str]:
    """Largest errors relative to the largest entry: of out, and of the gradients."""

    def worst(names: Iterable[str]) -> str:
        values = [row.errors[name]["relative"] for name in names]
        if any(map(math.isnan, values)):  # worse than any number
            return "[bold red]nan[/]"
        return f"{max(values):.1e}" if values else MISSING

    return [worst(row.errors.keys() & {"out"}), worst(row.errors.keys() - {"out"})]


def _best(rows: Sequence[Row]) -> Iterator[str]:
    """Who was the fastest in each pass, and who needed the least memory."""
    for each in dict.fromkeys(row.passes for row in rows):
        first = fastest([row for row in rows if row.passes == each])
        if first is not None:
            yield f"fastest, {each}: {first.implementation} ({first.ms:.3f} ms)"
    lean = leanest([row for row in rows if row.passes != FORWARD]) or leanest(rows)
    if lean is not None:
        yield f"leanest: {lean.implementation} ({mib(lean.peak_bytes)} MiB)"
