"""The roofline: how fast a device could be, from its measured peaks and what a call must move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..bench.workload import Workload


def roof(workload: Mapping[str, Any], passes: str, peak: Mapping[str, Any]) -> float | None:
    """TFLOP/s that cannot be exceeded; None where no peak of this dtype was measured."""
    if "tflops" not in peak or peak.get("dtype", workload.get("dtype")) != workload.get("dtype"):
        return None
    compute = float(peak["tflops"])
    if "gbps" not in peak:
        return compute
    whole = Workload.from_dict(workload)
    intensity = whole.flops(passes) / whole.bytes(passes)  # FLOPs for a byte
    return min(compute, intensity * float(peak["gbps"]) / 1e3)
