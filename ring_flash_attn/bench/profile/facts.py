"""All that a profile has found, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..machine import Peak
from ..results import Row
from .activity import Activity, Overlap
from .counters import Counters
from .parts import Part
from .roofline import Roofline
from .subject import Subject


@dataclass(frozen=True)
class Timed:
    """One of the subject's passes.

    Attributes:
        passes: which.
        samples_ms: all runs.
        host_ms: until everything was queued, median; on the CPU the same as the time.
        roofline: of the median run.
        peak_bytes: most memory above inputs, outputs and gradients; None on the CPU.
        exposed_ms: what the link adds to the time without communication; None without a link.
    """

    passes: str
    samples_ms: tuple[float, ...]
    host_ms: float
    roofline: Roofline
    peak_bytes: int | None
    exposed_ms: float | None = None

    @property
    def ms(self) -> float:
        """Of the median run."""
        return self.roofline.ms


@dataclass(frozen=True)
class Facts:
    """Everything.

    Attributes:
        subject: what was profiled.
        machine, versions: where.
        repeats: rounds of the medians.
        peak: what the device does at best; None on the CPU.
        timed: by pass; the last one is what the files are about.
        activity: of the trace.
        overlap: of a replayed rank with a link.
        baseline, comparison: rows of results.
        counters: of Nsight Compute, longest kernel first.
        parts: the files.
    """

    subject: Subject
    machine: Mapping[str, object]
    versions: Mapping[str, str]
    repeats: int
    peak: Peak | None
    timed: tuple[Timed, ...]
    activity: Activity
    overlap: Overlap | None
    baseline: tuple[Row, ...]
    comparison: tuple[Row, ...]
    counters: tuple[Counters, ...]
    parts: tuple[Part, ...]

    @property
    def main(self) -> Timed:
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
            "passes": {each.passes: _timed(each) for each in self.timed},
            "activity": asdict(self.activity),
            "overlap": None if self.overlap is None else asdict(self.overlap),
            "counters": [asdict(each) for each in self.counters],
            "files": {part.name: part.missing or "written" for part in self.parts},
        }


def _timed(timed: Timed) -> dict[str, Any]:
    return {
        **timed.roofline.to_dict(),
        "host_ms": timed.host_ms,
        "peak_bytes": timed.peak_bytes,
        "exposed_ms": timed.exposed_ms,
    }
