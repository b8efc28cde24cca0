"""torch's scaled_dot_product_attention, computed over a group while a context is entered."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointFunction

from ..engine import checks
from .batches import BatchDocuments
from .operators import break_graph

_NAME = "scaled_dot_product_attention"
_entered = threading.Lock()  # one context at a time: the function is the whole process's


@dataclass(slots=True)
class _Route:
    """Where calls go while a context is entered, and whether one has come by."""

    run: Callable[..., Any]
    documents: BatchDocuments
    called: bool = False


_route: _Route | None = None


@contextmanager
def routed(run: Callable[..., Any], documents: BatchDocuments) -> Iterator[None]:
    """`F.scaled_dot_product_attention` calls `run` on (batch, tokens, nheads, headdim).

    An error if it was never called: a model that imported the function by its name has attended to
    its own tokens alone.
    """
    global _route
    if not _entered.acquire(blocking=False):
        raise RuntimeError(f"{_NAME} is routed already: one context at a time")
    original, _route = getattr(F, _NAME), _Route(run, documents)
    setattr(F, _NAME, _attention)
    try:
        yield
    finally:
        called, _route = _route.called, None
        setattr(F, _NAME, original)
        _entered.release()
    if not called:
        raise RuntimeError(
            f"no call of F.{_NAME} came by: a model that imports the function by its name, or has "
            "another attention, has attended to this rank's tokens alone"
        )


@functools.wraps(F.scaled_dot_product_attention)
def _attention(  # the same for all contexts: torch.compile would compile another one anew
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    route = _route
    if route is None:
        raise RuntimeError(
            f"this is the F.{_NAME} of a context that was left: look it up when it is called"
        )
    route.called = True
    _check(query, key, value, attn_mask, enable_gqa, route.documents)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out: Tensor = route.run(
        q, k, v, route.documents, causal=is_causal, dropout_p=dropout_p, softmax_scale=scale
    )
    return out.transpose(1, 2)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    enable_gqa: bool,
    documents: BatchDocuments,
) -> None:
    """Self-attention of this rank's tokens, without a mask but the documents'."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        checks.check_tensor(name, x)
        # A graph would be compiled for this size alone; there, `run` compares them.
        wrong = not torch.compiler.is_compiling() and x.shape[2:3] != (documents.size,)
        if x.dim() != 4 or wrong:
            raise ValueError(
                f"{name} must be (batch, nheads, tokens, headdim) with this rank's "
                f"{documents.size} tokens, but has shape {tuple(x.shape)}"
            )
    if not torch.is_grad_enabled() and _in_reentrant_checkpoint():
        raise ValueError(
            "checkpoint(use_reentrant=True) would compute attention on this rank's tokens alone if "
            "the backward pass came after this context: take use_reentrant=False, which notices"
        )
    if attn_mask is not None:
        raise ValueError(
            "attn_mask: a mask over shards is not supported; is_causal is, and documents and "
            "padding are what ContextParallel.shard is told"
        )
    if not checks.check_flag("enable_gqa", enable_gqa) and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"query has {query.shape[1]} heads and key {key.shape[1]}: say enable_gqa=True"
        )


def _in_reentrant_checkpoint() -> bool:
    """Whether this is the forward pass of a checkpoint that saves nothing to compare with later."""
    if torch.compiler.is_compiling():
        break_graph(
            f"a context of cp.{_NAME} without gradients looks for a checkpoint on the stack"
        )
        return torch.compiler.disable(_in_reentrant_checkpoint)()
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return frame is not None
