"""Exercise 4. A softmax over blocks that are seen once, one after the other.

    m'     = max(m, max(s))        α = exp(m − m')
    total' = α · total + Σ_j exp(s_j − m')
    acc'   = α · acc + exp(s − m') v

Some scores are −inf (hidden). A row may have hidden scores only, in the first blocks or in all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch  # noqa: F401
from torch import Tensor


def online_softmax(blocks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the running maximum (rows,) and the sum of exp(score − maximum) (rows,).

    Args:
        blocks: (rows, n) scores each; n may differ. Use each block once, in order.

    A row that has hidden scores only: maximum −inf, sum 0.
    """
    raise NotImplementedError("start from -inf and 0; for each block move the maximum, correct")


def softmax_dot(scores: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Return softmax(all scores) @ all values, (rows, d), in one pass; 0 for rows that see nothing.

    Args:
        scores: blocks of (rows, n).
        values: blocks of (n, d), one for each block of scores.
    """
    raise NotImplementedError("as above, and correct the sum of weighted values by the same factor")
