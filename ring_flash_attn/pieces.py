"""Pieces: where the rows of several shards lie in one buffer, as plain data.

The buffer of one shard holds its rows as they are. A buffer of several holds them by document and
position, so that what a query sees of all of them lies together:

    zigzag, ranks 0 and 1 of 3      shard of 0: chunks 0, 5      shard of 1: chunks 1, 4
    in one buffer                   chunks 0, 1, 4, 5            two pieces of each shard

A piece is what of a shard lies together in every such buffer, whoever else is in it. So all ranks
cut a shard into the same pieces, and can send them one by one: those that the other one needs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from .layout import Span

MOST_PIECES = 4  # of a shard; each is a message for each tensor, which costs the host its time


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """Rows `start … start+length` of a shard; the order of pieces is that of a buffer.

    Attributes:
        document, position: of the first token.
        owner: whose shard.
        start: first row in the shard.
        length: number of rows, at least 1.
    """

    document: int
    position: int
    owner: int
    start: int
    length: int


def cut(shards: Sequence[Sequence[Span]]) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of every rank's shard, in the order of its rows.

    Spans that follow each other in the order of all ranks' spans are one piece. If some shard then
    has more than `MOST_PIECES`, every shard is one.
    """
    keys = sorted(
        (span.document, span.position, owner)
        for owner, spans in enumerate(shards)
        for span in spans
    )
    place = {key: number for number, key in enumerate(keys)}
    pieces = []
    for owner, spans in enumerate(shards):
        places = [place[span.document, span.position, owner] for span in spans]
        pieces.append(_pieces(owner, spans, [b - a != 1 for a, b in pairwise(places)]))
    if max(map(len, pieces), default=0) > MOST_PIECES:
        pieces = [_pieces(owner, s, [False] * (len(s) - 1)) for owner, s in enumerate(shards)]
    return tuple(pieces)


def _pieces(owner: int, spans: Sequence[Span], borders: Sequence[bool]) -> tuple[Piece, ...]:
    """The pieces of a shard; `borders` says between which spans it is cut."""
    found: list[Piece] = []
    for span, new in zip(spans, [True, *borders], strict=False):
        if new:
            found.append(Piece(span.document, span.position, owner, span.start, span.length))
        else:
            found[-1] = replace(found[-1], length=found[-1].length + span.length)
    return tuple(found)


def arrange(shards: Sequence[Sequence[Piece]]) -> dict[Piece, int]:
    """The first row of each piece in a buffer of some shards, given by their pieces."""
    if len(shards) == 1:
        return {piece: piece.start for piece in shards[0]}
    pieces = sorted(piece for shard in shards for piece in shard)
    return dict(zip(pieces, accumulate((p.length for p in pieces), initial=0), strict=False))


def within(spans: Sequence[Span], piece: Piece) -> Sequence[Span]:
    """Those spans of a shard that are in a piece of it."""
    first, end = (
        bisect_left(spans, row, key=lambda span: span.start)
        for row in (piece.start, piece.start + piece.length)
    )
    return spans[first:end]


def lay(shards: Sequence[tuple[Sequence[Span], Sequence[Piece]]]) -> list[Span]:
    """Spans of several shards as they lie in one buffer, in the order of its rows.

    Where one goes on with the tokens that follow those of the one before, the two become one.

    Args:
        shards: the spans of each, and those of its pieces that are in the buffer.
    """
    rows = arrange([pieces for _, pieces in shards])
    moved = [
        span.moved(rows[piece] - piece.start)
        for spans, pieces in shards
        for piece in pieces
        for span in within(spans, piece)
    ]
    return _joined(sorted(moved, key=lambda span: span.start))


def _joined(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    for span in spans:
        if found and _goes_on(found[-1], span):
            found[-1] = replace(found[-1], length=found[-1].length + span.length)
        else:
            found.append(span)
    return found


def _goes_on(span: Span, after: Span) -> bool:
    """Whether `after` is what `span` would hold if it were longer."""
    if (span.document, span.stride) != (after.document, after.stride):
        return False
    start = span.start + span.length
    tokens = span.stride * span.length
    return (start, span.position + tokens, span.index + tokens) == (
        after.start,
        after.position,
        after.index,
    )
