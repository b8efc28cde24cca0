"""`rfa replay`: what a rank of many GPUs costs, found on one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ..bench.links import NONE, Link, Topology, find_link
from ..bench.replays.results import Design, Measured, PackRates, Replay, pack_rates, replay_rows
from ..bench.results import (
    HOST_WAITS,
    ON_CPU,
    Results,
    cell,
    check_output,
    host_cell,
    make_table,
    save,
)
from ..bench.workload import BACKWARD, BOTH, FORWARD
from ..kernels.base import AUTO, LIBRARIES
from . import options
from .console import Report, print_lines, screen, status, usage_errors, write
from .options import parse_offsets, parse_seeds

if TYPE_CHECKING:
    import torch

_MIB = 2**20
_PASSES = (FORWARD, BACKWARD)  # of packs


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
    documents: options.Documents = None,
    seed: options.Seeds = None,
    document_cap: options.DocumentCap = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    nheads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    nheads_k: Annotated[int, typer.Option(min=1, help="KV heads.")] = 8,
    headdim: Annotated[int, typer.Option(min=1, help="Head dimension.")] = 128,
    dtype: options.Dtype = "bfloat16",
    causal: options.Causal = True,
    heads_k_stride: options.HeadsKStride = None,
    sources_per_launch: options.SourcesPerLaunch = None,
    ranks_per_node: options.RanksPerNode = None,
    link: options.LinkName = NONE,
    link_gbps: options.LinkGbps = None,
    latency_us: options.LatencyUs = None,
    network_gbps: options.NetworkGbps = None,
    network_latency_us: options.NetworkLatencyUs = None,
    gpus_per_node: options.GpusPerNode = None,
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

    Several packs of documents are measured one after the other; what counts of each is its slowest
    rank.

    \b
    rfa replay --world-size 8 --layout zigzag --link nvlink4
    rfa replay --route all_gather --heads-k-stride 2 --cu-seqlens 0,24832,65536
    rfa replay --nheads 64 --link nvlink4 --documents magi --seed 42,43,44,45,46 --json packs.json
    rfa replay --world-size 32 --rank 0 --rank 31 --link h100-ib400 --svg timeline.svg
    rfa replay --seqlen 16384 --baseline --json replay.json
    """
    from ..bench import replay as run_replay
    from ..bench.machine import find_device
    from ..draw.svg import draw_timeline

    console = screen()
    with usage_errors():
        for path in (json_file, svg):
            check_output(path)
        seeds = parse_seeds(seed)
        if svg is not None and len(seeds) > 1:
            raise ValueError(f"--svg {svg}: a timeline is of one pack; give one --seed, not {seed}")
        emulated = find_link(
            link, link_gbps, latency_us, network_gbps, network_latency_us, gpus_per_node
        )
        where = find_device(device, "a replay")

        def run(pack: int | None, report: Report) -> Replay:
            return run_replay(
                world_size=world_size,
                ranks=rank,
                layout=layout,
                route=route,
                kernel=kernel,
                seqlen=seqlen,
                cu_seqlens=None if cu_seqlens is None else parse_offsets(cu_seqlens),
                documents=documents,
                seed=pack,
                document_cap=document_cap,
                batch=batch,
                nheads=nheads,
                nheads_k=nheads_k,
                headdim=headdim,
                dtype=dtype or "bfloat16",
                causal=bool(causal),
                heads_k_stride=heads_k_stride,
                sources_per_launch=sources_per_launch,
                ranks_per_node=ranks_per_node,
                link=emulated,
                repeats=repeats,
                device=where,
                baseline=baseline_kernel or baseline,
                timeline=svg is not None or json_file is not None,
                report=report,
            )

        found: list[Replay] = []
        with status(console, "replaying") as report:
            for each in seeds:
                if found and json_file is not None:  # what there is, should the rest not end
                    save(_results(found, where, repeats), json_file)
                found.append(run(each, _of_pack(each, report)))
    print_lines(console, explain(found))
    if len(found) == 1:
        for table in (*map(_table, found[0].designs), _costs(found[0])):
            console.print(table)
    if documents is not None:
        console.print(_packs(found[0], _rates(found)))
    print_lines(console, notes(found))
    write(console, _results(found, where, repeats), json_file)
    if svg is not None:
        write(console, draw_timeline(found[0]), svg)


def _rates(found: Sequence[Replay]) -> list[PackRates]:
    return [pack_rates(found, each) for each in _PASSES]


def _results(found: Sequence[Replay], device: torch.device, repeats: int) -> Results:
    from ..bench.machine import make_results

    details: dict[str, Any] = {"replays": {each.name: each.to_dict() for each in found}}
    if found[0].workload.drawn is not None:
        details["packs"] = {each.passes: each.to_dict() for each in _rates(found)}
    rows = [row for each in found for row in replay_rows(each)]
    return make_results(rows, device, {"repeats": repeats}, details=details)


def _of_pack(seed: int | None, report: Report) -> Report:
    return report if seed is None else lambda line: report(f"seed {seed}: {line}")


def explain(replays: Sequence[Replay]) -> Iterator[str]:
    """What was run, what was emulated, and what was not there."""
    first = replays[0]
    placement, workload = first.placement, first.placement.describe(first.workload)
    yield (
        f"A replay of {placement}: ranks of {placement.world_size}, one at a time, on one device "
        f"({first.device}). No other rank is there."
    )
    if len(replays) > 1:
        del workload["lengths"]  # each pack has its own
    yield f"Each rank: {shard_sizes(workload)}."
    if (drawn := first.workload.drawn) is not None:
        seeds = [str(each.workload.drawn.seed) for each in replays if each.workload.drawn]
        yield (
            f"Documents were drawn from {drawn.documents}, none longer than "
            f"{drawn.document_cap:g} of all tokens; seed{'s' * (len(seeds) > 1)} "
            f"{', '.join(seeds)}."
        )
    if placement.route == "ring" and placement.world_size > 1:
        sources = placement.sources_per_launch
        others = "one other rank" if sources == 1 else f"up to {sources} other ranks"
        if sources is None:
            others = "as many other ranks as their sizes allow"
        yield f"A launch takes the keys of {others}."
    yield "Kernels, merges, buffers and streams are a real rank's; what it receives is random data."
    yield communication(first.link)
    yield f"Medians of {first.repeats} interleaved rounds, in ms."


def shard_sizes(workload: Mapping[str, Any]) -> str:
    """A rank's part of a workload, as rows of results have it."""
    w, lengths = workload, workload.get("lengths", ())
    documents = f" of {len(lengths)} documents ({sum(lengths)} tokens)" * (len(lengths) > 1)
    return (
        f"{w['seqlen']} tokens{documents}, batch {w['batch']}, heads {w['nheads']}/{w['nheads_k']}"
        f", headdim {w['headdim']}, {w['dtype']}, {'causal' if w['causal'] else 'full'}"
    )


def communication(link: Link | Topology | None) -> str:
    """What a replay has in place of the other ranks' messages."""
    if link is None:
        return "Communication is removed: messages cost nothing. --link emulates one."
    return (
        f"Communication is emulated, {link}: a copy within the device, and waiting. "
        "Other ranks never come late."
    )


def _table(design: Design) -> Table:
    """A row for each rank, the slowest, and what one device takes."""
    columns = ("TFLOP/s", "eff. %", "full %", "exposed", "host", "MiB")
    table = make_table([""], ["forward ms", *columns, "fwd+bwd ms", *columns], design.name)

    def cells(passes: str, pairs: int, measured: Measured, more: Sequence[str]) -> list[str]:
        rate = design.rate(pairs, measured, passes)
        peak = None if measured.peak is None else measured.peak[passes] / _MIB
        host = host_cell(measured.host[passes], measured.times[passes])
        return [f"{measured.times[passes]:.3f}", f"{rate:.4g}", *more, host, cell(peak, ".0f")]

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
    table.add_row(f"{design.world_size} × base", first, *[""] * len(columns), second)
    return table


def _costs(replay: Replay) -> Table:
    """What the slowest rank sends and holds, by name; what a launch and a post cost its host."""
    result = replay.ours.slowest(BOTH)
    title = f"rank {result.rank}: what it sends and holds (counted)"
    numbers = ["launches", "posts", "host µs a launch", "a post", "sent MiB", "received MiB"]
    table = make_table([""], numbers, title)
    table.add_column("held beside inputs, outputs and gradients, MiB")
    for name, cost in zip((FORWARD, BACKWARD), result.costs, strict=True):
        held = "\n".join(f"{size / _MIB:9.2f}  {what}" for what, size in cost.held.items())
        moved = (f"{size / _MIB:.2f}" for size in (cost.sent, cost.received))
        counts = cost.launches, cost.posts
        host = 1e3 * result.measured.host_ms(name)
        shares = (cell(host / count if count else None, ".0f") for count in counts)
        table.add_row(name, *map(str, counts), *shares, *moved, held or "nothing")
    return table


def _packs(replay: Replay, rates: Sequence[PackRates]) -> Table:
    """A row for each pack, all of them, and the worst."""
    replayed, world_size = len(replay.ours.ranks), replay.placement.world_size
    slowest = f"the slowest of {world_size} ranks"
    if replayed < world_size:
        slowest = f"the slowest of {replayed} of {world_size} ranks"
    texts, numbers = ["seed"], ["documents", "longest"]
    for each in rates:
        numbers += [f"{each.passes} ms", "TFLOP/s", "rank"]
    table = make_table(texts, numbers, f"packs: {replay.ours.name}, {slowest}")
    for packs in zip(*(each.packs for each in rates), strict=True):
        cells = [str(packs[0].ndocuments), str(packs[0].longest)]
        for pack in packs:
            cells += [f"{pack.ms:.3f}", f"{pack.tflops:.4g}", str(pack.rank)]
        table.add_row(str(packs[0].seed), *cells)
    total, worst = [], []
    for each in rates:
        total += [f"{each.ms:.3f}", f"{each.tflops:.4g}", ""]
        worst += [f"seed {each.worst.seed}", f"{each.worst.tflops:.4g}", ""]
    table.add_row("all", "", "", *total, style="bold")
    table.add_row("worst", "", "", *worst, style="bold")
    return table


def notes(replays: Sequence[Replay]) -> Iterator[str]:
    """How to read the columns."""
    first = replays[0]
    if len(replays) == 1:
        yield "base: the same kernel on one rank's own tokens, on one device; no mask: in full."
        yield "eff.: world size × base / measured. full: the same with the base's pairs at the"
        yield "      rate of 'no mask'. exposed: ms with the link less ms without communication."
        yield "host: ms until all was queued; a launch, a post: of these, over the number of each."
        yield "MiB: most memory above inputs, outputs and gradients; n/a on the CPU."
    if first.workload.drawn is not None:
        yield "packs: ms of the slowest rank, backward what both passes take beyond forward;"
        yield "       TFLOP/s per GPU: FLOPs of all ranks / (ranks × ms); all: of the sums."
    if first.device.startswith("cpu"):
        yield ON_CPU
        return
    if len(replays) == 1 and any(
        rank.measured.is_host_bound for each in first.designs for rank in each.ranks
    ):
        yield HOST_WAITS
    for each in replays:
        for design in each.designs:
            bound = [str(rank.rank) for rank in design.ranks if rank.measured.is_host_bound]
            if bound:
                yield (
                    f"{design.name if len(replays) == 1 else each.name}: the host took longer to "
                    f"queue the work of ranks {', '.join(bound)} than the device to do it. It had "
                    "a lead here; a real rank that has none waits for its host."
                )
