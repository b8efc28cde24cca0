"""`rfa draw`: who holds which tokens, and who computes what at which step, as text or SVG."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..bench.documents import pack_of
from ..bench.results import check_output
from ..bench.workload import Workload
from ..draw.schedule import Schedule
from ..plan.build import BY_HEADS, BY_NODES, BY_SOURCES
from ..plan.layout import get_layout, layout_names
from ..plan.problem import Problem
from . import options as o
from .console import usage_errors, write
from .options import parse_offsets, parse_window


def draw(
    layouts: Annotated[
        list[str],
        typer.Argument(
            parser=o.parse_layout,
            metavar="LAYOUT...",
            help=f"One of {', '.join(layout_names())}, 'Balanced(ranks_per_node=8)'.",
        ),
    ],
    route: o.Route = "ring",
    world_size: o.WorldSize = 4,
    seqlen: Annotated[
        int | None, typer.Option(min=1, help="Tokens, over all ranks; by default 16.")
    ] = None,
    cu_seqlens: o.CuSeqlens = None,
    documents: o.Documents = None,
    seed: o.Seed = None,
    document_cap: o.DocumentCap = None,
    causal: Annotated[
        bool,
        typer.Option("--causal/--full", " /--no-causal", help="Queries see no later keys, or all."),
    ] = True,
    window: o.Window = None,
    backward: Annotated[bool, typer.Option("--backward", help="The backward pass.")] = False,
    nheads_k: Annotated[int, typer.Option(min=1, help="KV heads.")] = 1,
    heads_k_stride: o.HeadsKStride = None,
    sources_per_launch: o.SourcesPerLaunch = 1,
    ranks_per_node: o.RanksPerNode = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture to this file.")] = None,
    json_file: o.JsonFile = None,
) -> None:
    """Draw who holds which tokens, and who computes what at which step.

    \b
    rfa draw zigzag
    rfa draw contiguous zigzag stripe --world-size 8 --seqlen 64 --svg schedules.svg
    rfa draw stripe --route all_gather --cu-seqlens 0,5,16 --backward
    rfa draw zigzag flat_contiguous --documents magi --seed 43 --seqlen 65536
    """
    from ..draw.svg import draw_svg
    from ..draw.terminal import render

    with usage_errors():
        for path in (svg, json_file):
            check_output(path)
        sources = sources_per_launch or 1
        if ranks_per_node is not None and (route not in BY_NODES or world_size % ranks_per_node):
            raise ValueError(
                f"--ranks-per-node {ranks_per_node}: goes with {' and '.join(BY_NODES)}, and "
                f"divides --world-size {world_size}"
            )
        if sources > 1 and route not in BY_SOURCES:
            raise ValueError(f"--sources-per-launch {sources}: not with route {route!r}")
        if heads_k_stride is not None and route not in BY_HEADS:
            raise ValueError(f"--heads-k-stride {heads_k_stride}: not with route {route!r}")
        if nheads_k % (heads_k_stride or nheads_k):
            raise ValueError(f"--heads-k-stride {heads_k_stride} must divide --nheads-k {nheads_k}")
        if seqlen is not None and cu_seqlens is not None:
            message = f"--seqlen {seqlen} and --cu-seqlens {cu_seqlens}: give one of them"
            raise ValueError(message)
        tokens = 16 if seqlen is None else seqlen
        offsets = None if cu_seqlens is None else parse_offsets(cu_seqlens)
        workload = Workload(
            batch=1,
            seqlen=tokens,
            nheads=nheads_k,
            nheads_k=nheads_k,
            causal=causal,
            window=(-1, -1) if window is None else parse_window(window),
            **pack_of(tokens, offsets, documents, seed, document_cap),
        )
        lengths, stride = workload.lengths, heads_k_stride or nheads_k
        heads = (nheads_k, stride, sources, ranks_per_node)
        rest = (lengths, lengths, world_size, workload.mask, *heads)
        schedules = [
            Schedule(route, Problem(get_layout(name), *rest), backward) for name in layouts
        ]
        plain = [
            {
                "layout": each.problem.layout.name,
                "route": route,
                "world_size": world_size,
                "lengths": lengths,
                "backward": backward,
                "steps": [[asdict(turn) for turn in step] for step in each.turns],
            }
            for each in schedules  # makes the plans, which may refuse it
        ]
    console = Console(highlight=False)
    write(console, plain, json_file)
    if svg is not None:
        write(console, draw_svg(schedules), svg)
        return
    for schedule in schedules:
        console.print(render(schedule))
