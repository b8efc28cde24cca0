"""Tiles: pairs of a query span and a key span that the mask leaves something of, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .layout import Span

FAR = 1 << 62  # further than any position


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys a query sees: position − left … position + right, None meaning no limit.

    Causal attention is `right = 0`. The rule speaks of positions in the document alone, so it means
    the same in every layout.

    Args:
        left: how many earlier keys a query sees.
        right: how many later ones.
    """

    left: int | None = None
    right: int | None = None

    @classmethod
    def of(cls, causal: bool, window_size: tuple[int, int] = (-1, -1)) -> Mask:
        """The mask that flash-attn's arguments mean (−1: no limit; causal cuts the right side)."""
        left, right = (None if side < 0 else side for side in window_size)
        return cls(left, 0 if causal else right)

    def allows(self, distance: int) -> bool:
        """Whether a query sees the key at `distance` = key position − query position."""
        return (self.left is None or -self.left <= distance) and (
            self.right is None or distance <= self.right
        )


class Tile(NamedTuple):
    """Queries of one span against keys of one span of the same document.

    Both spans have the same stride, so the mask is a band in local row numbers: query i of the tile
    sees key j of the tile if and only if `low <= j - i <= high`.
    """

    query: Span
    key: Span
    low: int  # at least −(query.length − 1)
    high: int  # at most key.length − 1
    first: bool = False  # no earlier launch touches these queries: their state is still empty
    last: bool = False  # no later launch does: their output is final after this one

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs that the mask allows."""
        return band_pairs(self.query.length, self.key.length, self.low, self.high)


def make_tile(query: Span, key: Span, mask: Mask) -> Tile | None:
    """The tile of two spans, or None where the mask leaves nothing."""
    if query.document != key.document:
        return None
    low, high = band(query, key, mask)
    return Tile(query, key, low, high) if low <= high else None


def band(query: Span, key: Span, mask: Mask) -> tuple[int, int]:
    """`low` and `high` of two spans of one document; low > high where the mask leaves nothing."""
    assert query.stride == key.stride, "queries and keys share one layout"
    stride = query.stride
    distance = key.position - query.position  # between the two first tokens
    low, high = 1 - query.length, key.length - 1
    if mask.left is not None:
        edge = -((mask.left + distance) // stride)  # ceil((−left − distance) / stride)
        low = edge if edge > low else low
    if mask.right is not None:
        edge = (mask.right - distance) // stride
        high = edge if edge < high else high
    return low, high


Reach = list[tuple[int, int]]  # positions from the first to one past the last, in order


def reach(queries: Iterable[Span], mask: Mask) -> Reach:
    """Positions of keys that some of a document's queries see, of stride 1."""
    found: Reach = []
    for query in queries:
        assert query.stride == 1
        low = -FAR if mask.left is None else query.position - mask.left
        high = FAR if mask.right is None else query.position + query.length + mask.right
        found.append((low, high))
    return _union(found)


def seen_rows(queries: Iterable[Span], reach: Reach | None, key: Span, mask: Mask) -> Reach:
    """Rows of a key span that some query of its document sees, as ranges that do not touch.

    `reach` is that of the queries; None where strides are above 1.
    """
    start, length, position = key.start, key.length, key.position
    if reach is not None:
        if len(reach) == 1:  # mostly
            ((low, high),) = reach
            low, high = low - position, high - position
            low, high = low if low > 0 else 0, high if high < length else length
            return [(start + low, start + high)] if low < high else []
        cut = [(max(low - position, 0), min(high - position, length)) for low, high in reach]
        return [(start + low, start + high) for low, high in cut if low < high]
    found = []
    for query in queries:
        low, high = band(query, key, mask)
        if low <= high:  # then every row from the first to the last is seen
            high += query.length
            found.append((start + low if low > 0 else start, start + min(high, length)))
    return found if len(found) < 2 else _union(found)


def _union(ranges: Reach) -> Reach:
    """The same numbers, as ranges in order that do not touch."""
    if len(ranges) < 2:
        return ranges
    ranges.sort()
    found = ranges[:1]
    for start, end in ranges[1:]:
        if start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def make_tiles(queries: Iterable[Span], keys: Sequence[Span], mask: Mask) -> tuple[Tile, ...]:
    """All tiles between two shards, in the order of the query rows."""
    by_document: dict[int, list[Span]] = {}
    for key in keys:
        by_document.setdefault(key.document, []).append(key)
    left, right = mask.left, mask.right
    found: list[Tile] = []
    for query in queries:
        held = by_document.get(query.document)
        if held is None:
            continue
        lowest, stride, position = 1 - query.length, query.stride, query.position
        for key in held:  # as `make_tile` does: plans have very many tiles
            _, length, at, key_stride, _, _ = key
            assert stride == key_stride, "queries and keys share one layout"
            low, high, distance = lowest, length - 1, at - position
            if left is not None:
                edge = -((left + distance) // stride)
                low = edge if edge > low else low
            if right is not None:
                edge = (right - distance) // stride
                high = edge if edge < high else high
            if low <= high:
                found.append(tuple.__new__(Tile, (query, key, low, high, False, False)))
    return tuple(found)


def band_pairs(rows: int, columns: int, low: int, high: int) -> int:
    """Number of pairs (i, j) of rows × columns with low <= j − i <= high."""
    return _pairs_up_to(rows, columns, high) - _pairs_up_to(rows, columns, low - 1)


def _pairs_up_to(rows: int, columns: int, high: int) -> int:
    """Pairs with j − i <= high: the sum over rows i of min(max(i + high + 1, 0), columns)."""
    first = max(0, -high)  # first row that sees a key
    full = max(first, min(rows, columns - high - 1))  # first row that sees every key
    if first >= rows:
        return 0
    ramp = full - first  # rows that see first + high + 1, first + high + 2, … keys
    return ramp * (first + high + 1) + ramp * (ramp - 1) // 2 + (rows - full) * columns
