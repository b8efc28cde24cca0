"""Lowering: a launch's tiles as the few calls that a FlashAttention library understands.

A library takes whole blocks of queries and keys, all keys or all up to a diagonal that ends in the
last corner (causal), or a window beside it; and several such blocks at once if they lie one after
the other in both buffers (packed documents). So tiles that together are one band are joined, what
nobody sees is cut off, and what is left is sorted into calls.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ...plan.tiles import Tile, band_pairs
from ..base import BLOCK, FIRST, LAST, Rows


@dataclass(frozen=True, slots=True)
class Rect:
    """Rows q … q_end of the query buffer against rows k … k_end of the key buffer, in a band.

    Row i of the one buffer sees row j of the other if and only if low <= j − i <= high.
    """

    q: int
    q_end: int
    k: int
    k_end: int
    low: int
    high: int

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs."""
        shift = self.q - self.k
        rows, columns = self.q_end - self.q, self.k_end - self.k
        return band_pairs(rows, columns, self.low + shift, self.high + shift)

    @property
    def window(self) -> tuple[int, int]:
        """flash-attn's window_size: what a query sees left and right of the diagonal; −1: all.

        The diagonal is the one that ends in the last corner. (0 right, −1 left is causal.)
        """
        diagonal = self.k_end - self.q_end
        left = -1 if self.low <= self.k - (self.q_end - 1) else diagonal - self.low
        right = -1 if self.high >= self.k_end - 1 - self.q else self.high - diagonal
        return left, right


@dataclass(frozen=True, slots=True)
class LibraryCall:
    """Blocks that lie one after the other in both buffers, with one window; see `Rect.window`."""

    rects: tuple[Rect, ...]
    window: tuple[int, int]
    rows: tuple[Rows, ...]

    @property
    def query_rows(self) -> tuple[int, int]:
        """From the first row of a query to the last."""
        return self.rects[0].q, self.rects[-1].q_end

    @property
    def key_rows(self) -> tuple[int, int]:
        """From the first row of a key to the last."""
        return self.rects[0].k, self.rects[-1].k_end


def lower(tiles: Sequence[Tile], packs: bool, square: bool) -> tuple[LibraryCall, ...]:
    """The calls that do the work of `tiles`.

    Args:
        tiles: of one launch.
        packs: the library takes several blocks at once.
        square: its causal form wants as many keys as queries.
    """
    rects = [part for rect in _joined(tiles) for part in _with_plain_edges(_trimmed(rect))]
    if square:
        rects = [part for rect in rects for part in _squared(rect)]
    groups = _packed(sorted(rects, key=lambda rect: (rect.q, rect.k)), packs)
    rows = _row_bits(tiles, groups)
    return tuple(
        LibraryCall(tuple(group), group[0].window, bits)
        for group, bits in zip(groups, rows, strict=True)
    )


def in_order(tiles: Sequence[Tile]) -> tuple[list[Tile], list[tuple[int, int]]]:
    """The tiles as if the keys that they see lay by document and position; and (start, end) of
    the rows to gather for that."""
    spans = {tile.key.start: tile.key for tile in tiles}
    rows, moved, end = [], {}, 0
    for span in sorted(spans.values(), key=lambda span: (span.document, span.position)):
        moved[span.start] = span.moved(end - span.start)
        rows.append((span.start, span.start + span.length))
        end += span.length
    return [tile._replace(key=moved[tile.key.start]) for tile in tiles], rows


def _joined(tiles: Sequence[Tile]) -> Iterator[Rect]:
    """As few rectangles as we find, document by document."""
    documents: dict[int, dict[int, list[Rect]]] = {}
    for tile in tiles:
        shift = tile.key.start - tile.query.start
        rect = Rect(
            tile.query.start,
            tile.query.start + tile.query.length,
            tile.key.start,
            tile.key.start + tile.key.length,
            tile.low + shift,
            tile.high + shift,
        )
        documents.setdefault(tile.query.document, {}).setdefault(rect.q, []).append(rect)
    for spans in documents.values():
        everything = _union([rect for rects in spans.values() for rect in rects])
        if everything is not None:
            yield everything
        else:
            by_span = [_merge_neighbours(sorted(r, key=lambda x: x.k)) for r in spans.values()]
            single = [rects[0] for rects in by_span if len(rects) == 1]
            yield from _merge_neighbours(sorted(single, key=lambda x: x.q))
            yield from (rect for rects in by_span if len(rects) > 1 for rect in rects)


def _merge_neighbours(rects: Iterable[Rect]) -> list[Rect]:
    """Each joined with the one before it, where the two are one band."""
    found: list[Rect] = []
    for rect in rects:
        joined = _union([found[-1], rect]) if found else None
        if joined is None:
            found.append(rect)
        else:
            found[-1] = joined
    return found


def _union(rects: Sequence[Rect]) -> Rect | None:
    """The band in one rectangle that has exactly the pairs of all of these, if there is one."""
    around = Rect(
        min(rect.q for rect in rects),
        max(rect.q_end for rect in rects),
        min(rect.k for rect in rects),
        max(rect.k_end for rect in rects),
        min(rect.low for rect in rects),
        max(rect.high for rect in rects),
    )
    # It has all of their pairs, and they share none: as many means the same ones.
    return around if around.pairs == sum(rect.pairs for rect in rects) else None


def _trimmed(rect: Rect) -> Rect:
    """Without the rows and columns in which nothing is seen."""
    q = max(rect.q, rect.k - rect.high)
    q_end = min(rect.q_end, rect.k_end - rect.low)
    k = max(rect.k, q + rect.low)
    k_end = min(rect.k_end, q_end + rect.high)
    return Rect(q, q_end, k, k_end, rect.low, rect.high)


def _with_plain_edges(rect: Rect) -> list[Rect]:
    """Parts whose right edge is the diagonal or none, and without an idle left edge.

    FlashAttention-2 takes a window to the right for none where it is longer than the keys, and none
    for one of that length. With more queries than keys that is wrong, so it never gets to see one:
    rows below the diagonal's end, which see the last key, come apart from those above it; and of
    these rows those that see every key from those that do not.
    """
    parts = [rect]
    if rect.window[1] > 0:
        below = rect.k_end - rect.high  # the first row after the diagonal has met the last key
        parts = [replace(rect, q_end=below), replace(rect, q=below)]
    found = []
    for part in map(_trimmed, parts):
        above = part.k - part.low + 1  # the first row that does not see the first key
        if part.window[0] >= 0 and part.window[1] < 0 and above > part.q:
            found += [replace(part, q_end=above), _trimmed(replace(part, q=above))]
        else:
            found.append(part)
    return found


def _squared(rect: Rect) -> list[Rect]:
    """What is left of a causal part's square, and the square."""
    edge = rect.k_end - (rect.q_end - rect.q)
    if rect.window != (-1, 0) or edge == rect.k:
        return [rect]
    return [replace(rect, k_end=edge), replace(rect, k=edge)]


def _packed(rects: Sequence[Rect], packs: bool) -> list[list[Rect]]:
    """Calls: rectangles of one window, each behind the one before it in both buffers."""
    calls: list[list[Rect]] = []
    for rect in rects:
        for call in calls if packs else []:
            last = call[-1]
            if last.q_end <= rect.q and last.k_end <= rect.k and last.window == rect.window:
                call.append(rect)
                break
        else:
            calls.append([rect])
    return calls


def _row_bits(tiles: Sequence[Tile], calls: Sequence[Sequence[Rect]]) -> list[tuple[Rows, ...]]:
    """For each call its rows, and those that no call has a result for with the first one."""
    spans = {tile.query.start: tile for tile in tiles}
    borders = {start + tile.query.length for start, tile in spans.items()} | {*spans}
    borders |= {border for call in calls for rect in call for border in (rect.q, rect.q_end)}
    edges, starts = sorted(borders), [[rect.q for rect in call] for call in calls]
    found: list[list[Rows]] = [[] for _ in calls]
    for begin in sorted(spans):
        tile = spans[begin]
        at = bisect_left(edges, begin), bisect_left(edges, begin + tile.query.length)
        for start, end in pairwise(edges[at[0] : at[1] + 1]):
            having = [
                number
                for number, call in enumerate(calls)
                if _has_row(call, bisect_right(starts[number], start) - 1, start)
            ]
            touching = having or [0]
            for number in touching:
                first = tile.first and number == touching[0]
                last = tile.last and number == touching[-1]
                bits = FIRST * first + LAST * last + BLOCK * bool(having)
                if bits:
                    _add_rows(found[number], Rows(start, end, bits))
    return [tuple(rows) for rows in found]


def _has_row(call: Sequence[Rect], number: int, row: int) -> bool:
    """Whether the rectangle before which no other could have the row does have it."""
    return number >= 0 and row < call[number].q_end


def _add_rows(found: list[Rows], rows: Rows) -> None:
    """Append, or extend the last ones if they are neighbours with the same bits."""
    if found and found[-1].end == rows.start and found[-1].bits == rows.bits:
        found[-1] = replace(found[-1], end=rows.end)
    else:
        found.append(rows)
