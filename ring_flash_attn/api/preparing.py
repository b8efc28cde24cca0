"""prepare: plans of a pack ahead of the step that needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import comm
from ..engine import checks
from ..engine.checks import CuSeqlens, document_lengths
from ..engine.entry import make_problem
from ..engine.prepare import Options, planned
from ..plan.build import BY_NODES, check_route
from ..plan.layout import Layout
from .sharding import which_rank

if TYPE_CHECKING:
    from ..comm import Group


def prepare(
    cu_seqlens: CuSeqlens,
    *,
    layout: str | Layout,
    route: str,
    nheads_k: int,
    cu_seqlens_k: CuSeqlens | None = None,
    heads_k_stride: int | None = None,
    sources_per_launch: int | None = None,
    ranks_per_node: int | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    rank: int | None = None,
    world_size: int | None = None,
    group: Group | None = None,
) -> None:
    """Plan a pack before the step that has it, so that `ring_attention` finds the plans ready.

    Call it in the process that trains, from any thread: the one that loads data, say. It sends
    nothing, and ranks need not call it alike. A call that comes while its plans are being made
    waits for them. Plans of the newest packs are kept, 64 at most.

    Args:
        cu_seqlens: (documents + 1,) of the whole stream, over all ranks; a tensor or a sequence.
        layout, route, cu_seqlens_k, causal, window_size: as in the calls of `ring_attention`.
        heads_k_stride, sources_per_launch, ranks_per_node: likewise; no other arguments change
            plans.
        nheads_k: KV heads of k and v.
        rank, world_size: whose plans; by default this process's in `group`.
        group: process group; the default one if None.
    """
    check_route(route)
    if route in BY_NODES and rank is None and world_size is None:
        rank, world_size, ranks_per_node = comm.rank_and_node(group, ranks_per_node)
    else:
        rank, world_size = which_rank(rank, world_size, group)
    opts = Options(causal=causal, window_size=window_size)
    lengths_q = lengths_k = document_lengths(cu_seqlens, fresh=True)
    if cu_seqlens_k is not None:
        lengths_k = document_lengths(cu_seqlens_k, name="cu_seqlens_k", fresh=True)
    nheads_k = checks.check_integer("nheads_k", nheads_k, 1)
    heads = nheads_k, heads_k_stride, sources_per_launch, ranks_per_node
    problem = make_problem(layout, route, lengths_q, lengths_k, world_size, opts, *heads)
    planned(route, problem, rank)
