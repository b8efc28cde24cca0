"""Rates from points: the least squares of relative errors, in plain Python.

The time of a launch is linear in four numbers: seconds of a block, what a block that is cut takes
longer, what a launch takes besides; and what a block takes longer in long work, when the GPU's
power limit has lowered its clock. What passes over rows take before and after a backward
kernel is subtracted first.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from ..bench.workload import BACKWARD
from .points import Point
from .rates import Rate, seconds

_ENOUGH = 6  # points for a fit of their own
_FP32 = 4


def row_bytes(headdim: int, headdim_v: int) -> int:
    """Bytes for each query and head that backward passes move besides their main kernel.

    dQ is cleared in fp32 and rounded in the end; delta is computed from out and dout.
    """
    return headdim * (_FP32 + _FP32 + 2) + 2 * headdim_v * 2


def around(point: Point, bandwidth: float, launch: float) -> float:
    """Seconds of these passes over rows."""
    if point.passes != BACKWARD:
        return 0.0
    return launch + point.rows * row_bytes(point.headdim, point.headdim_v) / bandwidth


def predicted(rate: Rate, point: Point, sms: int, bandwidth: float, launch: float) -> float:
    """Seconds of a point by a rate."""
    heads = point.batch * point.nheads
    kernel = seconds(rate, point.shards(), heads, sms, point.sustained)
    return kernel + around(point, bandwidth, launch)


def fit(points: Sequence[Point], sms: int, bandwidth: float, launch: float, ordered: bool) -> Rate:
    """The rate of one kernel in one direction, from all points of one head dimension."""
    names = ("block", "launch", "cut")
    none = Rate(0.0, 0.0, ordered=ordered)
    units = [replace(none, **{name: 1.0}) for name in names]  # type: ignore[arg-type]
    lines = []
    for point in points:
        time = point.ms * 1e-3 - around(point, bandwidth, launch)
        heads = point.batch * point.nheads
        parts = [seconds(unit, point.shards(), heads, sms) for unit in units]
        lines.append([each / time for each in (*parts, parts[0] * point.sustained)])
    found = _not_negative(lines, [1.0] * len(lines))
    values = dict(zip((*names, "slower"), found))
    sources = ", ".join(sorted({point.source for point in points}))
    return replace(none, **values, source=sources)  # type: ignore[arg-type]


def rescaled(
    rate: Rate, points: Sequence[Point], sms: int, bandwidth: float, launch: float
) -> Rate:
    """A rate made faster or slower by one factor, the median of some points."""
    logs = [
        math.log(predicted(rate, point, sms, bandwidth, launch) / (point.ms * 1e-3))
        for point in points
    ]
    sources = ", ".join(sorted({point.source for point in points}))
    return replace(rate.faster(math.exp(statistics.median(logs)), sources), estimated=False)


def rate_of(
    points: Sequence[Point],
    sms: int,
    bandwidth: float,
    launch: float,
    ordered: bool,
    like: Rate | None,
) -> Rate | None:
    """A fit if there are enough points, else another rate that is scaled to them."""
    if len(points) >= _ENOUGH:
        return fit(points, sms, bandwidth, launch, ordered)
    if not points or like is None:
        return None
    return rescaled(like, points, sms, bandwidth, launch)


def _not_negative(lines: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """Least squares; unknowns that would come out negative, or that nothing tells, are 0."""
    unknowns = [n for n in range(len(lines[0])) if any(line[n] for line in lines)]
    while True:
        found = _solve([[line[n] for n in unknowns] for line in lines], times)
        worst = min(range(len(found)), key=found.__getitem__)
        if found[worst] >= 0:
            break
        del unknowns[worst]
    return [found[unknowns.index(n)] if n in unknowns else 0.0 for n in range(len(lines[0]))]


def _solve(lines: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """The normal equations, by elimination; columns are scaled first."""
    count = len(lines[0])
    scales = [max(abs(line[n]) for line in lines) for n in range(count)]
    scaled = [[line[n] / scales[n] for n in range(count)] for line in lines]
    rows = [
        [sum(line[i] * line[j] for line in scaled) for j in range(count)]
        + [sum(line[i] * time for line, time in zip(scaled, times))]
        for i in range(count)
    ]
    for i in range(count):
        pivot = max(range(i, count), key=lambda row: abs(rows[row][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for row in range(count):
            if row != i:
                factor = rows[row][i] / rows[i][i]
                rows[row] = [a - factor * b for a, b in zip(rows[row], rows[i])]
    return [rows[n][count] / rows[n][n] / scales[n] for n in range(count)]
