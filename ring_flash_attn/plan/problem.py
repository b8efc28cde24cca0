"""What is to be computed over all ranks, and what follows from it for each of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from .layout import Layout, Span, spans
from .pieces import Piece, cut, within
from .steps import Heads, Side
from .tiles import Mask, make_tile, make_tiles

Method = TypeVar("Method", bound=Callable[..., Any])


def _once(method: Method) -> Method:
    """Remember, with the problem, what a method has returned for its arguments."""
    name = method.__name__

    @functools.wraps(method)
    def remembered(self: Problem, *args: object) -> Any:
        key = (name, *args)
        if key not in self._memo:
            self._memo[key] = method(self, *args)
        return self._memo[key]

    return remembered  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be computed over all ranks: documents, layout, mask, heads."""

    layout: Layout
    lengths_q: tuple[int, ...]  # of each document, over all ranks
    lengths_k: tuple[int, ...]
    world_size: int
    mask: Mask
    nheads_k: int = 1
    heads_k_stride: int = 1  # KV heads that travel together where a route goes by head groups
    sources_per_launch: int = 1  # ranks whose keys one launch of the ring takes at most

    _memo: dict[tuple[object, ...], Any] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @_once
    def spans(self, side: Side, rank: int) -> tuple[Span, ...]:
        """What `rank` holds of one side."""
        if side is Side.KEY:
            queries = self.lengths_q
            return spans(self.layout, self.lengths_k, rank, self.world_size, queries=queries)
        shifts = [k - q for q, k in zip(self.lengths_q, self.lengths_k, strict=True)]
        return spans(self.layout, self.lengths_q, rank, self.world_size, shifts)

    def size(self, side: Side, rank: int) -> int:
        """Number of tokens that `rank` holds of one side."""
        return sum(span.length for span in self.spans(side, rank))

    @_once
    def pieces(self, owner: int, user: int) -> tuple[Piece, ...]:
        """What `user` needs of a rank's keys, as it lies together in a buffer; by rows.

        Of each piece, from the first key that some query sees to the last.
        """
        spans, found = self.spans(Side.KEY, owner), []
        for piece in self._all_pieces()[owner]:
            keys = within(spans, piece)
            first = next(filter(None, (self._seen(user, key) for key in keys)), None)
            if first is not None:
                last = next(filter(None, (self._seen(user, key) for key in reversed(keys))))
                start, length = first[0], last[1] - first[0]
                head = within(spans, replace(piece, start=start, length=length))[0]
                found.append(Piece(head.document, head.position, owner, start, length))
        return tuple(found)

    @_once
    def _all_pieces(self) -> tuple[tuple[Piece, ...], ...]:
        return cut([self.spans(Side.KEY, rank) for rank in range(self.world_size)])

    def _seen(self, query_rank: int, key: Span) -> tuple[int, int] | None:
        """Of a key span, the first row that some query sees and one past the last."""
        queries = self._by_document(Side.QUERY, query_rank).get(key.document, ())
        tiles = make_tiles(queries, (key,), self.mask)
        if not tiles:
            return None
        return min(tile.seen[0] for tile in tiles), max(tile.seen[1] for tile in tiles)

    @_once
    def needed(self, query_rank: int, key_rank: int) -> bool:
        """Whether the mask leaves anything of these queries against these keys."""
        keys = self._by_document(Side.KEY, key_rank)
        return any(
            make_tile(query, span, self.mask) is not None
            for query in self.spans(Side.QUERY, query_rank)
            for span in keys.get(query.document, ())
        )

    @_once
    def _by_document(self, side: Side, rank: int) -> dict[int, list[Span]]:
        found: dict[int, list[Span]] = {}
        for span in self.spans(side, rank):
            found.setdefault(span.document, []).append(span)
        return found

    @property
    def all_heads(self) -> Heads:
        return (0, self.nheads_k)
