"""`rfa bench` and `rfa compare`: one implementation, or several side by side, on one device."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..bench.implementations import find_implementation, implementation_names
from ..bench.results import (
    BENCH,
    CANNOT,
    COMPARE,
    HOST_WAITS,
    MISSING,
    ON_CPU,
    Peak,
    Results,
    Row,
    beside,
    check_output,
    host_cell,
    least,
    load,
    make_table,
    mib,
    run_times,
    save,
    speed_up,
)
from ..bench.workload import FORWARD, Workload
from ..kernels.base import AUTO, NATIVE
from . import options as o
from .console import print_lines, print_versus, running, screen, usage_errors, write

if TYPE_CHECKING:
    import torch

_BASE = "torch standard"


def _choices() -> tuple[str, ...]:
    """Our kernels, and other libraries."""
    return (AUTO, NATIVE, *implementation_names())


Implementation = Annotated[str, o.named("implementation", _choices, "One of {}.", "--kernel")]


def bench(
    batch: o.Batch = None,
    seqlen: o.Seqlen = None,
    nheads: o.Nheads = None,
    nheads_k: o.NheadsK = None,
    headdim: o.Headdim = None,
    headdim_v: o.HeaddimV = None,
    causal: o.Causal = None,
    window: o.Window = None,
    softcap: o.Softcap = None,
    cu_seqlens: o.CuSeqlens = None,
    documents: o.Documents = None,
    seed: o.Seeds = None,
    document_cap: o.DocumentCap = None,
    dtype: o.Dtype = None,
    preset: o.Preset = None,
    kernel: Implementation = AUTO,
    host: o.Host = False,
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
    rfa bench --seqlen 128,512,2048 --host
    rfa bench --documents magi --seqlen 32768 --seed 42,43 --causal
    """
    from ..bench.machine import find_device

    numbers = {"batch": batch, "seqlen": seqlen, "nheads": nheads}
    numbers |= {"nheads_k": nheads_k, "headdim": headdim, "headdim_v": headdim_v}
    grad = not o.without_gradients(preset, no_grad)
    with usage_errors():
        check_output(json_file)
        where = find_device(device, "a benchmark")
        workloads = o.make_workloads(preset, causal, window, dtype, softcap, **numbers)
        pack = cu_seqlens, documents, seed, document_cap
        workloads = o.make_packs(workloads, batch, seqlen, *pack)
        jobs = [([_find_able("--kernel", kernel, each, where, grad)], each) for each in workloads]
    console = screen()
    rows = _measure(
        console,
        BENCH,
        jobs,
        where,
        {"repeats": o.repeats_on(where, repeats)},
        json_file,
        grad=grad,
        at_end=lambda results: _show_sweep(console, results, workloads, host),
    )
    raise typer.Exit(int(all(row.failed is not None for row in rows)))


def compare(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            parser=o.one_of("implementation", _choices),
            metavar="NAMES",
            help=f"Only these of {', '.join(implementation_names())}; auto, native.",
        ),
    ] = None,
    batch: o.Batch = None,
    seqlen: o.Seqlen = None,
    nheads: o.Nheads = None,
    nheads_k: o.NheadsK = None,
    headdim: o.Headdim = None,
    headdim_v: o.HeaddimV = None,
    causal: o.Causal = None,
    window: o.Window = None,
    softcap: o.Softcap = None,
    cu_seqlens: o.CuSeqlens = None,
    documents: o.Documents = None,
    seed: o.Seeds = None,
    document_cap: o.DocumentCap = None,
    dtype: o.Dtype = None,
    preset: o.Preset = None,
    random: Annotated[
        int | None,
        typer.Option(min=1, help="Instead of these, so many random calls, drawn with --seed."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the file of --json, if it is there.")
    ] = False,
    versus: Annotated[
        str | None,
        o.named(
            "implementation",
            _choices,
            "Whose time speed-ups are against; native if you name it, "
            f"else {_BASE}, else the first that ran.",
        ),
    ] = None,
    gate: o.Gate = False,
    min_speed: o.MinSpeed = None,
    max_memory: o.MaxMemory = None,
    errors: Annotated[
        bool, typer.Option("--errors/--no-errors", help="Compare results with fp64.")
    ] = True,
    host: o.Host = False,
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
    rfa compare triton cute "flash-attn 4" --preset llama3-8b --documents magi --seqlen 32768
    rfa compare auto triton fa2 --random 60 --seed 1 --no-errors --json grid.json --resume
    """
    from ..bench.machine import device_name, find_device
    from ..bench.measure import check_graphs, find_all

    left_out = ""
    numbers = {"batch": batch, "seqlen": seqlen, "nheads": nheads}
    numbers |= {"nheads_k": nheads_k, "headdim": headdim, "headdim_v": headdim_v}
    grad = not o.without_gradients(preset, no_grad)
    with usage_errors():
        check_output(json_file)
        where = find_device(device, "a comparison")
        check_graphs(graphs, where)
        if random is None:
            workloads = o.make_workloads(preset, causal, window, dtype, softcap, **numbers)
            pack = cu_seqlens, documents, seed, document_cap
            workloads = o.make_packs(workloads, batch, seqlen, *pack)
        else:
            shape = {"preset": preset, "causal": causal, "window": window, "softcap": softcap}
            drawn = {"cu_seqlens": cu_seqlens, "documents": documents, "document_cap": document_cap}
            workloads = _random(random, seed, dtype, {**shape, **numbers, **drawn})
        before = _before(json_file, resume)
        if versus is None and names and NATIVE in names:
            others = [name for name in names if name != NATIVE]
            gated = gate or min_speed is not None or max_memory is not None
            try:
                find_implementation(NATIVE, workloads[0], where, grad)
                versus = NATIVE
            except NotImplementedError as error:
                if gated or not others:
                    raise
                names, left_out = others, str(error)
        limits = o.find_limits(gate, min_speed, max_memory, versus or "", where)
        everyone = [*(names or implementation_names()), *([versus] if versus else [])]
        for each in workloads:
            found = find_all(everyone, each, where, grad)
            if limits is not None and versus is not None:
                base = _find_able("--versus", versus, each, where, grad)
                if all(other.name == base for other in found):
                    raise ValueError(f"--versus {base}: nothing else is named to compare with it")
    console, rounds, passed = screen(), o.repeats_on(where, repeats), True
    on = f"On {device_name(where)}, {rounds} round{'s' * (rounds > 1)}."
    print_lines(console, [left_out, on] if left_out else [on])

    def finish(workload: Workload, rows: list[Row]) -> list[Row]:
        """Show the rows of a workload; return them with their shares of the baseline's speed."""
        nonlocal passed
        base = find_implementation(versus, workload, where, grad).name if versus else None
        bases = {row.passes: row for row in rows if row.implementation == base}
        rows = [beside(row, bases[row.passes]) for row in rows] if bases else rows
        _show_comparison(console, workload, rows, base, host)
        if base is not None:
            ran = [row for row in rows if row.failed is None or row.implementation == base]
            judged = rows if names else ran
            groups = [
                (own, [row for row in judged if row.passes == own.passes and row is not own])
                for own in judged
                if own.implementation == base
            ]
            labels = {"implementation": lambda row: row.implementation}
            passed &= print_versus(console, groups, base, labels, limits)
        return rows

    rows = _measure(
        console,
        COMPARE,
        [(everyone, each) for each in workloads],
        where,
        {"repeats": rounds, "graphs": graphs, **o.compared(versus, limits)},
        json_file,
        before=before,
        grad=grad,
        errors=errors,
        graphs=graphs,
        after_each=finish,
    )
    if len(workloads) > 1:
        _show_summary(console, rows)
    if where.type == "cpu":
        console.print(ON_CPU)
    elif host:
        console.print(HOST_WAITS)
    raise typer.Exit(int(not passed or all(row.failed is not None for row in rows)))


def _random(
    count: int, seed: str | None, dtype: str | None, shape: Mapping[str, object]
) -> list[Workload]:
    """Those of `rfa compare --random`; ValueError for options that it draws itself."""
    from ..bench.grid import random_workloads

    for name, value in shape.items():
        if value is not None:
            raise ValueError(f"--{name.replace('_', '-')} {value}: --random draws it")
    found = [
        random_workloads(count, each or 0, dtype or "bfloat16") for each in o.parse_seeds(seed)
    ]
    return [workload for of_seed in found for workload in of_seed]


def _before(json_file: Path | None, resume: bool) -> tuple[Row, ...]:
    """What a run that was stopped has measured, with --resume."""
    if not resume:
        return ()
    if json_file is None:
        raise ValueError("--resume: say which file with --json")
    return load(json_file).rows if json_file.exists() else ()


def _show_summary(console: Console, rows: Sequence[Row]) -> None:
    """Of several workloads: how near each implementation came to the fastest of those that ran."""
    shares: dict[tuple[str, str], list[float]] = {}
    calls: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.ms is not None:
            calls.setdefault((json.dumps(row.workload), row.passes), []).append(row)
    for (_, passes), ran in calls.items():
        fastest = min(row.ms or math.inf for row in ran)
        for row in ran:
            name = row.implementation.partition(" (")[0]  # "auto", whatever it took
            shares.setdefault((name, passes), []).append(fastest / (row.ms or math.inf))
    table = make_table(("implementation", "pass"), ("calls", "geometric mean", "worst", "≥ 0.95"))
    for (name, passes), found in sorted(shares.items()):
        mean = math.exp(sum(map(math.log, found)) / len(found))
        near = sum(share >= 0.95 for share in found)
        table.add_row(name, passes, str(len(found)), f"{mean:.3f}", f"{min(found):.3f}", str(near))
    print_lines(console, ("", "Speed, of the fastest that ran:"))
    console.print(table)


def _find_able(option: str, name: str, workload: Workload, device: torch.device, grad: bool) -> str:
    """The name of the implementation; NotImplementedError with every reason if it cannot."""
    found = find_implementation(name, workload, device, grad)
    reasons = found.why_not(workload, device, grad)
    if reasons:
        raise NotImplementedError(
            f"{option} {found.name} cannot do {workload}: {'; '.join(reasons)}"
        )
    return found.name


def _measure(
    console: Console,
    kind: str,
    jobs: Sequence[tuple[Sequence[str], Workload]],
    device: torch.device,
    settings: dict[str, Any],
    json_file: Path | None,
    *,
    before: Sequence[Row] = (),
    after_each: Callable[[Workload, list[Row]], list[Row]] = lambda workload, rows: rows,
    at_end: Callable[[Results], None] = lambda results: None,
    **how: Any,
) -> list[Row]:
    """Measure implementations of one workload after the other; write what there is.

    Workloads of rows `before` are not measured again. `after_each` and `at_end` show what was
    found; `how` is what `measure` takes.
    """
    from ..bench.machine import make_results
    from ..bench.measure import measure
    from ..bench.timing import measure_peak

    rows, peak = list(before), None
    known = [row.workload for row in before]
    jobs = [(names, workload) for names, workload in jobs if workload.to_dict() not in known]
    if not jobs:
        return rows
    try:
        with running(console, kind, len(jobs)) as (report, advance):
            report("measuring the peak")
            peak = measure_peak(device, jobs[0][1].dtype)
            how |= {"kind": kind, "repeats": settings["repeats"], "report": report}
            for names, workload in jobs:
                rows += after_each(workload, measure(names, workload, device, **how))
                if json_file is not None and len(jobs) > 1:  # should the process be killed
                    save(make_results(rows, device, settings, peak), json_file)
                advance()
    finally:  # after Ctrl-C, too
        if rows:
            results = make_results(rows, device, settings, peak)
            at_end(results)
            write(console, results, json_file)
    return rows


def _print_failures(console: Console, rows: Sequence[Row]) -> None:
    """Why some have no times or no errors, once for each reason."""
    reasons = [(row.implementation, row.failed or row.note) for row in rows]
    for name, why in dict.fromkeys(reasons):
        if why is not None:
            text = f" {why}" if why.startswith(CANNOT) else f": {why}"
            console.print(f"[yellow]{escape(name)}[/]{escape(text)}", soft_wrap=True)


# One implementation.


def _show_sweep(
    console: Console, results: Results, workloads: Sequence[Workload], host: bool
) -> None:
    measured = dict.fromkeys(row.implementation for row in results.rows)
    what = workloads[0] if len(workloads) == 1 else f"{len(workloads)} workloads"
    print_lines(console, (f"{', '.join(measured)} on {results.device}", what))
    values = [each.to_dict() for each in workloads]
    names = [name for name in values[0] if name != "lengths"]  # of documents: many numbers
    varying = [name for name in names if any(v[name] != values[0][name] for v in values)]
    shares = ("% of matmul", "verdict") if results.peak else ()
    times = ("min ms", "avg ms", "median ms", "max ms", "TFLOP/s peak", "avg")
    own = ("host ms",) if host else ()
    table = make_table((*varying, "pass"), (*times, *own, *shares, "MiB"))
    for column in table.columns[: len(varying)]:
        column.justify = "right"
    for row in results.rows:
        sizes = (str(row.workload[name]) for name in varying)
        table.add_row(*sizes, row.passes, *_cells(row, results, host))
    console.print(table)
    _print_failures(console, results.rows)
    print_lines(console, _notes(results, host))


def _cells(row: Row, results: Results, host: bool) -> list[str]:
    """Times, rates of the fastest run and on average, the host's time, shares, memory."""
    from ..bench.machine import rate_verdict

    if row.failed is not None or row.ms is None or row.tflops is None:
        return ["[red]failed[/]"]
    times, work = run_times(row), row.tflops * row.ms
    cells = [f"{ms:.3f}" for ms in times.values()]
    cells += [f"{work / times[name]:.4g}" for name in ("min", "avg")]
    if host:
        cells.append(host_cell(row.values["host_ms"], row.ms))
    if results.peak:
        peak = Peak(**results.peak)
        verdict = rate_verdict(row.passes, row.tflops, results.device, peak)
        cells += [f"{100 * row.tflops / peak.tflops:.1f}", verdict.word]
    return [*cells, mib(row.peak_bytes)]


def _notes(results: Results, host: bool) -> Iterator[object]:
    """How to read it."""
    from ..bench.machine import machine_verdicts, rate_verdict

    yield (
        f"{results.settings['repeats']} rounds; short passes have several runs in each. TFLOP/s: "
        "of the fastest run, and on average."
    )
    if results.peak:
        peak = Peak(**results.peak)
        yield (
            f"% of matmul: the median run against {peak.tflops:.4g} TFLOP/s, measured here with a "
            f"product of large matrices in {peak.dtype}."
        )
        limits = rate_verdict("", 0.0, results.device, peak).limits
        yield f"verdict, of the median run: {limits}."
    if host:
        yield "host ms: median time until all of a pass was queued: launches and autograd."
        if results.machine["kind"] != "cpu":
            yield HOST_WAITS
    yield (
        "MiB: most memory above inputs, outputs and gradients (backward: with the forward pass); "
        "n/a on the CPU."
    )
    yield from machine_verdicts(results.machine)
    if results.machine["kind"] == "cpu":
        yield ON_CPU


# Several implementations.


def _show_comparison(
    console: Console, workload: Workload, rows: Sequence[Row], versus: str | None, host: bool
) -> None:
    """A table of those that ran, who was best, and why the others did not run."""
    print_lines(console, ("", workload))
    ran = [row for row in rows if row.failed is None]
    if ran:
        names = [row.implementation for row in ran]
        base = versus or (_BASE if _BASE in names else names[0])
        tried = [row for row in rows if not (row.failed or "").startswith(CANNOT)]
        console.print(_table(tried, base, host))
        print_lines(console, [f"speed-up: against {base}"])
        for passes in dict.fromkeys(row.passes for row in ran):
            first = least((row for row in ran if row.passes == passes), "ms")
            if first is not None:
                text = f"fastest, {passes}: {first.implementation} ({first.ms:.3f} ms)"
                print_lines(console, [text])
        lean = least((row for row in ran if row.passes != FORWARD), "peak_bytes")
        lean = lean or least(ran, "peak_bytes")
        if lean is not None:
            text = f"leanest: {lean.implementation} ({mib(lean.peak_bytes)} MiB)"
            print_lines(console, [text])
    _print_failures(console, rows)


def _table(rows: Sequence[Row], versus: str, host: bool) -> Table:
    """A row for each implementation that was tried; columns for each pass."""
    passes = list(dict.fromkeys(row.passes for row in rows))
    compared = any(row.errors for row in rows)
    of_pass = ("TFLOP/s", "speed-up", *(["host ms"] if host else []))
    columns = [name for each in passes for name in (f"{each} ms", *of_pass)]
    errors = ("error of out", "of gradients") if compared else ()
    table = make_table(("implementation",), (*columns, "MiB", *errors))
    table.columns[0].no_wrap = True
    base = {row.passes: row.ms for row in rows if row.implementation == versus}
    for name in dict.fromkeys(row.implementation for row in rows):
        mine = [row for row in rows if row.implementation == name]
        last = mine[-1]
        if last.failed is not None:
            what = "out of memory" if last.failed.startswith("out of memory") else "failed"
            table.add_row(name, f"[red]{what}[/]")
            continue
        cells: list[str] = []
        for row in mine:
            cells += (f"{row.ms:.3f}", f"{row.tflops:.4g}", speed_up(row, base.get(row.passes)))
            if host:
                cells.append(host_cell(row.values["host_ms"], row.ms or 0.0))
        cells.append(mib(last.peak_bytes))
        if compared:
            cells += [_worst(last, last.errors.keys() & {"out"})]
            cells += [_worst(last, last.errors.keys() - {"out"})]
        table.add_row(name, *cells)
    return table


def _worst(row: Row, names: Iterable[str]) -> str:
    """The largest error of some tensors, relative to the largest entry."""
    values = [row.errors[name]["relative"] for name in names]
    if any(map(math.isnan, values)):  # worse than any number
        return "[bold red]nan[/]"
    return f"{max(values):.1e}" if values else MISSING
