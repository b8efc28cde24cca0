"""What is to be computed over all ranks, and what follows from it for each of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .layout import Layout, Span, spans
from .rows import Arrangement, Rows, arrange, join
from .steps import Heads, Side
from .tiles import Mask, Reach, reach, seen_rows

_COUNTED = 1 << 13  # spans, for an estimate

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
    sources_per_launch: int | None = 1  # whose keys a launch of the ring takes; None: by size

    _memo: dict[tuple[object, ...], Any] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

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
    def seen(self, owner: int, user: int) -> tuple[Span, ...]:
        """What the queries of `user` see of a rank's keys, by rows: parts of its spans."""
        queries = self._queries(user)
        return tuple(
            key if end - start == key.length else key.part(start, end)
            for key in self.spans(Side.KEY, owner)
            if key.document in queries
            for start, end in seen_rows(*queries[key.document], key, self.mask)
        )

    @_once
    def sent(self, owner: int, user: int) -> Rows:
        """Rows of a rank's keys that go to `user` where shards are cut: those that it sees."""
        return join(range(s.start, s.start + s.length) for s in self.seen(owner, user))

    @_once
    def arrangement(self, owners: tuple[int, ...], user: int) -> Arrangement:
        """Where the keys that `user` gets of some ranks lie in one buffer."""
        spans = self._by_document(Side.QUERY, user)
        queries = {document: sum(s.length for s in held) for document, held in spans.items()}
        shards = [(owner, self.sent(owner, user), self.seen(owner, user)) for owner in owners]
        return arrange(shards, queries)

    def needed(self, query_rank: int, key_rank: int) -> bool:
        """Whether the mask leaves anything of these queries against these keys."""
        return bool(self._needs()[query_rank] >> key_rank & 1)

    @_once
    def _needs(self) -> tuple[int, ...]:
        """For each rank, whose keys its queries see: a bit for each."""
        ranks = range(self.world_size)
        holders: dict[int, list[tuple[Span, int]]] = {}  # of each document's keys
        masks: dict[int, int] = {}
        for owner in ranks:
            for document, held in self._by_document(Side.KEY, owner).items():
                holders.setdefault(document, []).extend((span, owner) for span in held)
                masks[document] = masks.get(document, 0) | 1 << owner
        found = []
        for rank in ranks:
            known = 0
            for document, queries in self._queries(rank).items():
                if masks.get(document, 0) & ~known:
                    for key, owner in holders[document]:
                        if not known >> owner & 1 and seen_rows(*queries, key, self.mask):
                            known |= 1 << owner
            found.append(known)
        return tuple(found)

    @_once
    def received(self) -> tuple[dict[int, int], ...]:
        """For each rank, about how many rows it needs of each other.

        The longest of the documents that lie on all ranks stands for them; of others, where there
        are very many, the longest too.
        """
        holders: dict[int, list[tuple[int, list[Span]]]] = {}  # of each document's keys
        users: dict[int, list[int]] = {}  # of its queries
        for rank in range(self.world_size):
            for document, held in self._by_document(Side.KEY, rank).items():
                holders.setdefault(document, []).append((rank, held))
            for document in self._by_document(Side.QUERY, rank):
                users.setdefault(document, []).append(rank)
        longest = sorted(holders, key=lambda document: (-self.lengths_k[document], document))
        found: tuple[dict[int, int], ...] = tuple({} for _ in range(self.world_size))
        for everywhere in (True, False):
            documents = [
                document
                for document in longest
                if (len(holders[document]) == self.world_size) is everywhere
                and (len(holders[document]), users.get(document)) != (1, [holders[document][0][0]])
            ]
            work, counted = 0, list[int]()
            rows: dict[tuple[int, int], int] = {}
            for document in documents:
                if work >= (1 if everywhere else _COUNTED):
                    break
                counted.append(self.lengths_k[document])
                for user in users.get(document, ()):
                    queries = self._queries(user)[document]
                    for owner, held in holders[document]:
                        work += len(held)
                        parts = [seen_rows(*queries, key, self.mask) for key in held]
                        seen = sum(end - start for part in parts for start, end in part)
                        rows[user, owner] = rows.get((user, owner), 0) + seen
            total = sum(self.lengths_k[document] for document in documents)
            for (user, owner), seen in rows.items():
                if seen and user != owner:
                    more = seen * total // sum(counted)
                    found[user][owner] = found[user].get(owner, 0) + more
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
    def _queries(self, user: int) -> dict[int, tuple[list[Span], Reach | None]]:
        """A rank's queries of each document, and which positions they reach, if of stride 1."""
        return {
            document: (held, None if held[0].stride > 1 else reach(held, self.mask))
            for document, held in self._by_document(Side.QUERY, user).items()
        }

    @property
    def all_heads(self) -> Heads:
        return (0, self.nheads_k)
