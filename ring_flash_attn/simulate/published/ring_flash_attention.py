"""ring-flash-attn 0.1.8 (8996282): the schedules of ring, zigzag and stripe, batched and packed.

Keys and values go round in half precision, their gradients in single precision. What a block
returns is merged by the operations of a TorchScript function, priced one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..rates import Band, causal, full
from ..timeline import Stage
from .launches import HALF, SINGLE
from .stages import NOTHING, RunSetting, hop

MERGES = 6  # launches of a merge, with those for lse


class RingSchedule:
    """What the three layouts share; a subclass says what each step computes and combines."""

    def __init__(
        self,
        setting: RunSetting,
        rank: int,
        lengths: Sequence[int] = (),
        members: Sequence[int] | None = None,
    ) -> None:
        self.setting, self.launches, self.rank = setting, setting.launches, rank
        self.members = range(setting.world) if members is None else members
        self.tokens, self.world = setting.tokens, len(self.members)
        self.place = self.members.index(rank)
        self.lengths = tuple(lengths) or (self.tokens,)
        self.packed = bool(lengths)

    def bands(self, step: int) -> list[Band]:
        """What a step computes; empty: nothing."""
        raise NotImplementedError

    def merge(self, step: int) -> float:
        """Seconds, forward."""
        raise NotImplementedError

    def add(self, step: int) -> tuple[float, float]:
        """Seconds of adding dq, and dk and dv, backward."""
        raise NotImplementedError

    def uneven(self, step: int) -> float:
        """How much longer the kernel takes because rows do not fill its last block."""
        return 1.0

    def stalls(self, step: int, backward: bool) -> int:
        """Tensors of which this step takes rows by index; for each the host waits for the GPU."""
        return 0

    def forward(self) -> Iterator[Stage]:
        """The stages of the forward pass."""
        q, k = self.launches.elements(self.tokens), self.launches.elements_k(self.tokens)
        for step in range(self.world):
            last = step == self.world - 1
            size = 2 * k * HALF
            exchange = NOTHING if last else hop(self.rank, self.members, size)
            compute = self._compute(step, backward=False)
            if step == 0:  # k and v out of kv
                compute += self.launches.cast(q) + self.launches.copy(2 * k, HALF, 2)
            elif compute:
                compute += self.merge(step)
            after = self.launches.cast(q) if last else 0.0
            yield self.setting.stage(self.rank, compute, exchange, after)

    def backward(self) -> Iterator[Stage]:
        """The stages of the backward pass: one with keys, and one with their gradients."""
        q, k = self.launches.elements(self.tokens), self.launches.elements_k(self.tokens)
        gradients = hop(self.rank, self.members, 2 * k * SINGLE)
        for step in range(self.world):
            last = step == self.world - 1
            exchange = NOTHING if last else hop(self.rank, self.members, 2 * k * HALF)
            compute, after = self._compute(step, backward=True), 0.0
            if step == 0:
                compute += self.launches.cast(q) + self.launches.cast(2 * k, 2)
            elif compute:
                dq, after = self.add(step)
                compute += dq
            beside = 2 * k * SINGLE if step else 0.0
            yield self.setting.stage(self.rank, compute, exchange, after, beside=beside)
            after = self._end(q, k) if last else 0.0
            yield self.setting.stage(self.rank, 0.0, gradients, after, awaited=0 if last else 1)

    def _end(self, q: float, k: float) -> float:
        casts = self.launches.cast(q) + self.launches.cast(2 * k, 2)
        unpacked = (
            2 * (2 * k * HALF + 2 * k * HALF) + 6 * k * HALF
        )  # gradients of kv's parts, and their sum
        return casts + self.launches.moving(unpacked, 5)

    def _compute(self, step: int, backward: bool) -> float:
        bands = self.bands(step)
        if not bands:
            return 0.0
        one = self.launches.backward if backward else self.launches.forward
        return (
            one(bands) * self.uneven(step)
            + self.stalls(step, backward) * self.setting.constants.stall
        )

    def _merged(self, tokens: float, sliced: bool) -> float:
        elements = self.launches.elements(tokens)
        back = self.launches.copy(elements, SINGLE, 2) if sliced else 0.0
        return self.launches.moving(elements * self.setting.constants.merged, MERGES) + back


class BasicRing(RingSchedule):
    """ring: a rank skips the keys of later ranks."""

    def bands(self, step: int) -> list[Band]:
        if step > self.place and self.setting.mask != "full":
            return []
        shape = causal if step == 0 and self.setting.mask != "full" else full
        return [shape(length, length) for length in self.lengths]

    def merge(self, step: int) -> float:
        return self._merged(self.tokens, sliced=False)

    def add(self, step: int) -> tuple[float, float]:
        keys = 2 * self.launches.elements_k(self.tokens)
        return self.launches.add(self.launches.elements(self.tokens)), self.launches.add(keys, 2)


class Zigzag(RingSchedule):
    """zigzag: half of the keys of an earlier rank, half of the queries for those of a later one."""

    def bands(self, step: int) -> list[Band]:
        if step == 0:
            return [causal(length, length) for length in self.lengths]
        if step <= self.place:
            return [full(length, length // 2) for length in self.lengths]
        return [full(length // 2, length) for length in self.lengths]

    def stalls(self, step: int, backward: bool) -> int:
        if not self.packed or step == 0:
            return 0
        if step <= self.place:
            return 4 if backward else 2  # k and v; dk and dv
        return 1 if backward else 2  # dq; out and lse

    @property
    def indexed(self) -> bool:
        """Are halves taken by an index, which copies? Those of one document are slices."""
        return len(self.lengths) > 1

    def merge(self, step: int) -> float:
        half = self.tokens / 2
        if step <= self.place:
            keys = 2 * self.launches.elements_k(half)
            taken = self.launches.copy(keys, HALF, 2) if self.indexed else 0.0
            return self._merged(self.tokens, sliced=False) + taken
        out = self.launches.elements(half)
        taken = self.launches.copy(out, SINGLE, 2) if self.indexed else 0.0
        return self._merged(half, sliced=True) + taken

    def add(self, step: int) -> tuple[float, float]:
        q, k = self.launches.elements(self.tokens), 2 * self.launches.elements_k(self.tokens)
        if step <= self.place:
            dq, dk, extra = q, k / 2, (k / 2 * HALF, k / 2 * SINGLE)
        else:
            dq, dk, extra = q / 2, k, (q / 2 * SINGLE, 0.0)
        taken = [4 * each if self.indexed else 0.0 for each in extra]  # gathered and put back
        first = self.launches.add(dq) + self.launches.moving(taken[0])
        return first, self.launches.add(dk, 2) + self.launches.moving(taken[1])


class Stripe(RingSchedule):
    """stripe: every block is causal; keys of a later rank are shifted by one."""

    def bands(self, step: int) -> list[Band]:
        rows = self.tokens - (step > self.place)
        return [causal(rows, rows)]

    def uneven(self, step: int) -> float:
        return self.setting.constants.uneven if step > self.place else 1.0

    def merge(self, step: int) -> float:
        return self._merged(self.tokens, sliced=step > self.place)

    def add(self, step: int) -> tuple[float, float]:
        keys = 2 * self.launches.elements_k(self.tokens)
        return self.launches.add(self.launches.elements(self.tokens)), self.launches.add(keys, 2)
