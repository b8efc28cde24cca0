"""`rfa replay`: what a rank of many GPUs costs, found on one device."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from ..bench.link import LINKS, NONE, find_link
from ..bench.results import check_output
from ..kernels.base import AUTO, LIBRARIES, NATIVE, kernel_names
from ..plan import routes as _routes  # registers them
from ..plan.build import route_names
from ..plan.layout import layout_names
from .groups import check_lengths
from .measuring import write
from .screen import screen, status

del _routes


def replay(
    world_size: Annotated[int, typer.Option(min=1, help="Number of ranks.")] = 8,
    rank: Annotated[
        list[int] | None, typer.Option(min=0, help="Each of these; by default all ranks.")
    ] = None,
    layout: Annotated[str, typer.Option(help=f"One of {', '.join(layout_names())}.")] = "zigzag",
    route: Annotated[str, typer.Option(help=f"One of {', '.join(route_names())}.")] = "ring",
    kernel: Annotated[
        str, typer.Option(help=f"One of {', '.join((AUTO, NATIVE, *kernel_names()))}.")
    ] = AUTO,
    seqlen: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each rank; by default 8192.")
    ] = None,
    cu_seqlens: Annotated[
        str | None,
        typer.Option(
            help="Packed documents instead: offsets in each rank's shard, as 0,3104,8192."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    nheads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    nheads_k: Annotated[int, typer.Option(min=1, help="KV heads.")] = 8,
    headdim: Annotated[int, typer.Option(min=1, help="Head dimension.")] = 128,
    dtype: Annotated[str, typer.Option(help="Of q, k and v.")] = "bfloat16",
    causal: Annotated[
        bool, typer.Option("--causal/--full", help="Queries see no later keys, or all.")
    ] = True,
    heads_k_stride: Annotated[
        int | None, typer.Option(min=1, help="KV heads that travel together (all_gather).")
    ] = None,
    sources_per_launch: Annotated[
        int | None, typer.Option(min=1, help="Ranks whose keys one launch takes (ring).")
    ] = None,
    link: Annotated[
        str, typer.Option(help=f"Emulated: {', '.join(LINKS)}; {NONE}: communication is removed.")
    ] = NONE,
    link_gbps: Annotated[
        float | None, typer.Option(help="A link in numbers: 10⁹ bytes a second, each way.")
    ] = None,
    latency_us: Annotated[
        float | None, typer.Option(help="µs that a post takes at least; each link has its own.")
    ] = None,
    existing: Annotated[
        bool, typer.Option("--existing", help="The existing library's zigzag design as well.")
    ] = False,
    existing_kernel: Annotated[
        str | None, typer.Option(help=f"The same, but not on fa2: {', '.join(LIBRARIES)}.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of the medians.")] = 9,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; by default cuda where there is a GPU.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write everything to this file.")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(help="Write a timeline of the slowest rank to this file.")
    ] = None,
) -> None:
    """Run ranks of a group one at a time on this device, without the others, and time them.

    \b
    rfa replay --world-size 8 --layout zigzag --link nvlink4
    rfa replay --route all_gather --heads-k-stride 2 --cu-seqlens 0,3104,8192
    rfa replay --world-size 32 --rank 0 --rank 31 --link ib400 --svg timeline.svg
    rfa replay --seqlen 16384 --existing --json replay.json
    """
    from ..bench import replay as run_replay
    from ..bench.machine import find_device, make_results
    from ..bench.replay_results import replay_rows
    from ..bench.workload import find_dtype
    from ..draw.timeline import draw_timeline
    from .replaying import explain, held_table, notes, tables

    console = screen()
    try:
        for path in (json_file, svg):
            check_output(path)
        check_lengths(seqlen, cu_seqlens)
        _check_link(link, link_gbps, latency_us)
        with status(console, "replaying") as report:
            found = run_replay(
                world_size=world_size,
                ranks=rank,
                layout=layout,
                route=route,
                kernel=kernel,
                seqlen=8192 if seqlen is None else seqlen,
                cu_seqlens=None if cu_seqlens is None else _offsets(cu_seqlens),
                batch=batch,
                nheads=nheads,
                nheads_k=nheads_k,
                headdim=headdim,
                dtype=find_dtype(dtype),
                causal=causal,
                heads_k_stride=heads_k_stride,
                sources_per_launch=sources_per_launch,
                link=find_link(link, link_gbps, latency_us),
                repeats=repeats,
                device=device,
                existing=existing_kernel or existing,
                timeline=svg is not None or json_file is not None,
                report=report,
            )
    except (ValueError, NotImplementedError) as error:
        raise typer.BadParameter(str(error)) from None
    for line in explain(found):
        console.print(line, markup=False)
    for each in (*tables(found), held_table(found)):
        console.print(each)
    for line in notes(found):
        console.print(line, markup=False)
    details = {"replays": {found.ours.name: found.to_dict()}}
    where = find_device(found.scenario["device"])
    settings = {"repeats": repeats}
    results = make_results(tuple(replay_rows(found)), where, settings, details=details)
    write(console, results, json_file)
    if svg is not None:
        svg.write_text(draw_timeline(found), encoding="utf-8")
        console.print(f"wrote {svg}", markup=False, soft_wrap=True)


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


def _offsets(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--cu-seqlens must be whole numbers and commas, not {text!r}") from None
