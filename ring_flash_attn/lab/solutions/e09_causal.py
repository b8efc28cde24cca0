"""Exercise 9: visit only the blocks that a causal mask leaves, and mask only those that need it.

Query i sees key j if j <= i + rows_k - rows_q: both sequences end together.
"""

from __future__ import annotations

import torch
from torch import Tensor


def visible_blocks(
    rows_q: int, rows_k: int, block_q: int, block_k: int, causal: bool
) -> list[tuple[int, int, bool]]:
    """The blocks that a kernel has to visit.

    Block (i, j) has the queries i * block_q … and the keys j * block_k …; the last block of a row
    or column may be shorter.

    Returns:
        (i, j, needs_mask) of each block in which some query sees some key, ordered by i, then by j.
        needs_mask: some query of the block does not see some key of it. That a block at the end is
        shorter is no reason.
    """
    shift = rows_k - rows_q
    blocks = []
    for i, row in enumerate(range(0, rows_q, block_q)):
        last_row = min(row + block_q, rows_q) - 1
        for j, key in enumerate(range(0, rows_k, block_k)):
            last_key = min(key + block_k, rows_k) - 1
            if not causal or key <= last_row + shift:
                blocks.append((i, j, causal and last_key > row + shift))
    return blocks


def causal_forward(
    q: Tensor, k: Tensor, v: Tensor, block_q: int = 64, block_k: int = 64
) -> tuple[Tensor, Tensor]:
    """Tiled causal attention that computes no scores outside of `visible_blocks`.

    Args:
        q: (batch, rows_q, d).
        k, v: (batch, rows_k, d).

    Returns:
        (out, lse): (batch, rows_q, d) and (batch, rows_q), natural. A query that sees no key: out
        0, lse -inf.
    """
    rows_q, rows_k = q.shape[1], k.shape[1]
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    top = q.new_full(q.shape[:2], float("-inf"))
    total = q.new_zeros(q.shape[:2])
    position = torch.arange(rows_q, device=q.device) + rows_k - rows_q
    for i, j, needs_mask in visible_blocks(rows_q, rows_k, block_q, block_k, True):
        rows, keys = slice(i * block_q, (i + 1) * block_q), slice(j * block_k, (j + 1) * block_k)
        scores = q[:, rows] @ k[:, keys].transpose(1, 2) / q.shape[-1] ** 0.5
        if needs_mask:
            hidden = torch.arange(rows_k, device=q.device)[keys] > position[rows, None]
            scores = scores.masked_fill(hidden, float("-inf"))
        new = torch.maximum(top[:, rows], scores.amax(-1))
        safe = torch.where(new == float("-inf"), 0.0, new)  # else -inf - -inf is NaN
        p, factor = (scores - safe[..., None]).exp(), (top[:, rows] - safe).exp()
        out[:, rows] = out[:, rows] * factor[..., None] + p @ v[:, keys]
        total[:, rows] = total[:, rows] * factor + p.sum(-1)
        top[:, rows] = new
    return out / torch.where(total > 0, total, 1.0)[..., None], top + total.log()
