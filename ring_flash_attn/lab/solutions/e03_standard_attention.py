"""Exercise 3. Standard attention, and what it must keep for backward.

    S = q kᵀ / √d        P = softmax(S)        out = P v

Write the forward pass, and return what backward will need. Backward itself is not asked for: its
formulas tell you what to keep, and in exercise 6 you write a better one.

    dV = Pᵀ dO    dP = dO vᵀ    dS = P ∘ (dP − rowsum(P ∘ dP))    dQ = dS k / √d    dK = dSᵀ q / √d

Then predict: how many bytes does `saved` have at 16,384 tokens, d 64, fp32? How many of them are P?
"""

from __future__ import annotations

import torch
from torch import Tensor


def standard_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute attention with the whole matrix of scores at once.

    Args:
        q: (batch, queries, d).
        k, v: (batch, keys, d).
        causal: query i, at position i + keys - queries, sees the keys up to its position. A query
            that sees no key has output 0.

    Returns:
        (out, saved): out (batch, queries, d); saved holds the tensors that backward needs, by the
        names "q", "k", "v" and "p", and no more.
    """
    queries, keys = q.shape[1], k.shape[1]
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
        hidden = hidden.triu(1 + keys - queries)
        scores = scores.masked_fill(hidden, float("-inf"))
    p = scores.softmax(-1)
    if causal and queries > keys:
        p = p.masked_fill(hidden, 0.0)  # rows that see no key: a softmax over nothing is NaN
    # 16,384 tokens: q, k, v have 3 · 16384 · 64 · 4 bytes = 12 MiB; P has 16384² · 4 = 1 GiB.
    return p @ v, {"q": q, "k": k, "v": v, "p": p}
