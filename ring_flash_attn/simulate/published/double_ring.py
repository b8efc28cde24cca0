"""LoongTrain's double ring, as in BurstEngine's benchmark; in one node, the ring of its USP.

Keys go round inside a node; once a window, while that goes on, also to the next node. Gradients of
keys follow: in single precision in the first window, then in half.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..rates import Band, causal, full
from ..timeline import Stage
from .launches import HALF, SINGLE
from .stages import Exchange, RunSetting, hop

FUSED = 10  # bytes that a merge moves for each element of out: a profile shows one fused kernel


@dataclass(frozen=True, slots=True)
class Windows:
    """One rank of rings inside nodes (`local`), and of one ring through the nodes (`across`)."""

    setting: RunSetting
    rank: int
    local: Sequence[int]
    across: Sequence[int]

    @property
    def elements(self) -> tuple[float, float]:
        """Of q, and of k and v together."""
        launches, tokens = self.setting.launches, self.setting.tokens
        return launches.elements(tokens), 2 * launches.elements_k(tokens)

    def source(self, window: int, step: int) -> int:
        """Whose keys a rank has then: a number in the order of the zigzag layout."""
        size = len(self.local)
        node = (self.across.index(self.rank) - window) % len(self.across)
        return node * size + (self.local.index(self.rank) - step) % size

    @property
    def place(self) -> int:
        """This rank's number in that order."""
        return self.source(0, 0)

    def bands(self, source: int) -> list[Band]:
        """Zigzag: what a rank computes against the keys of another."""
        lengths = self.setting.documents
        if self.setting.full:
            return [full(length, length) for length in lengths]
        if source == self.place:
            return [causal(length, length) for length in lengths]
        if source < self.place:
            return [full(length, length // 2) for length in lengths]
        return [full(length // 2, length) for length in lengths]

    def parts(self, source: int) -> tuple[float, float]:
        """Shares of the queries and of the keys that concern each other."""
        if self.setting.full or source == self.place:
            return 1.0, 1.0
        return (1.0, 0.5) if source < self.place else (0.5, 1.0)

    def hops(self, size: float) -> tuple[Exchange, Exchange]:
        """Inside the node, and to the next."""
        return hop(self.rank, self.local, size), hop(self.rank, self.across, size)

    def merge(self, source: int) -> float:
        """Seconds of combining a block's result with the others; halves are put back."""
        launches, (q, _) = self.setting.launches, self.elements
        rows, _ = self.parts(source)
        if source == self.place:
            return launches.cast(q)
        back = launches.copy(q * rows, SINGLE) if rows < 1 else 0.0
        return launches.moving(q * rows * FUSED, 4) + back

    def forward(self) -> Iterator[Stage]:
        """Keys for the next window are under way during a whole window."""
        launches, stage = self.setting.launches, self.setting.stage
        q, k = self.elements
        local, across = self.hops(k * HALF)
        size, windows = len(self.local), len(self.across)
        for window in range(windows):
            if window + 1 < windows:
                yield stage(self.rank, 0.0, across, awaited=size)
            for step in range(size):
                source, last = self.source(window, step), step == size - 1
                compute = launches.forward(self.bands(source)) + self.merge(source)
                yield stage(self.rank, compute, ((), ()) if last else local)
        yield Stage(launches.cast(q))

    def backward(self) -> Iterator[Stage]:
        """Gradients of keys go round inside the node, then to the next."""
        launches, stage = self.setting.launches, self.setting.stage
        q, k = self.elements
        keys, keys_across = self.hops(k * HALF)
        size, windows = len(self.local), len(self.across)
        for window in range(windows):
            if window + 1 < windows:  # awaited when this window ends
                yield stage(self.rank, 0.0, keys_across, awaited=2 * size)
            wire = SINGLE if window == 0 else HALF
            gradients = hop(self.rank, self.local, k * wire)
            for step in range(size):
                source, last = self.source(window, step), step == size - 1
                rows, columns = self.parts(source)
                compute = launches.backward(self.bands(source))
                compute += launches.moving(q * rows * (2 * wire + HALF))
                after = launches.moving(k * columns * (2 * wire + HALF), 2)
                beside = k * wire if step else 0.0
                yield stage(self.rank, compute, ((), ()) if last else keys, after, beside=beside)
                yield stage(self.rank, 0.0, gradients, awaited=0 if last else 1)
            yield Stage(launches.cast(k, 2) if window == 0 else 0.0)
            # To the next node; awaited after the first block there.
            _, gradients = self.hops(k * HALF)
            if window + 1 < windows:
                ahead = 2 if window + 2 < windows else 1  # a post of keys lies between
                yield stage(self.rank, 0.0, gradients, awaited=ahead)
            else:
                yield stage(self.rank, 0.0, gradients)
        yield Stage(launches.cast(q))
