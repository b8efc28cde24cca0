"""Pieces: where the rows of several shards lie in one buffer, as plain data.

A buffer of several shards holds their rows by document and position, so that what a query sees of
all of them lies together. A piece is what of a shard lies together in every such buffer, whoever
else is in it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from .layout import Span

MOST_PIECES = 4  # of a shard; each is a message for each tensor, which costs the host its time


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """Rows `start … start+length` of a shard; the order of pieces is that of a buffer."""

    document: int  # of the first token, as is its position
    position: int
    owner: int
    start: int
    length: int


def cut(shards: Sequence[Sequence[Span]]) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of every rank's shard, in the order of its rows.

    Spans that follow each other in the order of all ranks' spans are one piece. A shard with more
    than `MOST_PIECES` is cut only within the largest documents of which it has several spans.
    """
    keys = sorted(
        (span.document, span.position, owner)
        for owner, spans in enumerate(shards)
        for span in spans
    )
    place = {key: number for number, key in enumerate(keys)}
    found = []
    for owner, spans in enumerate(shards):
        places = [place[span.document, span.position, owner] for span in spans]
        firsts = [number + 1 for number, (a, b) in enumerate(pairwise(places)) if b - a != 1]
        if len(firsts) >= MOST_PIECES:
            inside = [n for n in firsts if spans[n].document == spans[n - 1].document]
            inside.sort(key=lambda n: spans[n - 1].length + spans[n].length, reverse=True)
            firsts = sorted(inside[: MOST_PIECES - 1])
        pieces = []
        for first, end in pairwise([0, *firsts, len(spans)] if spans else []):
            span, last = spans[first], spans[end - 1]
            length = last.start + last.length - span.start
            pieces.append(Piece(span.document, span.position, owner, span.start, length))
        found.append(tuple(pieces))
    return tuple(found)


def arrange(shards: Iterable[Iterable[Piece]]) -> dict[Piece, int]:
    """The first row of each piece in a buffer of some shards, given by their pieces."""
    pieces = sorted(piece for shard in shards for piece in shard)
    return dict(zip(pieces, accumulate((p.length for p in pieces), initial=0), strict=False))


def within(spans: Sequence[Span], piece: Piece) -> list[Span]:
    """What of a shard's spans is in a piece of it."""
    end = piece.start + piece.length
    first = bisect_right(spans, piece.start, key=lambda span: span.start + span.length)
    last = bisect_left(spans, end, key=lambda span: span.start)
    found = list(spans[first:last])
    for at in (0, -1) if found else ():
        found[at] = found[at].part(piece.start, end)
    return found


def lay(shards: Sequence[tuple[Sequence[Span], Sequence[Piece]]]) -> list[Span]:
    """Spans of several shards as they lie in one buffer, in the order of its rows.

    Where one goes on with the tokens that follow those of the one before, the two become one. Of
    each shard come its spans, and those of its pieces that are in the buffer.
    """
    rows = arrange([pieces for _, pieces in shards])
    moved = [
        span.moved(rows[piece] - piece.start)
        for spans, pieces in shards
        for piece in pieces
        for span in within(spans, piece)
    ]
    found: list[Span] = []
    for span in sorted(moved, key=lambda span: span.start):
        if found and found[-1].document == span.document:
            both = replace(found[-1], length=found[-1].length + span.length)
            if both.part(span.start, span.start + span.length) == span:
                found[-1] = both
                continue
        found.append(span)
    return found
