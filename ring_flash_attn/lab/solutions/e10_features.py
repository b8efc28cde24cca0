"""Exercise 10: grouped-query attention with a sliding window and attention sinks.

Query head h reads KV head h // (heads // heads_k). A query at position p (row i: p = i + rows_k -
rows_q) sees keys p - left … p + right, -1: no limit; causal: right = 0. A sink is a score without a
value: it takes part in the softmax, and adds nothing to the output.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 32  # keys of a tile


def _tiles(
    q: Tensor, k: Tensor, causal: bool, window: tuple[int, int]
) -> Iterator[tuple[slice, Tensor]]:
    """Each block of keys that some query sees, and (rows_q, keys) booleans: who does not."""
    rows_q, rows_k = q.shape[1], k.shape[1]
    left, right = window[0], 0 if causal else window[1]
    position = torch.arange(rows_q, device=q.device)[:, None] + rows_k - rows_q
    for first in range(0, rows_k, BLOCK):
        keys = torch.arange(first, min(first + BLOCK, rows_k), device=q.device)[None, :]
        hidden = torch.zeros(rows_q, keys.shape[1], dtype=torch.bool, device=q.device)
        if left >= 0:
            hidden |= keys < position - left
        if right >= 0:
            hidden |= keys > position + right
        if not hidden.all():
            yield slice(first, first + BLOCK), hidden


def _group(x: Tensor, heads_k: int) -> Tensor:
    """(batch, rows, heads, d) to (batch, heads_k, group, rows, d)."""
    return x.unflatten(2, (heads_k, -1)).permute(0, 2, 3, 1, 4)


def _ungroup(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def grouped_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and natural lse.

    Args:
        q: (batch, rows_q, heads, d).
        k, v: (batch, rows_k, heads_k, d).
        causal: no query sees a later key.
        window: (left, right).
        sinks: (heads,) or None.

    Returns:
        (out, lse): (batch, rows_q, heads, d) and (batch, heads, rows_q), with the sink in lse. A
        query that sees no key: out 0; lse is its sink, or -inf without one.
    """
    heads_k = k.shape[2]
    mine = _group(q, heads_k) * q.shape[-1] ** -0.5
    keys, values = _group(k, heads_k), _group(v, heads_k)  # groups of one
    out = torch.zeros_like(mine[..., :1]).expand(*mine.shape[:-1], v.shape[-1])
    total = torch.zeros_like(mine[..., 0])
    top = torch.full_like(total, float("-inf"))
    if sinks is not None:
        top = sinks.to(top).view(heads_k, -1, 1).expand_as(top)
        total = torch.ones_like(total)
    for tile, hidden in _tiles(q, k, causal, window):
        scores = mine @ keys[..., tile, :].transpose(-1, -2)
        scores = scores.masked_fill(hidden, float("-inf"))
        new = torch.maximum(top, scores.amax(-1))
        safe = torch.where(new == float("-inf"), 0.0, new)
        p, factor = (scores - safe[..., None]).exp(), (top - safe).exp()
        out = out * factor[..., None] + p @ values[..., tile, :]
        top, total = new, total * factor + p.sum(-1)
    out = out / torch.where(total > 0, total, 1.0)[..., None]
    return _ungroup(out), (top + total.log()).flatten(1, 2)


def grouped_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, in the shapes of q, k and v, from the forward pass's out and lse.

    The same with and without sinks: lse knows them.
    """
    heads_k, scale = k.shape[2], q.shape[-1] ** -0.5
    queries, douts = _group(q, heads_k), _group(dout, heads_k)
    keys, values = _group(k, heads_k), _group(v, heads_k)
    delta = (douts * _group(out, heads_k)).sum(-1, keepdim=True)
    known = lse.unflatten(1, (heads_k, -1))[..., None]
    dq, dk, dv = (torch.zeros_like(x) for x in (queries, keys, values))
    for tile, hidden in _tiles(q, k, causal, window):
        k_tile, v_tile = keys[..., tile, :], values[..., tile, :]
        p = (queries @ k_tile.transpose(-1, -2) * scale - known).exp().masked_fill(hidden, 0.0)
        ds = p * (douts @ v_tile.transpose(-1, -2) - delta) * scale
        dq += ds @ k_tile
        dk[..., tile, :] = (ds.transpose(-1, -2) @ queries).sum(2, keepdim=True)
        dv[..., tile, :] = (p.transpose(-1, -2) @ douts).sum(2, keepdim=True)
    return _ungroup(dq), _ungroup(dk), _ungroup(dv)
