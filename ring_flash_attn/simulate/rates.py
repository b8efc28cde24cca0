"""Seconds of one launch of a kernel: from the blocks of its tiles, on as many SMs as a GPU has.

A forward program takes a block of queries of one head through the blocks of keys that they see, a
backward program a block of keys through the queries that see them. A block that the mask or the end
of a document cuts is a whole one to the kernel. SMs take the next program when they are done with
one; so at the end some are idle: for about one of the last programs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ..plan.tiles import Tile

Band = tuple[
    int, int, int, int
]  # rows, columns, low, high: query i sees key j if low <= j-i <= high

THROTTLED = 0.5  # share of what a kernel alone is slower in long work that is left in a rank's
PARTS = 2  # of a program's rows (128) that leave out blocks by themselves (64)
TOGETHER = 2  # programs that share an SM, in kernels that do not begin with the longest
LAST = 0.5  # of the shortest program: what the last SM is behind, where the longest begin first
LATE = 0.3  # of the longest program: likewise, elsewhere


@dataclass(frozen=True, slots=True)
class Rate:
    """What a kernel takes in one direction, for one head dimension on one GPU."""

    block: float  # seconds of an SM for 128 queries × 128 keys of one query head
    program: float  # seconds of an SM for each block of queries (backward keys), besides
    launch: float  # seconds of each launch, besides
    slower: float = 0.0  # seconds that a block takes longer at the clock of long work
    rows: int = 128  # of a block that a program owns
    columns: int = 128  # of a block that it goes through
    cut: float = 0.0  # seconds that a block takes longer where a mask or a document's end cuts it
    ordered: bool = True  # the longest programs begin first
    source: str = ""  # of these numbers
    estimated: bool = False  # nobody has measured it on this GPU

    def faster(self, times: float, source: str) -> Rate:
        """The same kernel where all but the launch goes so many times as fast."""
        names = ("block", "program", "slower", "cut")
        values = {name: getattr(self, name) / times for name in names}
        return replace(self, **values, source=source)

    def at_clock(self, sustained: bool) -> Rate:
        """That of long work, or of short runs, whatever the launch."""
        block = self.block + self.slower * THROTTLED * sustained
        return replace(self, block=block, slower=0.0)

    def estimate(self, source: str) -> Rate:
        """The same, as what stands for something that nobody has measured."""
        return replace(self, source=source, estimated=True)


def band_of(tile: Tile) -> Band:
    """Rows and columns of a tile, and its mask."""
    return tile.query.length, tile.key.length, tile.low, tile.high


def full(rows: int, columns: int) -> Band:
    """All queries see all keys."""
    return rows, columns, 1 - rows, columns - 1


def causal(rows: int, columns: int) -> Band:
    """Both end together, and no query sees a later key."""
    return rows, columns, 1 - rows, columns - rows


def turned(band: Band) -> Band:
    """The same with keys as rows, as backward programs take it."""
    rows, columns, low, high = band
    return columns, rows, -high, -low


def seconds(
    rate: Rate, shards: Iterable[Iterable[Band]], heads: int, sms: int, sustained: bool = False
) -> float:
    """One launch.

    Args:
        rate: of the kernel, in one direction.
        shards: the bands of the same rows: of each query span those against its key spans;
            backward of each key span, `turned`, those against its query spans.
        heads: query heads, over the batch.
        sms: of the GPU.
        sustained: it is part of long work, at the clock that the GPU's power limit allows.
    """
    block = rate.block + rate.slower * sustained
    size = rate.rows * rate.columns / 128**2
    work = longest = programs = 0.0
    shortest = math.inf
    for bands in shards:
        together = [_programs(*band, rate.rows, rate.columns) for band in bands]
        programs += max((each.count for each in together), default=0)
        work += sum(each.blocks * block + each.cut * rate.cut for each in together)
        longest = max(longest, sum(each.most for each in together))
        shortest = min(shortest, sum(each.least for each in together))
    if not programs:
        return 0.0
    even = heads * (work * size + programs * rate.program) / sms
    one = PARTS * longest * block * size + rate.program
    if rate.ordered:
        return rate.launch + max(even + LAST * PARTS * shortest * block * size, one)
    return rate.launch + max(even + LATE * one, TOGETHER * one)


class _Programs(NamedTuple):
    """Of a band: programs; blocks of all of them, and those that are cut; blocks of one."""

    count: int
    blocks: int
    cut: int
    most: int
    least: int


@lru_cache(1 << 16)
def _programs(
    rows: int, columns: int, low: int, high: int, block_q: int, block_k: int
) -> _Programs:
    counts = list(_blocks(rows, columns, low, high, block_q, block_k))
    blocks, cut = [whole + cut for whole, cut in counts], sum(cut for _, cut in counts)
    most, least = max(blocks, default=0), min(blocks, default=0)
    return _Programs(-(-rows // block_q), sum(blocks), cut, most, least)


def _blocks(
    rows: int, columns: int, low: int, high: int, block_q: int, block_k: int
) -> Iterator[tuple[int, int]]:
    """Of each program its whole blocks, and those that are cut."""
    for first in range(0, rows, block_q):
        last = min(first + block_q, rows) - 1
        begin, end = max(0, first + low), min(columns - 1, last + high)  # keys that any row sees
        if begin > end:
            continue
        count = end // block_k - begin // block_k + 1
        # Keys that every row sees, and the blocks that hold nothing else.
        every, until = max(0, last + low), min(columns - 1, first + high) + 1
        filled = last - first + 1 == block_q
        whole = max(0, until // block_k - -(-every // block_k)) if filled else 0
        yield whole, count - whole
