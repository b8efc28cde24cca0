"""The real signatures: one function for each list of arguments; `generate.py` makes the others.

The first two arguments, `layout` and `route`, are what the public name says. In docstrings,
{tensors} stands for the description of q, k and v in the form at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..engine import entry
from ..engine.checks import CuSeqlens
from ..engine.prepare import Options, Output

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_OPTIONS = tuple(field.name for field in fields(Options))

COMMON = """dropout_p: probability that an entry of the softmax is dropped.
softmax_scale: factor on the scores; headdim ** -0.5 if None.
causal: queries see no later keys (positions count from the end of both sequences).
window_size: how many keys a query sees to its left and right, besides its own; -1: all.
alibi_slopes: (nheads,) or (batch, nheads); -slope * |distance| is added to the scores.
deterministic: the same input gives the same bits, gradients too.
return_attn_probs: return (out, lse, None); lse in fp32, natural log, {lse}.
softcap: scores become softcap * tanh(score / softcap); 0 means off.
sink: (nheads,), an attention sink: one more score for each head, without a value.
{group}{kernel}"""


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in _OPTIONS if name in given}


def batch(
    layout: str,
    route: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: ProcessGroup | None = None,
    *,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    kernel: str = "auto",
) -> Output:
    """{summary}

    {note}

    Args:
        {tensors}
        {common}

    Returns:
        out, (batch, seqlen, nheads, headdim_v); see return_attn_probs for more.
    """
    return entry.run_batch(layout, route, q, k, v, group=group, **_options(locals()))


def local_documents(
    layout: str,
    route: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: CuSeqlens,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: ProcessGroup | None = None,
    *,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    kernel: str = "auto",
) -> Output:
    """{summary}

    Every rank holds the same number of tokens of every document. For documents of any length see
    `ring_attention`. {note}

    Args:
        {tensors}
        cu_seqlens: (documents + 1,) of this rank's shard, equal on all ranks.
        max_seqlen: at least the longest document's tokens on this rank.
        {common}

    Returns:
        out, (total, nheads, headdim_v); see return_attn_probs for more.
    """
    return entry.run_local_documents(
        layout,
        route,
        q,
        k,
        v,
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        group=group,
        **_options(locals()),
    )


def documents(
    layout: str,
    route: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: CuSeqlens,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: ProcessGroup | None = None,
    *,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    kernel: str = "auto",
) -> Output:
    """{summary}

    Documents may have any length, and shards may differ in size (see `shard`). {note}

    Args:
        {tensors}
        cu_seqlens: (documents + 1,) of the whole stream, over all ranks.
        max_seqlen: at least the longest document's tokens, over all ranks.
        {common}

    Returns:
        out, (total, nheads, headdim_v); see return_attn_probs for more.
    """
    return entry.run_documents(
        layout,
        route,
        q,
        k,
        v,
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        group=group,
        **_options(locals()),
    )


def gathered_documents(
    layout: str,
    route: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: CuSeqlens,
    heads_k_stride: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: ProcessGroup | None = None,
    *,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    kernel: str = "auto",
) -> Output:
    """{summary}

    Documents may have any length, and shards may differ in size (see `shard`). {note}

    Args:
        {tensors}
        cu_seqlens: (documents + 1,) of the whole stream, over all ranks.
        heads_k_stride: KV heads that are gathered together; divides nheads_k.
        {common}

    Returns:
        out, (total, nheads, headdim_v); see return_attn_probs for more.
    """
    return entry.run_documents(
        layout,
        route,
        q,
        k,
        v,
        cu_seqlens=cu_seqlens,
        heads_k_stride=heads_k_stride,
        group=group,
        **_options(locals()),
    )


def llama3(
    layout: str,
    route: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: ProcessGroup | None = None,
    *,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    kernel: str = "auto",
) -> Output:
    """{summary}

    `llama3_flash_attn_prepare_cu_seqlens` makes the arguments from cu_seqlens_q to max_seqlen_k,
    and local_k_slice; they differ between ranks. {note}

    Args:
        {tensors}
        cu_seqlens_q: (documents + 1,) of this rank's queries.
        cu_seqlens_k: (documents + 1,) of the gathered keys in local_k_slice.
        max_seqlen_q: at least the longest document's queries on this rank.
        max_seqlen_k: at least the longest document's keys in local_k_slice.
        heads_k_stride: KV heads that are gathered together; divides nheads_k.
        local_k_slice: the part of all ranks' keys that this rank's queries need.
        {common}

    Returns:
        out, (total, nheads, headdim_v); see return_attn_probs for more.
    """
    return entry.run_llama3(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        heads_k_stride=heads_k_stride,
        local_k_slice=local_k_slice,
        group=group,
        **_options(locals()),
    )


def single(
    layout: str,
    route: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sink: Tensor | None = None,
    kernel: str = "auto",
) -> Output:
    """{summary}

    {note}

    Args:
        {tensors}
        {common}

    Returns:
        out, (batch, seqlen_q, nheads, headdim_v); see return_attn_probs for more.
    """
    return entry.run_single(q, k, v, **_options(locals()))


def single_documents(
    layout: str,
    route: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    sink: Tensor | None = None,
    kernel: str = "auto",
) -> Output:
    """{summary}

    {note}

    Args:
        {tensors}
        cu_seqlens_q: (documents + 1,) of the queries.
        cu_seqlens_k: (documents + 1,) of the keys.
        max_seqlen_q: at least the longest document's queries.
        max_seqlen_k: at least the longest document's keys.
        block_table: must be None: there are no paged keys and values.
        {common}

    Returns:
        out, (total_q, nheads, headdim_v); see return_attn_probs for more.
    """
    return entry.run_single_documents(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        block_table=block_table,
        **_options(locals()),
    )


def single_documents_qkv(
    layout: str,
    route: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: CuSeqlens,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sink: Tensor | None = None,
    kernel: str = "auto",
) -> Output:
    """{summary}

    {note}

    Args:
        {tensors}
        cu_seqlens: (documents + 1,).
        max_seqlen: at least the longest document's tokens.
        {common}

    Returns:
        out, (total, nheads, headdim_v); see return_attn_probs for more.
    """
    return entry.run_single_documents_qkv(
        q, k, v, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, **_options(locals())
    )


def anything(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: str,
    route: str,
    kernel: str = "auto",
    cu_seqlens: CuSeqlens | None = None,
    cu_seqlens_k: CuSeqlens | None = None,
    seqlen: int | None = None,
    seqlen_k: int | None = None,
    heads_k_stride: int | None = None,
    sources_per_launch: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: ProcessGroup | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
) -> Output:
    """{summary}

    A batch of sequences of one length, or with cu_seqlens packed documents; any length, and shards
    may differ in size (see `shard`). Queries and keys may differ in number: query i of a document
    then has position i + keys - queries. {note}

    Args:
        q: queries of this rank, (batch, seqlen_q, nheads, headdim) or (total_q, nheads, headdim).
        k: keys of this rank, (batch, seqlen_k, nheads_k, headdim) or (total_k, nheads_k, headdim).
        v: values of this rank, like k; its head dimension may differ.
        layout: who holds what: "contiguous", "zigzag" or "stripe" (every document by itself), or
            "flat_contiguous", "flat_zigzag", "flat_stripe" (the whole packed stream).
        route: what travels: "ring", "all_gather" or "query_ring".
        cu_seqlens: (documents + 1,) of the whole stream, over all ranks; a tensor or a sequence.
        cu_seqlens_k: the same for the keys, where it differs.
        seqlen: without cu_seqlens, queries of the whole sequence; by default all shards are equal.
        seqlen_k: the same for the keys.
        heads_k_stride: for route "all_gather", KV heads that travel together; all by default.
        sources_per_launch: for route "ring", ranks whose keys one launch takes at most: fewer and
            larger launches, and as many more buffers. Above 1, keys come straight from their
            owners. By default 4 with up to 8192 tokens a rank and 2 with more; 1 in groups of
            more than 16 ranks.
        {common}

    Returns:
        out, like q with v's head dimension; see return_attn_probs for more.
    """
    common = {
        "group": group,
        "heads_k_stride": heads_k_stride,
        "sources_per_launch": sources_per_launch,
        **_options(locals()),
    }
    if cu_seqlens is None:
        if cu_seqlens_k is not None:
            raise ValueError("cu_seqlens_k is given without cu_seqlens")
        return entry.run_batch(layout, route, q, k, v, seqlen=seqlen, seqlen_k=seqlen_k, **common)
    if seqlen is not None or seqlen_k is not None:
        raise ValueError("seqlen and seqlen_k go with a batch, not with cu_seqlens")
    return entry.run_documents(
        layout, route, q, k, v, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k, **common
    )
