"""Links between ranks, by name: bandwidth and latency; `replays/emulated.py` emulates them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

NONE = "none"  # communication is removed
OWN = "own"  # the user's, in numbers


@dataclass(frozen=True, slots=True)
class Link:
    """What lies between a rank and the others.

    Attributes:
        name: what users write.
        bandwidth: bytes in a second, each way at once.
        latency: seconds that a post of any size takes at least.
    """

    name: str
    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth < math.inf:
            raise ValueError(f"the link's bandwidth must be positive, not {self.bandwidth!r}")
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"the link's latency must not be negative, but is {self.latency!r}")

    def seconds(self, sent: int, received: int) -> float:
        """How long a post of so many bytes takes."""
        return self.latency + max(sent, received) / self.bandwidth

    def __str__(self) -> str:
        speed, delay = self.bandwidth / 1e9, self.latency * 1e6
        return f"{self.name}: {speed:g} GB/s each way, {delay:g} µs for each post"


# Bandwidths are the makers' nominal ones. Latencies are assumptions: a grouped send and receive of
# a few bytes, from the launch on one GPU to its end there, is of this order with NCCL.
LINKS = {
    link.name: link
    for link in (
        Link("nvlink4", 450e9, 10e-6),  # H100, H200: 18 links of 25 GB/s
        Link("nvlink-h800", 200e9, 10e-6),  # 8 links
        Link("pcie5", 64e9, 15e-6),  # 16 lanes
        Link("ib400", 50e9, 20e-6),  # 400 Gbit/s for each GPU
    )
}


def find_link(
    name: str = NONE, gbps: float | None = None, latency_us: float | None = None
) -> Link | None:
    """The link called `name`, or one of `gbps` gigabytes a second; None: communication is removed.

    Args:
        name: one of `LINKS`, or "none".
        gbps: gigabytes (10⁹ bytes) in a second each way; instead of a name.
        latency_us: microseconds; by default those of the named link, 10 for one in numbers.
    """
    if name not in (NONE, *LINKS):
        raise ValueError(f"unknown link {name!r}; choose one of {NONE}, {', '.join(LINKS)}")
    if gbps is not None and name != NONE:
        raise ValueError(f"either link {name!r} or one of {gbps:g} GB/s, not both")
    if gbps is not None:
        return Link(OWN, gbps * 1e9, 1e-6 * (10 if latency_us is None else latency_us))
    if name == NONE:
        if latency_us is not None:
            raise ValueError(f"a latency of {latency_us:g} µs needs a link")
        return None
    found = LINKS[name]
    return found if latency_us is None else replace(found, latency=latency_us * 1e-6)
