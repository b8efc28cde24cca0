"""Tiles: pairs of a query span and a key span that the mask leaves something of, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .layout import Span


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


@dataclass(frozen=True, slots=True)
class Tile:
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
    def seen(self) -> tuple[int, int]:
        """The first key row that some query sees, and one past the last."""
        start = self.key.start
        return (
            start + max(self.low, 0),
            start + min(self.high + self.query.length, self.key.length),
        )

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs that the mask allows."""
        return band_pairs(self.query.length, self.key.length, self.low, self.high)


def make_tile(query: Span, key: Span, mask: Mask) -> Tile | None:
    """The tile of two spans, or None where the mask leaves nothing."""
    if query.document != key.document:
        return None
    assert query.stride == key.stride, "queries and keys share one layout"
    stride = query.stride
    distance = key.position - query.position  # between the two first tokens
    low, high = 1 - query.length, key.length - 1
    if mask.left is not None:
        low = max(low, -((mask.left + distance) // stride))  # ceil((−left − distance) / stride)
    if mask.right is not None:
        high = min(high, (mask.right - distance) // stride)
    return Tile(query, key, low, high) if low <= high else None


def make_tiles(queries: Iterable[Span], keys: Sequence[Span], mask: Mask) -> tuple[Tile, ...]:
    """All tiles between two shards, in the order of the query rows."""
    by_document: dict[int, list[Span]] = {}
    for key in keys:
        by_document.setdefault(key.document, []).append(key)
    found = (
        make_tile(query, key, mask)
        for query in queries
        for key in by_document.get(query.document, ())
    )
    return tuple(tile for tile in found if tile is not None)


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
