"""Stages of a rank's plans: the library's own passes, run on tensors without data, and priced.

The executor does what it does on a GPU, on torch's device meta. So the bytes of messages, gathers,
sums and casts are those of the real pass, and are written down nowhere else. A kernel stands in
that prices its launches by their tiles; every other operation costs what it reads and writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ..bench.workload import BACKWARD, BOTH, FORWARD, Placement, Workload, call_of
from ..engine.attention import LocalRank, PreparedCall, backward, forward
from ..engine.executor import Pool
from ..kernels.base import Call, Kernels, as_block
from ..plan.buffers import BufferPlan
from ..plan.build import make_plan
from ..plan.problem import Problem
from ..plan.steps import Side
from .fit import predicted
from .machine import Gpu
from .meter import Meter
from .points import HOT, Point
from .stand_ins import stand_in
from .timeline import Stage

_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class PricedPass:
    """One pass of a rank: its stages, and what it holds."""

    stages: tuple[Stage, ...]
    launches: int
    held: int  # bytes beside inputs, outputs and gradients: the most at any time

    @property
    def sent(self) -> int:
        """Bytes that leave the rank."""
        return sum(size for stage in self.stages for _, size in stage.sends)

    @property
    def received(self) -> int:
        """Bytes that come to it."""
        return sum(size for stage in self.stages for _, size in stage.receives)


class _Arena:
    """Memory that is not there: views with one shape and strides are one tensor, made once.

    Posts of a thousand ranks take many views, of which only the sizes matter.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._views: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}

    def as_strided(self, shape: tuple[int, ...], strides: tuple[int, ...], _: int) -> Tensor:
        found = self._views.get((shape, strides))
        if found is None:
            found = torch.empty_strided(shape, strides, dtype=self._dtype, device=_META)
            self._views[shape, strides] = found
        return found


class _CountingPool(Pool):
    """Arenas that are not there; `size` has the bytes of those of a pass."""

    def __init__(self) -> None:
        self.size = 0

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.size += size * dtype.itemsize
        return cast(Tensor, _Arena(dtype))


def price_rank(
    workload: Workload,
    placement: Placement,
    problem: Problem,
    rank: int,
    gpu: Gpu,
    sustained: bool | None = None,
) -> tuple[PricedPass, PricedPass]:
    """The forward and the backward pass of one rank.

    `sustained`: at the clock of long work; by default as `is_hot` says.

    Raises:
        ValueError: the GPU has no rate for this kernel and head dimension.
    """
    call = call_of(workload, _META)
    plans = problem.remember(
        ("priced", placement.route, rank), lambda: _plans(placement.route, problem, rank)
    )
    q, k, v, dout = (
        torch.empty(shape, dtype=call.dtype, device=_META)
        for shape in _shapes(workload, problem, rank)
    )
    headdim = max(workload.headdim, workload.headdim_v or 0)
    if sustained is None:
        sustained = is_hot(workload.share(placement.world_size), placement.kernel, gpu)
    found: list[PricedPass] = []
    result: Any = None
    for is_backward in (False, True):
        meter, pool = Meter(gpu), _CountingPool()
        kernel = stand_in(placement.kernel, headdim, meter, sustained)
        local = LocalRank(plans[0], plans[1], pool)
        kernels = Kernels(kernel, kernel)
        prepared = PreparedCall((local,), kernels, call, lambda end=meter: [end])  # type: ignore
        with meter:
            if is_backward:
                backward(prepared, [(q, k, v)], None, result, [(dout, None)])
            else:
                result = forward(prepared, [(q, k, v)], None)
        kept = 0
        if plans[is_backward].single_launch is None:
            kept = _kept(call, (q, k, v), is_backward, as_block(kernel) is not None)
        found.append(PricedPass(meter.finished(), meter.launches, pool.size + kept))
    first, second = found
    return first, second


def _plans(route: str, problem: Problem, rank: int) -> tuple[BufferPlan, BufferPlan]:
    forward, backward = (make_plan(route, problem, rank, way) for way in (False, True))
    return BufferPlan(forward, problem), BufferPlan(backward, problem)


def is_hot(share: Workload, kernel: str, gpu: Gpu) -> bool:
    """Whether a kernel does a rank's own tokens so fast that long work goes at a lower clock."""
    return share.flops(BOTH) / seconds_alone(share, kernel, gpu) / 1e12 > HOT


def seconds_alone(share: Workload, kernel: str, gpu: Gpu) -> float:
    """Both passes of a rank's own tokens, on one device."""
    headdim = max(share.headdim, share.headdim_v or 0)
    time = 0.0
    for way in (FORWARD, BACKWARD):
        dims = share.headdim, share.headdim_v or share.headdim
        sizes = share.batch, share.nheads, share.nheads_k, *dims, share.lengths
        point = Point(gpu.name, kernel, way, *sizes, share.causal, 0.0, False, "")
        rate = gpu.rate(kernel, way, headdim)
        time += predicted(rate, point, gpu.sms, gpu.bandwidth, gpu.launch)
    return time


def _shapes(workload: Workload, problem: Problem, rank: int) -> Iterator[tuple[int, ...]]:
    """Of q, k, v and dout on a rank."""
    rows, rows_k = (problem.size(side, rank) for side in Side)
    batch, dims = workload.batch, (workload.headdim, workload.headdim_v or workload.headdim)
    yield batch, rows, workload.nheads, dims[0]
    yield batch, rows_k, workload.nheads_k, dims[0]
    yield batch, rows_k, workload.nheads_k, dims[1]
    yield batch, rows, workload.nheads, dims[1]


def _kept(call: Call, shard: Sequence[Tensor], is_backward: bool, blocks: bool) -> int:
    """Bytes of states or accumulators, beside the arenas; as docs/design.md (Memory) counts."""
    state, element = call.state_dtype.itemsize, call.dtype.itemsize
    rows = shard[0].shape[:3].numel() * state
    held = rows if is_backward and not blocks else 0  # delta
    if state != element:
        held += sum(x.numel() for x in shard) * state if is_backward else rows * call.headdim_v
    return held
