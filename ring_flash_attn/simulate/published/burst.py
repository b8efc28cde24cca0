"""BurstAttention: double ring; backward, what belongs to queries travels, and keys stay.

Burst-Attention b088c55, which BurstEngine builds in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..timeline import Stage
from .double_ring import Windows
from .launches import HALF, SINGLE
from .stages import together


@dataclass(frozen=True, slots=True)
class Burst(Windows):
    """One rank; with one node, a single ring."""

    def bands_back(self, source: int) -> tuple[list, float, float]:
        """What a rank's keys meet of another's queries, and the shares of queries and of keys."""
        rows, columns = self.parts(source)
        if rows == columns:
            return self.bands(source), rows, columns
        # Queries of a later rank see half of our keys; of an earlier one, half of them see all.
        tokens, launches = self.setting.tokens, self.setting.launches
        if source > self.place:
            return launches.half(tokens, tokens // 2), 1.0, 0.5
        return launches.half(tokens // 2, tokens), 0.5, 1.0

    def forward(self) -> Iterator[Stage]:
        """The double ring, with k, v and out copied, and keys that leave the node once more."""
        launches, (q, k) = self.setting.launches, self.elements
        copies = launches.copy(k * len(self.across), HALF, 2) + launches.copy(q, HALF)
        yield Stage(copies + launches.moving(k * HALF, 2))
        yield from Windows.forward(self)

    def backward(self) -> Iterator[Stage]:
        """Each step: queries go on, and the sum of dq that arrived with the queries before."""
        launches, stage = self.setting.launches, self.setting.stage
        q, k = self.elements
        rows = self.setting.tokens * launches.nheads
        size, windows = len(self.local), len(self.across)
        queries, queries_across = self.hops(2 * q * HALF + 2 * rows * SINGLE)
        sums, sums_across = self.hops(q * HALF)
        yield Stage(launches.moving(q * 16, 3))  # delta
        for window in range(windows):
            if window + 1 < windows:
                yield stage(self.rank, 0.0, queries_across, awaited=size + (window > 0))
            if window:  # the sum of a window goes to the next node
                yield stage(self.rank, 0.0, sums_across, awaited=size + (window + 1 < windows))
            for step in range(size):
                exchange = together(
                    *([queries] if step < size - 1 else []), *([sums] if step else [])
                )
                bands, part_q, part_k = self.bands_back(self.source(window, step))
                compute = launches.backward(bands)
                taken = launches.moving(q * 0.5 * 4 * 3, 3) if part_q < 1 else 0.0
                after = launches.moving(q * part_q * 3 * HALF) + launches.moving(
                    k * part_k * 3 * HALF, 2
                )
                yield stage(self.rank, compute + taken, exchange, after)
        if windows > 1:
            yield stage(self.rank, 0.0, sums_across)
        yield stage(self.rank, 0.0, sums)
