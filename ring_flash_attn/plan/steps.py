"""Steps: what one rank computes, sends and receives, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from .tiles import Tile

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
    The order of transfers is the order of messages between a pair of ranks. With `cut`, of the keys
    only the rows of `Problem.sent` go, as the launch wants that they are for (`Work.cut`).
    """

    payload: Payload
    side: Side
    owner: int
    heads: Heads
    source: int
    target: int
    cut: bool = False

    @classmethod
    def of_keys(cls, payload: Payload, owner: int, user: int, heads: Heads) -> Transfer:
        """Pieces of keys go from their owner to the user, gradients back."""
        ends = (owner, user) if payload is Payload.INPUT else (user, owner)
        return cls(payload, Side.KEY, owner, heads, *ends, cut=True)

    @property
    def user(self) -> int:
        """Whose launch it is for: inputs go there, results come from there."""
        return self.target if self.payload is Payload.INPUT else self.source


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel launch: query shards against key shards, each side in one buffer.

    The rows of tiles are those of the buffers. With `cut`, the buffer of keys holds the rows that
    are needed (`Problem.arrangement`), and not a whole shard.
    """

    queries: tuple[int, ...]  # owners
    keys: tuple[int, ...]
    heads: Heads
    tiles: tuple[Tile, ...]
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
            tile.pairs * (work.heads[1] - work.heads[0])
            for step in self.steps
            for work in step.work
            for tile in work.tiles
        )
