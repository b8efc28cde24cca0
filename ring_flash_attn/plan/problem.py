"""What is to be computed over all ranks, and what follows from it for each of them."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from operator import and_, or_
from typing import Any, TypeVar, cast

from .layout import Layout, Span, spans
from .rows import Arrangement, Rows, arrange, join_runs
from .steps import Heads, Side, Users
from .tiles import FAR, Mask, Reach, reach, seen_rows

_COUNTED = 1 << 17  # spans, for an estimate

Held = list[tuple[int, list[Span]]]  # ranks, and what they hold of a document

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

    @_once
    def spans(self, side: Side, rank: int) -> tuple[Span, ...]:
        """What `rank` holds of one side."""
        if side is Side.KEY:
            queries = self.lengths_q
            return spans(self.layout, self.lengths_k, rank, self.world_size, queries=queries)
        if self.lengths_q == self.lengths_k:
            return self.spans(Side.KEY, rank)
        shifts = [k - q for q, k in zip(self.lengths_q, self.lengths_k, strict=True)]
        return spans(self.layout, self.lengths_q, rank, self.world_size, shifts)

    def size(self, side: Side, rank: int) -> int:
        """Number of tokens that `rank` holds of one side."""
        return sum(span.length for span in self.spans(side, rank))

    @_once
    def seen(self, owner: int, user: Users) -> tuple[Span, ...]:
        """What the queries of `user` see of a rank's keys, by rows: parts of its spans."""
        limits, keys = self._limits(user), self.spans(Side.KEY, owner)
        found: list[Span] = []
        whole = True
        for key in keys:
            start, length, position, stride, document, _ = key
            limit = limits[document]
            if limit is None:
                parts = seen_rows(*self._queries(user, document), key, self.mask)
                found += [key.part(*rows) for rows in parts]
                whole = whole and found[-1:] == [key]
            elif position + stride * (length - 1) < limit:
                found.append(key)
            else:
                whole = False
                if position < limit:
                    found.append(key.part(start, start - (position - limit) // stride))
        return keys if whole else tuple(found)

    @_once
    def sent(self, owner: int, user: Users) -> Rows:
        """Rows of a rank's keys that go to `user` where shards are cut: those that it sees."""
        seen = self.seen(owner, user)
        if seen is self.spans(Side.KEY, owner):  # all
            return (range(self.size(Side.KEY, owner)),) if seen else ()
        return join_runs([span.start for span in seen], [span.length for span in seen])

    @_once
    def arrangement(self, owners: tuple[int, ...], user: Users) -> Arrangement:
        """Where the keys that `user` gets of some ranks lie in one buffer."""
        queries = self._counts(user)
        shards = [(owner, self.sent(owner, user), self.seen(owner, user)) for owner in owners]
        return arrange(shards, queries)

    @_once
    def _counts(self, user: Users) -> dict[int, int]:
        """How many queries of each document a rank has."""
        found: dict[int, int] = {}
        for span in self._held_by(user):
            found[span.document] = found.get(span.document, 0) + span.length
        return found

    @_once
    def sighted(self, owner: int) -> tuple[Span, ...]:
        """Of a rank's queries, those that see a key, by rows: parts of its spans."""
        queries, right = self.spans(Side.QUERY, owner), self.mask.right
        found = []
        for span in queries:
            start, length, position, stride, document, _ = span
            blind = 0 if self.lengths_k[document] else length  # too early to see the first key
            if right is not None and position + right < 0:
                blind = max(blind, min(length, (-right - position + stride - 1) // stride))
            if blind < length:
                found.append(span if not blind else span.part(start + blind, start + length))
        return tuple(found)

    @_once
    def asking(self, owner: int) -> Rows:
        """Rows of a rank's queries that travel where queries are cut: those that see a key."""
        seeing = self.sighted(owner)
        return join_runs([span.start for span in seeing], [span.length for span in seeing])

    @_once
    def query_arrangement(self, owners: tuple[int, ...]) -> Arrangement:
        """Where the queries of some ranks that see a key lie in one buffer."""
        shards = [(owner, self.asking(owner), self.sighted(owner)) for owner in owners]
        return arrange(shards, dict(enumerate(self.lengths_k)))

    def _held_by(self, user: Users) -> tuple[Span, ...]:
        """The queries of a rank, or of several."""
        if isinstance(user, int):
            return self.spans(Side.QUERY, user)
        return tuple(chain.from_iterable(self.spans(Side.QUERY, each) for each in user))

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

    @_once
    def wanted_by(self, key_rank: int) -> set[int]:
        """All ranks whose queries see these keys."""
        return {rank for rank, bits in enumerate(self._needs()) if bits >> key_rank & 1}

    @_once
    def _needs(self) -> tuple[int, ...]:
        """For each rank, whose keys its queries see: a bit for each."""
        everybody = (1 << self.world_size) - 1
        found = [0] * self.world_size
        holders, users = self._holders(Side.KEY), self._holders(Side.QUERY)
        for document in sorted(holders, key=self.lengths_k.__getitem__, reverse=True):
            if document in users:
                self._add_needs(document, holders[document], users[document], found)
                if functools.reduce(and_, found) == everybody:
                    break
        return tuple(found)

    def _add_needs(self, document: int, keys: Held, queries: Held, found: list[int]) -> None:
        """Add to each rank's bits whose keys of a document its queries see."""
        if self._bites(document):
            for user, _ in queries:
                seen = self._queries(user, document)
                for owner, held in keys:
                    if not found[user] >> owner & 1:
                        found[user] |= any(seen_rows(*seen, k, self.mask) for k in held) << owner
            return
        firsts = sorted(
            (held[0].position if len(held) == 1 else min(k.position for k in held), owner)
            for owner, held in keys
        )
        positions = [position for position, _ in firsts]
        bits = list(accumulate((1 << owner for _, owner in firsts), or_, initial=0))
        for user, _ in queries:
            limit = self._limits(user)[document]
            assert limit is not None
            found[user] |= bits[bisect_left(positions, limit)]

    @_once
    def received(self) -> tuple[dict[int, int], ...]:
        """For each rank, about how many rows it needs of each other.

        The longest of the documents that lie on all ranks stands for them. Of very many others the
        longest are counted.
        """
        holders, queries = self._holders(Side.KEY), self._holders(Side.QUERY)

        def is_apart(document: int) -> bool:
            """Not on one rank, with its queries."""
            owners = holders[document]
            return len(owners) > 1 or [u for u, _ in queries.get(document, ())] != [owners[0][0]]

        longest = sorted(holders, key=lambda document: (-self.lengths_k[document], document))
        apart = [document for document in longest if is_apart(document)]
        everywhere = [each for each in apart if len(holders[each]) == self.world_size]
        found: tuple[dict[int, int], ...] = tuple({} for _ in range(self.world_size))

        def add(document: int, weight: int, of: int) -> int:
            work = 0
            for user, _ in queries.get(document, ()):
                for owner, held in holders[document]:
                    work += len(held)
                    seen = self._rows_seen(user, document, held)
                    if seen and user != owner:
                        found[user][owner] = found[user].get(owner, 0) + seen * weight // of
            return work

        if everywhere:
            first = everywhere[0]
            add(first, sum(self.lengths_k[each] for each in everywhere), self.lengths_k[first])
        left = _COUNTED
        for document in apart:
            if left > 0 and len(holders[document]) < self.world_size:
                left -= add(document, 1, 1)
        return found

    @_once
    def _by_document(self, side: Side, rank: int) -> dict[int, list[Span]]:
        if side is Side.QUERY and self.lengths_q == self.lengths_k:
            return self._by_document(Side.KEY, rank)
        found: dict[int, list[Span]] = {}
        for span in self.spans(side, rank):
            found.setdefault(span.document, []).append(span)
        return found

    @_once
    def _holders(self, side: Side) -> dict[int, Held]:
        """Which ranks hold something of each document, and what."""
        if side is Side.QUERY and self.lengths_q == self.lengths_k:
            return self._holders(Side.KEY)
        found: dict[int, Held] = {}
        for rank in range(self.world_size):
            for document, held in self._by_document(side, rank).items():
                found.setdefault(document, []).append((rank, held))
        return found

    def _bites(self, document: int) -> bool:
        """Whether the left side of the window hides keys of a document from some query."""
        return self.mask.left is not None and self.mask.left < self.lengths_k[document] - 1

    @_once
    def _limits(self, user: Users) -> list[int | None]:
        """Of each document, a rank's queries see the keys before this position.

        None where the left side of the window hides some of these.
        """
        found = [-FAR] * len(self.lengths_k)  # no query
        right = FAR if self.mask.right is None else self.mask.right + 1
        for _, length, position, stride, document, _ in self._held_by(user):
            limit = position + stride * (length - 1) + right
            if limit > found[document]:
                found[document] = limit
        if self.mask.left is None:
            return cast("list[int | None]", found)
        return [
            None if limit > -FAR and self._bites(document) else limit
            for document, limit in enumerate(found)
        ]

    @_once
    def _queries(self, user: Users, document: int) -> tuple[list[Span], Reach | None]:
        """A rank's queries of a document, and which positions they reach, if of stride 1."""
        ranks = (user,) if isinstance(user, int) else user
        parts = (self._by_document(Side.QUERY, rank).get(document, ()) for rank in ranks)
        held = list(chain.from_iterable(parts))
        return held, None if held[0].stride > 1 else reach(held, self.mask)

    def _rows_seen(self, user: int, document: int, keys: Sequence[Span]) -> int:
        """How many rows of some keys of a document a rank's queries see."""
        limit = self._limits(user)[document]
        if limit is None:
            queries = self._queries(user, document)
            parts = [seen_rows(*queries, key, self.mask) for key in keys]
            return sum(end - start for part in parts for start, end in part)
        return sum(
            min(length, max(0, -((position - limit) // stride)))
            for _, length, position, stride, _, _ in keys
        )

    @property
    def all_heads(self) -> Heads:
        return (0, self.nheads_k)
