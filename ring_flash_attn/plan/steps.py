"""Steps: what one rank computes, sends and receives, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from .tiles import Tiles

Heads = tuple[int, int]  # first and one past the last KV head
Users = int | tuple[int, ...]  # whose queries: those of a rank, or of several


def users_of(queries: tuple[int, ...]) -> Users:
    """The owners of queries, as methods of `Problem` take them: one, or several."""
    return queries if len(queries) > 1 else queries[0]


class Side(IntEnum):
    """Which shard of a rank: its queries (with all that belongs to them) or its keys and values."""

    QUERY = 0
    KEY = 1


class Payload(IntEnum):
    """What of a shard travels: what kernels read, what they have accumulated so far, what is final.

    A FINAL result has the user's dtype, and nobody adds to it.
    """

    INPUT = 0
    RESULT = 1
    FINAL = 2


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """The payload of `owner`'s shard goes from rank `source` to rank `target`.

    An INPUT is there for the work of later steps. A RESULT is what the ranks before have summed up;
    the target adds its own part of the same step to it. A FINAL result takes its place at home.
    `source == target` is a copy in place. The order of transfers is the order of messages between a
    pair of ranks. With `cut`, of the keys only the rows of `Problem.sent` go, of the queries those
    of `Problem.asking`, as the launch wants that they are for (`Work.cut`). `queries` are those of
    the launch, where they are not the user's own.

    Between nodes a rank may relay: it gets, once, the rows that any of the ranks `relayed_for`
    needs, sends each of them what it needs itself, adds up what they return, and sends that home.
    On both ways, such a shard lies at the relay in a buffer of its own.
    """

    payload: Payload
    side: Side
    owner: int
    heads: Heads
    source: int
    target: int
    cut: bool = False
    queries: tuple[int, ...] = ()  # owners
    relayed_for: tuple[int, ...] = ()

    @classmethod
    def of_keys(cls, payload: Payload, owner: int, user: int, heads: Heads) -> Transfer:
        """Pieces of keys go from their owner to the user, gradients back."""
        ends = (owner, user) if payload is Payload.INPUT else (user, owner)
        return cls(payload, Side.KEY, owner, heads, *ends, cut=True)

    @property
    def user(self) -> int:
        """Whose launch it is for: inputs go there, results come from there."""
        return self.target if self.payload is Payload.INPUT else self.source

    @property
    def users(self) -> Users:
        """Whose queries need the rows: those of a rank, or of several."""
        if self.relayed_for and self.owner in (self.source, self.target):  # to or from the relay
            return users_of(self.relayed_for)
        return users_of(self.queries or (self.user,))

    @property
    def leaves_relay(self) -> bool:
        """Whether the source has the shard because it relays it."""
        if self.payload is Payload.INPUT:
            return bool(self.relayed_for) and self.owner != self.source
        return bool(self.relayed_for) and self.owner == self.target

    @property
    def fills_relay(self) -> bool:
        """Whether the target gets the shard, or adds to it, because it relays it."""
        return bool(self.relayed_for) and not self.leaves_relay


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel launch: query shards against key shards, each side in one buffer.

    The rows of tiles are those of the buffers. With `cut`, a buffer of keys holds the rows that are
    needed (`Problem.arrangement`), one of queries those that see a key
    (`Problem.query_arrangement`), and not a whole shard. A rank's own shard alone is never cut.
    """

    queries: tuple[int, ...]  # owners
    keys: tuple[int, ...]
    heads: Heads
    tiles: Tiles
    cut: bool = False

    def owners(self, side: Side) -> tuple[int, ...]:
        """Whose shards, of one side."""
        return self.queries if side is Side.QUERY else self.keys


@dataclass(frozen=True, slots=True)
class Step:
    """Transfers are posted, the work is done while they are under way, then they are awaited."""

    transfers: tuple[Transfer, ...] = ()
    work: tuple[Work, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """All steps of one rank, forward or backward; every rank has as many.

    If it is `complete`, launches with `last` tiles cover every query of the rank, so that kernels
    leave the whole output final; otherwise it is made from the state at the end.
    """

    rank: int
    steps: tuple[Step, ...]
    complete: bool

    @property
    def pairs(self) -> int:
        """Allowed (query, key) pairs that this rank computes, summed over KV heads."""
        return sum(
            int(work.tiles.pairs.sum()) * (work.heads[1] - work.heads[0])
            for step in self.steps
            for work in step.work
        )
