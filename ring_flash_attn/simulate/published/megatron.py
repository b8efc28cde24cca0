"""Transformer Engine's p2p context parallelism: zigzag, one ring through all nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..timeline import Stage
from .double_ring import Windows
from .launches import HALF, SINGLE
from .stages import NOTHING


@dataclass(frozen=True, slots=True)
class RingP2P(Windows):
    """One rank; `local` is the whole ring. Results are kept, and corrected at the end."""

    def forward(self) -> Iterator[Stage]:
        """Keys go on; halves are copied out."""
        launches = self.setting.launches
        q, k = self.elements
        size = len(self.local)
        keys, _ = self.hops(k * HALF)
        corrected = 0.0
        yield Stage(launches.copy(k, HALF))
        for step in range(size):
            source = self.source(0, step)
            rows, columns = self.parts(source)
            taken = launches.copy(q * rows if rows < 1 else k * columns, HALF)
            compute = launches.forward(self.bands(source)) + (
                taken if min(rows, columns) < 1 else 0
            )
            corrected += launches.moving(q * rows * (HALF + 2 * SINGLE))
            yield self.setting.stage(self.rank, compute, keys if step < size - 1 else NOTHING)
        yield Stage(corrected + launches.cast(q))

    def backward(self) -> Iterator[Stage]:
        """Keys and the gradients of the step before go on in one message."""
        launches = self.setting.launches
        q, k = self.elements
        size = len(self.local)
        both, _ = self.hops(2 * k * HALF)
        one, _ = self.hops(k * HALF)
        for step in range(size):
            source = self.source(0, step)
            rows, columns = self.parts(source)
            exchange = one if step in (0, size - 1) else both
            compute = launches.backward(self.bands(source))
            compute += launches.moving(q * rows * 3 * HALF)
            after = launches.moving(k * columns * 3 * HALF)
            yield self.setting.stage(self.rank, compute, exchange, after)
        yield self.setting.stage(self.rank, 0.0, one)
