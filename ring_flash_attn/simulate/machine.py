"""GPUs and machines: what launches, copies and messages cost, and who says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..bench.links import Topology
from .rates import Rate

RateKey = tuple[str, str, int]  # kernel, "forward" or "backward", head dimension


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a GPU takes for launches and copies, and where each number comes from."""

    name: str
    sms: int
    bandwidth: float  # bytes in a second that copies and sums read and write
    launch: float  # seconds of a small launch: a copy, a sum, a merge
    post: float  # seconds that a post keeps the compute stream from its work
    rates: Mapping[RateKey, Rate]
    sources: Mapping[str, str] = field(default_factory=dict)  # of each number, by its name
    estimated: frozenset[RateKey] = frozenset()  # rates that nobody has measured on this GPU

    def rate(self, kernel: str, passes: str, headdim: int) -> Rate:
        """Of a kernel in one direction; ValueError that lists what there is."""
        found = self.rates.get((kernel, passes, headdim))
        if found is None:
            known = sorted({f"{name} ({dim})" for name, each, dim in self.rates if each == passes})
            raise ValueError(
                f"no rate of kernel {kernel!r} {passes} with head dimension {headdim} on "
                f"{self.name}; there are {', '.join(known)}"
            )
        return found

    def moving(self, size: float) -> float:
        """Seconds of a small launch that reads and writes so many bytes."""
        return self.launch + size / self.bandwidth if size else 0.0


@dataclass(frozen=True, slots=True)
class Machine:
    """GPUs of one kind, and what lies between them."""

    gpu: Gpu
    topology: Topology
    interference: float = 0.0  # share of its speed that compute loses while messages are under way

    def __str__(self) -> str:
        return f"{self.gpu.name}, {self.topology}"
