"""The existing design as a contender: one rank of it without the others, and its block alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..comm import Transport
from ..engine.attention import QKV
from .contenders import Passes, Stage
from .existing import Block, ByLibrary, ZigzagRing, merge, run_together, scripted_merge
from .link import Link
from .pace import Peers
from .scenario import Scenario


def design_name(block: Block) -> str:
    """What the existing design is called in reports."""
    return f"existing library's zigzag design on {getattr(block, 'name', type(block).__name__)}"


class Recycler:
    """Memory like a tensor, the same from run to run: the n-th request gets the n-th buffer."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._next = 0

    def rewind(self) -> None:
        """A new run begins."""
        self._next = 0

    def make(self, tensor: Tensor) -> Tensor:
        """The next buffer."""
        if self._next == len(self._buffers):
            self._buffers.append(torch.empty_like(tensor))
        self._next += 1
        return self._buffers[self._next - 1]


class RivalRank:
    """One rank of the existing design.

    Args:
        stage: its data.
        block: who computes a block.
        rank: which.
        link: how it reaches the others; None: messages cost nothing.
        recycler: keeps buffers from run to run, which messages that cost nothing need.
    """

    def __init__(
        self,
        stage: Stage,
        block: Block,
        rank: int,
        link: Link | None,
        recycler: Recycler | None = None,
    ) -> None:
        scenario = stage.scenario
        self._shard, self._dout = stage.data(scenario.tokens)
        self._recycler = recycler
        transport: Callable[[], Transport] = Peers(scenario.device, link, stage.bank).transport
        self._ring = ZigzagRing(
            rank,
            scenario.world_size,
            transport,
            block,
            scripted_merge() if scenario.device.type == "cuda" else merge,
            torch.empty_like if recycler is None else recycler.make,
        )
        precision = torch.promote_types(scenario.dtype, torch.float32)
        for dtype in (scenario.dtype, precision):
            stage.bank.like(torch.empty_like(self._shard[1], dtype=dtype, device="meta"))

    def forward(self) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        if self._recycler is not None:
            self._recycler.rewind()
        (result,) = run_together([self._ring.forward(*self._shard)])
        return result

    def both(self) -> Passes:
        """(out, lse) and (dq, dk, dv)."""
        result = self.forward()
        (grads,) = run_together([self._ring.backward(self._dout, *self._shard, *result)])
        return result, grads


class BlockAlone:
    """The block on one rank's own tokens, on one device."""

    def __init__(self, stage: Stage, block: Block, causal: bool) -> None:
        self._shard, self._dout = stage.data(stage.scenario.tokens)
        self._block, self._causal = block, causal

    def forward(self) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        return self._block.forward(*self._shard, self._causal)

    def both(self) -> Passes:
        """(out, lse) and (dq, dk, dv)."""
        result = self.forward()
        grads: QKV = self._block.backward(self._dout, *self._shard, *result, self._causal)
        return result, grads


def rival_pairs(scenario: Scenario) -> int:
    """Pairs of a rank: a causal block of its own tokens and half a block with every other rank."""
    own = scenario.tokens * (scenario.tokens + 1) // 2
    return scenario.nheads * (own + (scenario.world_size - 1) * scenario.tokens**2 // 2)


def check_rival(scenario: Scenario, block: Block) -> None:
    """ValueError where the existing design cannot do the scenario."""
    reasons = []
    if scenario.packed or not scenario.causal:
        reasons.append("only the causal one of equal sequences is replayed")
    if scenario.tokens % 2:
        reasons.append(f"it halves shards, and {scenario.tokens} tokens are odd")
    if isinstance(block, ByLibrary):
        heads, last = (scenario.nheads, scenario.nheads_k), scenario.headdim
        q, k = (
            torch.empty((0, 0, each, last), dtype=scenario.dtype, device=scenario.device)
            for each in heads
        )
        reasons += [f"{block.name}: {why}" for why in block.why_not(q, k)]
    if reasons:
        raise ValueError(f"the existing design: {'; '.join(reasons)}")
