"""All that a profile has found, as plain data; how near passes come to the device's limits."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..machine import Peak
from ..results import Row
from .counters import Counters
from .parts import PARTS
from .subject import Subject
from .trace import Activity, Overlap

NEAR = 0.5  # of a limit: what is nearer to it is bound by it
COMPUTE, BANDWIDTH, NEITHER = "compute-bound", "bandwidth-bound", "neither"


@dataclass(frozen=True)
class TimedPass:
    """One of the subject's passes, and how near it comes to the device's limits (the roofline).

    Attributes:
        passes, samples_ms: which, and all runs.
        host_ms: until everything was queued, median; on the CPU the same as the time.
        flops: what it computes.
        bytes: the least that it has to read and write.
        peak: what the device does at best, measured; None on the CPU, and so are shares of it.
        peak_bytes: most memory above inputs, outputs and gradients; None on the CPU.
        exposed_ms: what the link adds to the time without communication; None without a link.
    """

    passes: str
    samples_ms: tuple[float, ...]
    host_ms: float
    flops: float
    bytes: float
    peak: Peak | None
    peak_bytes: int | None = None
    exposed_ms: float | None = None

    @property
    def ms(self) -> float:
        """Of the median run."""
        return statistics.median(self.samples_ms)

    @property
    def tflops(self) -> float:
        """Achieved, in TFLOP/s."""
        return self.flops / self.ms / 1e9

    @property
    def gbps(self) -> float:
        """Achieved with the least traffic, in 10⁹ bytes a second."""
        return self.bytes / self.ms / 1e6

    @property
    def compute_share(self) -> float | None:
        """Of the peak of a matrix product."""
        return None if self.peak is None else self.tflops / self.peak.tflops

    @property
    def bandwidth_share(self) -> float | None:
        """Of the bandwidth of a copy."""
        return None if self.peak is None else self.gbps / self.peak.gbps

    @property
    def intensity(self) -> float:
        """FLOP for each byte."""
        return self.flops / self.bytes

    @property
    def ridge(self) -> float | None:
        """The intensity above which arithmetic is the limit, not memory."""
        return None if self.peak is None else self.peak.tflops * 1e3 / self.peak.gbps

    @property
    def least_ms(self) -> float | None:
        """What the nearer limit would allow."""
        if self.compute_share is None or self.bandwidth_share is None:
            return None
        return self.ms * max(self.compute_share, self.bandwidth_share)

    @property
    def bound(self) -> str | None:
        """COMPUTE or BANDWIDTH if it is near that limit; else NEITHER."""
        if self.least_ms is None or self.ridge is None:
            return None
        if self.least_ms < NEAR * self.ms:
            return NEITHER
        return COMPUTE if self.intensity >= self.ridge else BANDWIDTH

    def to_dict(self) -> dict[str, float | str | None]:
        """Plain values, without the runs."""
        names = ("ms", "flops", "bytes", "tflops", "gbps", "compute_share", "bandwidth_share")
        more = ("intensity", "ridge", "least_ms", "bound", "host_ms", "peak_bytes", "exposed_ms")
        return {name: getattr(self, name) for name in (*names, *more)}


@dataclass(frozen=True)
class Facts:
    """Everything.

    Attributes:
        subject: what was profiled.
        machine: where.
        repeats: rounds of the medians.
        timed: by pass; the last one is what the files are about.
        activity: of the trace.
        overlap: of a replayed rank with a link.
        baseline, comparison: rows of results.
        counters: of Nsight Compute, longest kernel first.
        missing: files that could not be written, and why.
    """

    subject: Subject
    machine: Mapping[str, object]
    repeats: int
    timed: tuple[TimedPass, ...]
    activity: Activity
    overlap: Overlap | None
    baseline: tuple[Row, ...]
    comparison: tuple[Row, ...]
    counters: tuple[Counters, ...]
    missing: Mapping[str, str]

    @property
    def main(self) -> TimedPass:
        """The pass that the files are about."""
        return self.timed[-1]

    @property
    def on_cpu(self) -> bool:
        """Whether the host did it all."""
        return self.subject.device.type == "cpu"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without the rows."""
        return {
            "subject": self.subject.to_dict(),
            "passes": {each.passes: each.to_dict() for each in self.timed},
            "activity": asdict(self.activity),
            "overlap": None if self.overlap is None else asdict(self.overlap),
            "counters": [each.to_dict() for each in self.counters],
            "files": {name: self.missing.get(name, "written") for name in PARTS},
        }
