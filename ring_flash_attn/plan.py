"""Plans: what one rank computes, sends and receives, step by step, as plain data.

A route (one file in `routes/`) turns a `Problem` into the steps of a rank; `make_plan` adds what
all routes share. Nothing here knows torch: plans can be proved, priced, drawn, and run by virtual
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import pairwise
from typing import Any

from .layout import Layout, Span, spans
from .pieces import Piece, cut, lay, trimmed, within
from .tiles import Mask, Tile, make_tile, make_tiles

Heads = tuple[int, int]  # first and one past the last KV head


class Side(IntEnum):
    """Which shard of a rank: its queries (with all that belongs to them) or its keys and values."""

    QUERY = 0
    KEY = 1


class Payload(IntEnum):
    """What of a shard travels: what kernels read, or what they have accumulated so far."""

    INPUT = 0
    RESULT = 1


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """The payload of `owner`'s shard goes from rank `source` to rank `target`.

    An INPUT is there for the work of later steps. A RESULT is what the ranks before have summed up;
    the target adds its own part of the same step to it. `source == target` is a copy in place.
    The order of transfers is the order of messages between a pair of ranks.

    Attributes:
        payload, side, owner, heads: what.
        source, target: from whom to whom.
        cut: whether of the keys only the pieces of `Problem.pieces` go, and not the whole shard, as
            the launch that they are for wants it (`Work.cut`).
    """

    payload: Payload
    side: Side
    owner: int
    heads: Heads
    source: int
    target: int
    cut: bool = False

    @property
    def user(self) -> int:
        """Whose launch it is for: inputs go there, results come from there."""
        return self.target if self.payload is Payload.INPUT else self.source


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel launch: query shards against key shards, each side in one buffer.

    Attributes:
        queries: owners of the query shards.
        keys: owners of the key shards.
        heads: the KV heads (and the query heads that share them).
        tiles: what to compute; `start` counts rows of the buffers (see `pieces.py`).
        cut: whether the buffer of keys holds the pieces of `Problem.pieces`, and not a whole shard.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: Heads
    tiles: tuple[Tile, ...]
    cut: bool = False

    def owners(self, side: Side) -> tuple[int, ...]:
        """Owners of the shards of one side."""
        return self.queries if side is Side.QUERY else self.keys


@dataclass(frozen=True, slots=True)
class Step:
    """Transfers are posted, the work is done while they are under way, then they are awaited."""

    transfers: tuple[Transfer, ...] = ()
    work: tuple[Work, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """All steps of one rank, forward or backward; every rank of a plan has as many.

    Attributes:
        rank: whose plan.
        steps: what happens, in order.
        complete: launches with `last` tiles cover every query of the rank, so that kernels leave
            the whole output final; otherwise it is made from the state at the end.
    """

    rank: int
    steps: tuple[Step, ...]
    complete: bool

    @property
    def pairs(self) -> int:
        """Allowed (query, key) pairs that this rank computes, summed over KV heads."""
        return sum(
            tile.pairs * (work.heads[1] - work.heads[0])
            for step in self.steps
            for work in step.work
            for tile in work.tiles
        )


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be computed over all ranks: documents, layout, mask, heads.

    Attributes:
        layout: how tokens are spread, queries and keys alike.
        lengths_q: queries of each document, over all ranks.
        lengths_k: keys of each document, over all ranks.
        world_size: number of ranks.
        mask: which keys a query sees.
        nheads_k: number of KV heads.
        heads_k_stride: KV heads that travel together where a route goes by head groups.
        sources_per_launch: ranks whose keys one launch of the ring takes at most.
    """

    layout: Layout
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    world_size: int
    mask: Mask
    nheads_k: int = 1
    heads_k_stride: int = 1
    sources_per_launch: int = 1

    _memo: dict[tuple[object, ...], Any] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def spans(self, side: Side, rank: int) -> tuple[Span, ...]:
        """What `rank` holds of one side."""
        key = ("spans", side, rank)
        if key not in self._memo:
            self._memo[key] = self._spans(side, rank)
        found: tuple[Span, ...] = self._memo[key]
        return found

    def _spans(self, side: Side, rank: int) -> tuple[Span, ...]:
        if side is Side.KEY:
            return spans(self.layout, self.lengths_k, rank, self.world_size)
        shifts = [k - q for q, k in zip(self.lengths_q, self.lengths_k, strict=True)]
        return spans(self.layout, self.lengths_q, rank, self.world_size, shifts)

    def size(self, side: Side, rank: int) -> int:
        """Number of tokens that `rank` holds of one side."""
        return sum(span.length for span in self.spans(side, rank))

    def pieces(self, owner: int, user: int) -> tuple[Piece, ...]:
        """What `user` needs of a rank's keys, as it lies together in a buffer; by rows."""
        key = ("pieces", owner, user)
        if key not in self._memo:
            needed = (self._needed(user, piece) for piece in self._all_pieces(owner))
            self._memo[key] = tuple(piece for piece in needed if piece is not None)
        found: tuple[Piece, ...] = self._memo[key]
        return found

    def _all_pieces(self, owner: int) -> tuple[Piece, ...]:
        key = ("all pieces",)
        if key not in self._memo:
            self._memo[key] = cut([self.spans(Side.KEY, r) for r in range(self.world_size)])
        found: tuple[Piece, ...] = self._memo[key][owner]
        return found

    def _needed(self, query_rank: int, piece: Piece) -> Piece | None:
        """A piece from the first key that some query sees to the last."""
        spans = self.spans(Side.KEY, piece.owner)
        keys = within(spans, piece)
        start = next(filter(None, (self._seen(query_rank, key) for key in keys)), None)
        if start is None:
            return None
        end = next(filter(None, (self._seen(query_rank, key) for key in reversed(keys))))
        return trimmed(piece, spans, start[0], end[1])

    def _seen(self, query_rank: int, key: Span) -> tuple[int, int] | None:
        """Of a key span, the first row that some query sees and one past the last."""
        queries = self._by_document(Side.QUERY, query_rank).get(key.document, ())
        tiles = make_tiles(queries, (key,), self.mask)
        if not tiles:
            return None
        return min(tile.seen[0] for tile in tiles), max(tile.seen[1] for tile in tiles)

    def needed(self, query_rank: int, key_rank: int) -> bool:
        """Whether the mask leaves anything of these queries against these keys."""
        key = ("needed", query_rank, key_rank)
        if key not in self._memo:
            keys = self._by_document(Side.KEY, key_rank)
            self._memo[key] = any(
                make_tile(query, span, self.mask) is not None
                for query in self.spans(Side.QUERY, query_rank)
                for span in keys.get(query.document, ())
            )
        answer: bool = self._memo[key]
        return answer

    def _by_document(self, side: Side, rank: int) -> dict[int, list[Span]]:
        key = ("by document", side, rank)
        if key not in self._memo:
            found: dict[int, list[Span]] = {}
            for span in self.spans(side, rank):
                found.setdefault(span.document, []).append(span)
            self._memo[key] = found
        by_document: dict[int, list[Span]] = self._memo[key]
        return by_document

    @property
    def all_heads(self) -> Heads:
        """Every KV head."""
        return (0, self.nheads_k)


Route = Callable[[Problem, int, bool], list[Step]]

_ROUTES: dict[str, Route] = {}


def register_route(name: str) -> Callable[[Route], Route]:
    """Make `route(problem, rank, backward)` available as `name`."""

    def register(route: Route) -> Route:
        _ROUTES[name] = route
        return route

    return register


def route_names() -> tuple[str, ...]:
    """All routes, in order of registration."""
    return tuple(_ROUTES)


def check_route(name: str) -> None:
    """ValueError that lists the choices if there is no route `name`."""
    if not isinstance(name, str) or name not in _ROUTES:
        raise ValueError(f"unknown route {name!r}; choose one of {', '.join(_ROUTES)}")


def make_plan(route: str, problem: Problem, rank: int, backward: bool = False) -> Plan:
    """The plan of `rank` for a problem on a route."""
    check_route(route)
    steps = _ROUTES[route](problem, rank, backward)
    in_order = [Step(tuple(sorted(step.transfers)), step.work) for step in steps]
    return _marked(rank, in_order, problem.size(Side.QUERY, rank), problem.nheads_k)


def make_work(
    problem: Problem, query_rank: int, key_ranks: Sequence[int], heads: Heads, cut: bool = False
) -> tuple[Work, ...]:
    """The launch of a rank's queries against the keys of several; nothing if the mask is empty.

    Args:
        problem: what is to be computed.
        query_rank: whose queries.
        key_ranks: whose keys.
        heads: the KV heads.
        cut: whether of another rank's keys only the needed pieces are there. Those of several ranks
            are always cut, our own alone never.
    """
    owners = tuple(key_ranks)
    cut = (cut or len(owners) > 1) and owners != (query_rank,)
    keys: Sequence[Span] = ()
    if cut:
        keys = lay([(problem.spans(Side.KEY, o), problem.pieces(o, query_rank)) for o in owners])
    elif owners:
        keys = problem.spans(Side.KEY, owners[0])
    tiles = make_tiles(problem.spans(Side.QUERY, query_rank), keys, problem.mask)
    return (Work((query_rank,), owners, heads, tiles, cut),) if tiles else ()


def _marked(rank: int, steps: Iterable[Step], size: int, nheads_k: int) -> Plan:
    """A plan whose tiles know the first and the last launch of their queries."""
    steps = tuple(steps)
    launches = [work for step in steps for work in step.work]
    groups = sorted({work.heads for work in launches})
    assert all(a[1] <= b[0] for a, b in pairwise(groups)), f"head groups overlap: {groups}"
    first: dict[tuple[tuple[int, ...], Heads, int], int] = {}
    last: dict[tuple[tuple[int, ...], Heads, int], int] = {}
    rows: dict[tuple[tuple[int, ...], Heads, int], int] = {}
    for number, work in enumerate(launches):
        for tile in work.tiles:
            key = (work.queries, work.heads, tile.query.start)
            first.setdefault(key, number)
            last[key] = number
            rows[key] = tile.query.length
    merged = any(  # somebody else's part of our queries still comes: no launch of ours is the last
        transfer.payload is Payload.RESULT and transfer.side is Side.QUERY
        for step in steps
        for transfer in step.transfers
    )
    numbers = iter(range(len(launches)))

    def mark(work: Work) -> Work:
        number = next(numbers)
        tiles = []
        for tile in work.tiles:
            key = (work.queries, work.heads, tile.query.start)
            is_first, is_last = first[key] == number, not merged and last[key] == number
            tiles.append(Tile(tile.query, tile.key, tile.low, tile.high, is_first, is_last))
        return replace(work, tiles=tuple(tiles))

    marked = tuple(Step(step.transfers, tuple(map(mark, step.work))) for step in steps)
    covered = sum(length * (key[1][1] - key[1][0]) for key, length in rows.items())
    return Plan(rank, marked, complete=not merged and covered == size * nheads_k)
