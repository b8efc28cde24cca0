"""Exercise 4. A softmax over blocks that are seen once, one after the other.

    m'     = max(m, max(s))        α = exp(m − m')
    total' = α · total + Σ_j exp(s_j − m')
    acc'   = α · acc + exp(s − m') v

Some scores are −inf (hidden). A row may have hidden scores only, in the first blocks or in all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def online_softmax(blocks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the running maximum (rows,) and the sum of exp(score − maximum) (rows,).

    Args:
        blocks: (rows, n) scores each; n may differ. Use each block once, in order.

    A row that has hidden scores only: maximum −inf, sum 0.
    """
    m = torch.full_like(blocks[0][:, 0], float("-inf"))
    total = torch.zeros_like(m)
    for s in blocks:
        new = torch.maximum(m, s.amax(-1))
        safe = new.masked_fill(new == float("-inf"), 0.0)  # −inf − (−inf) would be NaN
        total = total * (m - safe).exp() + (s - safe[:, None]).exp().sum(-1)
        m = new
    return m, total


def softmax_dot(scores: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Return softmax(all scores) @ all values, (rows, d), in one pass; 0 for rows that see nothing.

    Args:
        scores: blocks of (rows, n).
        values: blocks of (n, d), one for each block of scores.
    """
    m = torch.full_like(scores[0][:, 0], float("-inf"))
    total = torch.zeros_like(m)
    acc = scores[0].new_zeros(scores[0].shape[0], values[0].shape[1])
    for s, v in zip(scores, values):
        new = torch.maximum(m, s.amax(-1))
        safe = new.masked_fill(new == float("-inf"), 0.0)
        alpha = (m - safe).exp()
        p = (s - safe[:, None]).exp()
        total = total * alpha + p.sum(-1)
        acc = acc * alpha[:, None] + p @ v
        m = new
    return acc / total.masked_fill(total == 0, 1.0)[:, None]
