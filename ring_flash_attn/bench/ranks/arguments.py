"""The arguments that belong to one signature: lengths, cu_seqlens and what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ...api.llama3 import llama3_flash_attn_prepare_cu_seqlens


@dataclass(frozen=True, slots=True)
class Spread:
    """Documents, and how they are spread over the ranks.

    Attributes:
        lengths_q, lengths_k: tokens of the documents over all ranks (of one sequence of a batch).
        packed: packed documents rather than a batch.
        causal: queries see no later keys.
        layout, route: empty on one device.
        heads_k_stride: KV heads that travel together, for functions that have to be told.
    """

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    packed: bool
    causal: bool
    layout: str = ""
    route: str = ""
    heads_k_stride: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """A rank, of how many, and its device."""

    rank: int
    world_size: int
    device: torch.device


def own_arguments(signature: str, spread: Spread, place: Place) -> dict[str, Any]:
    """What a function takes besides q, k, v and the options that all share.

    Args:
        signature: name of the function's list of arguments in `signatures.py`.
        spread: what is computed.
        place: by whom.
    """
    if signature not in _MAKERS:
        raise ValueError(f"nobody has said yet how to call signatures.{signature}")
    return _MAKERS[signature](spread, place)


def _cu_seqlens(lengths: Sequence[int], place: Place) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=place.device)


def _nothing(spread: Spread, place: Place) -> dict[str, Any]:
    return {}


def _local_documents(spread: Spread, place: Place) -> dict[str, Any]:
    local = [length // place.world_size for length in spread.lengths_q]
    return {"cu_seqlens": _cu_seqlens(local, place), "max_seqlen": max(local)}


def _documents(spread: Spread, place: Place) -> dict[str, Any]:
    lengths = spread.lengths_q
    return {"cu_seqlens": _cu_seqlens(lengths, place), "max_seqlen": max(lengths)}


def _gathered_documents(spread: Spread, place: Place) -> dict[str, Any]:
    cu_seqlens = _cu_seqlens(spread.lengths_q, place)
    return {"cu_seqlens": cu_seqlens, "heads_k_stride": spread.heads_k_stride}


def _llama3(spread: Spread, place: Place) -> dict[str, Any]:
    cu_seqlens = _cu_seqlens(spread.lengths_q, place)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")
    values = llama3_flash_attn_prepare_cu_seqlens(
        cu_seqlens, spread.causal, place.rank, place.world_size
    )
    return {**dict(zip(names, values, strict=True)), "heads_k_stride": spread.heads_k_stride}


def _single_documents(spread: Spread, place: Place) -> dict[str, Any]:
    return {
        "cu_seqlens_q": _cu_seqlens(spread.lengths_q, place),
        "cu_seqlens_k": _cu_seqlens(spread.lengths_k, place),
        "max_seqlen_q": max(spread.lengths_q),
        "max_seqlen_k": max(spread.lengths_k),
    }


def _anything(spread: Spread, place: Place) -> dict[str, Any]:
    extra: dict[str, Any] = {"layout": spread.layout, "route": spread.route}
    if spread.heads_k_stride is not None:
        extra["heads_k_stride"] = spread.heads_k_stride
    if not spread.packed:
        return {**extra, "seqlen": spread.lengths_q[0], "seqlen_k": spread.lengths_k[0]}
    extra["cu_seqlens"] = _cu_seqlens(spread.lengths_q, place)
    if spread.lengths_k != spread.lengths_q:
        extra["cu_seqlens_k"] = _cu_seqlens(spread.lengths_k, place)
    return extra


_MAKERS: dict[str, Callable[[Spread, Place], dict[str, Any]]] = {
    "batch": _nothing,
    "local_documents": _local_documents,
    "documents": _documents,
    "gathered_documents": _gathered_documents,
    "llama3": _llama3,
    "single": _nothing,
    "single_documents": _single_documents,
    "single_documents_qkv": _documents,
    "anything": _anything,
}
