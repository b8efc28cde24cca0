"""ring-flash-attn 0.1.8: llama3, which gathers the keys of four KV heads at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..rates import Band, causal
from ..timeline import Stage
from .launches import HALF
from .stages import NOTHING, RunSetting

STRIDE = 4  # KV heads at a time, in the benchmark


class Llama3:
    """One rank; the documents of all ranks together follow each other."""

    def __init__(self, setting: RunSetting, rank: int, lengths: Sequence[int] = ()) -> None:
        self.setting, self.rank = setting, rank
        self.tokens, self.world = setting.tokens, setting.world
        heads = setting.launches
        self.rounds = heads.nheads_k // STRIDE
        self.launches = heads.of_heads(heads.nheads // self.rounds, STRIDE)
        total = setting.tokens * setting.world
        self.lengths = [length * self.world for length in lengths] or [total]

    def bands(self) -> list[Band]:
        """This rank's queries of each document, against its keys until the last of them."""
        found, start = [], 0
        first, last = self.rank * self.tokens, (self.rank + 1) * self.tokens
        for length in self.lengths:
            begin, end = max(start, first), min(start + length, last)
            if begin < end:
                found.append(causal(end - begin, end - start))
            start += length
        return found

    def forward(self) -> Iterator[Stage]:
        """A gathering beside nothing, then one beside each call but the last."""
        stage, keys = self.setting.stage, 2 * self.launches.elements_k(self.tokens)
        gather = self.setting.everybody(self.rank, range(self.world), keys * HALF)
        packed = self.launches.copy(keys, HALF, 2)
        yield Stage(packed, *NOTHING)
        yield stage(self.rank, 0.0, gather)
        for number in range(self.rounds):
            last = number == self.rounds - 1
            compute = self.launches.forward(self.bands())
            out = self.setting.launches.elements(self.tokens)
            after = self.launches.copy(out, HALF) if last else 0.0
            yield stage(self.rank, compute + packed, NOTHING if last else gather, after)

    def backward(self) -> Iterator[Stage]:
        """As forward; gradients of all keys are zeroed, and summed over ranks after each call."""
        stage, keys = self.setting.stage, 2 * self.launches.elements_k(self.tokens)
        gather = self.setting.everybody(self.rank, range(self.world), keys * HALF)
        packed = self.launches.copy(keys, HALF, 2)
        zeros = self.launches.moving(keys * self.world * HALF)
        yield stage(self.rank, 0.0, gather)
        for number in range(self.rounds):
            last = number == self.rounds - 1
            compute = self.launches.backward(self.bands()) + zeros + packed
            yield stage(self.rank, compute, NOTHING if last else gather)
            yield stage(self.rank, 0.0, gather, after=packed)  # the sum, as many bytes
        k = self.setting.launches.elements_k(self.tokens)
        yield Stage(
            self.launches.moving(14 * k * HALF, 5)
        )  # gradients of kv's parts, and their sum
