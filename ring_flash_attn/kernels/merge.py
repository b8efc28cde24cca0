"""The fp32 merge: two softmax results over different keys become one over both.

For kernels that cannot go on from a state, and for states that meet. On a GPU it is one pass of one
Triton kernel (`fused_merge.py`); elsewhere, and in fp64, plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import lru_cache

import torch
from torch import Tensor

from ..trace import span
from .base import BLOCK, FIRST, LAST, Rows, State
from .rows import is_fused

# What runs in place of a merge, where passes are priced and compute nothing; sees block and rows.
merging: ContextVar[Callable[[Tensor, Sequence[Rows]], None] | None] = ContextVar(
    "merging", default=None
)


def merge(state: State, out: Tensor, lse: Tensor) -> None:
    """Merge a block into `state`, in place.

    Rows that saw no key on either side stay (out 0, lse −inf), without a NaN.

    Args:
        state: what the keys so far gave.
        out: (batch, seqlen_q, nheads, headdim_v), the block's normalised output.
        lse: (batch, nheads, seqlen_q), natural logarithm.
    """
    merge_rows(state, out, lse, 0, _all_rows(out.shape[1]), sink=False)


@lru_cache(maxsize=64)
def _all_rows(length: int) -> tuple[Rows, ...]:
    return (Rows(0, length, BLOCK),)


def merge_rows(
    state: State, out: Tensor, lse: Tensor, offset: int, rows: Sequence[Rows], sink: bool
) -> None:
    """Merge a block into some rows of `state`, in place; write those that are final.

    Args:
        state: what the keys so far gave; nothing is read of rows marked FIRST but a sink.
        out: (batch, rows of the block, nheads, headdim_v), normalised.
        lse: (batch, nheads, rows of the block), natural logarithm; ±inf where no key was seen.
        offset: row of the state at which the block begins.
        rows: what to do with which rows; a plan hands out the same ones each time.
        sink: whether `state.lse` of rows marked FIRST is that of a sink.
    """
    with span("merge"):
        instead = merging.get()
        if instead is not None:
            instead(out, rows)
            return
        if _is_fused(state):
            from .fused_merge import fused_merge

            fused_merge(state, out, lse, offset, rows, sink)
            return
        for each in rows:
            _merge_some(state, out, lse, offset, each, sink)


def _is_fused(state: State) -> bool:
    return state.out.dtype is torch.float32 and is_fused(state.out)


def _merge_some(
    state: State, out: Tensor, lse: Tensor, offset: int, rows: Rows, sink: bool
) -> None:
    at = slice(rows.start, rows.end)
    ours, our_lse = state.out[:, at], state.lse[:, :, at]
    if rows.bits & FIRST:
        ours.zero_()
        if not sink:
            our_lse.fill_(-torch.inf)
    if rows.bits & BLOCK:
        there = slice(rows.start - offset, rows.end - offset)
        _add(ours, our_lse, out[:, there], lse[:, :, there].to(our_lse.dtype))
    if rows.bits & LAST and state.result is not None:
        state.result[:, at] = ours.to(state.result.dtype)


def _add(ours: Tensor, our_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    lse = torch.where(lse == torch.inf, -torch.inf, lse)
    both = torch.logaddexp(our_lse, lse)
    finite = torch.where(both == -torch.inf, 0.0, both)  # −inf − 0 = −inf: weight 0, not NaN
    mine, theirs = ((part - finite).exp().transpose(1, 2)[..., None] for part in (our_lse, lse))
    ours.mul_(mine).add_(torch.where(theirs > 0, out * theirs, 0.0))
    our_lse.copy_(both)
