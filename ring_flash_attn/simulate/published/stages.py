"""RunSetting: a row's machine, shape and habits, and the stages that all schedules are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...bench.links import INSIDE, Topology
from ..timeline import Stage
from .constants import Constants
from .launches import Launches

Messages = tuple[tuple[int, int], ...]  # (peer, bytes)
Exchange = tuple[Messages, Messages]  # sent and received
NOTHING: Exchange = ((), ())


@dataclass(frozen=True, slots=True)
class RunSetting:
    """What a schedule needs to know of a row."""

    launches: Launches
    topology: Topology
    constants: Constants
    world: int
    tokens: int  # on each rank
    passes: str = "both"
    mask: str = "causal"
    ulysses: int = 1
    several: float = 1.0  # how much faster NCCL is to several peers of a node than to one
    lengths: tuple[int, ...] = ()  # of documents, of which each rank has as much; (): one

    @property
    def full(self) -> bool:
        """Do queries see later keys, too?"""
        return self.mask in ("full", "documents full")

    @property
    def documents(self) -> tuple[int, ...]:
        """Tokens of each document on each rank."""
        return self.lengths or (self.tokens,)

    @property
    def forward(self) -> bool:
        """Is the forward pass timed?"""
        return self.passes in ("forward", "both")

    @property
    def backward(self) -> bool:
        """Is the backward pass timed?"""
        return self.passes in ("backward", "both")

    def everybody(self, rank: int, members: Sequence[int], size: float) -> Exchange:
        """As many bytes to each of the others, and from each.

        Links are priced at the rate of one peer. To several peers in its node NCCL is faster by
        `several`; these messages count as so many bytes fewer.
        """
        others = [member for member in members if member != rank and size]
        inside = [each for each in others if self.topology.level(rank, each) == INSIDE]
        faster = self.several if len(inside) > 1 else 1.0
        sizes = ((each, int(size / (faster if each in inside else 1.0))) for each in others)
        messages = tuple(sizes)
        return messages, messages

    def stage(
        self,
        rank: int,
        compute: float = 0.0,
        exchange: Exchange = NOTHING,
        after: float = 0.0,
        awaited: int = 0,
        beside: float = 0.0,
    ) -> Stage:
        """One step; compute is slower for every byte that NCCL moves beside it.

        Args:
            rank: whose step it is.
            compute: seconds on the compute stream.
            exchange: messages that are posted first.
            after: seconds on the compute stream once messages have arrived.
            awaited: messages are awaited so many stages later.
            beside: bytes of messages that were posted before, and are under way.
        """
        sent, received = exchange
        if compute:
            moved = beside + sum(size for _, size in sent)
            lost = self.constants.interference * moved / self.constants.nvlink
            compute += lost
        return Stage(compute, sent, received, after, awaited=awaited)


def hop(rank: int, members: Sequence[int], size: float) -> Exchange:
    """To the next of a ring, and from the one before."""
    if len(members) < 2 or not size:
        return NOTHING
    at = members.index(rank)
    after, before = members[(at + 1) % len(members)], members[at - 1]
    return ((after, int(size)),), ((before, int(size)),)


def together(*exchanges: Exchange) -> Exchange:
    """Several in one post."""
    sent = tuple(message for each, _ in exchanges for message in each)
    received = tuple(message for _, each in exchanges for message in each)
    return sent, received
