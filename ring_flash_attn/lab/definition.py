"""Attention by its definition, in fp64: what every step and every exercise is checked against.

    s = scale · q kᵀ,  lse_i = log Σ_j exp(s_ij),  p_ij = exp(s_ij − lse_i),  out_i = Σ_j p_ij v_j

The sums run over the keys that query i sees. Nothing is tiled here, nothing is fast, and nothing is
shared with the library.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def visible(
    queries: int, keys: int, causal: bool = False, window: tuple[int, int] = (-1, -1)
) -> Tensor:
    """(queries, keys) booleans: who sees whom. Both sequences end together.

    `window` is (left, right): keys that a query sees before and after its own position; -1: all.
    """
    distance = torch.arange(keys)[None, :] - (torch.arange(queries)[:, None] + keys - queries)
    left, right = window
    right = 0 if causal else right
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    return seen


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_q: Sequence[int] | None = None,
    cu_seqlens_k: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and natural lse in fp64; a row that sees no key has output 0 and lse −inf.

    Args:
        q, k, v: (batch, rows, heads, d), or (batch, rows, d) without heads; with `cu_seqlens_q`
            packed documents, (tokens, heads, d). Query head h uses KV head h // (heads / heads_k).
        causal, window: who sees whom; see `visible`.
        scale: 1/√d by default.
        sinks: (heads,): a score without a value, which takes part in the softmax.
        cu_seqlens_q, cu_seqlens_k: where documents begin and end; keys as queries by default.

    Returns:
        (out, lse): out like q, with the width of v; lse (batch, heads, rows), (batch, rows)
        without heads, or (heads, tokens) of packed documents.
    """
    options = {"causal": causal, "window": window, "scale": scale, "sinks": sinks}
    if cu_seqlens_q is not None:
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        found = []
        for i in range(len(cu_seqlens_q) - 1):
            own = slice(cu_seqlens_q[i], cu_seqlens_q[i + 1])
            seen = slice(cu_seqlens_k[i], cu_seqlens_k[i + 1])
            found.append(attention(q[None, own], k[None, seen], v[None, seen], **options))  # type: ignore[arg-type]
        return torch.cat([out[0] for out, _ in found]), torch.cat([x[0] for _, x in found], -1)
    if q.dim() == 3:
        out, lse = attention(q[:, :, None], k[:, :, None], v[:, :, None], **options)  # type: ignore[arg-type]
        return out[:, :, 0], lse[:, 0]
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))  # (batch, heads, rows, d)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    hidden = ~visible(q.shape[2], k.shape[2], causal, window).to(q.device)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        extra = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        lse = torch.cat([scores, extra], -1).logsumexp(-1)
    else:
        lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).exp()
    return (p @ v).transpose(1, 2), lse
