"""`rfa compare`: our kernels beside every other implementation that is here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..bench.names import implementation_names
from ..bench.results import COMPARE, FORWARD, Row, check_output
from ..bench.versus import Limits, beside
from ..kernels.base import NATIVE
from .measuring import (
    ON_CPU,
    Device,
    Graphs,
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
from .versus import Gate, MaxMemory, MinSpeed, compared, find_limits, print_versus
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
    make_workloads,
    without_gradients,
)

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
    batch: Batch = None,
    seqlen: Seqlen = None,
    nheads: Nheads = None,
    nheads_k: NheadsK = None,
    headdim: Headdim = None,
    causal: Causal = None,
    window: Window = None,
    dtype: Dtype = None,
    preset: Preset = None,
    versus: Annotated[
        str | None,
        typer.Option(
            help="Whose time speed-ups are against; native if you name it, "
            f"else {_BASE}, else the first that ran."
        ),
    ] = None,
    gate: Gate = False,
    min_speed: MinSpeed = None,
    max_memory: MaxMemory = None,
    errors: Annotated[
        bool, typer.Option("--errors/--no-errors", help="Compare results with fp64.")
    ] = True,
    repeats: Repeats = None,
    graphs: Graphs = False,
    no_grad: NoGrad = False,
    device: Device = None,
    json_file: JsonFile = None,
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
    numbers = {"batch": batch, "seqlen": seqlen, "headdim": headdim}
    numbers |= {"nheads": nheads, "nheads_k": nheads_k}
    try:
        check_output(json_file)
        where = find_device(device, "a comparison")
        check_graphs(graphs, where)
        workloads = make_workloads(preset, numbers, causal, window, dtype)
        if versus is None and NATIVE in (names or ()):
            versus = NATIVE
            if not (gate or min_speed is not None or max_memory is not None):
                names, left_out = _without_native(names or [], workloads[0], where)
                versus = None if left_out else NATIVE
        limits = find_limits(gate, min_speed, max_memory, versus or "", where)
        asked = [*(names or implementation_names()), *([versus] if versus else [])]
        for each in workloads:
            found = find_all(asked, each, where)
            if limits is not None and versus is not None:
                _check_gate(found, find_implementation(versus, each, where), each, where)
    except (ValueError, NotImplementedError) as error:
        raise typer.BadParameter(str(error)) from None
    console, rounds = screen(), repeats_on(where, repeats)
    grad = not without_gradients(preset, no_grad)
    rows: list[Row] = []
    peak, passed = None, True
    if left_out:
        console.print(left_out, markup=False)
    console.print(f"On {device_name(where)}, {rounds} round{'s' * (rounds > 1)}.", markup=False)
    try:
        with running(console, "compare", len(workloads)) as (say, advance):
            say("measuring the peak")
            peak = (measure_peak(where, workloads[0].dtype), workloads[0].dtype)
            for each in workloads:
                measured = measure(
                    asked,
                    each,
                    where,
                    kind=COMPARE,
                    repeats=rounds,
                    grad=grad,
                    errors=errors,
                    graphs=graphs,
                    report=say,
                )
                base = find_implementation(versus, each, where).name if versus else None
                if base is not None:
                    measured = _beside(measured, base)
                show(console, each, measured, base)
                if base is not None:
                    ran = [r for r in measured if r.failed is None or r.implementation == base]
                    passed &= _gated(console, measured if names else ran, base, limits)
                rows += measured
                advance()
    finally:  # what is there is written, even if the user has had enough
        if rows:
            settings = {"repeats": rounds, "graphs": graphs, **compared(versus, limits)}
            write(console, make_results(rows, where, settings, peak), json_file)
    if where.type == "cpu":
        console.print(ON_CPU)
    raise typer.Exit(int(not passed or all(row.failed is not None for row in rows)))


def _without_native(
    names: Sequence[str], workload: Workload, device: torch.device
) -> tuple[list[str], str]:
    """What else is named, and why, if `native` cannot do it; NotImplementedError if it is alone."""
    from ..bench.implementations import find_implementation

    try:
        find_implementation(NATIVE, workload, device)
    except NotImplementedError as error:
        others = [name for name in names if name != NATIVE]
        if not others:
            raise
        return others, str(error)
    return list(names), ""


def _check_gate(
    found: Sequence[Implementation], base: Implementation, workload: Workload, device: torch.device
) -> None:
    """ValueError if there is nothing to compare, or nothing to compare with."""
    reasons = base.why_not(workload, device)
    if reasons:
        raise ValueError(f"--versus {base.name}: it cannot do this here: {'; '.join(reasons)}")
    if all(each.name == base.name for each in found):
        raise ValueError(f"--versus {base.name}: nothing else is named to compare with it")


def _beside(rows: Sequence[Row], versus: str) -> list[Row]:
    bases = {row.passes: row for row in rows if row.implementation == versus}
    return [beside(row, bases[row.passes]) for row in rows]


def _gated(console: Console, rows: Sequence[Row], versus: str, limits: Limits | None) -> bool:
    """The table of kernels beside the baseline; whether the gate lets all of them through."""
    groups = [
        (base, [row for row in rows if row.passes == base.passes and row is not base])
        for base in rows
        if base.implementation == versus
    ]
    labels = {"implementation": lambda row: row.implementation}
    return print_versus(console, groups, versus, labels, limits)


def show(console: Console, workload: Workload, rows: Sequence[Row], versus: str | None) -> None:
    """A table of those that ran, who was best, and why the others did not run."""
    from ..bench.measure import CANNOT

    console.print(f"\n{workload}", markup=False)
    ran = [row for row in rows if row.failed is None]
    if ran:
        names = [row.implementation for row in ran]
        base = versus or (_BASE if _BASE in names else names[0])
        tried = [row for row in rows if not (row.failed or "").startswith(CANNOT)]
        console.print(_table(tried, base))
        console.print(f"speed-up: against {base}", markup=False)
        for line in best(ran):
            console.print(line, markup=False)
    print_failures(console, rows)


def _table(rows: Sequence[Row], versus: str) -> Table:
    """A row for each implementation that was tried; columns for each pass."""
    passes = list(dict.fromkeys(row.passes for row in rows))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("implementation", no_wrap=True)
    for each in passes:
        for column in (f"{each} ms", "TFLOP/s", "speed-up"):
            table.add_column(column, justify="right", no_wrap=True)
    compared = any(row.errors for row in rows)
    for column in ("MiB", *(("error of out", "of gradients") if compared else ())):
        table.add_column(column, justify="right", no_wrap=True)
    base = {row.passes: row.ms for row in rows if row.implementation == versus}
    for name in dict.fromkeys(row.implementation for row in rows):
        mine = {row.passes: row for row in rows if row.implementation == name}
        failed = mine[passes[-1]].failed
        if failed is not None:
            what = "out of memory" if failed.startswith("out of memory") else "failed"
            table.add_row(name, f"[red]{what}[/]")
            continue
        cells = [cell for each in passes for cell in _cells(mine[each], base.get(each))]
        last = mine[passes[-1]]
        table.add_row(name, *cells, mib(last.peak_bytes), *(_errors(last) if compared else ()))
    return table


def _cells(row: Row, base: float | None) -> list[str]:
    """Time, rate, and speed-up against the base if that ran."""
    assert row.ms is not None
    assert row.tflops is not None
    speed = "n/a" if base is None else f"{base / row.ms:.2f}x"
    return [f"{row.ms:.3f}", f"{row.tflops:.4g}", speed]


def _errors(row: Row) -> list[str]:
    """Largest errors relative to the largest entry: of out, and of the gradients."""
    relative = {name: each["relative"] for name, each in row.errors.items()}
    gradients = [value for name, value in relative.items() if name != "out"]
    return [_worst([relative["out"]] if relative else []), _worst(gradients)]


def _worst(values: Sequence[float]) -> str:
    """The largest; NaN is worse than any number."""
    if not values:
        return "n/a"
    return "[bold red]nan[/]" if any(map(math.isnan, values)) else f"{max(values):.1e}"


def best(rows: Sequence[Row]) -> Iterator[str]:
    """Who was the fastest in each pass, and who needed the least memory."""
    for each in dict.fromkeys(row.passes for row in rows):
        timed = [row for row in rows if row.passes == each and row.ms is not None]
        fastest = min(timed, key=lambda row: row.ms or 0.0)
        yield f"fastest, {each}: {fastest.implementation} ({fastest.ms:.3f} ms)"
    sizes = [row for row in rows if row.peak_bytes is not None and row.passes != FORWARD]
    sizes = sizes or [row for row in rows if row.peak_bytes is not None]
    if sizes:
        leanest = min(sizes, key=lambda row: row.peak_bytes or 0)
        yield f"leanest: {leanest.implementation} ({mib(leanest.peak_bytes)} MiB)"
