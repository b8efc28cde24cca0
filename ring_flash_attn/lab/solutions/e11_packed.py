"""Exercise 11: attention of packed documents, which must not see each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

BLOCK = 32  # queries, and keys, of a tile


def _block(q: Tensor, k: Tensor, v: Tensor, first: int, causal: bool) -> tuple[Tensor, Tensor]:
    """Queries from row `first` of a document on, against all its keys; (heads, rows, d)."""
    rows = torch.arange(first, first + q.shape[1], device=q.device)[:, None]
    out, total = torch.zeros_like(q), q.new_zeros(q.shape[:2])
    top = q.new_full(q.shape[:2], float("-inf"))
    stop = first + q.shape[1] if causal else k.shape[1]
    for key in range(0, stop, BLOCK):
        last = min(key + BLOCK, stop)
        scores = q @ k[:, key:last].transpose(1, 2) * q.shape[-1] ** -0.5
        if causal:
            hidden = torch.arange(key, last, device=q.device) > rows
            scores = scores.masked_fill(hidden, float("-inf"))
        new = torch.maximum(top, scores.amax(-1))
        p, factor = (scores - new[..., None]).exp(), (top - new).exp()
        out = out * factor[..., None] + p @ v[:, key:last]
        top, total = new, total * factor + p.sum(-1)
    return out / total[..., None], top + total.log()


def packed_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Sequence[int] | Tensor, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Output and natural lse of a packed stream.

    Args:
        q, k, v: (tokens, heads, d): documents one after the other.
        cu_seqlens: (documents + 1,): document n has rows cu_seqlens[n] … cu_seqlens[n + 1] - 1. It
            may have none.
        causal: a query sees its own key and those before, of its document.

    Returns:
        (out, lse): (tokens, heads, d) and (heads, tokens).
    """
    out = torch.zeros_like(q)
    lse = q.new_full((q.shape[1], q.shape[0]), float("-inf"))
    for begin, end in pairwise(int(offset) for offset in cu_seqlens):
        document = [x[begin:end].transpose(0, 1) for x in (q, k, v)]
        for row in range(0, end - begin, BLOCK):
            rows = slice(begin + row, min(begin + row + BLOCK, end))
            mine = document[0][:, row : row + BLOCK]
            found, lse[:, rows] = _block(mine, document[1], document[2], row, causal)
            out[rows] = found.transpose(0, 1)
    return out, lse
