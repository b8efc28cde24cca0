"""`rfa replay`: what a rank of many GPUs costs, found on one device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ..bench.link import NONE, find_link
from ..bench.replays.results import Design, Measured, Replay, replay_rows
from ..bench.results import ON_CPU, cell, check_output, make_table
from ..bench.workload import BACKWARD, BOTH, FORWARD
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
        _check_link(link or NONE, link_gbps, latency_us)
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
                link=find_link(link or NONE, link_gbps, latency_us),
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


def _check_link(link: str, gbps: float | None, latency_us: float | None) -> None:
    """ValueError for numbers that are none of a link, or a name and numbers."""
    if gbps is not None and not 0 < gbps < math.inf:
        raise ValueError(f"--link-gbps must be positive, not {gbps:g}")
    if latency_us is not None and not 0 <= latency_us < math.inf:
        raise ValueError(f"--latency-us must not be negative, but is {latency_us:g}")
    if gbps is not None and link != NONE:
        raise ValueError(f"--link {link} and --link-gbps {gbps:g}: give one of them")
    if latency_us is not None and gbps is None and link == NONE:
        raise ValueError(f"--latency-us {latency_us:g} needs --link or --link-gbps")


def explain(replay: Replay) -> Iterator[str]:
    """What was run, what was emulated, and what was not there."""
    workload, placement = replay.workload, replay.placement
    yield (
        f"A replay of {placement}: ranks of {placement.world_size}, one at a time, on one device "
        f"({replay.device}). No other rank is there."
    )
    tokens = f"{workload.seqlen // placement.world_size} tokens"
    if workload.packed:
        tokens += f" of {len(workload.lengths)} documents ({workload.seqlen} tokens)"
    yield (
        f"Each rank: {tokens}, batch {workload.batch}, heads {workload.nheads}/"
        f"{workload.nheads_k}, headdim {workload.headdim}, {workload.dtype}, "
        f"{'causal' if workload.causal else 'full'}."
    )
    if placement.sources_per_launch is not None and placement.world_size > 1:
        sources = placement.sources_per_launch
        others = "one other rank" if sources == 1 else f"up to {sources} other ranks"
        yield f"A launch takes the keys of {others}."
    yield "Kernels, merges, buffers and streams are a real rank's; what it receives is random data."
    if replay.link is None:
        yield "Communication is removed: messages cost nothing."
    else:
        yield (
            f"Communication is emulated, {replay.link}: a copy within the device, and waiting. "
            "Other ranks never come late."
        )
    yield f"Medians of {replay.repeats} interleaved rounds, in ms."


def _table(design: Design) -> Table:
    """A row for each rank, the slowest, and what one device takes."""
    columns = ("TFLOP/s", "eff. %", "full %", "exposed", "MiB")
    table = make_table([""], ["forward ms", *columns, "fwd+bwd ms", *columns], design.name)
    rows = [(f"rank {each.rank}", each, each) for each in design.ranks]
    if len(design.ranks) > 1:
        rows.append(("slowest", design.slowest(both=False), design.slowest(both=True)))
    for name, *ranks in rows:
        cells = []
        for each, passes in zip(ranks, (FORWARD, BOTH), strict=True):
            shares = (design.efficiency(each), design.full_rate_efficiency(each))
            exposed = None if each.measured.exposed is None else each.measured.exposed[passes]
            more = [*(f"{share[passes]:.1f}" for share in shares), cell(exposed)]
            cells += _cells(design, each.pairs, each.measured, passes, more)
        table.add_row(name, *cells, style="bold" if name == "slowest" else None)
    for name, pairs, measured in (
        ("base", design.base_pairs, design.base),
        ("no mask", design.full_pairs, design.full),
    ):
        both = (_cells(design, pairs, measured, passes, [""] * 3) for passes in (FORWARD, BOTH))
        table.add_row(name, *chain.from_iterable(both))
    times = f"{design.theoretic.forward:.3f}", *[""] * 5, f"{design.theoretic.both:.3f}"
    table.add_row(f"{design.world_size} × base", *times)
    return table


def _cells(
    design: Design, pairs: int, measured: Measured, passes: str, more: list[str]
) -> list[str]:
    """Time, rate, more, and memory."""
    time, rate = measured.times[passes], design.rate(pairs, measured.times)[passes]
    peak = None if measured.peak is None else measured.peak[passes] / _MIB
    return [f"{time:.3f}", f"{rate:.4g}", *more, cell(peak, ".0f")]


def _costs(replay: Replay) -> Table:
    """What the slowest rank sends and holds, by name; computed, not measured."""
    result = replay.ours.slowest(both=True)
    title = f"rank {result.rank}: what it sends and holds (computed)"
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
