"""What the planner found: forecasts, the best first, and why the others lose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..bench.workload import Placement, Workload
from ..plan.layout import layout_names
from .forecast import Forecast
from .machine import Machine

_FORMAT, _VERSION = "ring_flash_attn plan", 1


@dataclass(frozen=True, slots=True)
class Refused:
    """A placement that cannot be, or does not fit."""

    placement: Placement
    why: str


@dataclass(frozen=True, slots=True)
class Ranking:
    """What the planner found: forecasts, the best first, and what else there was."""

    workload: Workload  # over all ranks
    machine: Machine
    ranked: tuple[Forecast, ...]
    slower: tuple[Forecast, ...]  # those of which a few ranks were enough to see it
    refused: tuple[Refused, ...]

    @property
    def best(self) -> Forecast:
        """The first."""
        return self.ranked[0]

    @property
    def estimates(self) -> tuple[str, ...]:
        """What of the forecasts nobody has measured."""
        gpu = self.machine.gpu
        kernels = sorted({each.placement.kernel for each in self.ranked})
        known = {kernel for kernel, _, _ in gpu.estimated}
        found = [f"rates of {each} on {gpu.name}" for each in kernels if each in known]
        return (*found, f"bandwidth and latency of {self.machine.topology}")

    @property
    def python(self) -> str:
        """One line that calls attention like the best."""
        placement, workload = self.best.placement, self.workload
        parts = {
            "layout": placement.layout,
            "route": placement.route,
            "kernel": placement.kernel,
            **placement.parameters,
            **({"causal": True} if workload.causal else {}),
            **({"window_size": workload.window} if workload.window != (-1, -1) else {}),
        }
        lengths = ", cu_seqlens=cu_seqlens" if workload.packed else f", seqlen={workload.seqlen}"
        text = ", ".join(f"{name}={value!r}" for name, value in parts.items())
        if placement.layout not in layout_names():  # an object, whose name says how it is made
            text = text.replace(repr(placement.layout), f"ring_flash_attn.{placement.layout}")
        return f"ring_flash_attn.ring_attention(q, k, v, {text}{lengths}, group=group)"

    def why(self, other: Forecast) -> str:
        """Why a forecast is not the best: how much slower, and the largest part of it."""
        best = self.best
        if other is best:
            return ""
        reasons = {
            "more exposed communication": other.exposed - best.exposed,
            "a worse balance": (other.busy - other.average) - (best.busy - best.average),
            "smaller launches, copies and sums": other.average - best.average,
        }
        name = max(reasons, key=reasons.__getitem__)
        slower = other.seconds / best.seconds - 1
        return f"{slower:.1%} slower: {reasons[name] * 1e3:.2g} ms of {name}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a file."""
        gpu, topology = self.machine.gpu, self.machine.topology
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "workload": self.workload.to_dict(),
            "gpu": gpu.name,
            "topology": str(topology),
            "estimates": list(self.estimates),
            "python": self.python,
            "ranked": [{**each.to_dict(), "why": self.why(each)} for each in self.ranked],
            "slower": [{**each.to_dict(), "why": self.why(each)} for each in self.slower],
            "refused": [
                {"placement": each.placement.to_dict(), "why": each.why} for each in self.refused
            ],
        }
