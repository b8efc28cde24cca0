"""Tiles: pairs of a query span and a key span that the mask leaves something of, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .arrays import Array, filled, maximum, minimum, vector, where
from .columns import DOCUMENT, LENGTH, Columns, LazySequence, pairs, to_columns
from .layout import Span

FAR = 1 << 62  # further than any position


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys a query sees: position − left … position + right, None meaning no limit.

    Causal attention is `right = 0`. The rule speaks of positions in the document alone, so it means
    the same in every layout.

    Args:
        left: how many earlier keys a query sees.
        right: how many later ones. Of both, more than any position is no limit.
    """

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            if (getattr(self, name) or 0) >= FAR:  # beyond it, int64 would overflow
                object.__setattr__(self, name, None)

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


class Tiles(LazySequence[Tile]):
    """The tiles of a launch, in the order of the query rows.

    Attributes:
        columns: (16, tiles) int64: the fields of the query's span, those of the key's, then low,
            high, first and last.
    """

    __slots__ = ("columns",)

    def __init__(self, columns: Array) -> None:
        super().__init__()
        self.columns = columns

    @classmethod
    def of(cls, tiles: Sequence[Tile]) -> Tiles:
        """The same ones; what is made once is found by its identity."""
        if isinstance(tiles, cls):
            return tiles
        fields = vector(x for query, key, *band in tiles for x in (*query, *key, *band))
        return cls(fields.reshape(-1, 16).T)

    @property
    def query(self) -> Array:
        """The fields of the queries' spans."""
        return self.columns[:6]

    @property
    def key(self) -> Array:
        return self.columns[6:12]

    @property
    def low(self) -> Array:
        return self.columns[12]

    @property
    def high(self) -> Array:
        return self.columns[13]

    @property
    def first(self) -> Array:
        return self.columns[14]

    @property
    def last(self) -> Array:
        return self.columns[15]

    @property
    def pairs(self) -> Array:
        """Of each tile, the number of (query, key) pairs that the mask allows."""
        rows, columns = self.query[1], self.key[1]
        before = _all_pairs_up_to(rows, columns, self.low - 1)
        return _all_pairs_up_to(rows, columns, self.high) - before

    def marked(self, first: Array | bool, last: Array | bool) -> Tiles:
        """The same tiles, which know whether they are the first and the last of their queries."""
        columns = self.columns + 0
        columns[14], columns[15] = first, last
        return Tiles(columns)

    def _make(self) -> tuple[Tile, ...]:
        query, key = (
            map(Span._make, zip(*x.tolist(), strict=True)) for x in (self.query, self.key)
        )
        low, high, first, last = self.columns[12:].tolist()
        return tuple(map(Tile, query, key, low, high, map(bool, first), map(bool, last)))

    def __len__(self) -> int:
        return self.columns.shape[1]


def seen_rows(queries: Columns, keys: Columns, mask: Mask) -> tuple[Array, Array]:
    """Of pairs of spans of a document, the rows of the keys that some query sees: from, to.

    Nothing is seen where that is not above the first.
    """
    low, high = _bands(queries[1:], keys[1:], mask)
    end = minimum(high + queries[LENGTH], keys[LENGTH])
    return low.clip(min=0), where(low <= high, end, 0)


def _bands(query: Array, key: Array, mask: Mask) -> tuple[Array, Array]:
    """As `band`, of many pairs of spans."""
    _, rows, at, stride, _, _ = query
    _, length, position, strides, _, _ = key
    assert (stride == strides).all(), "queries and keys share one layout"
    low, high, distance = 1 - rows, length - 1, position - at
    if mask.left is not None:
        low = maximum(low, -((distance + mask.left) // stride))
    if mask.right is not None:
        high = minimum(high, (mask.right - distance) // stride)
    return low, high


def make_tiles(queries: Iterable[Span], keys: Iterable[Span], mask: Mask) -> Tiles:
    """All tiles between two shards, in the order of the query rows."""
    return tiles_between(to_columns([(0, tuple(queries))]), to_columns([(0, tuple(keys))]), mask)


def tiles_between(queries: Columns, keys: Columns, mask: Mask) -> Tiles:
    """The same, of columns."""
    documents = queries[DOCUMENT], keys[DOCUMENT]
    count = 1 + max((int(each.max()) for each in documents if len(each)), default=0)
    query, key = pairs(*documents, count)
    columns = filled((16, len(query)), 0)
    columns[:6], columns[6:12] = queries[1:, query], keys[1:, key]
    columns[12], columns[13] = _bands(columns[:6], columns[6:12], mask)
    return Tiles(columns[:, columns[12] <= columns[13]])


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


def _all_pairs_up_to(rows: Array, columns: Array, high: Array) -> Array:
    """As `_pairs_up_to`, of many."""
    first = (-high).clip(min=0)
    full = maximum(first, minimum(rows, columns - high - 1))
    ramp = full - first
    found = ramp * (first + high + 1) + ramp * (ramp - 1) // 2 + (rows - full) * columns
    return where(first < rows, found, 0)
