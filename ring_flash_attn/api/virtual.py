"""Ring attention in one process: the ranks are virtual, the plans and kernels are the real ones."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from torch import Tensor

from ..engine import checks
from ..engine.checks import CuSeqlens, document_lengths
from ..engine.entry import in_autocast_dtype, run_virtual
from ..engine.prepare import Output
from ..plan.layout import Layout
from .sharding import shard, unshard


def virtual_ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    world_size: int,
    layout: str | Layout,
    route: str,
    cu_seqlens: CuSeqlens | None = None,
    cu_seqlens_k: CuSeqlens | None = None,
    heads_k_stride: int | None = None,
    sources_per_launch: int | None = None,
    ranks_per_node: int | None = None,
    return_attn_probs: bool = False,
    **options: Any,
) -> Output:
    """`ring_attention` on whole tensors: sharded over virtual ranks, computed, put together again.

    What each rank computes, sends and receives is exactly what a real one would; only the wires are
    missing. For tests, for learning, and for work on a single GPU. Differentiable.

    Args:
        q: (batch, seqlen_q, nheads, headdim), or (total_q, nheads, headdim) with cu_seqlens.
        k: (batch, seqlen_k, nheads_k, headdim), or (total_k, nheads_k, headdim).
        v: (batch, seqlen_k, nheads_k, headdim_v), or (total_k, nheads_k, headdim_v).
        world_size: number of virtual ranks.
        layout, route: as in `ring_attention`.
        cu_seqlens: (documents + 1,) of the packed stream.
        cu_seqlens_k: the same for the keys, where it differs.
        heads_k_stride: KV heads that travel together, for routes "all_gather" and "all_to_all".
        sources_per_launch: ranks whose keys one launch takes at most, for route "ring" (nodes for
            "mesh" and "double_ring"); by default as many as in `ring_attention`.
        ranks_per_node: for routes "mesh" and "double_ring"; by default all.
        return_attn_probs: return (out, lse, None).
        options: the other arguments of `ring_attention`, except `group`.
    """
    world_size = checks.check_integer("world_size", world_size, 1)
    packed = cu_seqlens is not None
    if cu_seqlens_k is not None and not packed:
        raise ValueError("cu_seqlens_k is given without cu_seqlens")
    q, k, v = in_autocast_dtype(q, k, v)
    checks.check_tensors(q, k, v, packed)
    lengths_q: tuple[int, ...] = (q.shape[1],)
    lengths_k: tuple[int, ...] = (k.shape[1],)
    if cu_seqlens is not None:
        lengths_k = lengths_q = document_lengths(cu_seqlens, q.device)
        name = "cu_seqlens" if cu_seqlens_k is None else "cu_seqlens_k"
        if cu_seqlens_k is not None:
            lengths_k = document_lengths(cu_seqlens_k, q.device, name)
        checks.check_total(lengths_q, q, "q", "cu_seqlens")
        checks.check_total(lengths_k, k, "k", name)
    offsets_q, offsets_k = (
        [0, *accumulate(lengths)] if packed else None for lengths in (lengths_q, lengths_k)
    )
    shards = []
    for rank in range(world_size):
        parts = [
            shard(
                x,
                layout,
                cu_seqlens=offsets,
                cu_seqlens_q=offsets_q,
                rank=rank,
                world_size=world_size,
            )
            for x, offsets in ((q, offsets_q), (k, offsets_k), (v, offsets_k))
        ]
        shards.append((parts[0], parts[1], parts[2]))
    results = run_virtual(
        layout,
        route,
        shards,
        lengths_q,
        lengths_k,
        packed,
        heads_k_stride,
        sources_per_launch,
        ranks_per_node,
        return_attn_probs=return_attn_probs,
        **options,
    )
    if not return_attn_probs:
        outs = [out for out in results if isinstance(out, Tensor)]
        return unshard(outs, layout, cu_seqlens=offsets_q)
    out = unshard([result[0] for result in results], layout, cu_seqlens=offsets_q)
    lse = unshard([result[1] for result in results], layout, cu_seqlens=offsets_q, dim=-1)
    return out, lse, None
