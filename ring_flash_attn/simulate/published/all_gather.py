"""Megatron's all-gather context parallelism, as in MagiAttention's benchmark: zigzag."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..rates import Band, causal, full
from ..timeline import Stage
from .launches import HALF
from .stages import RunSetting


@dataclass(frozen=True, slots=True)
class RingAllGather:
    """One rank; keys are gathered across nodes, then inside the node, beside nothing."""

    setting: RunSetting
    rank: int
    local: Sequence[int]
    across: Sequence[int]

    def calls(self) -> list[list[Band]]:
        """An early and a late half of each document's queries, against the keys until its end."""
        setting, world, place = self.setting, self.setting.world, self.rank
        if setting.full:
            return [[full(each // 2, each * world) for each in setting.documents]] * 2
        return [
            [causal(each // 2, each // 2 * (number + 1)) for each in setting.documents]
            for number in (place, 2 * world - 1 - place)
        ]

    @property
    def keys(self) -> float:
        """Elements of k and v."""
        return 2 * self.setting.launches.elements_k(self.setting.tokens)

    def exchange(self) -> Iterator[Stage]:
        """Every rank's keys to every other, or the other way round what is summed."""
        nodes = len(self.across)
        yield self.setting.stage(
            self.rank, 0.0, self.setting.everybody(self.rank, self.across, self.keys * HALF)
        )
        inside = self.setting.everybody(self.rank, self.local, self.keys * HALF * nodes)
        yield self.setting.stage(self.rank, 0.0, inside)

    def forward(self) -> Iterator[Stage]:
        """Keys are put in order after they have arrived; results are put together."""
        launches = self.setting.launches
        yield from self.exchange()
        ordered = launches.copy(self.keys * self.setting.world, HALF, 2)
        out = launches.copy(launches.elements(self.setting.tokens), HALF, 2)
        compute = sum(launches.forward(bands) for bands in self.calls())
        yield self.setting.stage(self.rank, ordered + compute + out)

    def backward(self) -> Iterator[Stage]:
        """The gradients of all keys: both halves added, put in order, then summed over ranks."""
        launches = self.setting.launches
        every = self.keys * self.setting.world
        yield from self.exchange()
        ordered = launches.copy(every, HALF, 2)
        added = launches.moving(every * 3 * HALF, 2) + launches.copy(every, HALF, 2)
        compute = sum(launches.backward(bands) for bands in self.calls())
        yield self.setting.stage(self.rank, ordered + compute + added)
        yield from self.exchange()
