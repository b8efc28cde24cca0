"""Launch tables: a step's tiles as integers on the device, built once for each plan and kept.

A launch has one program for each block of rows (queries, or for dK and dV keys) and head. `blocks`
says which rows a program owns and which tiles to walk through; `tiles` says where the other side of
a tile lies and which band the mask leaves of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...layout import Span
from ...tiles import Tile

BLOCK_COLUMNS, TILE_COLUMNS = 12, 8
FIRST, LAST = 1, 2
_KEPT = 512  # tables; each is a few kilobytes


@dataclass(frozen=True, slots=True)
class Table:
    """What a launch reads.

    Attributes:
        blocks: (programs, 12) int32: row, rows, number of the first row in its span, first tile,
            one past the last tile, flags, position, token, stride.
        tiles: (tiles, 8) int32: row of the other side, its length, low, high, position, token.
        windowed: some tile's band starts inside: there is an edge on the left.
        full: every tile's queries see all of its keys.
        ragged: blocks of the other side may reach beyond its end.
        short: some other side is shorter than a block.
        carried: some queries have a state from earlier launches.
        level: all programs have as much to do.
        length: rows of the other sides, all together.
    """

    blocks: Tensor
    tiles: Tensor
    windowed: bool
    full: bool
    ragged: bool
    short: bool
    carried: bool
    level: bool
    length: int


_tables: OrderedDict[tuple[object, ...], tuple[Sequence[Tile], Table]]
_tables = OrderedDict()


def table(
    tiles: Sequence[Tile], block: int, loop: int, by_key: bool, device: torch.device
) -> Table:
    """The table of a launch.

    Args:
        tiles: plans hand out the same ones each time: their identity is the key.
        block: rows that a program owns.
        loop: rows of the other side that it takes at a time; divides `block`.
        by_key: programs own keys rather than queries.
        device: where the table is wanted.
    """
    key = (id(tiles), block, loop, by_key, device)
    found = _tables.get(key)
    if found is None:
        made = _build(tiles, block, loop, by_key, device)
        found = _tables[key] = tiles, made  # keeps the tiles, and so their id, alive
        if len(_tables) > _KEPT:
            _tables.popitem(last=False)
    else:
        _tables.move_to_end(key)
    return found[1]


def _build(
    tiles: Sequence[Tile], block: int, loop: int, by_key: bool, device: torch.device
) -> Table:
    groups: dict[int, list[tuple[Span, Span, int, int, int]]] = {}
    for tile in tiles:
        flags = FIRST * tile.first + LAST * tile.last
        if by_key:
            item = tile.key, tile.query, -tile.high, -tile.low, flags
        else:
            item = tile.query, tile.key, tile.low, tile.high, flags
        groups.setdefault(item[0].start, []).append(item)
    blocks: list[list[int]] = []
    others: list[list[int]] = []
    work: list[int] = []
    # Where loops over the other side begin and end, relative to the program's first row: blocks
    # that do not divide all of these may reach beyond its end.
    marks: set[int] = set()
    for items in groups.values():
        own, flags = items[0][0], items[0][4]
        begin = len(others)
        for _, other, low, high, _ in items:
            marks |= {other.length, *([low] if low > 1 - own.length else [])}
            others.append([other.start, other.length, low, high, other.position, other.index, 0, 0])
        for i in range(0, own.length, block):
            rows = min(block, own.length - i)
            position, token = own.position + i * own.stride, own.index + i * own.stride
            row = [own.start + i, rows, i, begin, len(others), flags, position, token, own.stride]
            blocks.append([*row, 0, 0, 0])
            work.append(sum(_columns(i, rows, item) for item in items))
    order = sorted(range(len(blocks)), key=lambda n: -work[n])  # the longest first
    windowed = any(tile.low > 1 - tile.query.length for tile in tiles)
    return Table(
        _on(device, [blocks[n] for n in order]),
        _on(device, others),
        windowed,
        all(tile.full for tile in tiles),
        any(mark % loop for mark in marks),
        any(other[1] < loop for other in others),
        not all(tile.first for tile in tiles),
        len(set(work)) == 1,
        sum(length for _, length in {(other[0], other[1]) for other in others}),
    )


def _columns(i: int, rows: int, item: tuple[Span, Span, int, int, int]) -> int:
    """How much of the other side the rows i … i+rows of a tile see."""
    _, other, low, high, _ = item
    return max(0, min(other.length, i + rows + high) - max(0, i + low))


def _on(device: torch.device, rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32).to(device)
