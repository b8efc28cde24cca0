"""Launch tables: a step's tiles as integers on the device, built once for each plan and kept.

A launch has one program for each block of rows (queries, or for dK and dV keys) and head. `blocks`
says which rows a program owns and which tiles to walk through; `tiles` says where the other side of
a tile lies and which band the mask leaves of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..plan.layout import Span
from ..plan.tiles import Tile, band_pairs
from .device_cache import DeviceCache, to_device

FIRST, LAST = 1, 2  # flags of a block


class TileEntry(NamedTuple):
    """A row of `tiles`: the other side of a tile, and the band that the mask leaves of it."""

    row: int
    length: int
    low: int
    high: int
    position: int
    token: int


class BlockEntry(NamedTuple):
    """A row of `blocks`: the rows that a program owns; its first tile's `TileEntry` follows.

    Attributes:
        first: number of the first row in its span.
        tile, last_tile: the tiles tile … last_tile - 1 are those of which the rows see something;
            one that they do not see, if there is none.
    """

    row: int
    rows: int
    first: int
    tile: int
    last_tile: int
    flags: int
    position: int
    token: int
    stride: int


TILE_COLUMNS, BLOCK_COLUMNS = 8, 16  # 32 and 64 bytes
DOCUMENT = BLOCK_COLUMNS - 1  # the column of a block's document, for ALiBi
_LEVELLING = 0.5  # times the longest in it: work for each program that goes in order of length
_MUCH = 20  # a twentieth: asking costs 1 to 2 %, skipping saves less than half of a block


@dataclass(frozen=True, slots=True)
class Table:
    """What a launch reads.

    Attributes:
        blocks: (programs, BLOCK_COLUMNS) int32: `BlockEntry`, then `TileEntry` of its first tile;
            at `DOCUMENT` its document.
        tiles: (tiles, TILE_COLUMNS) int32: `TileEntry`.
        windowed: some tile's band starts inside: there is an edge on the left.
        short: some other side is shorter than a block.
        work: what programs do, most first: rows of the other side.
        longest, total: what the first program and all together do.
        halves: much of the work is in blocks that have no more than half of their rows.
        rows: of all blocks: those that tiles name.
        by_key: these are keys, and the other side is queries.
        parts: of groups of query heads, by what they depend on; see `scheduler.split`.
    """

    blocks: Tensor
    tiles: Tensor
    windowed: bool
    short: bool
    work: tuple[int, ...]
    longest: int
    total: int
    halves: bool
    rows: int
    by_key: bool
    parts: dict[tuple[int, ...], int] = field(default_factory=dict, compare=False)

    @property
    def level(self) -> bool:
        """Whether all programs have as much to do."""
        return self.longest * len(self.blocks) == self.total


_tables: DeviceCache[Table] = DeviceCache()  # 64 bytes for each block, so a few kilobytes as a rule


class LaunchSize(NamedTuple):
    """How large a launch is, in whole blocks, roughly; see `launch_size`.

    Attributes:
        items: blocks of rows.
        longest, total: rows times columns of one item, and of all.
    """

    items: int
    longest: float
    total: float

    def time(self, pairs: int, programs: int) -> float:
        """Of a launch for so many pairs of batch and head, where an entry takes 1."""
        if self.longest * self.items <= self.total:  # level: in waves
            return -(-self.items * pairs // programs) * self.longest
        return max(self.longest, self.total * pairs / programs)


def launch_size(tiles: Sequence[Tile], block: int, loop: int) -> LaunchSize:
    """Of a launch for queries, without its table."""
    items, total = 0, 0.0
    longest: dict[int, float] = {}
    for query, key, low, high, *_ in tiles:
        count = -(-query.length // block)
        most = min(key.length, query.length + high) - max(low, 0)
        most = -(-min(most, high - low + block) // loop)
        cut = (high < key.length - 1) + (low > 1 - query.length)
        mean = float(most)
        if cut:
            seen = band_pairs(query.length, key.length, low, high) / query.length
            mean = min(mean, (seen + cut * (block - 1) / 2) / loop + 0.5)
        if query.start not in longest:
            items += count
        longest[query.start] = longest.get(query.start, 0.0) + most * loop * block
        total += count * block * mean * loop
    return LaunchSize(items, max(longest.values()), total)


def table(
    tiles: Sequence[Tile],
    block: int,
    loop: int,
    by_key: bool,
    device: torch.device,
    programs: float = 0.0,
) -> Table:
    """The table of a launch.

    Args:
        tiles: plans hand out the same ones each time: their identity is the key.
        block: rows that a program owns.
        loop: rows of the other side that it takes at a time.
        by_key: programs own keys rather than queries.
        device: where the table is wanted.
        programs: how many run at a time for each pair of batch and head: if given, those of a
            document come one after another, see `_order`.
    """
    wanted = block, loop, by_key, programs
    return _tables.get(tiles, device, wanted, lambda: _build(tiles, *wanted, device))


def _build(
    tiles: Sequence[Tile],
    block: int,
    loop: int,
    by_key: bool,
    programs: float,
    device: torch.device,
) -> Table:
    groups: dict[int, list[tuple[Span, Span, int, int, int]]] = {}
    for tile in tiles:
        flags = FIRST * tile.first + LAST * tile.last
        if by_key:
            item = tile.key, tile.query, -tile.high, -tile.low, flags
        else:
            item = tile.query, tile.key, tile.low, tile.high, flags
        groups.setdefault(item[0].start, []).append(item)
    blocks: list[BlockEntry] = []
    documents: list[int] = []  # of the blocks
    others: list[TileEntry] = []
    work: list[int] = []
    for items in groups.values():
        own, flags = items[0][0], items[0][4]
        begin = len(others)
        for _, other, low, high, _ in items:
            span = other.start, other.length
            others.append(TileEntry(*span, low, high, other.position, other.index))
        for i in range(0, own.length, block):
            rows = min(block, own.length - i)
            position, token = own.position + i * own.stride, own.index + i * own.stride
            seen = [_columns(i, rows, item) for item in items]
            some = [begin + n for n, columns in enumerate(seen) if columns] or [begin]
            walk = some[0], some[-1] + 1
            place = position, token, own.stride
            blocks.append(BlockEntry(own.start + i, rows, i, *walk, flags, *place))
            documents.append(own.document)
            work.append(sum(seen))
    order = _order(work, documents, programs)
    in_halves = sum(n for entry, n in zip(blocks, work, strict=True) if 2 * entry.rows <= block)
    windowed = any(tile.low > 1 - tile.query.length for tile in tiles)
    return Table(
        _on(
            device,
            [(*blocks[n], *others[blocks[n].tile], documents[n]) for n in order],
            BLOCK_COLUMNS,
        ),
        _on(device, others, TILE_COLUMNS),
        windowed,
        any(other.length < loop for other in others),
        tuple(sorted(work, reverse=True)),
        max(work),
        sum(work),
        in_halves * _MUCH > sum(work),
        sum(entry.rows for entry in blocks),
        by_key,
    )


def _order(work: Sequence[int], documents: Sequence[int], programs: float) -> list[int]:
    """Of blocks: the longest first, so that all programs end together.

    That mixes documents. Programs that own keys read queries at the rate of the memory then, unless
    those that run at the same time read the same ones from the L2 cache. So documents come one
    after another, the longest first; but for the short ones at the end, as many as it takes for
    all programs to end together.
    """
    longest_first = sorted(range(len(work)), key=lambda n: -work[n])
    if not programs:
        return longest_first
    of_documents: dict[int, list[int]] = {}
    for n in longest_first:
        of_documents.setdefault(documents[n], []).append(n)
    apart, left, total = list(of_documents.values()), 0, 0
    while apart and total <= _LEVELLING * programs * left:
        last = apart.pop()
        left, total = work[last[0]], total + sum(work[n] for n in last)
    first = [n for blocks in apart for n in blocks]
    taken = set(first)
    return first + [n for n in longest_first if n not in taken]


def _columns(i: int, rows: int, item: tuple[Span, Span, int, int, int]) -> int:
    """How much of the other side the rows i … i+rows of a tile see."""
    _, other, low, high, _ = item
    return max(0, min(other.length, i + rows + high) - max(0, i + low))


def _on(device: torch.device, rows: Sequence[tuple[int, ...]], columns: int) -> Tensor:
    """The rows, as many columns wide."""
    filled = torch.tensor(rows, dtype=torch.int32, device="cpu")
    return to_device(torch.nn.functional.pad(filled, (0, columns - filled.shape[1])), device)
