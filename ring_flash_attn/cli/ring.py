"""`rfa ring`: distributed functions beside one device, on real ranks or by replay."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ..bench.documents import pack_of
from ..bench.links import find_link
from ..bench.results import (
    HOST_WAITS,
    ON_CPU,
    Limits,
    Row,
    cell,
    check_output,
    host_cell,
    make_table,
)
from ..bench.workload import FORWARD, Placement, Workload, rank_tokens
from ..kernels.base import AUTO
from . import options
from .console import FAILED, print_versus, screen, status, usage_errors, write
from .options import (
    check_group,
    check_no_group,
    check_world_size,
    compared,
    find_limits,
    find_versus,
    is_first_rank,
    parse_offsets,
)
from .replay import communication, shard_sizes

if TYPE_CHECKING:
    from ..bench.ranks import Rows, Settings, Target

_RANKS_ON_ONE_GPU, _RANKS_ON_CPU = 8, 4
_SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"seqlen": 8192, "nheads": 32, "nheads_k": 8, "headdim": 128, "dtype": "bfloat16"},
    "cpu": {"seqlen": 256, "nheads": 4, "nheads_k": 2, "headdim": 32, "dtype": "float32"},
}

_COLUMNS = ("theoretic iter/s", "iter/s", "ms", "host ms", "eff. %", "GB")
_LABELS = {
    "function": lambda row: str(row.placement["function"]),
    "layout × route × kernel": lambda row: " × ".join(
        (row.placement["layout"], row.placement["route"], row.implementation)
    ),
}

Names = Annotated[
    list[str] | None,
    typer.Argument(
        help="Functions: names, patterns such as 'stripe_*', or parts of names; by default one for "
        "each layout and route."
    ),
]


def ring(
    names: Names = None,
    world_size: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks; by default as many as GPUs, 8 for one GPU, 4 on the CPU."),
    ] = None,
    layout: options.Layouts = None,
    route: options.Routes = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences, or packed documents.")] = 1,
    seqlen: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of each rank; by default those of --cu-seqlens, or 8192, on the CPU 256.",
        ),
    ] = None,
    cu_seqlens: options.CuSeqlens = None,
    documents: options.Documents = None,
    seed: options.Seed = None,
    document_cap: options.DocumentCap = None,
    nheads: Annotated[
        int | None, typer.Option(min=1, help="Query heads; 32, on the CPU 4.")
    ] = None,
    nheads_k: Annotated[int | None, typer.Option(min=1, help="KV heads; 8, on the CPU 2.")] = None,
    headdim: Annotated[
        int | None, typer.Option(min=1, help="Head dimension; 128, on the CPU 32.")
    ] = None,
    dtype: options.Dtype = None,
    causal: options.Causal = True,
    heads_k_stride: options.HeadsKStride = None,
    kernel: options.Kernels = None,
    versus: options.Versus = None,
    gate: options.Gate = False,
    min_speed: options.MinSpeed = None,
    max_memory: options.MaxMemory = None,
    repeats: options.Rounds = 9,
    no_grad: options.NoGrad = False,
    device: options.Device = None,
    backend: options.Backend = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="Replay the ranks on one device, even if ranks could.")
    ] = False,
    link: options.LinkName = None,
    link_gbps: options.LinkGbps = None,
    latency_us: options.LatencyUs = None,
    network_gbps: options.NetworkGbps = None,
    network_latency_us: options.NetworkLatencyUs = None,
    gpus_per_node: options.GpusPerNode = None,
    timeout: options.Timeout = None,
    json_file: options.JsonFile = None,
) -> None:
    """Time distributed functions, and compare them with one device.

    Under torchrun the ranks are those that it started. Otherwise there are new ones: on GPUs if
    there are as many, else on the CPU. With fewer GPUs than ranks, unless --backend says that they
    share GPUs, or with --link, one device replays three ranks: the first, the last and the one with
    most pairs. Several kernels are compared with one of them; --gate makes that an exit code.

    \b
    rfa ring --world-size 8
    rfa ring zigzag_ring_flash_attn_func 'stripe_*' --seqlen 16384 --no-grad
    rfa ring --world-size 8 --link nvlink4 --json ring.json
    rfa ring --world-size 16 --link h100-ib400
    rfa ring llama3_flash_attn_varlen_func --world-size 8 --cu-seqlens 0,3104,65536
    rfa ring 'llama3_*' 'stripe_*' --world-size 8 --link nvlink4 --documents magi --seed 42
    rfa ring --kernel triton --kernel native --gate --min-speed 0.6 --max-memory 1.2
    torchrun --nproc_per_node 8 -m ring_flash_attn.cli ring --repeats 20
    """
    from ..bench.machine import make_results
    from ..bench.ranks import choose_targets, time_targets
    from ..comm import launch

    kernels, baseline = find_versus(kernel or [AUTO], versus)
    sizes = {"seqlen": seqlen, "nheads": nheads, "nheads_k": nheads_k, "headdim": headdim}
    numbers = {
        "gbps": link_gbps,
        "latency_us": latency_us,
        "network_gbps": network_gbps,
        "network_latency_us": network_latency_us,
        "gpus_per_node": gpus_per_node,
    }
    with usage_errors():
        check_output(json_file if is_first_rank() else None)
        settings = find_settings(
            world_size, device, backend, replay, link, timeout, repeats, not no_grad, **numbers
        )
        limits = find_limits(gate, min_speed, max_memory, baseline, settings.device)
        usual = _SIZES[settings.device.type]["seqlen"]
        pack = pack_of(
            settings.world_size * (usual if seqlen is None else seqlen),
            None if cu_seqlens is None else parse_offsets(cu_seqlens),
            documents,
            seed,
            document_cap,
        )
        offsets = pack.get("cu_seqlens")
        targets = choose_targets(
            names or (),
            _workload(settings, offsets, batch=batch, causal=bool(causal), dtype=dtype, **sizes),
            Placement(settings.world_size, heads_k_stride=heads_k_stride, link=settings.link),
            settings.device,
            **pack,
            layouts=layout or (),
            routes=route or (),
            kernels=kernels,
            versus=baseline,
            grad=settings.grad or settings.is_replay,
        )
        if limits is not None and all(each.name == each.baseline for each in targets):
            raise ValueError(f"--versus {baseline}: every --kernel is the same one here")
    console = screen(quiet=not is_first_rank())
    try:
        with status(console, "replaying" if settings.is_replay else "timing") as report:
            rows, replays = time_targets(targets, settings, report)
    except launch.RanksFailed as failure:
        console.print(f"nothing could be timed: {failure}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    passed = _print_rows(console, rows, settings, targets, baseline, limits)
    if is_first_rank():
        details = {"replays": {name: each.to_dict() for name, each in replays.items()}}
        how = {"repeats": repeats, **compared(baseline, limits)}
        results = make_results(
            list(rows.values()), settings.device, how, details=details if replays else {}
        )
        write(console, results, json_file)
    failed = all(row.failed for row in rows.values())
    raise typer.Exit(int(failed or not passed))


def find_settings(
    world_size: int | None = None,
    device: str | None = None,
    backend: str | None = None,
    replay: bool = False,
    link: str | None = None,
    timeout: float | None = None,
    repeats: int = 9,
    grad: bool = True,
    **numbers: Any,
) -> Settings:
    """torchrun's ranks, new ones, or a replay; ValueError for options that do not go together.

    `numbers` are those of `find_link`.
    """
    import torch

    from ..bench.machine import find_device
    from ..bench.ranks import Settings
    from ..bench.replays.emulated import check_link
    from ..comm import check_mode, launch

    check_mode()
    where = find_device(device, "a ring")
    gpus = torch.cuda.device_count() if where.type == "cuda" else 0
    default = _RANKS_ON_CPU if where.type == "cpu" else gpus if gpus > 1 else _RANKS_ON_ONE_GPU
    size = check_world_size(world_size, default)
    joined = launch.torchrun_rank() is not None
    linked = any(value is not None for value in (link, *numbers.values()))
    too_few = where.type == "cuda" and not joined and gpus < size and backend is None
    if replay or linked or too_few:
        if joined:
            raise ValueError("--replay and --link need one process: start it without torchrun")
        check_no_group("this is a replay on one device", backend, timeout)
        emulated = find_link(link, **numbers)
        check_link(emulated, where)
        return Settings(size, where, None, emulated, repeats, grad)
    group, seconds = check_group(device, where.type, size, backend, timeout)
    return Settings(size, where, group, None, repeats, grad, seconds)


def _workload(settings: Settings, offsets: tuple[int, ...] | None, **sizes: Any) -> Workload:
    """Of functions for batches, over all ranks; --seqlen is that of a rank."""
    world_size = settings.world_size
    if offsets is not None:
        sizes["seqlen"] = rank_tokens(offsets, world_size, sizes["seqlen"])
    changes = {name: value for name, value in sizes.items() if value is not None}
    values = {**_SIZES[settings.device.type], **changes}
    return Workload(**{**values, "seqlen": values["seqlen"] * world_size})


def _print_rows(
    console: Console,
    rows: Rows,
    settings: Settings,
    targets: Sequence[Target],
    versus: str,
    limits: Limits | None,
) -> bool:
    """Print what was run, a table for each passes, what failed, how to read it; the comparison.

    Returns:
        Whether the gate, if there is one, lets everything through.
    """
    for line in _explain(rows, settings):
        console.print(line, markup=False)
    for passes in settings.passes:
        _print_table(console, [row for row in rows.values() if row.passes == passes], passes)
    failures = {name: row.failed for (name, _), row in rows.items() if row.failed is not None}
    for name, why in failures.items():
        console.print(f"{FAILED} {escape(name)}")
        console.print("  " + why.replace("\n", "\n  "), markup=False)
    for line in _notes(rows, settings, bool(versus)):
        console.print(line, markup=False)
    if not versus:
        return True
    groups = [
        (
            rows[base, passes],
            [rows[t.name, passes] for t in targets if t.name != t.baseline == base],
        )
        for passes in settings.passes
        for base in dict.fromkeys(target.baseline for target in targets)
    ]
    return print_versus(console, groups, versus, _LABELS, limits)


def _explain(rows: Rows, settings: Settings) -> Iterator[str]:
    """What was run: ranks, their shards (more lines where functions differ), rounds."""
    from ..bench.machine import device_name
    from ..comm import launch

    size, where = settings.world_size, device_name(settings.device)
    counts = "of each run the slowest rank counts"
    if settings.is_replay:
        counts = "the slowest of them counts"
        yield (
            f"Replays of {size} ranks (the first, the last and the one with most pairs), one at a "
            f"time, on one device ({where}): no other is there, and what they receive is random "
            "data."
        )
        yield communication(settings.link)
    else:
        origin = "of torchrun" if launch.torchrun_rank() else "in new processes"
        yield f"{size} rank{'s' * (size > 1)} {origin} over {settings.used_backend}, {where}."
        if settings.device.type == "cuda" and settings.used_backend == "gloo":
            yield "gloo takes what GPUs send through the host: times say little about NCCL."
    shards: dict[str, list[str]] = {}
    for (name, _), row in rows.items():
        shards.setdefault(shard_sizes(row.workload), []).append(name)
    most = max(shards, key=lambda line: len(shards[line]))
    yield f"Each rank: {most}."
    for line, names in shards.items():
        if line != most:
            yield f"{', '.join(dict.fromkeys(names))}: {line}."
    rounds = f"{settings.repeats} interleaved rounds" if settings.repeats > 1 else "one round"
    yield f"Medians of {rounds}; {counts}."


def _print_table(console: Console, rows: list[Row], passes: str) -> None:
    title = "forward" if passes == FORWARD else "forward and backward"
    table = make_table(_LABELS, _COLUMNS, title)
    best = max((row.values["efficiency_percent"] for row in rows if row.values), default=None)
    for row in rows:
        cells = [FAILED]
        if row.ms is not None:
            size, theoretic = row.placement["world_size"], 1e3 / row.values["theoretic_ms"]
            share = row.values["efficiency_percent"]
            cells = [
                f"{theoretic * size:.1f}/{size} = {theoretic:.1f}",
                f"{row.values['iterations_per_second']:.1f}",
                f"{row.ms:.3f}",
                host_cell(row.values["host_ms"], row.ms),
                f"[bold]{share:.1f}[/]" if share == best else f"{share:.1f}",
                cell(row.peak_bytes, per=1e9),
            ]
        table.add_row(*(label(row) for label in _LABELS.values()), *cells)
    console.print(table)


def _notes(rows: Rows, settings: Settings, several: bool) -> Iterator[str]:
    yield "theoretic: iter/s of the same kernel on one device, with one rank's tokens, / number of"
    yield "           ranks: each meets the keys of all. eff.: theoretic / measured time."
    yield "host ms: until all was queued; of the rank whose host took longest."
    if settings.device.type != "cpu":
        yield HOST_WAITS
    yield "GB: most memory above inputs, outputs and gradients, of the rank that holds most."
    if any("qkvpacked" in name for name, _ in rows):
        yield "qkvpacked functions have as many KV heads as query heads."
    if several and settings.is_replay:
        yield "Kernels were replayed one after the other: clocks may have changed in between."
    if settings.device.type == "cpu":
        yield ON_CPU
        cores, ranks = os.cpu_count() or 1, settings.world_size
        if not settings.is_replay and cores < ranks:
            yield f"{ranks} ranks share this machine's {cores} core{'s' * (cores > 1)}."
