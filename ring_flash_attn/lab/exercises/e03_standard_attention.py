"""Exercise 3. Standard attention, and what it must keep for backward.

    S = q kᵀ / √d        P = softmax(S)        out = P v

Write the forward pass, and return what backward will need. Backward itself is not asked for: its
formulas tell you what to keep, and in exercise 6 you write a better one.

    dV = Pᵀ dO    dP = dO vᵀ    dS = P ∘ (dP − rowsum(P ∘ dP))    dQ = dS k / √d    dK = dSᵀ q / √d

Then predict: how many bytes does `saved` have at 16,384 tokens, d 64, fp32? How many of them are P?
"""

from __future__ import annotations

import torch  # noqa: F401
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
    raise NotImplementedError("scores, mask with -inf, softmax, product with v")
