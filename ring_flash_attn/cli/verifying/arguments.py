"""The arguments that belong to one signature: lengths, cu_seqlens and what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ...llama3 import llama3_flash_attn_prepare_cu_seqlens
from .cases import Case

_Who = tuple[int, int]  # rank, world_size


def own_arguments(case: Case, rank: int, world_size: int, device: torch.device) -> dict[str, Any]:
    """What the function of a case takes besides q, k, v and the options that all share."""
    if case.signature not in _MAKERS:
        raise ValueError(f"verify does not know how to call signatures.{case.signature} yet")
    return _MAKERS[case.signature](case, (rank, world_size), device)


def _cu_seqlens(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def _nothing(case: Case, who: _Who, device: torch.device) -> dict[str, Any]:
    return {}


def _local_documents(case: Case, who: _Who, device: torch.device) -> dict[str, Any]:
    local = [length // who[1] for length in case.question.lengths_q]
    return {"cu_seqlens": _cu_seqlens(local, device), "max_seqlen": max(local)}


def _documents(case: Case, who: _Who, device: torch.device) -> dict[str, Any]:
    lengths = case.question.lengths_q
    return {"cu_seqlens": _cu_seqlens(lengths, device), "max_seqlen": max(lengths)}


def _gathered_documents(case: Case, who: _Who, device: torch.device) -> dict[str, Any]:
    return {"cu_seqlens": _cu_seqlens(case.question.lengths_q, device), "heads_k_stride": 1}


def _llama3(case: Case, who: _Who, device: torch.device) -> dict[str, Any]:
    cu_seqlens = _cu_seqlens(case.question.lengths_q, device)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")
    values = llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, case.question.causal, *who)
    return {**dict(zip(names, values, strict=True)), "heads_k_stride": 1}


def _single_documents(case: Case, who: _Who, device: torch.device) -> dict[str, Any]:
    question = case.question
    return {
        "cu_seqlens_q": _cu_seqlens(question.lengths_q, device),
        "cu_seqlens_k": _cu_seqlens(question.lengths_k, device),
        "max_seqlen_q": max(question.lengths_q),
        "max_seqlen_k": max(question.lengths_k),
    }


def _anything(case: Case, who: _Who, device: torch.device) -> dict[str, Any]:
    question = case.question
    extra: dict[str, Any] = {"layout": case.layout, "route": case.route}
    if question.batch is not None:
        return {**extra, "seqlen": question.lengths_q[0], "seqlen_k": question.lengths_k[0]}
    extra["cu_seqlens"] = _cu_seqlens(question.lengths_q, device)
    if question.lengths_k != question.lengths_q:
        extra["cu_seqlens_k"] = _cu_seqlens(question.lengths_k, device)
    return extra


_MAKERS: dict[str, Callable[[Case, _Who, torch.device], dict[str, Any]]] = {
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
