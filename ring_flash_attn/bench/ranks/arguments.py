"""The arguments of one public function: its tensors, cu_seqlens and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ...api.llama3 import llama3_flash_attn_prepare_cu_seqlens
from ..workload import Placement, Workload

_SHOWN = 5  # documents in a message


def packed_leaves(form: str, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """The tensors that a function of this form takes, each a leaf that wants a gradient."""
    leaves = {"q": q, "k": k, "v": v}
    if form.startswith("kv"):
        leaves = {"q": q, "kv": torch.stack([k, v], -3)}
    elif form.startswith("qkv"):
        leaves = {"qkv": torch.stack([q, k, v], -3)}
    return {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}


def own_arguments(
    signature: str, workload: Workload, placement: Placement, rank: int, device: torch.device
) -> dict[str, Any]:
    """What functions with this one of `signatures.py` take besides q, k, v and common options.

    Only `ring_attention` takes the layout and route of the placement.

    Raises:
        ValueError: the function needs documents, or all tokens, that divide by the ranks.
    """
    lengths, lengths_k = workload.lengths, workload.lengths_k

    def cu(of: Sequence[int]) -> Tensor:
        return torch.tensor([0, *accumulate(of)], dtype=torch.int32, device=device)

    if signature in ("batch", "single"):
        return {}
    if signature == "local_documents":
        local = [length // placement.world_size for length in lengths]
        uneven = [str(length) for length in lengths if length % placement.world_size]
        if uneven:
            shown = ", ".join(uneven[:_SHOWN]) + ", …" * (len(uneven) > _SHOWN)
            raise ValueError(
                f"every document of cu_seqlens must divide by {placement.world_size} ranks; "
                f"{len(uneven)} of {len(lengths)} do not: {shown} tokens"
            )
        return {"cu_seqlens": cu(local), "max_seqlen": max(local)}
    if signature in ("documents", "single_documents_qkv"):
        return {"cu_seqlens": cu(lengths), "max_seqlen": max(lengths)}
    if signature == "gathered_documents":
        return {"cu_seqlens": cu(lengths), "heads_k_stride": placement.heads_k_stride}
    if signature == "llama3":
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")
        values = llama3_flash_attn_prepare_cu_seqlens(
            cu(lengths), workload.causal, rank, placement.world_size
        )
        own: dict[str, Any] = dict(zip(names, values, strict=True))
        return {**own, "heads_k_stride": placement.heads_k_stride}
    if signature == "single_documents":
        return {
            "cu_seqlens_q": cu(lengths),
            "cu_seqlens_k": cu(lengths_k),
            "max_seqlen_q": max(lengths),
            "max_seqlen_k": max(lengths_k),
        }
    if signature == "anything":
        point: dict[str, Any] = {"layout": placement.layout, "route": placement.route}
        if placement.heads_k_stride is not None:
            point["heads_k_stride"] = placement.heads_k_stride
        if not workload.packed:
            return {**point, "seqlen": lengths[0], "seqlen_k": lengths_k[0]}
        if lengths_k != lengths:
            point["cu_seqlens_k"] = cu(lengths_k)
        return {**point, "cu_seqlens": cu(lengths)}
    raise ValueError(f"nobody has said yet how to call signatures.{signature}")
