"""`rfa plan`: which layout, route, kernel and parameters a workload should take on a machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ..bench.links import NONE
from ..bench.results import check_output
from ..kernels.base import AUTO
from . import options as o
from .console import print_lines, screen, status, usage_errors, write
from .options import parse_offsets, parse_window

if TYPE_CHECKING:
    from ..simulate.ranking import Ranking

_MIB, _GIB = 2**20, 2**30


def plan(
    world_size: o.WorldSize = 8,
    gpu: Annotated[str, typer.Option(help="H200, H100, H800, A100 or A800.")] = "H200",
    link: o.LinkName = "nvlink4",
    link_gbps: o.LinkGbps = None,
    latency_us: o.LatencyUs = None,
    network_gbps: o.NetworkGbps = None,
    network_latency_us: o.NetworkLatencyUs = None,
    gpus_per_node: o.GpusPerNode = None,
    preset: o.Preset = None,
    seqlen: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each rank; by default 8192.")
    ] = None,
    cu_seqlens: o.CuSeqlens = None,
    documents: o.Documents = None,
    seed: o.Seed = None,
    document_cap: o.DocumentCap = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences.")] = None,
    nheads: Annotated[int | None, typer.Option(min=1, help="Query heads.")] = None,
    nheads_k: Annotated[
        int | None, typer.Option(min=1, help="Of keys; by default as many.")
    ] = None,
    headdim: Annotated[int | None, typer.Option(min=1, help="Head dimension.")] = None,
    causal: o.Causal = None,
    window: o.Window = None,
    dtype: o.Dtype = None,
    memory_gib: Annotated[
        float | None,
        typer.Option(min=0, help="GiB that a rank may hold beside inputs, outputs, gradients."),
    ] = None,
    kernel: o.Kernel = AUTO,
    layout: o.PlacedLayouts = None,
    route: o.Routes = None,
    top: Annotated[int, typer.Option(min=1, help="Rows of the table.")] = 12,
    svg: Annotated[
        Path | None, typer.Option(help="Write a timeline of the best one to this file.")
    ] = None,
    json_file: o.JsonFile = None,
) -> None:
    """Rank layouts, routes, kernels and parameters by what they would take. Nothing is measured.

    \b
    rfa plan --world-size 8 --link nvlink4
    rfa plan --world-size 64 --link h200-ib400 --documents magi --svg best.svg
    rfa plan --gpu A100 --link a100-ib200 --world-size 32 --nheads 40 --nheads-k 40 --memory-gib 2
    rfa plan --preset gpt3 --link nvlink4 --route ring --route all_to_all --json plan.json
    """
    console = screen()
    with usage_errors():
        for path in (svg, json_file):
            check_output(path)
        from ..bench.links import find_link

        own = None if link_gbps is not None and link == "nvlink4" else link
        found = find_link(
            own, link_gbps, latency_us, network_gbps, network_latency_us, gpus_per_node
        )
        if found is None:
            raise ValueError(f"--link {NONE}: a plan needs to know what lies between ranks")
        changes = {
            "batch": batch,
            "nheads": nheads,
            "nheads_k": nheads if nheads_k is None else nheads_k,
            "headdim": headdim,
            "causal": causal,
            "window": None if window is None else parse_window(window),
            "dtype": dtype,
        }
        from ..simulate.planner import plan_for

        with status(console, "planning") as report:
            choice = plan_for(
                world_size=world_size,
                topology=found,
                gpu=gpu,
                preset=preset,
                seqlen=seqlen,
                cu_seqlens=None if cu_seqlens is None else parse_offsets(cu_seqlens),
                documents=documents,
                seed=seed,
                document_cap=document_cap,
                memory_limit=None if memory_gib is None else int(memory_gib * _GIB),
                kernel=None if kernel == AUTO else kernel,
                layouts=layout or (),
                routes=route or (),
                report=report,
                **{name: value for name, value in changes.items() if value is not None},
            )
    console.print(_table(choice, top))
    print_lines(console, _notes(choice))
    write(console, choice.to_dict(), json_file)
    if svg is not None:
        from ..draw.svg import draw_bars

        title = f"{choice.best.placement}, {world_size} ranks"
        note = f"rank {choice.best.slowest} of {choice.machine}; {choice.workload}; a forecast"
        write(console, draw_bars(title, note, choice.best.bars), svg)


def _table(choice: Ranking, top: int) -> Table:
    """The best, and what there is to say about the others."""
    found = Table(title=f"{choice.workload} on {choice.machine}")
    for name in ("layout × route × kernel", "parameters"):
        found.add_column(name)
    for name in ("forward, ms", "backward, ms", "exposed, ms", "memory, MiB"):
        found.add_column(name, justify="right")
    found.add_column("why not")
    for each in (*choice.ranked, *choice.slower)[:top]:
        times = (each.forward, each.backward, each.exposed)
        numbers = [f"{time * 1e3:.2f}" for time in times]
        memory = f"{each.memory / _MIB:.0f}"
        parameters = each.placement.parameters
        text = ", ".join(f"{name} {value}" for name, value in parameters.items())
        found.add_row(str(each.placement), text, *numbers, memory, choice.why(each))
    return found


def _notes(choice: Ranking) -> Iterator[str]:
    """What was priced, what was refused, what nobody has measured, and how to use it."""
    ranks, size = choice.best.ranks, choice.best.placement.world_size
    priced = "all ranks" if len(ranks) == size else f"ranks {', '.join(map(str, sorted(ranks)))}"
    yield f"Priced: {priced} of {size} for the first {len(choice.ranked)}, fewer for the others."
    reasons: dict[str, list[str]] = {}
    for each in choice.refused:
        reasons.setdefault(each.why, []).append(str(each.placement))
    for why, placements in reasons.items():
        more = f" and {len(placements) - 2} more" if len(placements) > 2 else ""
        yield f"Refused: {', '.join(placements[:2])}{more}: {why}"
    for estimate in choice.estimates:
        yield f"Estimate, not measured: {estimate}"
    yield choice.python
