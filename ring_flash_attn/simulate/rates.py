"""Seconds of one launch of a kernel: from the blocks of its tiles, on as many SMs as a GPU has.

A forward program takes a block of queries of one head through the blocks of keys that they see, a
backward program a block of keys through the queries that see them. A block that the mask or the end
of a document cuts is a whole one to the kernel, and may take longer. SMs take the next program when
they are done with one. Where the longest begin first, all are done at about the same time;
elsewhere the last ones are waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ..plan.tiles import Tile

# Rows, columns, low, high, as in a tile: query i sees key j if low <= j - i <= high.
Band = tuple[int, int, int, int]

# A program owns 128 rows, as two halves that leave out blocks by themselves.
ROWS, COLUMNS, HALVES = 64, 128, 2
# Fitted constants (see `gpus`).
THROTTLED = 0.85  # share of what a kernel alone is slower in long work that is left in a rank's
TOGETHER = 2  # programs that share an SM, in kernels that do not begin with the longest
LATE = 0.8  # of the longest program: what the last SM is behind there


@dataclass(frozen=True, slots=True)
class Rate:
    """What a kernel takes in one direction, for one head dimension on one GPU."""

    block: float  # seconds of an SM for 128 queries × 128 keys of one query head
    launch: float  # seconds of each launch, besides
    slower: float = 0.0  # seconds that a block takes longer at the clock of long work
    cut: float = 0.0  # seconds that half a block takes longer where something cuts it
    ordered: bool = True  # the longest programs begin first
    source: str = ""  # of these numbers
    estimated: bool = False  # nobody has measured it on this GPU

    def faster(self, times: float, source: str) -> Rate:
        """The same kernel where all but the launch goes so many times as fast."""
        values = {name: getattr(self, name) / times for name in ("block", "slower", "cut")}
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
    block = (rate.block + rate.slower * sustained) * ROWS * COLUMNS / 128**2
    work = 0.0
    longest = 0
    for bands in shards:
        together = [_programs(*band) for band in bands]
        work += sum(each.blocks * block + each.cut * rate.cut for each in together)
        longest = max(longest, sum(each.most for each in together))
    if not longest:
        return 0.0
    even, one = heads * work / sms, HALVES * longest * block
    if rate.ordered:
        return rate.launch + max(even, one)
    return rate.launch + max(even + LATE * one, TOGETHER * one)


class _Programs(NamedTuple):
    """Of a band: blocks of all halves of programs, those that are cut, blocks of the longest."""

    blocks: int
    cut: int
    most: int


@lru_cache(1 << 16)
def _programs(rows: int, columns: int, low: int, high: int) -> _Programs:
    counts = list(_blocks(rows, columns, low, high))
    blocks = [whole + cut for whole, cut in counts]
    return _Programs(sum(blocks), sum(cut for _, cut in counts), max(blocks, default=0))


def _blocks(rows: int, columns: int, low: int, high: int) -> Iterator[tuple[int, int]]:
    """Of each half of a program its whole blocks, and those that are cut."""
    for first in range(0, rows, ROWS):
        last = min(first + ROWS, rows) - 1
        begin, end = max(0, first + low), min(columns - 1, last + high)  # keys that any row sees
        if begin > end:
            continue
        count = end // COLUMNS - begin // COLUMNS + 1
        # Keys that every row sees, and the blocks that hold nothing else.
        every, until = max(0, last + low), min(columns - 1, first + high) + 1
        filled = last - first + 1 == ROWS
        whole = max(0, until // COLUMNS - -(-every // COLUMNS)) if filled else 0
        yield whole, count - whole
