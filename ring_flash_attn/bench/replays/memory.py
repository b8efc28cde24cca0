"""What a rank launches, sends and holds: its passes on meta tensors, with a kernel that counts.

The executor is the real one, so that buffers and messages are, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...comm import Message
from ...engine.attention import LocalRank, PreparedCall, backward, forward
from ...engine.executor import Pool
from ...kernels.base import Call, Kernel, as_block, as_direct
from ...plan.steps import Payload, Plan, Side
from .emulated import RandomData, message_bytes
from .results import PassCost

_INPUTS = {Side.KEY: "K, V", Side.QUERY: "Q"}
_RESULTS = {(Side.QUERY, False): "out, lse", (Side.QUERY, True): "dQ", (Side.KEY, True): "dK, dV"}


class _Counter:
    """A transport that counts messages, and a kernel that counts its launches."""

    name = "counter"

    def __init__(self, kernel: Kernel, data: RandomData) -> None:
        self.direct, self.blocks = as_direct(kernel) is not None, as_block(kernel) is not None
        self._data = data
        self.launches = self.posts = self.sent = self.received = 0

    def post(self, messages: Sequence[Message]) -> None:
        sent, received = message_bytes(messages)
        self.posts += bool(messages)
        self.sent += sent
        self.received += received
        for message in messages:
            if message.receive:
                self._data.like(message.tensor)

    def wait(self) -> None:
        """Nothing is under way."""

    def abandon(self, steps: Sequence[bool], drain: bool) -> None:
        """Nobody else is there."""

    def why_not(self, call: Call) -> list[str]:
        return []

    def forward(self, *args: Any) -> None:
        self.launches += 1

    backward = forward

    def alone(self, *args: Any) -> None:
        """Blocks are for others to merge."""

    alone_backward = alone

    def delta(self, dout: Tensor, out: Tensor, call: Call) -> Tensor:
        batch, length, nheads, _ = out.shape
        return out.new_empty((batch, nheads, length), dtype=call.state_dtype)


class _CountingPool(Pool):
    """Counts the bytes of buffers in use, by dtype."""

    def __init__(self) -> None:
        self._now: dict[torch.dtype, int] = {}
        self.most: dict[torch.dtype, int] = {}

    def take(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer = super().take(shape, dtype, device)
        self._now[dtype] = self._now.get(dtype, 0) + buffer.nbytes
        self.most[dtype] = max(self.most.get(dtype, 0), self._now[dtype])
        return buffer

    def give(self, buffer: Tensor) -> None:
        self._now[buffer.dtype] -= buffer.nbytes


def pass_costs(
    prepared: PreparedCall, shard: Sequence[Tensor], data: RandomData
) -> tuple[PassCost, PassCost]:
    """The forward and the backward pass of the call's only rank; `data` is made large enough."""
    q, k, v = (torch.empty_like(x, device="meta") for x in shard)
    batch, length, nheads, _ = q.shape
    out = q.new_empty((batch, length, nheads, prepared.call.headdim_v))
    lse = q.new_empty((batch, nheads, length), dtype=prepared.call.state_dtype)
    (local,) = prepared.ranks
    call = replace(prepared.call, device=torch.device("meta"))

    def cost(is_backward: bool) -> PassCost:
        counter, pool = _Counter(prepared.kernel, data), _CountingPool()
        rank = LocalRank(local.forward, local.backward, pool)
        dry = PreparedCall((rank,), counter, call, lambda: [counter])
        if is_backward:
            backward(dry, [(q, k, v)], None, [(out, lse)], [(out, None)])
        else:
            forward(dry, [(q, k, v)], None)
        held = _held(dry, (q, k, v), pool.most, is_backward)
        return PassCost(counter.launches, counter.posts, counter.sent, counter.received, held)

    return cost(is_backward=False), cost(is_backward=True)


def _held(
    prepared: PreparedCall,
    shard: Sequence[Tensor],
    buffers: dict[torch.dtype, int],
    is_backward: bool,
) -> dict[str, int]:
    """By name: states or accumulators of the pass, and its buffers."""
    path = prepared.ranks[0].backward if is_backward else prepared.ranks[0].forward
    call = prepared.call
    element, state = call.dtype.itemsize, call.state_dtype.itemsize
    rows = shard[0].shape[:3].numel() * state
    held = {}
    at_once = path.single_launch is not None and as_direct(prepared.kernel) is not None
    if element != state and not at_once:  # else they become what the user gets
        if is_backward:
            held["accumulators of dQ, dK, dV, fp32"] = state * sum(x.numel() for x in shard)
        else:
            held["state of out, fp32"] = rows * call.headdim_v
    if is_backward and as_block(prepared.kernel) is None:
        held["delta"] = rows
    inputs, results = _names(path.plan, is_backward)
    for dtype, most in buffers.items():
        if element == state:
            name = "; ".join(name for name in (inputs, results) if name)
        else:
            name = inputs if dtype is call.dtype else results
        held[name] = most
    return held


def _names(plan: Plan, is_backward: bool) -> tuple[str, str]:
    """What travels, in words: what kernels read, and what they have accumulated."""
    transfers = [t for step in plan.steps for t in step.transfers]
    inputs = {_INPUTS[t.side] for t in transfers if t.payload is Payload.INPUT}
    results = {_RESULTS[t.side, is_backward] for t in transfers if t.payload is Payload.RESULT}
    if is_backward and any(t.side is Side.QUERY for t in transfers):
        inputs.add("dout")
        results.add("lse, delta")
    first, second = (f"{', '.join(sorted(x))} in flight" if x else "" for x in (inputs, results))
    return first, second
