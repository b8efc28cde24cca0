"""Exercise 14: the zigzag layout.

The sequence is cut into 2 * world_size chunks; chunk p of P begins at p * length // P. Rank r holds
chunk r, its early half, and chunk 2 * world_size - 1 - r, its late half.
"""

from __future__ import annotations

import torch
from torch import Tensor


def zigzag_shard(length: int, rank: int, world_size: int) -> Tensor:
    """The positions of the tokens that a rank holds, in ascending order, as int64."""
    chunks = 2 * world_size
    positions: list[int] = []
    for chunk in (rank, chunks - 1 - rank):
        positions += range(chunk * length // chunks, (chunk + 1) * length // chunks)
    return torch.tensor(positions, dtype=torch.int64)


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
    steps = []
    for step in range(world_size):
        source = (rank - step) % world_size
        queries = "late" if source > rank else "all"
        keys = "early" if source < rank else "all"
        steps.append((source, queries, keys, source == rank))
    return steps
