"""How each public function is called: inputs, shards cut by slicing, and the other arguments.

Shards are cut as `rfa verify` does: not by the library's layouts, but for layout balanced, whose
tokens are proved to be there once.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import Any

import torch
from samples import Results, Sample, make_sample
from torch import Tensor

from ring_flash_attn import llama3_flash_attn_prepare_cu_seqlens
from ring_flash_attn.api import families
from ring_flash_attn.verify.check import proved_tokens
from ring_flash_attn.verify.oracle import cut, cut_names

# name without prefix → (family, form)
FUNCTIONS = {
    name: (named.family, named.form)
    for name, named in families.FUNCTIONS.items()
    if not named.prefix
}
# Documents: (W = 3) equal shards of each; any length; the stream divides.
LENGTHS = {
    "local_documents": (12, 6, 24),
    "documents": (11, 0, 4, 1, 20),
    "gathered_documents": (11, 0, 4, 1, 20),
    "llama3": (11, 1, 20, 7),
    "single_documents": (5, 0, 9),
    "single_documents_qkv": (5, 0, 9),
}


def held(layout: str, total: int, rank: int, world_size: int) -> Tensor:
    """Tokens of a rank, of one sequence."""
    return held_of(layout, None, total, rank, world_size)


def held_of(
    layout: str,
    cu_seqlens: list[int] | None,
    total: int,
    rank: int,
    n: int,
    cu_seqlens_q: list[int] | None = None,
) -> Tensor:
    """Tokens of a rank of `n`, of a batch's sequence or of packed documents.

    Keys of documents with another number of queries need that, too.
    """
    lengths, queries = (
        (total,) if cu is None else tuple(b - a for a, b in pairwise(cu))
        for cu in (cu_seqlens, cu_seqlens_q or cu_seqlens)
    )
    if layout in cut_names():
        return torch.tensor(cut(layout, lengths, rank, n), dtype=torch.int64)
    return torch.tensor(proved_tokens(layout, lengths, queries, n)[rank], dtype=torch.int64)


EACH = "each"  # for alibi_slopes: those of every sequence of a batch, or of every document


def sample_for(name: str, lengths: tuple[int, ...] | None = None, **options: Any) -> Sample:
    """Make global inputs that a function can take: packing ties head counts and dimensions.

    `lengths` of packed documents are `LENGTHS` unless given.
    """
    family, form = FUNCTIONS[name]
    kind = family.signature.name
    lengths = (lengths or LENGTHS[kind]) if kind in LENGTHS else None
    if options.get("alibi_slopes") is EACH:
        rows = 2 if lengths is None else len(lengths)
        options["alibi_slopes"] = torch.linspace(-0.2, 1.1, 4 * rows).view(rows, 4)
    sizes: dict[str, Any] = {"batch": 2, "seqlen_q": 24} if lengths is None else {}
    if form.startswith("qkvpacked"):
        sizes["nheads_k"] = 4
    if form == "func":
        sizes["headdim_v"] = 3
    return make_sample(lengths, seed=3, **sizes, **options)


def packed_inputs(form: str, shard: Sample) -> list[Tensor]:
    """Return q, k, v; or q, kv; or qkv."""
    inputs = [shard.q, shard.k, shard.v]
    if form.startswith("kvpacked"):
        return [shard.q, torch.stack(inputs[1:], dim=-3)]
    return [torch.stack(inputs, dim=-3)] if form.startswith("qkvpacked") else inputs


def shard_of(sample: Sample, tokens: Tensor) -> Sample:
    """The tokens of one rank."""
    tensors = (x.index_select(-3, tokens) for x in (sample.q, sample.k, sample.v, sample.dout))
    return Sample(*tensors, sample.dlse[..., tokens], options=sample.options)


def whole(parts: list[Results], tokens: list[Tensor]) -> Results:
    """Put the ranks' results together; the sinks' gradients add up."""
    order = torch.cat(tokens).argsort()
    results = {}
    for name in parts[0]:
        each = [part[name] for part in parts]
        if name == "dsink":
            results[name] = torch.stack(each).sum(0)
        else:
            dim = -1 if name == "lse" else -3
            results[name] = torch.cat(each, dim).index_select(dim, order)
    return results


def extra_arguments(name: str, sample: Sample, rank: int, n: int) -> dict[str, Any]:
    """Make what a function wants of rank `rank` of `n` besides tensors and common arguments."""
    kind, cu = FUNCTIONS[name][0].signature.name, sample.cu_seqlens_q
    if kind == "anything":
        return {"layout": "zigzag", "route": "query_ring"}
    if cu is None:
        return {}
    cu_seqlens = torch.tensor(cu, dtype=torch.int32)
    longest = int(cu_seqlens.diff().max())
    if kind == "local_documents":
        return {"cu_seqlens": cu_seqlens // n, "max_seqlen": longest // n}
    if kind == "documents":
        return {"cu_seqlens": cu_seqlens, "max_seqlen": longest}
    if kind == "gathered_documents":
        return {"cu_seqlens": cu, "heads_k_stride": 1}
    if kind == "llama3":
        causal = sample.options.get("causal", False)
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")
        values = llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, causal, rank, n)
        extra = {**dict(zip(names, values)), "heads_k_stride": 2}
        slopes = sample.options.get("alibi_slopes")
        if slopes is not None and slopes.dim() == 2:  # those of the documents of this rank
            last = bisect_left(cu, cu[-1] // n * (rank + 1))
            extra["alibi_slopes"] = slopes[last - len(values[0]) + 1 : last]
        return extra
    if kind == "single_documents":
        both = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        return {**both, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return {"cu_seqlens": cu_seqlens, "max_seqlen": longest}
