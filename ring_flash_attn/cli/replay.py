"""`rfa replay`: what a rank of many GPUs costs, found on one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ..bench.replays.results import Design, Measured, Replay, replay_rows
from ..bench.results import ON_CPU, cell, check_output, make_table
from ..bench.workload import BACKWARD, BOTH, FORWARD, NONE, Link, find_link
from ..kernels.base import AUTO, LIBRARIES
from . import options
from .console import screen, status, usage_errors, write
from .options import parse_offsets

_MIB = 2**20


def replay(
    world_size: options.WorldSize = 8,
    rank: Annotated[
        list[int] | None, typer.Option(min=0, help="Each of these; by default all ranks.")
    ] = None,
    layout: options.Layout = "zigzag",
    route: options.Route = "ring",
    kernel: options.Kernel = AUTO,
    seqlen: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each rank; by default 8192.")
    ] = None,
    cu_seqlens: options.CuSeqlens = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    nheads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    nheads_k: Annotated[int, typer.Option(min=1, help="KV heads.")] = 8,
    headdim: Annotated[int, typer.Option(min=1, help="Head dimension.")] = 128,
    dtype: options.Dtype = "bfloat16",
    causal: options.Causal = True,
    heads_k_stride: options.HeadsKStride = None,
    sources_per_launch: options.SourcesPerLaunch = None,
    link: options.LinkName = NONE,
    link_gbps: Annotated[
        float | None, typer.Option(help="A link in numbers: 10⁹ bytes a second, each way.")
    ] = None,
    latency_us: Annotated[
        float | None, typer.Option(help="µs that a post takes at least; each link has its own.")
    ] = None,
    baseline: Annotated[
        bool,
        typer.Option("--baseline", "--existing", help="ring-flash-attn 0.1.8's zigzag as well."),
    ] = False,
    baseline_kernel: Annotated[
        str | None,
        options.named(
            "library",
            lambda: LIBRARIES,
            "The same, but not on fa2: {}.",
            "--baseline-kernel",
            "--existing-kernel",
        ),
    ] = None,
    repeats: options.Rounds = 9,
    device: options.Device = None,
    json_file: options.JsonFile = None,
    svg: Annotated[
        Path | None, typer.Option(help="Write a timeline of the slowest rank to this file.")
    ] = None,
) -> None:
    """Run ranks of a group one at a time on this device, without the others, and time them.

    \b
    rfa replay --world-size 8 --layout zigzag --link nvlink4
    rfa replay --route all_gather --heads-k-stride 2 --cu-seqlens 0,24832,65536
    rfa replay --world-size 32 --rank 0 --rank 31 --link ib400 --svg timeline.svg
    rfa replay --seqlen 16384 --baseline --json replay.json
    """
    from ..bench import replay as run_replay
    from ..bench.machine import find_device, make_results
    from ..draw.svg import draw_timeline

    console = screen()
    with usage_errors():
        for path in (json_file, svg):
            check_output(path)
        emulated = find_link(link, link_gbps, latency_us)
        where = find_device(device, "a replay")
        with status(console, "replaying") as report:
            found = run_replay(
                world_size=world_size,
                ranks=rank,
                layout=layout,
                route=route,
                kernel=kernel,
                seqlen=seqlen,
                cu_seqlens=None if cu_seqlens is None else parse_offsets(cu_seqlens),
                batch=batch,
                nheads=nheads,
                nheads_k=nheads_k,
                headdim=headdim,
                dtype=dtype or "bfloat16",
                causal=bool(causal),
                heads_k_stride=heads_k_stride,
                sources_per_launch=sources_per_launch,
                link=emulated,
                repeats=repeats,
                device=where,
                baseline=baseline_kernel or baseline,
                timeline=svg is not None or json_file is not None,
                report=report,
            )
    for line in explain(found):
        console.print(line, markup=False)
    for table in (*map(_table, found.designs), _costs(found)):
        console.print(table)
    for line in notes(found):
        console.print(line, markup=False)
    details = {"replays": {found.ours.name: found.to_dict()}}
    rows = tuple(replay_rows(found))
    write(console, make_results(rows, where, {"repeats": repeats}, details=details), json_file)
    if svg is not None:
        write(console, draw_timeline(found), svg)


def explain(replay: Replay) -> Iterator[str]:
    """What was run, what was emulated, and what was not there."""
    placement = replay.placement
    yield (
        f"A replay of {placement}: ranks of {placement.world_size}, one at a time, on one device "
        f"({replay.device}). No other rank is there."
    )
    yield f"Each rank: {shard_sizes(placement.describe(replay.workload))}."
    if placement.sources_per_launch is not None and placement.world_size > 1:
        sources = placement.sources_per_launch
        others = "one other rank" if sources == 1 else f"up to {sources} other ranks"
        yield f"A launch takes the keys of {others}."
    yield "Kernels, merges, buffers and streams are a real rank's; what it receives is random data."
    yield communication(replay.link)
    yield f"Medians of {replay.repeats} interleaved rounds, in ms."


def shard_sizes(workload: Mapping[str, Any]) -> str:
    """A rank's part of a workload, as rows of results have it."""
    w, lengths = workload, workload.get("lengths", ())
    documents = f" of {len(lengths)} documents ({sum(lengths)} tokens)" * (len(lengths) > 1)
    return (
        f"{w['seqlen']} tokens{documents}, batch {w['batch']}, heads {w['nheads']}/{w['nheads_k']}"
        f", headdim {w['headdim']}, {w['dtype']}, {'causal' if w['causal'] else 'full'}"
    )


def communication(link: Link | None) -> str:
    """What a replay has in place of the other ranks' messages."""
    if link is None:
        return "Communication is removed: messages cost nothing. --link emulates one."
    return (
        f"Communication is emulated, {link}: a copy within the device, and waiting. "
        "Other ranks never come late."
    )


def _table(design: Design) -> Table:
    """A row for each rank, the slowest, and what one device takes."""
    columns = ("TFLOP/s", "eff. %", "full %", "exposed", "MiB")
    table = make_table([""], ["forward ms", *columns, "fwd+bwd ms", *columns], design.name)

    def cells(passes: str, pairs: int, measured: Measured, more: Sequence[str]) -> list[str]:
        rate = design.rate(pairs, measured, passes)
        peak = None if measured.peak is None else measured.peak[passes] / _MIB
        return [f"{measured.times[passes]:.3f}", f"{rate:.4g}", *more, cell(peak, ".0f")]

    rows = [(f"rank {each.rank}", each, each) for each in design.ranks]
    if len(rows) > 1:
        rows.append(("slowest", design.slowest(FORWARD), design.slowest(BOTH)))
    for name, *ranks in rows:
        row = []
        for each, passes in zip(ranks, (FORWARD, BOTH), strict=True):
            values = design.values(each, passes)
            shares = (values["efficiency_percent"], values["full_rate_efficiency_percent"])
            more = [*(f"{share:.1f}" for share in shares), cell(values.get("exposed_ms"))]
            row += cells(passes, each.pairs, each.measured, more)
        table.add_row(name, *row, style="bold" if name == "slowest" else None)
    for name, pairs, measured in (
        ("base", design.base_pairs, design.base),
        ("no mask", design.full_pairs, design.full),
    ):
        both = (cells(passes, pairs, measured, [""] * 3) for passes in (FORWARD, BOTH))
        table.add_row(name, *chain.from_iterable(both))
    first, second = (f"{design.theoretic(passes):.3f}" for passes in (FORWARD, BOTH))
    table.add_row(f"{design.world_size} × base", first, *[""] * 5, second)
    return table


def _costs(replay: Replay) -> Table:
    """What the slowest rank sends and holds, by name."""
    result = replay.ours.slowest(BOTH)
    title = f"rank {result.rank}: what it sends and holds (counted)"
    table = make_table([""], ["launches", "posts", "sent MiB", "received MiB"], title)
    table.add_column("held beside inputs, outputs and gradients, MiB")
    for name, cost in zip((FORWARD, BACKWARD), result.costs, strict=True):
        held = "\n".join(f"{size / _MIB:9.2f}  {what}" for what, size in cost.held.items())
        moved = (f"{size / _MIB:.2f}" for size in (cost.sent, cost.received))
        table.add_row(name, str(cost.launches), str(cost.posts), *moved, held or "nothing")
    return table


def notes(replay: Replay) -> Iterator[str]:
    """How to read the columns."""
    yield "base: the same kernel on one rank's own tokens, on one device; no mask: in full."
    yield "eff.: world size × base / measured. full: the same with the base's pairs at the rate of "
    yield "      'no mask'. exposed: ms with the link less ms with communication removed."
    yield "MiB: most memory above inputs, outputs and gradients; n/a on the CPU."
    if replay.device.startswith("cpu"):
        yield ON_CPU
        return
    for design in replay.designs:
        bound = [str(each.rank) for each in design.ranks if each.measured.is_host_bound]
        if bound:
            yield (
                f"{design.name}: the host took longer to queue the work of ranks "
                f"{', '.join(bound)} than the device to do it. It had a lead here; a real rank "
                "that has none waits for its host."
            )
