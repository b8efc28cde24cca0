"""Ulysses around a ring: all-to-all exchanges of heads for tokens before and after it.

As yunchang (USP) and BurstEngine's benchmark have it: each tensor is laid out anew before and after
its exchange, which nothing runs beside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..timeline import Stage
from .launches import HALF
from .stages import RunSetting


@dataclass(frozen=True, slots=True)
class Groups:
    """Who shares heads with a rank, and who is in a ring with it: both in order."""

    heads: Sequence[int]
    ring: Sequence[int]


def groups(rank: int, world: int, ulysses: int, neighbours: bool = True) -> Groups:
    """Neighbours share heads (yunchang's default, "head first"), or those far from each other."""
    ring = world // ulysses
    if neighbours:
        first = rank - rank % ulysses
        return Groups(range(first, first + ulysses), range(rank % ulysses, world, ulysses))
    first = rank - rank % ring
    return Groups(range(rank % ring, world, ring), range(first, first + ring))


def inner(setting: RunSetting, ulysses: int) -> RunSetting:
    """What the ring sees: more tokens, fewer heads; KV heads are repeated if there are few."""
    launches = setting.launches
    heads = launches.of_heads(launches.nheads // ulysses, max(1, launches.nheads_k // ulysses))
    return replace(setting, launches=heads, tokens=setting.tokens * ulysses)


@dataclass(frozen=True, slots=True)
class Ulysses:
    """One rank."""

    setting: RunSetting
    rank: int
    members: Sequence[int]  # who share heads
    ring: Callable[[], Iterator[Stage]]  # forward, inside
    ring_back: Callable[[], Iterator[Stage]]

    def exchange(self, elements: float, tensors: int) -> Iterator[Stage]:
        """Tensors of so many elements together, one after the other."""
        launches, parts = self.setting.launches, len(self.members)
        laid_out = launches.copy(elements, HALF, tensors)
        one = self.setting.everybody(self.rank, self.members, elements / tensors * HALF / parts)
        yield Stage(laid_out)
        for _ in range(tensors):
            yield self.setting.stage(self.rank, 0.0, one, laid_out / tensors)

    def sizes(self) -> tuple[float, float]:
        """Elements of q, and of k and v together."""
        launches, tokens = self.setting.launches, self.setting.tokens
        nheads_k = max(launches.nheads_k, len(self.members))
        return launches.elements(tokens), 2 * launches.of_heads(nheads_k, nheads_k).elements(tokens)

    def forward(self) -> Iterator[Stage]:
        """q, k and v; the ring; out."""
        q, k = self.sizes()
        yield from self.exchange(q, 1)
        yield from self.exchange(k, 2)
        yield from self.ring()
        yield from self.exchange(q, 1)

    def backward(self) -> Iterator[Stage]:
        """dout; the ring; dq, dk and dv."""
        q, k = self.sizes()
        yield from self.exchange(q, 1)
        yield from self.ring_back()
        yield from self.exchange(q, 1)
        yield from self.exchange(k, 2)
