"""Exercise 6. Backward by recomputation: dq, dk and dv from q, k, v, out, lse and dout.

    P = exp(S − lse)    dP = dO Vᵀ    D = rowsum(dO ∘ O)    dS = P ∘ (dP − D)
    dV = Pᵀ dO          dQ = dS K / √d          dK = dSᵀ Q / √d

Begin with one tile that is the whole matrix. When that passes, cut it into tiles: which of the
three gradients is then a sum over blocks of keys, and which over blocks of queries?
"""

from __future__ import annotations

import torch
from torch import Tensor


def tiled_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of attention, without a softmax.

    Args:
        q, out, dout: (batch, queries, d).
        k, v: (batch, keys, d).
        lse: (batch, queries), natural; −inf where a query sees no key.
        causal: query i, at position i + keys − queries, sees the keys up to its position.

    Returns:
        (dq, dk, dv), like q, k and v. A query that sees no key has dq 0 and adds nothing to dk, dv.
    """
    block_q, block_k = 64, 64
    queries, keys, scale = q.shape[1], k.shape[1], q.shape[2] ** -0.5
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    D = (dout * out).sum(-1, keepdim=True)
    for j in range(0, keys, block_k):
        k_j, v_j = k[:, j : j + block_k], v[:, j : j + block_k]
        key = torch.arange(j, j + k_j.shape[1], device=q.device)
        for i in range(0, queries, block_q):
            at = slice(i, i + block_q)
            q_i, do_i = q[:, at], dout[:, at]
            p = torch.exp(q_i @ k_j.transpose(1, 2) * scale - lse[:, at, None])
            if causal:  # after exp, which makes inf of a row that sees nothing
                position = torch.arange(i, i + q_i.shape[1], device=q.device) + keys - queries
                p = p.masked_fill(key[None, :] > position[:, None], 0.0)
            ds = p * (do_i @ v_j.transpose(1, 2) - D[:, at])
            dv[:, j : j + block_k] += p.transpose(1, 2) @ do_i
            dk[:, j : j + block_k] += ds.transpose(1, 2) @ q_i * scale
            dq[:, at] += ds @ k_j * scale
    return dq, dk, dv
