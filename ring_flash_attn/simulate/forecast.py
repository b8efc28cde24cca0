"""Forecasts: what a placement of a workload takes on a machine, by its busiest ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..bench.replays.results import COMPUTE as COMPUTE_LANE
from ..bench.replays.results import NETWORK, TRANSFERS, Bar
from ..bench.workload import BACKWARD, FORWARD, Placement, Workload
from ..plan.layout import Span
from ..plan.problem import Problem
from ..plan.steps import Side
from .machine import Machine
from .plans import PricedPass, price_rank
from .timeline import COMPUTE, INSIDE, OUTSIDE, Timeline, run

ALL = 16  # ranks of which all are priced
_SCANNED = 32  # of more ranks, those that are asked for their pairs
Passes = tuple[PricedPass, PricedPass]  # forward, backward
_LANES = {COMPUTE: COMPUTE_LANE, INSIDE: TRANSFERS, OUTSIDE: NETWORK}


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a placement takes: seconds of the slowest rank, and bytes of the one that holds most."""

    placement: Placement
    ranks: tuple[int, ...]  # that were priced
    forward: float
    backward: float
    exposed: float  # seconds that the slowest rank waits for messages, in both passes
    busy: float  # seconds that its compute stream works
    average: float  # seconds that compute streams work, on average
    memory: int  # bytes beside inputs, outputs and gradients
    received: int  # bytes, both passes, of the rank that gets most
    slowest: int
    bars: tuple[Bar, ...]  # of the slowest rank

    @property
    def seconds(self) -> float:
        """Of both passes."""
        return self.forward + self.backward

    def to_dict(self) -> dict[str, Any]:
        """Plain values, times in milliseconds."""
        return {
            "placement": {**self.placement.to_dict(), "kernel": self.placement.kernel},
            "forward_ms": self.forward * 1e3,
            "backward_ms": self.backward * 1e3,
            "exposed_ms": self.exposed * 1e3,
            "memory_bytes": self.memory,
            "received_bytes": self.received,
            "ranks_priced": list(self.ranks),
            "slowest_rank": self.slowest,
        }


def forecast(
    workload: Workload,
    placement: Placement,
    machine: Machine,
    problem: Problem,
    ranks: Sequence[int],
    hot: bool,
    known: dict[int, Passes],
) -> Forecast:
    """Price some ranks of a placement, but for those that are `known`; more become known.

    If these are all, they wait for each other; otherwise the rest are as early as they are. `hot`
    is what `is_hot` says of a rank's own tokens.
    """
    chosen = tuple(ranks)
    for rank in chosen:
        if rank not in known:
            known[rank] = price_rank(workload, placement, problem, rank, machine.gpu, hot)
    priced = {rank: known[rank] for rank in chosen}
    first, second = (
        run(
            {rank: passes[way].stages for rank, passes in priced.items()},
            machine.topology,
            machine.interference,
        )
        for way in (0, 1)
    )
    both = {rank: first.ranks[rank].end + second.ranks[rank].end for rank in chosen}
    busy = {rank: first.ranks[rank].busy + second.ranks[rank].busy for rank in chosen}
    slowest = max(chosen, key=lambda rank: (both[rank], -rank))
    return Forecast(
        placement,
        chosen,
        first.seconds,
        second.seconds,
        first.ranks[slowest].exposed + second.ranks[slowest].exposed,
        busy[slowest],
        sum(busy.values()) / len(busy),
        max(passes.held for both_passes in priced.values() for passes in both_passes),
        max(_received(passes) for passes in priced.values()),
        slowest,
        _bars(first, second, slowest),
    )


def _received(passes: Sequence[PricedPass]) -> int:
    return sum(each.received for each in passes)


def _bars(first: Timeline, second: Timeline, rank: int) -> tuple[Bar, ...]:
    """Both passes of a rank, one after the other, in milliseconds."""
    return tuple(
        Bar(_LANES[lane], way, str(stage), (after + start) * 1e3, (after + end) * 1e3)
        for way, timeline, after in ((FORWARD, first, 0.0), (BACKWARD, second, first.seconds))
        for lane, stage, start, end in timeline.ranks[rank].intervals
    )


def sample(problem: Problem) -> tuple[int, ...]:
    """The busiest first. All ranks if they are few; else these, who receives most, first and last.

    One by the pairs of a rank's own queries, one by those of its own keys, as routes move either;
    and one by the keys that its queries see. Of many ranks, those of every so many are asked.
    """
    size = problem.world_size
    scanned: Sequence[int] = range(size)
    if size > _SCANNED:
        scanned = sorted({round(n * (size - 1) / (_SCANNED - 1)) for n in range(_SCANNED)})
    busiest = [
        max(scanned, key=lambda rank: (_pairs(problem, side, rank), rank))
        for side in (Side.QUERY, Side.KEY)
    ]
    if size <= ALL:
        return tuple(dict.fromkeys((*busiest, *range(size))))
    most = max(scanned, key=lambda rank: (_seen(problem, rank), -rank))
    return tuple(dict.fromkeys((*busiest, most, 0, size - 1)))


def _pairs(problem: Problem, side: Side, rank: int) -> int:
    """Pairs of a rank's own queries, or of its own keys, one head."""
    count = _row if side is Side.QUERY else _column
    return sum(
        sum(count(problem, span, position) for position in _ends(span)) * span.length // 2
        for span in problem.spans(side, rank)
    )


def _ends(span: Span) -> tuple[int, int]:
    """Positions of the first and the last token."""
    return span.position, span.position + span.stride * (span.length - 1)


def _row(problem: Problem, span: Span, position: int) -> int:
    """Keys that the query at a position of a span's document sees."""
    keys, mask = problem.lengths_k[span.document], problem.mask
    low = 0 if mask.left is None else max(0, position - mask.left)
    high = keys - 1 if mask.right is None else min(keys - 1, position + mask.right)
    return max(0, high - low + 1)


def _column(problem: Problem, span: Span, position: int) -> int:
    """Queries that see the key at a position of a span's document."""
    keys, mask = problem.lengths_k[span.document], problem.mask
    first = keys - problem.lengths_q[span.document]
    low = first if mask.right is None else max(first, position - mask.right)
    high = keys - 1 if mask.left is None else min(keys - 1, position + mask.left)
    return max(0, high - low + 1)


def _seen(problem: Problem, rank: int) -> int:
    """Keys that some query of a rank sees: of each document up to its last query."""
    last: dict[int, int] = {}
    for span in problem.spans(Side.QUERY, rank):
        last[span.document] = max(last.get(span.document, 0), _row(problem, span, _ends(span)[1]))
    return sum(last.values())
