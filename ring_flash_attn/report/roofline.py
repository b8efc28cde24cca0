"""The roofline: how fast a device could be, from its measured peaks and what a call must move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..bench.results import BACKWARD, BOTH, FORWARD
from ..bench.workload import BACKWARD_FLOPS, find_dtype
from ..plan.layout import Span
from ..plan.tiles import Mask, make_tile

_FLOPS = {FORWARD: 1.0, BACKWARD: BACKWARD_FLOPS, BOTH: 1.0 + BACKWARD_FLOPS}
# Tensors of a pass that are read or written once. Forward as large as q: q, out; as large as k:
# k, v. Backward: q, out, dout, dq and k, v, dk, dv.
_TENSORS = {FORWARD: 2, BACKWARD: 4, BOTH: 6}


def flops(workload: Mapping[str, Any], passes: str) -> float:
    """Of one call on one device; KeyError if the workload does not say enough."""
    lengths = workload.get("lengths") or [workload["seqlen"]]
    left, right = workload.get("window", (-1, -1))
    mask = Mask.of(bool(workload["causal"]), (left, right))
    pairs = sum(_pairs(length, mask) for length in lengths)
    heads = workload["batch"] * workload["nheads"] * workload["headdim"]
    return float(4 * heads * pairs * _FLOPS[passes])


def moved_bytes(workload: Mapping[str, Any], passes: str) -> float:
    """What a call has to read and write at least: every tensor once."""
    tokens = workload["batch"] * workload["seqlen"] * workload["headdim"]
    heads = workload["nheads"] + workload["nheads_k"]
    return float(_TENSORS[passes] * tokens * heads * find_dtype(workload["dtype"]).itemsize)


def roof(workload: Mapping[str, Any], passes: str, peak: Mapping[str, Any]) -> float | None:
    """TFLOP/s that cannot be exceeded; None where no peak of this dtype was measured."""
    if "tflops" not in peak or peak.get("dtype", workload.get("dtype")) != workload.get("dtype"):
        return None
    compute = float(peak["tflops"])
    if "gbps" not in peak:
        return compute
    intensity = flops(workload, passes) / moved_bytes(workload, passes)  # FLOPs for a byte
    return min(compute, intensity * float(peak["gbps"]) / 1e3)


def _pairs(length: int, mask: Mask) -> int:
    """Allowed (query, key) pairs of one document."""
    if not length:
        return 0
    span = Span(0, length, 0, 1, 0, 0)
    tile = make_tile(span, span, mask)
    return 0 if tile is None else tile.pairs
