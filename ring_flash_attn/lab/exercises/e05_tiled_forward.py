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
    raise NotImplementedError(
        "loop over blocks of queries; in it, loop over blocks of keys: scores, mask, m, α, P, sums"
    )


class TiledAttention(torch.autograd.Function):
    """`apply(q, k, v, causal)` → out; the shapes are those of `tiled_forward`.

    Its backward pass is exercise 6.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        """Call `tiled_forward`, and save what step 6 will need: q, k, v, out and lse."""
        raise NotImplementedError(
            "choose the sizes of a tile; ctx.save_for_backward; ctx.causal; return out"
        )
