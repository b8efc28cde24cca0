"""Exercise 5. Tiled attention, forward: the whole matrix of scores never exists.

For each block of queries, walk over the blocks of keys and keep m, total and acc for every row:

    S = Q Kᵀ / √d      m' = max(m, rowmax S)      P = exp(S − m')      α = exp(m − m')
    total ← α total + rowsum P      acc ← α acc + P V      out = acc / total, lse = m + log total

Lengths are any numbers, not only multiples of a block. Then ask yourself: what would change in the
result if acc were not multiplied by α? In which rows?
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def tiled_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, block_q: int, block_k: int
) -> tuple[Tensor, Tensor]:
    """Compute attention from tiles of at most block_q × block_k scores.

    Args:
        q: (batch, queries, d).
        k, v: (batch, keys, d).
        causal: query i, at position i + keys − queries, sees the keys up to its position.
        block_q, block_k: the sizes of a tile.

    Returns:
        (out, lse): out (batch, queries, d); lse (batch, queries), the natural logarithm of
        Σ exp(score). A query that sees no key has out 0 and lse −inf.
    """
    (batch, queries, d), keys = q.shape, k.shape[1]
    out = torch.zeros_like(q)
    lse = torch.zeros(batch, queries, device=q.device)
    for i in range(0, queries, block_q):
        q_i = q[:, i : i + block_q]
        rows = q_i.shape[1]
        position = torch.arange(i, i + rows, device=q.device) + keys - queries
        m = torch.full((batch, rows, 1), -torch.inf, device=q.device)
        total = torch.zeros(batch, rows, 1, device=q.device)
        acc = torch.zeros(batch, rows, d, device=q.device)
        for j in range(0, keys, block_k):
            k_j, v_j = k[:, j : j + block_k], v[:, j : j + block_k]
            s = q_i @ k_j.transpose(1, 2) / d**0.5
            if causal:
                key = torch.arange(j, j + k_j.shape[1], device=q.device)
                s = s.masked_fill(key[None, :] > position[:, None], -torch.inf)
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            shift = torch.where(m_new == -torch.inf, 0.0, m_new)  # −inf − (−inf) is nan
            p, alpha = torch.exp(s - shift), torch.exp(m - shift)
            total = alpha * total + p.sum(-1, keepdim=True)
            acc = alpha * acc + p @ v_j
            m = m_new
        out[:, i : i + rows] = acc / torch.where(total == 0.0, 1.0, total)
        lse[:, i : i + rows] = (m + torch.log(total))[..., 0]
    return out, lse


class TiledAttention(torch.autograd.Function):
    """`apply(q, k, v, causal)` → out; the shapes are those of `tiled_forward`.

    Its backward pass is exercise 6.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        """Call `tiled_forward`, and save what step 6 will need: q, k, v, out and lse."""
        out, lse = tiled_forward(q, k, v, causal, 64, 64)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal = causal
        return out
