"""What is timed: a rank of many without the others, and the same kernel on one device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..engine.attention import QKV, PreparedCall, backward, forward
from ..engine.executor import Pool
from ..engine.prepare import prepare_rank, prepare_virtual
from ..kernels.base import choose_kernel
from .link import Link
from .pace import Bank, Peers
from .scenario import Scenario
from .timeline import BACKWARD, Bar, RecordedKernel, Recorder

Passes = tuple[tuple[Tensor, Tensor], QKV]  # (out, lse), (dq, dk, dv)


class Contender(Protocol):
    """Something that does a forward pass, or a forward and a backward pass, again and again."""

    def forward(self) -> object:
        """Returns what a user gets."""
        ...

    def both(self) -> object:
        """Returns what a user gets of both passes."""
        ...


@dataclass(frozen=True, slots=True)
class OneRank:
    """A prepared of one rank and its data; a rank of many, or one device on its own.

    Attributes:
        prepared: what runs.
        shard: q, k, v.
        dout: gradient of the output.
        peers: what stands in for the other ranks; None on one device.
    """

    prepared: PreparedCall
    shard: QKV
    dout: Tensor
    peers: Peers | None = None

    def forward(self) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        (result,) = forward(self.prepared, [self.shard], None)
        return result

    def both(self) -> Passes:
        """(out, lse) and (dq, dk, dv)."""
        result = self.forward()
        return result, self._backward(self.prepared, result)

    def _backward(self, prepared: PreparedCall, result: tuple[Tensor, Tensor]) -> QKV:
        _, (grads,) = backward(prepared, [self.shard], None, [result], [(self.dout, None)])
        return grads

    def recorded(self, both: bool = True) -> tuple[Bar, ...]:
        """One forward and backward pass, with the times of its launches and transfers.

        Args:
            both: False: without the backward pass.
        """
        recorder = Recorder(self.prepared.call.device)
        plans = [p.plan for p in (self.prepared.ranks[0].forward, self.prepared.ranks[0].backward)]
        kernel: Any = RecordedKernel(self.prepared.kernel, recorder, plans)
        prepared = replace(self.prepared, kernel=kernel)
        assert self.peers is not None, "a rank of many"
        self.peers.recorder = recorder
        try:
            (result,) = forward(prepared, [self.shard], None)
            recorder.direction = BACKWARD
            if both:
                self._backward(prepared, result)
        finally:
            self.peers.recorder = None
        return recorder.bars()


class Kept(Pool):
    """Buffers that stay, and serve every walk."""

    def __init__(self) -> None:
        self.free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}

    def take(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A used one if there is any."""
        free = self.free.get((shape, dtype))
        return free.pop() if free else super().take(shape, dtype, device)

    def give(self, buffer: Tensor) -> None:
        """For the next to take."""
        self.free.setdefault((buffer.shape, buffer.dtype), []).append(buffer)


class Stage:
    """Makes contenders; they share prepared data, buffers, and shards where these have one size."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.bank = Bank(scenario.device)
        self._shards: dict[int, tuple[QKV, Tensor]] = {}
        self._kept = Kept()

    def data(self, tokens: int) -> tuple[QKV, Tensor]:
        """(q, k, v) and dout of so many tokens."""
        if tokens not in self._shards:
            self._shards[tokens] = self.scenario.shard(tokens)
        return self._shards[tokens]

    def rank(self, rank: int, link: Link | None, keeps_buffers: bool = True) -> OneRank:
        """A rank of many.

        Args:
            rank: which.
            link: how it reaches the others; None: messages cost nothing.
            keeps_buffers: from run to run, which messages that cost nothing need for sane numbers.
                All such ranks share them; their memory is not as it would be.
        """
        scenario = self.scenario
        shard, dout = self.data(scenario.size(rank))
        wide = scenario.dtype.itemsize >= torch.float32.itemsize
        peers = Peers(scenario.device, link, self.bank, always_copies=wide)
        pool = self._kept if keeps_buffers and link is None else Pool()
        prepared = prepare_rank(
            scenario.route, scenario.problem, rank, shard, scenario.options, peers.transport, pool
        )
        return OneRank(prepared, shard, dout, peers)

    def alone(self, causal: bool, lengths: tuple[int, ...]) -> OneRank:
        """The same kernel on one device: documents of these lengths, as many tokens as a shard."""
        scenario = self.scenario
        shard, dout = self.data(scenario.tokens)
        problem = scenario.alone(lengths, causal)
        opts = replace(scenario.options, causal=causal)
        return OneRank(prepare_virtual("ring", problem, [shard], opts), shard, dout)


def with_chosen_kernel(scenario: Scenario) -> Scenario:
    """The scenario with the kernel that it gets; an error with all reasons if there is none."""
    heads = (scenario.nheads, scenario.nheads_k, scenario.nheads_k)
    rows, headdim = scenario.size(scenario.ranks[0]), scenario.headdim
    shapes = [(scenario.batch, rows, each, headdim) for each in heads]
    q, k, v = (torch.empty(shape, dtype=scenario.dtype, device="meta") for shape in shapes)
    opts = replace(scenario.options, kernel="reference")  # any device will do for now
    ranks = scenario.ranks[0], (q, k, v)
    prepared = prepare_rank(scenario.route, scenario.problem, *ranks, opts, _nobody, Pool())
    call = replace(prepared.call, device=scenario.device)
    return replace(scenario, kernel=choose_kernel(scenario.kernel, call).name)


def _nobody() -> Any:
    raise AssertionError("nothing is sent yet")
