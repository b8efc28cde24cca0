"""Relayouts: which rows go from which rank to which, between two layouts, as plain data."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter

from .layout import Span
from .problem import Problem
from .rows import Packing, Rows, join
from .steps import Side


@dataclass(frozen=True, slots=True)
class Relayout:
    """What one rank does: one message for each peer that it shares rows with, and a local copy.

    Attributes:
        rank: whose part.
        sends: rows of the shard in the old layout that go to others.
        receives: rows of the shard in the new layout that come from others.
        stays: rows of the old shard that stay.
        stay_at: the same rows in the new shard.
    """

    rank: int
    sends: Packing
    receives: Packing
    stays: Packing
    stay_at: Packing

    @property
    def size_before(self) -> int:
        """Rows of the shard in the old layout."""
        return self.sends.total + self.stays.total

    @property
    def size_after(self) -> int:
        """Rows of the shard in the new layout."""
        return self.receives.total + self.stays.total

    @property
    def has_messages(self) -> bool:
        """Whether the rank sends or receives anything."""
        return bool(self.sends.counts or self.receives.counts)

    def reversed(self) -> Relayout:
        """The way back."""
        return Relayout(self.rank, self.receives, self.sends, self.stay_at, self.stays)


def make_relayout(before: Problem, after: Problem, rank: int) -> Relayout:
    """What `rank` does to bring its rows from the layout of one problem to that of another.

    Both have the same documents and world size. Rows between two ranks travel in the order of their
    tokens, so both ends know it.
    """
    assert before.lengths_k == after.lengths_k, "both layouts are of the same documents"
    assert before.world_size == after.world_size
    old, new = (
        [problem.spans(Side.KEY, each) for each in range(problem.world_size)]
        for problem in (before, after)
    )
    sends, receives = _by_peer(old[rank], new), _by_peer(new[rank], old)
    stays, stay_at = sends.pop(rank, ()), receives.pop(rank, ())
    return Relayout(rank, _pack(sends), _pack(receives), Packing(stays), Packing(stay_at))


def _by_peer(ours: Sequence[Span], theirs: Sequence[Sequence[Span]]) -> dict[int, Rows]:
    """Rows of our spans that each rank has in the other layout, in the order of tokens."""
    documents = {span.document for span in ours}
    others = sorted(
        (span.index, span.index + span.stride * span.length, span.stride, peer)
        for peer, spans in enumerate(theirs)
        for span in spans
        if span.document in documents
    )
    starts = [start for start, *_ in others]
    stops = list(accumulate((stop for _, stop, *_ in others), max))  # of striped spans, which mix
    found: dict[int, list[tuple[int, range]]] = {}
    for span in ours:
        tokens = span.tokens
        first, last = bisect_right(stops, tokens.start), bisect_left(starts, tokens.stop)
        for start, stop, stride, peer in others[first:last]:
            common = _common(tokens, range(start, stop, stride))
            if common:
                row = span.start + (common.start - tokens.start) // tokens.step
                step = common.step // tokens.step
                rows = range(row, row + step * len(common), step)
                found.setdefault(peer, []).append((common.start, rows))
    return {
        peer: join(rows for _, rows in sorted(parts, key=itemgetter(0)))
        for peer, parts in found.items()
    }


def _common(a: range, b: range) -> range:
    """What two ranges have in common; their steps are positive."""
    low, high = max(a.start, b.start), min(a.stop, b.stop)
    if a.step == b.step == 1 or low >= high:
        return range(low, high)
    shared = math.gcd(a.step, b.step)
    distance, rest = divmod(b.start - a.start, shared)
    if rest:
        return range(0)
    # The first i with a.start + i · a.step = b.start modulo b.step; then the first from low on.
    period = b.step // shared
    i = distance * pow(a.step // shared, -1, period) % period
    first, step = a.start + i * a.step, a.step * period
    return range(first - (first - low) // step * step, high, step)


def _pack(by_peer: dict[int, Rows]) -> Packing:
    """One buffer for all peers, in an order in which their rows often follow each other."""
    peers = sorted(by_peer, key=lambda peer: by_peer[peer][0].start)
    counts = tuple((peer, sum(map(len, by_peer[peer]))) for peer in peers)
    return Packing(join(rows for peer in peers for rows in by_peer[peer]), counts)
