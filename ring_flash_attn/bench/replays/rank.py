"""This library's ranks, each replayed without the others, and the same kernel on one device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...engine.attention import QKV, PreparedCall, backward, forward
from ...engine.executor import Pool
from ...engine.prepare import prepare
from ...plan.steps import Side
from ..inputs import options_of, problem_of
from ..link import Link
from ..workload import BACKWARD, Placement, Workload
from .emulated import EmulatedRanks, RandomData, RecordedKernel, Recorder
from .memory import pass_costs
from .results import Bar, PassCost

OutLse = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class ReplayedRank:
    """A rank of many, or the only one of a single device, and its data.

    Attributes:
        prepared: what runs.
        shard: q, k, v.
        dout: gradient of the output.
        others: emulated; None on one device.
    """

    prepared: PreparedCall
    shard: QKV
    dout: Tensor
    others: EmulatedRanks | None = None

    def forward(self) -> OutLse:
        """(out, lse)."""
        (result,) = forward(self.prepared, [self.shard], None)
        return result

    def backward(self, result: OutLse) -> QKV:
        """(dq, dk, dv)."""
        _, (grads,) = backward(self.prepared, [self.shard], None, [result], [(self.dout, None)])
        return grads

    def both(self) -> tuple[OutLse, QKV]:
        """(out, lse) and (dq, dk, dv)."""
        result = self.forward()
        return result, self.backward(result)

    def recorded(self, both: bool = True) -> tuple[Bar, ...]:
        """A timeline of one forward pass and, if `both`, one backward pass."""
        assert self.others is not None, "a rank of many"
        recorder = Recorder(self.prepared.call.device)
        (local,) = self.prepared.ranks
        plans = (local.forward.plan, local.backward.plan)
        kernel: Any = RecordedKernel(self.prepared.kernel, recorder, plans)
        rank = replace(self, prepared=replace(self.prepared, kernel=kernel))
        self.others.recorder = recorder
        try:
            result = rank.forward()
            recorder.direction = BACKWARD
            if both:
                rank.backward(result)
        finally:
            self.others.recorder = None
        return recorder.bars()


class PersistentPool(Pool):
    """Buffers that stay, and serve every pass."""

    def __init__(self) -> None:
        self.free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}

    def take(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A used one if there is any."""
        free = self.free.get((shape, dtype))
        return free.pop() if free else super().take(shape, dtype, device)

    def give(self, buffer: Tensor) -> None:
        """For the next to take."""
        self.free.setdefault((buffer.shape, buffer.dtype), []).append(buffer)


class LibraryRanks:
    """This library's ranks; they share random data, buffers, and shards of one size.

    Attributes:
        name: in words.
        workload: what all ranks compute together.
        placement: how it is spread, resolved (`inputs.resolve`).
        share: a rank's own tokens, as a call on one device.
        device: where ranks run.
        problem: the workload as plans have it.
        base_pairs, full_pairs: of a rank's own tokens with the mask and without, over query heads.
        data: what others send.
    """

    def __init__(self, workload: Workload, placement: Placement, device: torch.device) -> None:
        self.workload, self.placement, self.device = workload, placement, device
        self.share = workload.share(placement.world_size)
        self.name = str(placement)
        self.problem = problem_of(workload, placement)
        self.base_pairs = workload.nheads * self.share.pairs
        self.full_pairs = workload.nheads * self.share.seqlen**2
        self.data = RandomData(device)
        self._shards: dict[int, tuple[QKV, Tensor]] = {}
        self._pool = PersistentPool()

    def shard(self, tokens: int) -> tuple[QKV, Tensor]:
        """(q, k, v) and dout of so many tokens."""
        if tokens not in self._shards:
            self._shards[tokens] = self.workload.tensors(self.device, tokens)
        return self._shards[tokens]

    def size(self, rank: int) -> int:
        """Tokens in the shard of a rank."""
        return self.problem.size(Side.QUERY, rank)

    @property
    def flops_per_pair(self) -> int:
        """Of the forward pass, for a pair and a query head, over the batch."""
        headdim, headdim_v = self.workload.headdim, self.workload.headdim_v
        return 2 * self.workload.batch * (headdim + (headdim_v or headdim))

    def rank(self, rank: int, link: Link | None, keep_buffers: bool = True) -> ReplayedRank:
        """A rank of many.

        Args:
            rank: which.
            link: how it reaches the others; None: messages cost nothing.
            keep_buffers: from run to run, which messages that cost nothing need for sane numbers.
                All such ranks share them; their memory is not as it would be.
        """
        shard, dout = self.shard(self.size(rank))
        wide = self.workload.torch_dtype.itemsize >= torch.float32.itemsize
        others = EmulatedRanks(self.device, link, self.data, always_copies=wide)
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

        Random data for all that it receives is there afterwards.
        """
        found = self.rank(rank, None)
        pairs = found.prepared.ranks[0].forward.plan.pairs  # over KV heads
        group = self.workload.nheads // self.workload.nheads_k
        return self.size(rank), pairs * group, pass_costs(found.prepared, found.shard, self.data)
