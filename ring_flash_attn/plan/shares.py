"""Shares: which rank computes which queries for which KV heads, where heads are spread over ranks.

Ranks of a group exchange tokens for heads. A unit is a KV head and a rank's queries: there are
ranks times heads of them, and each rank computes as many as there are heads. So any number of heads
fits any number of ranks. Where ranks share a head, they split its tokens, not its query heads:
either way each needs the keys that its queries see, and this way some queries stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heapreplace

from .build import make_shared_work
from .problem import Problem
from .steps import Heads, Payload, Side, Transfer, Work, users_of

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank computes: queries of some ranks, of which each has one that sees a key."""

    heads: Heads
    queries: Ranks


Shares = dict[int, tuple[Share, ...]]  # by rank


def share_out(problem: Problem, group: Ranks) -> Shares:
    """The shares of the ranks of a group, in the order of their heads.

    Rank i of U gets units i·n … (i + 1)·n of n·U, where n is the number of KV heads and unit u
    belongs to head u // U.
    """
    size, heads = len(group), problem.nheads_k
    seeing = tuple(rank for rank in group if problem.asking(rank))
    found: dict[int, list[Share]] = {rank: [] for rank in group}
    loads = _Loads(problem, group)
    for head in range(heads):
        units = range(head * size, (head + 1) * size)
        room = {
            rank: len(range(max(units.start, i * heads), min(units.stop, (i + 1) * heads)))
            for i, rank in enumerate(group)
        }
        for rank, queries in loads.split(room).items():
            some = tuple(owner for owner in queries if owner in seeing)
            if some:
                _append(found[rank], Share((head, head + 1), some))
    return {rank: tuple(theirs) for rank, theirs in found.items()}


def _append(shares: list[Share], share: Share) -> None:
    """Add a head, to the heads before it if they have the same queries."""
    if shares and (last := shares[-1]).queries == share.queries and last.heads[1] == share.heads[0]:
        shares[-1] = Share((last.heads[0], share.heads[1]), share.queries)
    else:
        shares.append(share)


class _Loads:
    """How much each rank of a group has to compute so far."""

    def __init__(self, problem: Problem, group: Ranks) -> None:
        self._problem, self._group = problem, group
        self._loads = dict.fromkeys(group, 0)
        self._costs: dict[int, int] = {}

    def split(self, room: dict[int, int]) -> dict[int, Ranks]:
        """Whose queries of a head each rank takes, as many as it has room for.

        Ranks keep their own, unless costs differ: then the costliest go first, each to the rank
        that has least to do.
        """
        sharing = [rank for rank in self._group if room[rank]]
        if len(sharing) == 1:
            return {sharing[0]: self._group}
        costs = self._costs = self._costs or {r: _cost(self._problem, r) for r in self._group}
        apart = max(costs.values()) - min(costs.values())
        even = max(room.values()) == 1 or apart <= sum(costs.values()) // (8 * len(costs))
        taken = {rank: list[int]() for rank in sharing}

        def turn(owner: int) -> tuple[int, int]:
            return (0 if owner in left else 1) if even else -costs[owner], owner

        left = {rank: room[rank] for rank in sharing}
        least = [(0 if even else self._loads[rank], rank) for rank in sharing]  # a heap
        heapify(least)
        for owner in sorted(self._group, key=turn):
            if even and left.get(owner):
                rank = owner
            else:
                while not left[least[0][1]]:
                    heappop(least)
                rank = least[0][1]
            left[rank] -= 1
            self._loads[rank] += costs[owner]
            taken[rank].append(owner)
            if not even:
                heapreplace(least, (self._loads[rank], rank))
        return {rank: tuple(sorted(owners)) for rank, owners in taken.items()}


def _cost(problem: Problem, rank: int) -> int:
    """About how many keys the queries of a rank see: those in the middle of a span, for all."""
    left, right, total = problem.mask.left, problem.mask.right, 0
    for span in problem.spans(Side.QUERY, rank):
        middle = span.position + span.stride * (span.length // 2)
        keys = problem.lengths_k[span.document]
        first = 0 if left is None else max(0, middle - left)
        last = keys if right is None else min(keys, middle + right + 1)
        total += span.length * max(0, last - first)
    return total


class Exchange:
    """The transfers and launches of one rank for the shares of all ranks of its world."""

    def __init__(self, problem: Problem, rank: int, shares: Shares) -> None:
        self.problem, self.rank, self.shares = problem, rank, shares
        self._elsewhere = [s for user, theirs in shares.items() for s in theirs if user != rank]

    @property
    def returns(self) -> bool:
        """Whether some rank's output is computed elsewhere."""
        return any(
            share.queries != (user,) for user, theirs in self.shares.items() for share in theirs
        )

    def keys(self, share: Share, among: Sequence[int]) -> Ranks:
        """Those of some ranks whose keys a share needs."""
        return self.problem.senders(tuple(among), users_of(share.queries))

    def work(self, share: Share, among: Sequence[int]) -> tuple[Work, ...]:
        """Our launch on our share and the keys of some ranks."""
        keys = self.keys(share, among)
        return make_shared_work(self.problem, self.rank, share.queries, keys, share.heads)

    def queries_come(self, user: int, share: Share) -> list[Transfer]:
        return self._moves(Payload.INPUT, Side.QUERY, user, share, self._ours(user, share.queries))

    def keys_come(self, user: int, share: Share, among: Sequence[int]) -> list[Transfer]:
        keys = self.keys(share, self._ours(user, among))
        return self._moves(Payload.INPUT, Side.KEY, user, share, keys)

    def results_leave(self, user: int, share: Share) -> list[Transfer]:
        """Outputs, or gradients of queries, go home; a rank's own are rounded in place."""
        if share.queries == (user,) and not self._queries_elsewhere:
            return []
        return self._moves(Payload.FINAL, Side.QUERY, user, share, self._ours(user, share.queries))

    def gradients_leave(self, user: int, share: Share, among: Sequence[int]) -> list[Transfer]:
        """Gradients of keys go home, final where nobody else has others for the same head."""
        keys = self.keys(share, self._ours(user, among))
        payload = Payload.FINAL if self._final_keys else Payload.RESULT
        if keys == (user,) and not self._keys_elsewhere:
            return []
        return self._moves(payload, Side.KEY, user, share, keys)

    @cached_property
    def _queries_elsewhere(self) -> bool:
        """Whether others compute with our queries: then all our results arrive final."""
        return any(self.rank in share.queries for share in self._elsewhere)

    @cached_property
    def _keys_elsewhere(self) -> bool:
        return any(self.keys(share, (self.rank,)) for share in self._elsewhere)

    @cached_property
    def _final_keys(self) -> bool:
        """Whether every KV head is computed by one rank alone."""
        heads = [h for theirs in self.shares.values() for s in theirs for h in range(*s.heads)]
        return len(set(heads)) == len(heads)

    def _ours(self, user: int, owners: Sequence[int]) -> Sequence[int]:
        """Those of some ranks whose shards go from or to us, on their way to or from a user."""
        if user == self.rank:
            return owners
        return (self.rank,) if self.rank in owners else ()

    def _moves(
        self, payload: Payload, side: Side, user: int, share: Share, owners: Sequence[int]
    ) -> list[Transfer]:
        alone = tuple(owners) == (user,)  # then the shard is read, and its results lie, in place
        if alone and payload is not Payload.FINAL:
            return []
        queries = () if share.queries == (user,) else share.queries
        found = []
        for owner in owners:
            ends = (owner, user) if payload is Payload.INPUT else (user, owner)
            found.append(Transfer(payload, side, owner, share.heads, *ends, not alone, queries))
        return found
