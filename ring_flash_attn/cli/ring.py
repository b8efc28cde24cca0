"""`rfa ring`: distributed functions beside one device, on real ranks or by replay."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..bench.link import LINKS, NONE
from ..bench.results import check_output
from ..kernels.base import AUTO, NATIVE, kernel_names
from ..plan import routes as _routes  # registers them
from ..plan.build import route_names
from ..plan.layout import layout_names
from .measuring import write
from .screen import screen
from .versus import Gate, MaxMemory, MinSpeed, Versus, find_limits, find_versus

del _routes

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
    layout: Annotated[
        list[str] | None, typer.Option(help=f"Only these: {', '.join(layout_names())}.")
    ] = None,
    route: Annotated[
        list[str] | None, typer.Option(help=f"Only these: {', '.join(route_names())}.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences, or packed documents.")] = 1,
    seqlen: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each rank; 8192, on the CPU 256.")
    ] = None,
    cu_seqlens: Annotated[
        str | None,
        typer.Option(help="Of packed functions: offsets in each rank's shard, as 0,3104,8192."),
    ] = None,
    nheads: Annotated[
        int | None, typer.Option(min=1, help="Query heads; 32, on the CPU 4.")
    ] = None,
    nheads_k: Annotated[int | None, typer.Option(min=1, help="KV heads; 8, on the CPU 2.")] = None,
    headdim: Annotated[
        int | None, typer.Option(min=1, help="Head dimension; 128, on the CPU 32.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bf16, fp16, fp32 or fp64; bf16, on the CPU fp32.")
    ] = None,
    causal: Annotated[
        bool, typer.Option("--causal/--full", help="Queries see no later keys, or all.")
    ] = True,
    heads_k_stride: Annotated[
        int | None, typer.Option(min=1, help="KV heads that are gathered together; all.")
    ] = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option(help=f"Each of these: {', '.join((AUTO, NATIVE, *kernel_names()))}."),
    ] = None,
    versus: Versus = None,
    gate: Gate = False,
    min_speed: MinSpeed = None,
    max_memory: MaxMemory = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of the medians.")] = 9,
    no_grad: Annotated[bool, typer.Option("--no-grad", help="Forward only.")] = False,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; by default cuda where there is a GPU.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="gloo or nccl; by default nccl where each rank has a GPU.")
    ] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="Replay the ranks on one device, even if ranks could.")
    ] = False,
    link: Annotated[
        str | None,
        typer.Option(help=f"Of replays, emulated: {', '.join(LINKS)}; {NONE}: costs nothing."),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds that a rank may take to try a function, or for a round; 300."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write everything to this file.")
    ] = None,
) -> None:
    """Time distributed functions, and compare them with one device.

    Under torchrun the ranks are those that it started. Otherwise there are new ones: on GPUs if
    there are as many, else on the CPU. With fewer GPUs than ranks, or with --link, one device
    replays three ranks: the first, the last and the one with most pairs. Several kernels are
    compared with one of them; --gate makes that an exit code.

    \b
    rfa ring --world-size 8
    rfa ring zigzag_ring_flash_attn_func 'stripe_*' --seqlen 16384 --no-grad
    rfa ring --world-size 8 --link nvlink4 --json ring.json
    rfa ring llama3_flash_attn_varlen_func --cu-seqlens 0,3104,8192
    rfa ring --kernel triton --kernel native --gate --min-speed 0.6 --max-memory 1.2
    torchrun --nproc_per_node 8 -m ring_flash_attn.cli ring --repeats 20
    """
    from ..comm import launch
    from .ringing.choices import Asked, choose_targets
    from .ringing.run import run
    from .ringing.tables import print_findings
    from .ringing.way import find_way

    kernels, baseline = find_versus(kernel or [AUTO], versus)
    asked = Asked(
        names=tuple(names or ()),
        layouts=tuple(layout or ()),
        routes=tuple(route or ()),
        batch=batch,
        seqlen=seqlen,
        cu_seqlens=cu_seqlens,
        nheads=nheads,
        nheads_k=nheads_k,
        headdim=headdim,
        dtype=dtype,
        causal=causal,
        heads_k_stride=heads_k_stride,
        kernels=kernels,
        versus=baseline,
    )
    ranks = launch.torchrun_rank()
    speaks = ranks is None or ranks[0] == 0
    try:
        check_output(json_file if speaks else None)
        way = find_way(world_size, device, backend, replay, link, timeout)
        limits = find_limits(gate, min_speed, max_memory, baseline, way.device)
        chosen = choose_targets(asked, way)
        if limits is not None and all(name == base for name, base in chosen.baselines.items()):
            raise ValueError(f"--versus {baseline}: every --kernel is the same one here")
    except (ValueError, NotImplementedError) as error:
        raise typer.BadParameter(str(error)) from None
    console = screen(quiet=not speaks)
    try:
        found = run(chosen, way, repeats, not no_grad, limits, console)
    except launch.RanksFailed as failure:
        console.print(f"nothing could be timed: {failure}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    passed = print_findings(console, found)
    if speaks:
        write(console, found.results(), json_file)
    failed = all(finding.failed for finding in found.findings)
    raise typer.Exit(int(failed or not passed))
