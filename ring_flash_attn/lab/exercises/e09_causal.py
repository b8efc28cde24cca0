"""Exercise 9: visit only the blocks that a causal mask leaves, and mask only those that need it.

Query i sees key j if j <= i + rows_k - rows_q: both sequences end together.
"""

from __future__ import annotations

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
    raise NotImplementedError("compare the first and the last row with the first and the last key")


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
    raise NotImplementedError("online softmax over visible_blocks; mask where needs_mask says so")
