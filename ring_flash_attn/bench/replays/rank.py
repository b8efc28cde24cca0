"""This library's ranks, each replayed without the others, and the same kernel on one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...engine.attention import QKV, PreparedCall, backward, forward
from ...engine.executor import Pool
from ...engine.prepare import prepare
from ...kernels.base import Kernels, as_block, as_direct
from ...plan.steps import Payload, Plan, Side
from ..links import Link, Topology
from ..workload import BACKWARD, FORWARD, Placement, Workload, options_of, problem_of
from .emulated import EmulatedRanks, RandomData, RecordedKernel, Recorder
from .results import Bar, PassCost

OutLse = tuple[Tensor, Tensor]
_INPUTS = {Side.KEY: "K, V", Side.QUERY: "Q"}
_RESULTS = {(Side.QUERY, False): "out, lse", (Side.QUERY, True): "dQ", (Side.KEY, True): "dK, dV"}


@dataclass(frozen=True, slots=True)
class ReplayedRank:
    """A rank of many, or the only one of a single device: what runs, its data, emulated others."""

    prepared: PreparedCall
    shard: QKV
    dout: Tensor
    others: EmulatedRanks | None = None

    def forward(self) -> OutLse:
        (result,) = forward(self.prepared, [self.shard], None)
        return result

    def backward(self, result: OutLse) -> QKV:
        _, (grads,) = backward(self.prepared, [self.shard], None, [result], [(self.dout, None)])
        return grads

    def both(self) -> tuple[OutLse, QKV]:
        result = self.forward()
        return result, self.backward(result)

    def recorded_by(self, recorder: Recorder) -> ReplayedRank:
        """This rank of many, whose launches and posts a recorder notes from now on."""
        assert self.others is not None, "a rank of many"
        self.others.recorder = recorder
        (local,) = self.prepared.ranks
        plans = (local.forward.plan, local.backward.plan)
        of_passes = zip(self.prepared.kernels, plans, strict=True)
        kernels: Any = Kernels(*[RecordedKernel(*each, recorder) for each in of_passes])
        return replace(self, prepared=replace(self.prepared, kernels=kernels))

    def recorded(self, both: bool = True) -> tuple[Bar, ...]:
        """A timeline of one forward pass and, if `both`, one backward pass."""
        recorder = Recorder(self.prepared.call.device)
        rank = self.recorded_by(recorder)
        result = rank.forward()
        recorder.direction = BACKWARD
        if both:
            rank.backward(result)
        return recorder.bars()


class PersistentPool(Pool):
    """Arenas that stay, and serve every pass; `most` has bytes in use at once since a clear."""

    def __init__(self) -> None:
        self.free: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self.most: dict[torch.dtype, int] = {}
        self._used: Counter[torch.dtype] = Counter()

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        free = self.free.get((size, dtype))
        arena = free.pop() if free else super().take(size, dtype, device)
        self._used[dtype] += arena.nbytes
        self.most[dtype] = max(self.most.get(dtype, 0), self._used[dtype])
        return arena

    def give(self, arena: Tensor) -> None:
        self._used[arena.dtype] -= arena.nbytes
        self.free.setdefault((len(arena), arena.dtype), []).append(arena)


class LibraryRanks:
    """This library's ranks; they share random data, buffers, and shards of one size.

    The placement is resolved (`workload.resolve`); `share` is a rank's own tokens, on one device.
    """

    def __init__(self, workload: Workload, placement: Placement, device: torch.device) -> None:
        self.workload, self.placement, self.device = workload, placement, device
        self.share = workload.share(placement.world_size)
        self.name = str(placement)
        self.problem = problem_of(workload, placement)
        self.data = RandomData(device)
        self._shards: dict[int, tuple[QKV, Tensor]] = {}
        self._pool = PersistentPool()

    def shard(self, tokens: int) -> tuple[QKV, Tensor]:
        """(q, k, v) and dout of so many tokens."""
        if tokens not in self._shards:
            self._shards[tokens] = self.workload.tensors(self.device, tokens)
        return self._shards[tokens]

    def size(self, rank: int) -> int:
        return self.problem.size(Side.QUERY, rank)

    @property
    def flops_per_pair(self) -> int:
        """Of the forward pass, for a pair and a query head, over the batch."""
        headdim, headdim_v = self.workload.headdim, self.workload.headdim_v
        return 2 * self.workload.batch * (headdim + (headdim_v or headdim))

    def rank(
        self, rank: int, link: Link | Topology | None, keep_buffers: bool = True
    ) -> ReplayedRank:
        """A rank of many; `link` None: messages cost nothing.

        Such messages need `keep_buffers`, the same from run to run, for sane numbers. All ranks
        share those, so that their memory is not as it would be.
        """
        shard, dout = self.shard(self.size(rank))
        wide = self.workload.torch_dtype.itemsize >= torch.float32.itemsize
        others = EmulatedRanks(self.device, link, self.data, rank, always_copies=wide)
        pool = self._pool if keep_buffers and link is None else Pool()
        opts = options_of(self.workload, self.placement.kernel)
        prepared = prepare(
            self.placement.route,
            self.problem,
            {rank: shard},
            opts,
            lambda: [others.transport()],
            pool,
        )
        return ReplayedRank(prepared, shard, dout, others)

    def single_device(self, masked: bool) -> ReplayedRank:
        """The same kernel on a rank's own tokens, or on as many without a mask."""
        workload = self.share
        if not masked:
            workload = replace(workload, cu_seqlens=None, causal=False)
        kernel = self.placement.kernel
        problem = problem_of(workload, Placement(1, "contiguous", "ring", kernel))
        shard, dout = self.shard(workload.seqlen)
        prepared = prepare("ring", problem, {0: shard}, options_of(workload, kernel))
        return ReplayedRank(prepared, shard, dout)

    def describe(self, rank: int) -> tuple[int, int, tuple[PassCost, PassCost]]:
        """Tokens of a rank, pairs that it computes over all query heads, and its passes' costs.

        It runs both passes once. Random data for all that the rank receives is there afterwards.
        """
        recorder, buffers = Recorder(self.device), self._pool.most
        found = self.rank(rank, None).recorded_by(recorder)
        buffers.clear()
        result = found.forward()
        first = PassCost(**recorder.costs[FORWARD], held=_held(found, buffers, False))
        buffers.clear()
        recorder.direction = BACKWARD
        found.backward(result)
        second = PassCost(**recorder.costs[BACKWARD], held=_held(found, buffers, True))
        pairs = found.prepared.ranks[0].forward.plan.pairs  # over KV heads
        group = self.workload.nheads // self.workload.nheads_k
        return self.size(rank), pairs * group, (first, second)


def _held(
    rank: ReplayedRank, buffers: Mapping[torch.dtype, int], is_backward: bool
) -> dict[str, int]:
    """By name: states or accumulators of the pass, and its buffers."""
    call, kernels, (local,) = rank.prepared.call, rank.prepared.kernels, rank.prepared.ranks
    kernel = kernels.backward if is_backward else kernels.forward
    path = local.backward if is_backward else local.forward
    element, state = call.dtype.itemsize, call.state_dtype.itemsize
    rows = rank.shard[0].shape[:3].numel() * state
    held = {}
    at_once = path.single_launch is not None and as_direct(kernel) is not None
    if element != state and not at_once:  # else they become what the user gets
        if is_backward:
            held["accumulators of dQ, dK, dV, fp32"] = state * sum(x.numel() for x in rank.shard)
        else:
            held["state of out, fp32"] = rows * call.headdim_v
    if is_backward and as_block(kernel) is None:
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
    results = {_RESULTS[t.side, is_backward] for t in transfers if t.payload is not Payload.INPUT}
    if is_backward and any(t.side is Side.QUERY for t in transfers):
        inputs.add("dout")
        results.add("lse, delta")
    first, second = (f"{', '.join(sorted(x))} in flight" if x else "" for x in (inputs, results))
    return first, second
