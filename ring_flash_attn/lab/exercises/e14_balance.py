"""Exercise 14: the zigzag layout.

The sequence is cut into 2 * world_size chunks; chunk p of P begins at p * length // P. Rank r holds
chunk r, its early half, and chunk 2 * world_size - 1 - r, its late half.
"""

from __future__ import annotations

from torch import Tensor


def zigzag_shard(length: int, rank: int, world_size: int) -> Tensor:
    """The positions of the tokens that a rank holds, in ascending order, as int64."""
    raise NotImplementedError("one chunk from the front, one from the back")


def zigzag_steps(rank: int, world_size: int) -> list[tuple[int, str, str, bool]]:
    """What a rank computes in each step of a causal ring.

    In step t the keys of rank (rank - t) % world_size are here.

    Returns:
        (source, queries, keys, causal) of each step:
        source: the rank whose keys are here.
        queries: "all", or "late" if only the late half of ours sees any of them.
        keys: "all", or "early" if nobody sees the late half of theirs.
        causal: whether the tile of these queries and keys needs a causal mask.
    """
    raise NotImplementedError("compare chunk numbers: which halves are before which?")
