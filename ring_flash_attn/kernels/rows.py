"""Rows that lie apart: brought to their places, or added up there, in one pass over memory.

On a GPU that is a Triton kernel (`fused_rows.py`); elsewhere, and in fp64, plain torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

# What runs in place of an addition, where passes are priced and compute nothing; sees the bytes.
adding: ContextVar[Callable[[int], None] | None] = ContextVar("adding", default=None)


class Part(NamedTuple):
    """Rows to be added, all or those `taken`, and where: their numbers, or a slice."""

    theirs: Sequence[Tensor]  # (batch, rows, nheads, headdim)
    at: Tensor | slice
    taken: Tensor | slice | None


def is_fused(tensor: Tensor) -> bool:
    """Whether a Triton kernel may pass over it."""
    return tensor.device.type == "cuda" and tensor.dtype is not torch.float64 and has_triton()


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def copy_rows(target: Tensor, source: Tensor, at: Tensor, taken: Tensor | None, dim: int) -> None:
    """Copy rows, all or those `taken`, to the rows `at` of the target."""
    if is_fused(target):
        from .fused_rows import fused_copy, is_simple

        if is_simple(target) and is_simple(source):
            fused_copy(target, source, at, taken, dim)
            return
    target.index_copy_(dim, at, source if taken is None else source.index_select(dim, taken))


def add_from_arena(
    ours: Sequence[Tensor], arena: Tensor, table: Tensor, firsts: Sequence[int], batch_stride: int
) -> None:
    """See `fused_add`."""
    from .fused_rows import fused_add

    fused_add(ours, arena, table, firsts, batch_stride)


def add_parts(ours: Sequence[Tensor], parts: Iterable[Part]) -> None:
    """Add rows to ours, (batch, rows, nheads, headdim), part after part; each names a row once."""
    for theirs, at, taken in parts:
        for mine, other in zip(ours, theirs, strict=True):
            if isinstance(taken, slice):
                other = other[:, taken]
            elif taken is not None:
                other = other.index_select(1, taken)
            if isinstance(at, slice):
                mine[:, at] += other
            else:
                mine.index_copy_(1, at, mine.index_select(1, at).add_(other))
