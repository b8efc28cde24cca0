"""What is to be computed over all ranks, and what follows from it for each of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from operator import or_
from typing import Any, TypeVar, cast

from .arrays import (
    Array,
    argsort,
    cat,
    count,
    filled,
    maximum,
    minimum,
    most_of_each,
    nonzero,
    stack,
    sum_of_each,
    vector,
    where,
)
from .columns import (
    DOCUMENT,
    LENGTH,
    OWNER,
    START,
    Columns,
    last_positions,
    pairs,
    part_of,
    prefixes,
    split_columns,
    to_columns,
    union,
)
from .layout import Layout, Span, spans
from .needs import Needs, windowed
from .rows import Arrangement, Rows, arrange, cuts_between, ranges_apart, ranges_of
from .steps import Heads, Side, Users
from .tiles import FAR, Mask, seen_rows

Made = TypeVar("Made")
Method = TypeVar("Method", bound=Callable[..., Any])


def _once(method: Method) -> Method:
    """Remember, with the problem, what a method has returned for its arguments."""
    name = method.__name__

    @functools.wraps(method)
    def remembered(self: Problem, *args: object) -> Any:
        key = (name, *args)
        found = self._memo.get(key)
        if found is None:
            found = self._memo[key] = method(self, *args)
        return found

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
    sources_per_launch: int | None = 1  # whose keys a launch of the ring takes; None: by size
    ranks_per_node: int | None = None  # of the mesh and the double ring; None: one node

    _memo: dict[tuple[object, ...], Any] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def remember(self, key: tuple[object, ...], make: Callable[[], Made]) -> Made:
        """What `make` has returned for this key; plans forward and backward have much in common."""
        if key not in self._memo:
            self._memo[key] = make()
        return cast(Made, self._memo[key])

    def share(self, other: Problem) -> None:
        """Take over what another problem knows of the same layout, documents and mask."""
        same = ("layout", "lengths_q", "lengths_k", "world_size", "mask")
        assert all(getattr(self, name) == getattr(other, name) for name in same)
        known = ((key, made) for key, made in other._memo.items() if hasattr(Problem, str(key[0])))
        self._memo.update(known)

    @property
    def _shifts(self) -> list[int]:
        """Of each document, added to the positions of queries."""
        return [k - q for q, k in zip(self.lengths_q, self.lengths_k, strict=True)]

    @_once
    def spans(self, side: Side, rank: int) -> tuple[Span, ...]:
        """What `rank` holds of one side."""
        if side is Side.KEY:
            queries = self.lengths_q
            return spans(self.layout, self.lengths_k, rank, self.world_size, queries=queries)
        if self.lengths_q == self.lengths_k:
            return self.spans(Side.KEY, rank)
        return spans(self.layout, self.lengths_q, rank, self.world_size, self._shifts)

    def size(self, side: Side, rank: int) -> int:
        """Number of tokens that `rank` holds of one side."""
        return sum(span.length for span in self.spans(side, rank))

    @_once
    def sizes(self, side: Side) -> list[int]:
        """Those of all ranks."""
        owner, _, length, *_ = self._all_columns(side)
        return sum_of_each(owner, length, self.world_size).tolist()

    def seen(self, owner: int, user: Users) -> Columns:
        """What the queries of `user` see of a rank's keys, by rows: parts of its spans."""
        return self._visible(self.columns(Side.KEY, owner), user)

    def sent(self, owner: int, user: Users) -> Rows:
        """Rows of a rank's keys that go to `user` where shards are cut: those that it sees."""
        key = ("sent", owner, user)
        if key not in self._memo:
            if isinstance(user, int) and self.mask.left is None:
                self._send(owner)
            else:
                self._memo[key] = ranges_of(self.seen(owner, user))
        return cast(Rows, self._memo[key])

    def _send(self, owner: int) -> None:
        """Find what of a rank's keys goes to every other, all at once."""
        keys, users = self.columns(Side.KEY, owner), sorted(self.wanted_by(owner))
        found = dict.fromkeys(range(self.world_size), cast(Rows, ()))
        if users:
            limits = stack([self._limits(user) for user in users])
            rows = prefixes(keys, limits[:, keys[DOCUMENT]])
            some = rows > 0
            ends = [0, *some.sum(1).cumsum(0).tolist()]
            starts = (keys[START] + filled((len(users), 1), 0))[some]
            parts = ranges_apart(starts, rows[some], list(pairwise(ends)))
            found.update(zip(users, parts, strict=True))
        self._memo.update((("sent", owner, user), rows) for user, rows in found.items())

    @_once
    def _shards(self, owners: tuple[int, ...], user: Users) -> Columns:
        """What `user` sees of the keys of some ranks; `sent` knows then."""
        known = self._visible(self.columns(Side.KEY, owners), user)
        sent = ranges_apart(known[START], known[LENGTH], cuts_between(owners, known))
        self._memo.update(
            (("sent", owner, user), rows) for owner, rows in zip(owners, sent, strict=True)
        )
        return known

    def senders(self, owners: tuple[int, ...], user: Users) -> tuple[int, ...]:
        """Those of some ranks whose keys `user` sees."""
        if any(("sent", owner, user) not in self._memo for owner in owners):
            self._shards(owners, user)
        return tuple(owner for owner in owners if self.sent(owner, user))

    @_once
    def arrangement(self, owners: tuple[int, ...], user: Users) -> Arrangement:
        """Where the keys that `user` gets of some ranks lie in one buffer."""
        return arrange(owners, self._shards(owners, user), self._counts(user))

    @_once
    def _counts(self, user: Users) -> Array:
        """How many queries of each document a rank has."""
        _, _, length, _, _, document, _ = self.columns(Side.QUERY, user)
        return sum_of_each(document, length, len(self.lengths_q))

    @_once
    def _all_sighted(self) -> list[Columns]:
        """Of each rank's queries, those that see a key, by rows: parts of its spans."""
        queries, right = self._all_columns(Side.QUERY), self.mask.right
        _, _, length, position, stride, document, _ = queries
        blind = where(self._lengths()[document] > 0, 0, length)
        if right is not None:  # too early to see the first key
            blind = maximum(blind, minimum(-((position + right) // stride), length))
        found = part_of(queries, blind, length - blind)
        return [found[:, a:b] for a, b in cuts_between(range(self.world_size), found)]

    @_once
    def asking(self, owner: int) -> Rows:
        """Rows of a rank's queries that travel where queries are cut: those that see a key."""
        return ranges_of(self._all_sighted()[owner])

    @_once
    def query_arrangement(self, owners: tuple[int, ...]) -> Arrangement:
        """Where the queries of some ranks that see a key lie in one buffer."""
        known = cat([self._all_sighted()[owner] for owner in owners], 1)
        return arrange(owners, known, self._lengths())

    @_once
    def _lengths(self) -> Array:
        """Keys of each document."""
        return vector(self.lengths_k)

    def needed(self, query_rank: int, key_rank: int) -> bool:
        """Whether the mask leaves anything of these queries against these keys."""
        return bool(self._needs()[query_rank] >> key_rank & 1)

    def sources(self, query_ranks: Iterable[int]) -> int:
        """The ranks whose keys some queries see: a bit for each."""
        needs = self._needs()
        return functools.reduce(or_, (needs[rank] for rank in query_ranks), 0)

    @_once
    def whose(self, query_rank: int) -> set[int]:
        """All ranks whose keys these queries see."""
        bits = bin(self._needs()[query_rank])[:1:-1]
        return {rank for rank, bit in enumerate(bits) if bit == "1"}

    def wanted_by(self, key_rank: int) -> set[int]:
        """All ranks whose queries see these keys."""
        return self._all_wanted()[key_rank]

    @_once
    def _all_wanted(self) -> list[set[int]]:
        found: list[set[int]] = [set() for _ in range(self.world_size)]
        for rank in range(self.world_size):
            for owner in self.whose(rank):
                found[owner].add(rank)
        return found

    @_once
    def _needs(self) -> tuple[int, ...]:
        """For each rank, whose keys its queries see: a bit for each."""
        return self._all_needs().bits()

    @_once
    def received(self) -> tuple[dict[int, int], ...]:
        """For each rank, about how many rows it needs of each other."""
        return self._all_needs().rows()

    @_once
    def _all_needs(self) -> Needs:
        queries, keys = self._all_columns(Side.QUERY), self._all_columns(Side.KEY)
        return Needs(queries, keys, self._lengths(), self.mask, self.world_size)

    @_once
    def _all_columns(self, side: Side) -> Columns:
        """The spans of all ranks."""
        if side is Side.QUERY and self.lengths_q == self.lengths_k:
            return self._all_columns(Side.KEY)
        lengths, shifts = self.lengths_k, None
        if side is Side.QUERY:
            lengths, shifts = self.lengths_q, self._shifts
        found = split_columns(self.layout, lengths, self.world_size, shifts)
        if found is None:
            found = to_columns([(rank, self.spans(side, rank)) for rank in range(self.world_size)])
        return found

    @_once
    def _ends(self, side: Side) -> list[int]:
        """Where the columns of each rank's spans end."""
        counts = count(self._all_columns(side)[OWNER], self.world_size)
        return counts.cumsum(0).tolist()

    def columns(self, side: Side, ranks: Users) -> Columns:
        """The spans of a rank, or of several."""
        columns, ends = self._all_columns(side), self._ends(side)
        if isinstance(ranks, int):
            return columns[:, ends[ranks - 1] if ranks else 0 : ends[ranks]]
        return cat([columns[:, :0], *(self.columns(side, rank) for rank in ranks)], 1)

    @_once
    def _limits(self, user: Users) -> Array:
        """Of each document, a rank's queries see the keys before this position.

        But for those that the left side of a window hides.
        """
        queries = self.columns(Side.QUERY, user)
        right = FAR if self.mask.right is None else self.mask.right + 1
        limits = last_positions(queries) + right
        return most_of_each(queries[DOCUMENT], limits, len(self.lengths_k), -FAR)

    def _visible(self, keys: Columns, user: Users) -> Columns:
        """What the queries of `user` see of some keys, in their order: parts of the spans."""
        limits = self._limits(user)[keys[DOCUMENT]]
        rows = prefixes(keys, limits)
        if self.mask.left is None:
            return part_of(keys, filled(len(rows), 0), rows)
        cut = windowed(self._lengths(), self.mask)[keys[DOCUMENT]]
        apart, whole = nonzero(cut), nonzero(~cut)
        queries = self.columns(Side.QUERY, user)
        key, query = pairs(keys[DOCUMENT][apart], queries[DOCUMENT], len(self.lengths_k))
        part, first, end = union(key, *seen_rows(queries[:, query], keys[:, apart[key]], self.mask))
        number = cat([whole, apart[part]])
        first = cat([filled(len(whole), 0), first])
        end = cat([rows[whole], end])
        order = argsort(number)
        first, end = first[order], end[order]
        return part_of(keys[:, number[order]], first, end - first)

    @property
    def all_heads(self) -> Heads:
        return (0, self.nheads_k)
