"""`replay`: what a rank of many costs, found on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .contenders import with_chosen_kernel
from .existing import Block, ByLibrary
from .link import NONE, Link, find_link
from .pace import check_link
from .report import Replay
from .rival import check_rival
from .scenario import make_scenario
from .session import Session
from .workload import Placement, Workload


def replay(
    *,
    world_size: int = 8,
    ranks: Sequence[int] | None = None,
    layout: str = "zigzag",
    route: str = "ring",
    kernel: str = "auto",
    seqlen: int = 8192,
    cu_seqlens: Sequence[int] | None = None,
    batch: int = 1,
    nheads: int = 32,
    nheads_k: int = 8,
    headdim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = True,
    heads_k_stride: int | None = None,
    sources_per_launch: int | None = None,
    link: Link | str | None = None,
    repeats: int = 9,
    device: str | torch.device | None = None,
    existing: bool | str | Block = False,
    timeline: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> Replay:
    """Run ranks of a group, one at a time and without the others, and time them.

    Kernels, merges, buffers and streams are those of the real rank. What it would receive is random
    data, which is there at once (`link=None`) or after as long as a link would take. The base is
    the same kernel on one rank's own tokens on this device; `world_size` times as long is what a
    rank would take if spreading cost nothing.

    Args:
        world_size: number of ranks.
        ranks: those to replay; by default all. The slowest is what counts.
        layout, route, kernel: as in `ring_attention`.
        seqlen: tokens of a rank.
        cu_seqlens: offsets of packed documents in a rank's shard instead; over all ranks each has
            `world_size` times as many tokens.
        batch, nheads, nheads_k, headdim, dtype: of q, k and v.
        causal: queries see no later keys.
        heads_k_stride: KV heads that travel together, for route "all_gather".
        sources_per_launch: ranks whose keys one launch takes, for route "ring"; by default as many
            as in `ring_attention`.
        link: one of `LINKS` by name, or a `Link`; None or "none": communication costs nothing.
        repeats: rounds of the medians.
        device: by default the GPU, if there is one.
        existing: replay the existing library's zigzag design as well: on torch's FlashAttention-2
            (True), on another library by its name, such as "fa4", or on a block of your own.
        timeline: record when each launch and transfer of the slowest rank began and ended.
        report: is told what is being done.

    Raises:
        ValueError: a wrong argument.
        NotImplementedError: the kernel cannot do it; with every reason.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be positive, not {repeats}")
    scenario = make_scenario(
        world_size=world_size,
        ranks=ranks,
        layout=layout,
        route=route,
        kernel=kernel,
        seqlen=seqlen,
        cu_seqlens=cu_seqlens,
        batch=batch,
        nheads=nheads,
        nheads_k=nheads_k,
        headdim=headdim,
        dtype=dtype,
        causal=causal,
        heads_k_stride=heads_k_stride,
        sources_per_launch=sources_per_launch,
        device=device,
    )
    found = link if isinstance(link, Link) else find_link(NONE if link is None else link)
    check_link(found, scenario.device)
    scenario = with_chosen_kernel(scenario)
    block = _block(existing)
    if block is not None:
        check_rival(scenario, block)
    return Session(scenario, found, repeats, report).run(block, timeline)


def _block(existing: bool | str | Block) -> Block | None:
    """What the existing design is to run on, if it is to run."""
    if isinstance(existing, bool):
        return ByLibrary("fa2") if existing else None
    return ByLibrary(existing) if isinstance(existing, str) else existing


def replay_ranks(
    workload: Workload,
    placement: Placement,
    *,
    device: torch.device,
    ranks: Sequence[int] | None = None,
    repeats: int = 9,
    report: Callable[[str], None] = lambda line: None,
) -> Replay:
    """Replay some ranks of a workload; the placement is resolved (`inputs.resolve`)."""
    share = workload.share(placement.world_size)
    scenario = make_scenario(
        world_size=placement.world_size,
        ranks=ranks,
        layout=placement.layout,
        route=placement.route,
        kernel=placement.kernel,
        seqlen=share.seqlen,
        cu_seqlens=share.cu_seqlens,
        batch=workload.batch,
        nheads=workload.nheads,
        nheads_k=workload.nheads_k,
        headdim=workload.headdim,
        dtype=workload.torch_dtype,
        causal=workload.causal,
        heads_k_stride=placement.heads_k_stride,
        sources_per_launch=placement.sources_per_launch,
        device=device,
    )
    return Session(scenario, placement.link, repeats, report).run(None, False)
