"""`rfa lab bench`: attention alone, and a whole Transformer, as the course measures them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ..bench.results import (
    CANNOT,
    MISSING,
    ON_CPU,
    Row,
    cell,
    check_output,
    host_mark,
    make_table,
    mib,
)
from ..bench.workload import BACKWARD, BOTH, FORWARD, SHORT_DTYPES
from ..lab.bench.config import (
    IMPLEMENTATIONS,
    MODEL_PASSES,
    OURS,
    PRECISIONS,
    SIZES,
    STANDARD,
    STEP,
    AttentionConfig,
    ModelConfig,
    make_config,
)
from . import options as o
from .console import Report, print_lines, running, screen, usage_errors, write

if TYPE_CHECKING:
    import torch

    from ..bench.results import Results

_MEMORY = "out of memory"
_WAITS = (
    "*: the GPU waits for the host. It is done within 5 % of the time after the last launch; "
    "host_ms in the file is the time until then."
)
_HOST_BOUND = 0.95  # of a pass is the host's, and the GPU waits for it
_HEADINGS = {FORWARD: "forward", BOTH: "forward + backward", STEP: "whole step"}
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="TOML file with the tables attention, model, sizes.NAME."),
]
Batch = Annotated[int | None, typer.Option(min=1, help="Sequences.")]


def attention(
    d_model: Annotated[
        str | None, typer.Option(help="Dimensions of the head; default 16,32,64,128.")
    ] = None,
    seqlen: Annotated[
        str | None, typer.Option(help="Tokens; default 256,1024,4096,8192,16384.")
    ] = None,
    batch: Batch = None,
    dtype: Annotated[str | None, typer.Option(help="Of q, k, v: fp32, bf16, fp16.")] = None,
    causal: o.Causal = None,
    implementation: Annotated[
        str | None, typer.Option(help=f"Some of {', '.join(IMPLEMENTATIONS)}; default all.")
    ] = None,
    passes: Annotated[int | None, typer.Option(min=1, help="Timed passes; default 100.")] = None,
    seconds: Annotated[
        int | None,
        typer.Option(min=1, help="Passes that take more in all are timed fewer times; 10."),
    ] = None,
    device: o.Device = None,
    config: ConfigFile = None,
    json_file: o.JsonFile = None,
) -> None:
    """Attention alone, batch 8, a single head: time of 100 passes, and memory before the backward.

    standard: step 3's three lines. compiled: the same under torch.compile. tiled: PyTorch tile by
    tile (256 × 256 on a GPU), steps 5 and 6. triton: steps 7 and 8. ours: what the library runs.
    What runs out of memory says so in its cell. Without a GPU, give small sizes.

    \b
    rfa lab bench attention
    rfa lab bench attention --dtype bf16 --causal --json attention.json
    rfa lab bench attention --seqlen 64,128 --d-model 16 --batch 2 --passes 5 --device cpu
    """
    given: dict[str, Any] = {"d_model": d_model, "seqlen": seqlen, "batch": batch, "dtype": dtype}
    given |= {"causal": causal, "implementation": implementation, "passes": passes}
    given |= {"seconds": seconds, "device": device, "json": json_file}
    with usage_errors():
        chosen = make_config(AttentionConfig, config, given)
        check_output(chosen.json)
        workloads = chosen.workloads()

        from ..bench.machine import find_device
        from ..lab.bench.attention import measure_attention

        where = find_device(chosen.device, "a benchmark")
    console = screen()
    jobs = [
        (
            f"{SHORT_DTYPES[each.dtype]}, d_model {each.headdim}, seqlen {each.seqlen}",
            lambda report, each=each: measure_attention(
                chosen.implementation, each, where, chosen.passes, chosen.seconds, report
            ),
        )
        for each in workloads
    ]
    rows = _run(console, "lab bench attention", jobs, where, chosen, _show_attention)
    raise typer.Exit(int(all(row.failed is not None for row in rows)))


def model(
    size: Annotated[
        str | None, typer.Option(help=f"Some of {', '.join(SIZES)}; default all.")
    ] = None,
    d_model: Annotated[int | None, typer.Option(min=1, help="Instead of the size's own.")] = None,
    d_ff: Annotated[int | None, typer.Option(min=1, help="Likewise.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Likewise.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Likewise.")] = None,
    context: Annotated[
        str | None, typer.Option(help="Tokens of a sequence; default 128,256,512,1024.")
    ] = None,
    batch: Batch = None,
    vocab: Annotated[int | None, typer.Option(min=1, help="Tokens that there are; 10000.")] = None,
    precision: Annotated[
        str | None, typer.Option(help=f"Some of {', '.join(PRECISIONS)} (autocast); default all.")
    ] = None,
    attention_kind: Annotated[
        str | None, typer.Option("--attention", help=f"{STANDARD}, {OURS}; default both.")
    ] = None,
    passes: Annotated[
        str | None, typer.Option(help=f"Some of {', '.join(MODEL_PASSES)}; default all.")
    ] = None,
    compiled: Annotated[
        bool | None,
        typer.Option("--compile/--eager", help="Each layer under torch.compile, or not."),
    ] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Timed runs; default 10.")] = None,
    device: o.Device = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="Folder for profiles of the last pass: nsys's, or torch's traces."),
    ] = None,
    memory_snapshot: Annotated[
        Path | None,
        typer.Option(help="File for a snapshot of the memory (GPU); docs.pytorch.org/memory_viz."),
    ] = None,
    config: ConfigFile = None,
    json_file: o.JsonFile = None,
) -> None:
    """A decoder-only Transformer: forward, forward + backward, whole step with AdamW; batch 4.

    Profiles have ranges around scores, softmax and value product.

    \b
    rfa lab bench model --size small,medium --context 512
    rfa lab bench model --size xl --precision bf16 --compile --json xl.json
    rfa lab bench model --size 2.7B --context 512 --precision bf16 --attention ours --profile traces
    rfa lab bench model --d-model 32 --d-ff 64 --layers 2 --heads 2 --context 16 --device cpu
    """
    given: dict[str, Any] = {
        "size": size,
        "d_model": d_model,
        "d_ff": d_ff,
        "layers": layers,
        "heads": heads,
    }
    given |= {"context": context, "batch": batch, "vocab": vocab, "precision": precision}
    given |= {"attention": attention_kind, "passes": passes, "compile": compiled}
    given |= {"repeats": repeats, "device": device, "profile": profile}
    given |= {"memory_snapshot": memory_snapshot, "json": json_file}
    with usage_errors():
        chosen = make_config(ModelConfig, config, given)
        check_output(chosen.json)
        check_output(chosen.memory_snapshot)
        cases = list(chosen.cases())
        if chosen.memory_snapshot is not None and len(cases) > 1:
            raise ValueError(
                f"--memory-snapshot is of one case, not {len(cases)}: give one --size, --context, "
                "--precision and --attention"
            )
        if chosen.profile is not None and chosen.profile.is_file():
            raise ValueError(f"--profile {chosen.profile} is a file: name a folder")

        from ..bench.machine import find_device
        from ..lab.bench.model import measure_model, snapshot_memory, why_not
        from ..lab.bench.model import profile as record

        where = find_device(chosen.device, "a benchmark")
        if chosen.memory_snapshot is not None and where.type != "cuda":
            raise ValueError("--memory-snapshot: torch records the memory of GPUs; this is a CPU")
    console = screen()
    jobs = [
        (
            str(each),
            lambda report, each=each: measure_model(each, where, chosen.repeats, report),
        )
        for each in cases
    ]
    rows = _run(console, "lab bench model", jobs, where, chosen, _show_model)
    able = [each for each in cases if why_not(each, where) is None]
    failed = False
    for case in able:
        try:
            if chosen.profile is not None:
                console.print(f"profile of {case}", markup=False)
                print_lines(console, record(case, where, chosen.profile))
            if chosen.memory_snapshot is not None:
                snapshot_memory(case, where, chosen.memory_snapshot)
                print_lines(console, [f"wrote {chosen.memory_snapshot}"])
        except Exception as error:  # out of memory, say: the next case may do
            console.print(f"nothing recorded of {case}: {error}", style="red", markup=False)
            failed = True
    raise typer.Exit(int(failed or all(row.failed is not None for row in rows)))


# Running and showing.

Job = tuple[str, Callable[[Report], list[Row]]]


def _run(
    console: Console,
    what: str,
    jobs: Sequence[Job],
    device: torch.device,
    config: AttentionConfig | ModelConfig,
    show: Callable[[Console, Results], None],
) -> list[Row]:
    """One job after the other; the file is written after each, whatever happens to the next."""
    from ..bench.machine import make_results

    rows: list[Row] = []
    results = make_results(rows, device, config.settings())  # it asks the driver
    try:
        with running(console, what, len(jobs)) as (report, advance):
            for name, job in jobs:
                rows += job(partial(_tell, report, name))
                advance()
                if config.json is not None and len(jobs) > 1:
                    replace(results, rows=tuple(rows)).save(config.json)
    finally:  # after Ctrl-C, too
        if rows:
            results = replace(results, rows=tuple(rows))
            show(console, results)
            write(console, results, config.json)
    return rows


def _tell(report: Report, name: str, line: str) -> None:
    report(f"{name}: {line}")


def _cell(row: Row | None, value: Callable[[Row], str]) -> str:
    """A number; or, in a word, why there is none."""
    if row is None or (row.failed or "").startswith(CANNOT):
        return MISSING
    if row.failed is not None:
        return f"[red]{_MEMORY if row.failed.startswith(_MEMORY) else 'failed'}[/]"
    return value(row)


def _print_reasons(console: Console, rows: Sequence[Row]) -> None:
    """Why there are no numbers, once for each reason; out of memory needs none."""
    failed = [(row.implementation, row.failed) for row in rows if row.failed is not None]
    for name, why in dict.fromkeys(failed):
        if not why.startswith(_MEMORY):
            text = f" {why}" if why.startswith(CANNOT) else f": {why}"
            console.print(f"[yellow]{escape(name)}[/]{escape(text)}", soft_wrap=True)


def _show_attention(console: Console, results: Results) -> None:
    """Three tables: a row for each cell, a column for each implementation."""
    from ..lab.bench.attention import BEFORE_BACKWARD

    passes = results.settings["passes"]
    names = list(dict.fromkeys(row.implementation for row in results.rows))
    places = ("dtype", "headdim", "seqlen")
    found: dict[tuple[Any, ...], dict[tuple[str, str], Row]] = {}
    for row in results.rows:
        place = tuple(row.workload[name] for name in places)
        found.setdefault(place, {})[row.implementation, row.passes] = row

    def total(row: Row) -> str:
        return f"{row.values['total_ms']:.1f}"

    def memory(row: Row | None) -> str:
        if row is not None and BEFORE_BACKWARD in row.values:  # even where backward fails
            return cell(row.values[BEFORE_BACKWARD], ".2f", per=2**20)
        return _cell(row, lambda row: MISSING)

    first = results.rows[0].workload
    seen = "causal" if first["causal"] else "full"
    print_lines(console, [f"{results.device}: batch {first['batch']}, one head, {seen}"])
    titles = {
        FORWARD: f"forward, ms of {passes} passes",
        BACKWARD: f"backward, ms of {passes} passes",
        BEFORE_BACKWARD: "memory in use before the backward, MiB",
    }
    for what, title in titles.items():
        table = make_table(("dtype",), ("d_model", "seqlen", *names), title)
        for (dtype, d, seqlen), rows in found.items():
            if what == BEFORE_BACKWARD:
                cells = [memory(rows.get((name, BACKWARD))) for name in names]
            else:
                cells = [_cell(rows.get((name, what)), total) for name in names]
            table.add_row(SHORT_DTYPES[dtype], str(d), str(seqlen), *cells)
        console.print(table)
    _print_reasons(console, results.rows)
    print_lines(
        console,
        [
            f"Times: {passes} × the median pass; forward keeps what backward needs. What would "
            f"take more than {results.settings['seconds']} s is timed fewer times (--seconds).",
            "Memory: q, k, v, their output and its gradient, and all that waits for backward.",
            *[ON_CPU] * (results.machine["kind"] == "cpu"),
        ],
    )


def _show_model(console: Console, results: Results) -> None:
    """A row for each case; time and memory of each pass."""
    passes = list(dict.fromkeys(row.passes for row in results.rows))
    mark = _host_mark if results.machine["kind"] != "cpu" else lambda row: ""
    places = ("model", "seqlen", "precision")
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in results.rows:
        place = (*(row.workload[name] for name in places), row.implementation)
        found.setdefault(place, {})[row.passes] = row
    first = results.rows[0].workload
    how = "under torch.compile" if first["compile"] else "eager"
    print_lines(
        console, [f"{results.device}: batch {first['batch']}, vocabulary {first['vocab']}, {how}"]
    )
    columns = [name for way in passes for name in (f"{_HEADINGS[way]} ms", "MiB")]
    table = make_table(("size", "precision", "attention"), ("context", *columns, "TFLOP/s"))
    for (name, context, precision, kind), rows in found.items():
        cells = [str(context)]
        for way in passes:
            each = rows.get(way)
            cells.append(_cell(each, lambda row: f"{row.ms:.3f}{mark(row)}"))
            cells.append(_cell(each, lambda row: mib(row.peak_bytes)) if _ran(each) else "")
        last = rows.get(passes[-1])
        cells.append(_cell(last, lambda row: f"{row.tflops:.4g}") if _ran(last) else "")
        table.add_row(name, precision, kind, *cells)
    console.print(table)
    _print_reasons(console, results.rows)
    print_lines(
        console,
        [
            f"ms: median of {results.settings['repeats']} runs, each from an idle device until all "
            "is done. forward: without gradients. whole step: with AdamW.",
            "MiB: most memory at a time, with parameters, gradients and AdamW's state where there "
            "are any; n/a on the CPU. TFLOP/s: of the last pass.",
            *[_WAITS] * any(map(mark, results.rows)),
            *[ON_CPU] * (results.machine["kind"] == "cpu"),
        ],
    )


def _host_mark(row: Row) -> str:
    """Whether the GPU waits for the host: otherwise launches that are queued remain to be done."""
    return "" if row.ms is None else host_mark(row.values["host_ms"], row.ms, _HOST_BOUND)


def _ran(row: Row | None) -> bool:
    return row is not None and row.failed is None
