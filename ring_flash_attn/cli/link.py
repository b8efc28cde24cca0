"""`rfa link`: latency and bandwidth between ranks, and a topology file for --link."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ..bench.links import FORMAT, LEVELS, SUFFIX, VERSION, Topology
from ..bench.results import ON_CPU, check_output, make_table
from . import options
from .console import print_lines, screen, status, usage_errors, write
from .options import check_group, check_world_size, is_first_rank, parse_sizes

if TYPE_CHECKING:
    from ..bench.ranks import Settings
    from ..bench.ranks.links import MeasuredLinks, MeasuredTraffic

_RANKS_ON_CPU = 4
_SIZES = {
    "cuda": (4096, 65_536, 1 << 20, 1 << 24, 1 << 26),
    "cpu": (4096, 65_536, 1 << 20, 1 << 22),
}


def link(
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Ranks; by default as many as GPUs, 4 on the CPU.")
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(help="Bytes of a message: 4096,1048576; by default 4 KiB to 64 MiB, CPU 4."),
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks of a node; by default those of one host.")
    ] = None,
    name: Annotated[str, typer.Option(help="Of the topology, in tables and files.")] = "measured",
    repeats: options.Rounds = 9,
    device: options.Device = None,
    backend: options.Backend = None,
    timeout: options.Timeout = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help=f"Write a topology file (*{SUFFIX}), which --link takes."),
    ] = None,
) -> None:
    """Measure what lies between ranks: all pairs, all at once, several sizes.

    Under torchrun the ranks are those that it started, on any number of hosts; otherwise there are
    new ones, one for each GPU of this machine. A post sends to one rank and receives from one.

    \b
    rfa link
    rfa link --sizes 4096,1048576,67108864 --json ours.json
    torchrun --nnodes 2 --nproc_per_node 8 … -m ring_flash_attn.cli link --json cluster.json
    rfa replay --world-size 16 --link cluster.json
    """
    from ..bench.ranks.links import measure_links
    from ..comm import launch

    with usage_errors():
        check_output(json_file if is_first_rank() else None)
        if json_file is not None and json_file.suffix != SUFFIX:
            raise ValueError(f"{json_file} must end with {SUFFIX}, by which --link knows files")
        settings = find_group(world_size, device, backend, timeout, repeats)
        if gpus_per_node is not None and settings.world_size % gpus_per_node:
            raise ValueError(
                f"gpus_per_node {gpus_per_node} does not divide {settings.world_size} ranks"
            )
        asked = _SIZES[settings.device.type] if sizes is None else parse_sizes(sizes)
    console = screen(quiet=not is_first_rank())
    try:
        with status(console, "measuring links") as report:
            found = measure_links(settings, asked, gpus_per_node, report)
            topology = found.topology(name, settings.used_backend or "")
    except (launch.RanksFailed, ValueError) as failure:
        console.print(f"nothing could be measured: {failure}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    print_lines(console, _explain(found, settings))
    console.print(_table(found))
    print_lines(console, (f"{topology}", *_notes(settings)))
    if is_first_rank():
        write(console, _file(found, settings, topology), json_file)


def find_group(
    world_size: int | None,
    device: str | None,
    backend: str | None,
    timeout: float | None,
    repeats: int,
) -> Settings:
    """torchrun's ranks, or new ones; ValueError for a single one, or wrong options."""
    import torch

    from ..bench.machine import find_device
    from ..bench.ranks import Settings

    where = find_device(device, "a link")
    default = _RANKS_ON_CPU if where.type == "cpu" else torch.cuda.device_count()
    size = check_world_size(world_size, default)
    if size == 1:
        raise ValueError(
            f"a link needs two ranks or more, and there is one: {where.type}; "
            "--world-size 2 --device cpu measures two processes"
        )
    group, seconds = check_group(device, where.type, size, backend, timeout)
    return Settings(size, where, group, repeats=repeats, timeout=seconds)


def _explain(found: MeasuredLinks, settings: Settings) -> Iterator[str]:
    from ..bench.machine import device_name

    size, nodes = settings.world_size, len(found.hosts) // found.ranks_per_node
    yield (
        f"{size} ranks in {nodes} node{'s' * (nodes > 1)} over {settings.used_backend}, "
        f"{device_name(settings.device)}. Medians of {settings.repeats} runs, of the slowest rank."
    )


def _table(found: MeasuredLinks) -> Table:
    """A row for each level, alone and all at once: µs of the smallest, GB/s of each size."""
    first = f"µs, {_size(found.sizes[0])}"
    numbers = [first, *(f"GB/s, {_size(n)}" for n in found.sizes), "fit µs", "fit GB/s"]
    table = make_table(["between ranks", "who sends"], numbers, "each way")

    def add(level: str, who: str, measured: Sequence[MeasuredTraffic], *fitted: str) -> None:
        def middle(values: Iterator[float]) -> float:
            return statistics.median(values)

        delay = middle(each.median(found.sizes[0]) for each in measured)
        rates = (middle(each.rate(n) for each in measured) for n in found.sizes)
        cells = (f"{1e6 * delay:.1f}", *(f"{rate / 1e9:.4g}" for rate in rates), *fitted)
        table.add_row(f"{level} a node", who, *cells)

    for level in LEVELS:
        pairs = [each for each in found.pairs if each.traffic.level == level]
        if not pairs:
            continue
        order = sorted(pairs, key=lambda each: each.rate(found.sizes[-1]))
        for who, each in {"slowest pair": order[0], "fastest pair": order[-1]}.items():
            a, b = sorted(each.traffic.targets)
            add(level, f"{who}: {a}, {b}", [each], "", "")
        if len(pairs) > 2:
            add(level, f"median of {len(pairs)} pairs", pairs, "", "")
        latency, bandwidth = found.together[level].fit()
        fitted = f"{1e6 * latency:.1f}", f"{bandwidth / 1e9:.4g}"
        add(level, "all at once", [found.together[level]], *fitted)
    return table


def _size(n: int) -> str:
    """Bytes in words."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if n >= unit:
            return f"{n / unit:.4g} {name}"
    return f"{n} B"


def _notes(settings: Settings) -> Iterator[str]:
    yield "The topology has what a rank gets while all send at once: latency + bytes / bandwidth,"
    yield "fitted over all sizes. Pairs alone say whether ranks share a link."
    if settings.device.type == "cpu":
        yield ON_CPU
    elif settings.used_backend == "gloo":
        yield "gloo takes what GPUs send through the host: this says little about NCCL."


def _file(found: MeasuredLinks, settings: Settings, topology: Topology) -> dict[str, Any]:
    """What --link reads, and how it was found."""
    from ..bench.machine import command, commit, machine, versions

    return {
        "format": FORMAT,
        "version": VERSION,
        "topology": asdict(topology),
        "measured": {
            "backend": settings.used_backend,
            "repeats": settings.repeats,
            **found.to_dict(),
        },
        "command": command(),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(settings.device),
        "versions": versions(),
        "commit": commit(),
    }
