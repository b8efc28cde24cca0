"""Steps: what one rank computes, sends and receives, as plain data.

A route (one file in `routes/`) turns a `Problem` into the steps of a rank; `make_plan` (`build.py`)
adds what all routes share. Nothing here knows torch: plans can be proved, priced, drawn, and run by
virtual ranks.
"""

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
