"""Exercise 6. Backward by recomputation: dq, dk and dv from q, k, v, out, lse and dout.

    P = exp(S − lse)    dP = dO Vᵀ    D = rowsum(dO ∘ O)    dS = P ∘ (dP − D)
    dV = Pᵀ dO          dQ = dS K / √d          dK = dSᵀ Q / √d

Begin with one tile that is the whole matrix. When that passes, cut it into tiles: which of the
three gradients is then a sum over blocks of keys, and which over blocks of queries?
"""

from __future__ import annotations

import torch  # noqa: F401
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
    raise NotImplementedError(
        "D once; then for each tile: S, P = exp(S − lse), dP, dS, and three sums"
    )
