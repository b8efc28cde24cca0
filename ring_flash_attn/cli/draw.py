"""`rfa draw`: who holds which tokens, and who computes what at which step, as text or SVG."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..bench.results import check_output
from ..draw.schedule import Schedule, make_schedule
from ..plan import routes as _routes  # registers them
from ..plan.build import route_names
from ..plan.layout import get_layout, layout_names
from ..plan.problem import Problem
from ..plan.tiles import Mask
from .groups import check_lengths
from .measuring import JsonFile, write_json

del _routes


def draw(
    layouts: Annotated[
        list[str], typer.Argument(metavar="LAYOUT...", help=f"One of {', '.join(layout_names())}.")
    ],
    route: Annotated[str, typer.Option(help=f"One of {', '.join(route_names())}.")] = "ring",
    world_size: Annotated[int, typer.Option(min=1, help="Number of ranks.")] = 4,
    seqlen: Annotated[
        int | None, typer.Option(min=1, help="Tokens, over all ranks; by default 16.")
    ] = None,
    cu_seqlens: Annotated[
        str | None, typer.Option(help="Packed documents instead, such as 0,5,16.")
    ] = None,
    causal: Annotated[bool, typer.Option(help="Queries see no later keys.")] = True,
    window: Annotated[
        str, typer.Option(help="Keys that a query sees to its left and right; -1: all.")
    ] = "-1,-1",
    backward: Annotated[bool, typer.Option("--backward", help="The backward pass.")] = False,
    nheads_k: Annotated[int, typer.Option(min=1, help="KV heads.")] = 1,
    heads_k_stride: Annotated[
        int | None, typer.Option(min=1, help="KV heads that travel together (all_gather).")
    ] = None,
    sources_per_launch: Annotated[
        int, typer.Option(min=1, help="Ranks whose keys one launch takes (ring; usually 4).")
    ] = 1,
    svg: Annotated[Path | None, typer.Option(help="Write a picture to this file.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Draw who holds which tokens, and who computes what at which step.

    \b
    rfa draw zigzag
    rfa draw contiguous zigzag stripe --world-size 8 --seqlen 64 --svg schedules.svg
    rfa draw stripe --route all_gather --cu-seqlens 0,5,16 --backward
    """
    from ..draw.svg import draw_svg
    from ..draw.terminal import render

    try:
        for path in (svg, json_file):
            check_output(path)
        if sources_per_launch > 1 and route != "ring":
            raise ValueError(f"--sources-per-launch {sources_per_launch}: not with route {route!r}")
        if heads_k_stride is not None and route != "all_gather":
            raise ValueError(f"--heads-k-stride {heads_k_stride}: not with route {route!r}")
        if nheads_k % (heads_k_stride or nheads_k):
            raise ValueError(f"--heads-k-stride {heads_k_stride} must divide --nheads-k {nheads_k}")
        check_lengths(seqlen, cu_seqlens)
        lengths = _lengths(16 if seqlen is None else seqlen, cu_seqlens)
        mask = _mask(causal, window)
        schedules = []
        for name in layouts:
            problem = Problem(
                get_layout(name),
                lengths,
                lengths,
                world_size,
                mask,
                nheads_k,
                heads_k_stride or nheads_k,
                sources_per_launch,
            )
            schedules.append(make_schedule(route, problem, backward))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    console = Console(highlight=False)
    write_json(console, [_plain(each) for each in schedules], json_file)
    if svg:
        svg.write_text(draw_svg(schedules), encoding="utf-8")
        typer.echo(f"wrote {svg}")
        return
    for schedule in schedules:
        console.print(render(schedule))


def _plain(schedule: Schedule) -> dict[str, Any]:
    problem = schedule.problem
    return {
        "layout": problem.layout.name,
        "route": schedule.route,
        "world_size": problem.world_size,
        "lengths": problem.lengths_q,
        "backward": schedule.backward,
        "steps": [[asdict(turn) for turn in step] for step in schedule.turns],
    }


def _numbers(text: str, what: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{what} must be whole numbers and commas, not {text!r}") from None


def _lengths(seqlen: int, cu_seqlens: str | None) -> tuple[int, ...]:
    if cu_seqlens is None:
        return (seqlen,)
    offsets = _numbers(cu_seqlens, "--cu-seqlens")
    lengths = tuple(b - a for a, b in pairwise(offsets))
    if offsets[0] != 0 or not lengths or min(lengths) < 0 or not sum(lengths):
        raise ValueError(f"--cu-seqlens {cu_seqlens} must start at 0 and go up")
    return lengths


def _mask(causal: bool, window: str) -> Mask:
    sides = _numbers(window, "--window")
    if len(sides) != 2:
        raise ValueError(f"--window must be two numbers, not {window!r}")
    if min(sides) < -1:
        raise ValueError(f"--window {window}: sides are -1 (all keys) or more")
    return Mask.of(causal, (sides[0], sides[1]))
