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

from ..plan.arrays import (
    Array,
    argsort,
    before,
    cat,
    counted,
    doubles,
    filled,
    least_of_each,
    maximum,
    minimum,
    most_of_each,
    stack,
    sum_of_each,
    to_tensor,
    unique,
    where,
)
from ..plan.columns import breaks, ends_of, ranges
from ..plan.tiles import Tile, Tiles
from .device_cache import DeviceCache, to_device

FIRST, LAST, MORE = 1, 2, 8  # flags of a block; MORE: of its keys, another block takes the next
PIECE = 16  # times how many blocks have taken keys of the same rows before, in the same launch


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
        masked: in some tile, not all rows see all of the other side.
        short: some other side is shorter than a block.
        work: what programs do, most first: rows of the other side.
        longest, total: what the first program and all together do.
        halves: much of the work is in blocks that have no more than half of their rows.
        rows: of all blocks: those that tiles name.
        by_key: these are keys, and the other side is queries.
        pieces: most blocks that take keys of the same rows, one after another.
        parts: of groups of query heads, by what they depend on; see `scheduler.split`.
    """

    blocks: Tensor
    tiles: Tensor
    windowed: bool
    masked: bool
    short: bool
    work: tuple[int, ...]
    longest: int
    total: int
    halves: bool
    rows: int
    by_key: bool
    pieces: int
    parts: dict[tuple[int, ...], int] = field(default_factory=dict, compare=False)

    @property
    def level(self) -> bool:
        """Whether all programs have as much to do."""
        return self.longest * len(self.blocks) == self.total


_tables: DeviceCache[Table] = DeviceCache()  # 64 bytes for each block, so a few kilobytes as a rule


class Pieces(NamedTuple):
    """How some blocks of queries are cut by their keys, so that programs end together.

    Attributes:
        number: of pieces of the longest block.
        blocks: so many are cut, the longest.
    """

    number: int = 1
    blocks: int = 0


WHOLE = Pieces()


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
    known = Tiles.of(tiles)
    start, rows, *_ = known.query
    length, low, high = known.key[1], known.low, known.high
    blocks = (rows + block - 1) // block
    most = minimum(length, rows + high) - low.clip(min=0)
    most = (minimum(most, high - low + block) + loop - 1) // loop
    cut = (high < length - 1) * 1 + (low > 1 - rows)
    seen = doubles(known.pairs) / rows
    mean = where(cut > 0, minimum(doubles(most), (seen + cut * (block - 1) / 2) / loop + 0.5), most)
    spans, which = unique(start)
    items = most_of_each(which, blocks, len(spans), 0).sum()
    longest = sum_of_each(which, most, len(spans)).max()
    total = (blocks * mean).sum() * block * loop
    return LaunchSize(int(items), float(longest) * loop * block, float(total))


def padded_pairs(tiles: Sequence[Tile], block: int) -> float:
    """Pairs of a query and a key if queries were padded to whole blocks, each with as many keys."""
    known = Tiles.of(tiles)
    rows = known.query[1]
    return float((doubles(known.pairs) * ((rows + block - 1) // block * block) / rows).sum())


def table(
    tiles: Sequence[Tile],
    block: int,
    loop: int,
    by_key: bool,
    device: torch.device,
    programs: float = 0.0,
    pieces: Pieces = WHOLE,
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
        pieces: those of keys that come one after another.
    """
    wanted = block, loop, by_key, programs, pieces
    return _tables.get(tiles, device, wanted, lambda: _build(tiles, *wanted, device))


def _build(
    tiles: Sequence[Tile],
    block: int,
    loop: int,
    by_key: bool,
    programs: float,
    pieces: Pieces,
    device: torch.device,
) -> Table:
    known = Tiles.of(tiles)
    flags, rounds = FIRST * known.first + LAST * known.last, filled(len(known), 0)
    if pieces.blocks:
        known, flags, rounds = _in_pieces(known, pieces, block, loop)
    own, other, low, high = known.query, known.key, known.low, known.high
    windowed = bool((low > 1 - own[1]).any())
    masked = windowed or bool((high < other[1] - 1).any())
    if by_key:
        own, other, low, high = other, own, -high, -low
    # Tiles of the same rows lie together, in the order in which these are named first.
    of_rows = own[0] * (2 + pieces.number) + rounds
    spans, which = unique(of_rows)
    named = least_of_each(which, counted(len(which)), len(spans), len(which))[which]
    together = argsort(named)
    own, other, flags = own[:, together], other[:, together], flags[together]
    low, high, of_rows, rounds = (x[together] for x in (low, high, of_rows, rounds))
    begins = breaks(of_rows[1:] != of_rows[:-1])  # of the tiles of each span
    counts = ends_of(begins, len(which)) - begins
    entries = stack([other[0], other[1], low, high, other[2], other[5]])  # `TileEntry`
    start, length, position, stride, document, token = own[:, begins]
    span, number = ranges(filled(len(begins), 0), (length + block - 1) // block)
    first = number * block
    rows = minimum(length[span] - first, filled(1, block))
    # Of all pairs of a block and a tile of its span, how much of the other side the rows see.
    of, tile = ranges(begins[span], counts[span])
    end = minimum(other[1, tile], (first + rows)[of] + high[tile])
    columns = (end - (first[of] + low[tile]).clip(min=0)).clip(min=0)
    work = sum_of_each(of, columns, len(span))
    some = columns > 0
    walk = least_of_each(of[some], tile[some], len(span), len(which))
    walk = where(work > 0, walk, begins[span])
    last = maximum(most_of_each(of[some], tile[some], len(span), -1), walk)
    away = first * stride[span]
    blocks = [start[span] + first, rows, first, walk, last + 1, flags[begins][span]]
    blocks += [position[span] + away, token[span] + away, stride[span]]  # `BlockEntry`
    blocks += [*entries[:, walk], document[span]]
    order = _order(work, document[span], programs)
    order = order[argsort(rounds[begins][span[order]])]
    most_first = sorted(work.tolist(), reverse=True)
    total = sum(most_first)
    return Table(
        _on(device, stack(blocks)[:, order], BLOCK_COLUMNS),
        _on(device, entries, TILE_COLUMNS),
        windowed,
        masked,
        bool((other[1] < loop).any()),
        tuple(most_first),
        most_first[0],
        total,
        int(work[2 * rows <= block].sum()) * _MUCH > total,
        int(rows.sum()),
        by_key,
        int((flags // PIECE).max()) + 1,
    )


def _in_pieces(known: Tiles, pieces: Pieces, block: int, loop: int) -> tuple[Tiles, Array, Array]:
    """Tiles that are cut, in whole blocks of keys; their flags; and the round of each.

    Blocks of a round come before those of the next one: what is long and whole, then piece after
    piece, so that a piece is done, as a rule, when the turn of the next one comes; with the last
    pieces comes what is short. Only rows that see all keys of their tiles are cut.
    """
    spans, which = unique(known.query[0])
    order = argsort(which)
    which, columns = which[order], known.columns[:, order]
    count = len(spans)
    whole = (columns[12] <= 1 - columns[1]) & (columns[13] >= columns[7] - 1)
    keys = sum_of_each(which, columns[7], count)
    longest = int(keys.max())
    keys = where(least_of_each(which, whole * 1, count, 1) > 0, keys, 0)

    # The last rows of a span are cut, as many blocks as are wanted of it.
    rows = most_of_each(which, columns[1], count, 0)
    blocks, most_first = (rows + block - 1) // block, argsort(-keys)
    wanted = filled(count, 0)
    wanted[most_first] = (pieces.blocks - before(blocks[most_first])).clip(min=0)
    uncut = where(keys > 0, (blocks - wanted).clip(min=0) * block, rows)
    uncut = minimum(uncut, rows)[which]
    above, below = uncut > 0, uncut < columns[1]
    tops, bottoms = columns[:, above] + 0, columns[:, below] + 0
    tops[1] = uncut[above]
    _skip_rows(bottoms, uncut[below])
    parts = cat([tops, bottoms], 1)
    of_span = cat([which[above], which[below] + count])  # of those that are cut: from `count` on

    # Their keys are cut where a piece ends, in the order of the tiles.
    length, keys = parts[7], cat([keys, keys])
    size = -(-longest // (pieces.number * loop)) * loop  # of a piece of the longest
    number = (keys + size - 1) // size
    number[:count] = 1
    each = ((keys + number.clip(min=1) * loop - 1) // (number.clip(min=1) * loop) * loop).clip(
        min=1
    )
    totals = sum_of_each(of_span, length, 2 * count)
    begin = before(length) - before(totals)[of_span]
    each = where(number > 1, each, totals.clip(min=1))[of_span]
    first = begin // each
    of, piece = ranges(first, (begin + length - 1) // each - first + 1)

    def cut(piece: Array) -> Array:
        at = ((piece * each[of] - begin[of] + loop - 1) // loop * loop).clip(min=0)
        return minimum(at, length[of])

    start, end = cut(piece), cut(piece + 1)
    some = start < end
    of, piece, start, end = of[some], piece[some], start[some], end[some]
    parts, of_span = parts[:, of] + 0, of_span[of]
    _skip_keys(parts, start, end - start)
    last = most_of_each(of_span, piece, 2 * count, 0)[of_span]
    flags = FIRST * parts[14] * (piece == 0) + LAST * parts[15] * (piece == last)
    flags = flags + MORE * (piece < last) + PIECE * piece
    is_long = (of_span < count) & (totals[of_span] > size)
    rounds = where(is_long, 0, pieces.number - last + piece)
    return Tiles(parts), flags, rounds


def _skip_rows(columns: Array, rows: Array) -> None:
    """Leave the first queries of each tile out."""
    columns[0], columns[1] = columns[0] + rows, columns[1] - rows
    columns[2], columns[5] = columns[2] + rows * columns[3], columns[5] + rows * columns[3]
    columns[12] = maximum(columns[12] + rows, 1 - columns[1])
    columns[13] = minimum(columns[13] + rows, columns[7] - 1)


def _skip_keys(columns: Array, keys: Array, length: Array) -> None:
    """Leave the first keys of each tile out, and all behind so many others."""
    columns[6], columns[7] = columns[6] + keys, length
    columns[8], columns[11] = columns[8] + keys * columns[9], columns[11] + keys * columns[9]
    columns[12] = maximum(columns[12] - keys, 1 - columns[1])
    columns[13] = minimum(columns[13] - keys, length - 1)


def _order(work: Array, documents: Array, programs: float) -> Array:
    """Of blocks: the longest first, so that all programs end together.

    That mixes documents. Programs that own keys read queries at the rate of the memory then, unless
    those that run at the same time read the same ones from the L2 cache. So documents come one
    after another, the longest first; but for the short ones at the end, as many as it takes for
    all programs to end together.
    """
    longest_first = argsort(-work)
    if not programs:
        return longest_first
    work, documents = work[longest_first], documents[longest_first]
    found, which = unique(documents)
    named = least_of_each(which, counted(len(work)), len(found), len(work))
    in_order = argsort(named)
    sums = sum_of_each(which, work, len(found))[in_order]
    apart = list(zip(work[named[in_order]].tolist(), sums.tolist(), strict=True))
    left = total = 0
    while apart and total <= _LEVELLING * programs * left:
        left, size = apart.pop()
        total += size
    turn = filled(len(found), 0)
    turn[in_order] = counted(len(found))
    return longest_first[argsort(turn[which].clip(max=len(apart)))]  # the rest by length


def _on(device: torch.device, entries: Array, columns: int) -> Tensor:
    """Entries, by columns, as rows that are so many columns wide."""
    numbers = to_tensor(entries).T.to(torch.int32)
    return to_device(torch.nn.functional.pad(numbers, (0, columns - len(entries))), device)
