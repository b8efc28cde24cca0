"""The roofline: how near a pass comes to what the device does at best, and what limits it."""

from __future__ import annotations

from dataclasses import dataclass

from ..machine import Peak

NEAR = 0.5  # of a limit: what is nearer to it is bound by it
COMPUTE, BANDWIDTH, NEITHER = "compute-bound", "bandwidth-bound", "neither"


@dataclass(frozen=True, slots=True)
class Roofline:
    """One pass.

    Attributes:
        ms: how long it takes.
        flops: what it computes.
        bytes: the least that it has to read and write.
        peak: what the device does at best, measured; None on the CPU, and so are shares of it.
    """

    ms: float
    flops: float
    bytes: float
    peak: Peak | None

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
        return None if self.nearest_share is None else self.ms * self.nearest_share

    @property
    def nearest_share(self) -> float | None:
        """Of the limit that is nearer."""
        if self.compute_share is None or self.bandwidth_share is None:
            return None
        return max(self.compute_share, self.bandwidth_share)

    @property
    def bound(self) -> str | None:
        """COMPUTE or BANDWIDTH if it is near that limit; else NEITHER."""
        if self.nearest_share is None or self.ridge is None:
            return None
        if self.nearest_share < NEAR:
            return NEITHER
        return COMPUTE if self.intensity >= self.ridge else BANDWIDTH

    def to_dict(self) -> dict[str, float | str | None]:
        """Plain values."""
        names = ("ms", "flops", "bytes", "tflops", "gbps", "compute_share", "bandwidth_share")
        more = ("intensity", "ridge", "least_ms", "bound")
        return {name: getattr(self, name) for name in (*names, *more)}
