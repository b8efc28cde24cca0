"""Links and topologies: what lies between ranks, inside a node and between nodes.

Importing it loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

NONE, OWN = "none", "own"  # communication is removed; the user's, in numbers
INSIDE, OUTSIDE = LEVELS = ("inside", "outside")


@dataclass(frozen=True, slots=True)
class Link:
    """What lies between a rank and others, as if all of them were in one node."""

    name: str
    bandwidth: float  # bytes in a second, each way at once
    latency: float  # seconds that a post of any size takes at least
    shared_by: int = 1  # neighbouring GPUs that share it: their traffic adds up

    def __post_init__(self) -> None:
        speed, delay = self.bandwidth / 1e9, self.latency * 1e6
        if not 0 < speed < math.inf:
            raise ValueError(f"the link's bandwidth must be positive, not {speed:g} GB/s")
        if not 0 <= delay < math.inf:
            raise ValueError(f"the link's latency must not be negative, but is {delay:g} µs")
        if self.shared_by < 1:
            raise ValueError(f"a link is shared by one GPU or more, not {self.shared_by}")

    def seconds(self, sent: int, received: int) -> float:
        """How long a post of so many bytes takes, while those that share it send as much."""
        return self.latency + max(sent, received) * self.shared_by / self.bandwidth

    def __str__(self) -> str:
        speed, delay = self.bandwidth / 1e9, self.latency * 1e6
        shared = f" shared by {self.shared_by} GPUs" if self.shared_by > 1 else ""
        return f"{self.name}: {speed:g} GB/s each way{shared}, {delay:g} µs for each post"


@dataclass(frozen=True, slots=True)
class Topology:
    """What lies between ranks: a link of each GPU inside its node, and one to other nodes."""

    name: str
    inside: Link
    outside: Link | None = None  # of each GPU, to other nodes
    ranks_per_node: int | None = None  # ranks follow each other in a node; None: one node

    def __post_init__(self) -> None:
        if (self.outside is None) != (self.ranks_per_node is None):
            missing = "link outside" if self.outside is None else "number of ranks per node"
            raise ValueError(f"topology {self.name!r}: nodes need a {missing}")
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ValueError(
                f"topology {self.name!r}: ranks_per_node must be positive, "
                f"not {self.ranks_per_node}"
            )

    @classmethod
    def of(cls, link: Link | Topology) -> Topology:
        """Itself, or one node with this link."""
        return cls(link.name, link) if isinstance(link, Link) else link

    def node(self, rank: int) -> int:
        """The node in which a rank is."""
        return 0 if self.ranks_per_node is None else rank // self.ranks_per_node

    def level(self, a: int, b: int) -> str:
        """INSIDE if both ranks are in one node, or OUTSIDE."""
        return INSIDE if self.node(a) == self.node(b) else OUTSIDE

    def link(self, a: int, b: int) -> Link:
        """What lies between two ranks."""
        return self.at(self.level(a, b))

    def at(self, level: str) -> Link:
        """The link of a level."""
        found = self.inside if level == INSIDE else self.outside
        assert found is not None, "ranks of one node"
        return found

    def lanes(
        self, rank: int, sent: Mapping[int, int], received: Mapping[int, int]
    ) -> dict[str, float]:
        """Seconds of one post on each level that it uses; see `seconds`."""
        totals: dict[str, list[int]] = {}
        for way, sizes in enumerate((sent, received)):
            for peer, size in sizes.items():
                totals.setdefault(self.level(rank, peer), [0, 0])[way] += size
        return {each: self.at(each).seconds(*totals[each]) for each in LEVELS if each in totals}

    def seconds(self, rank: int, sent: Mapping[int, int], received: Mapping[int, int]) -> float:
        """How long one post takes, of so many bytes to and from each peer.

        Both levels work at once, and the slower one counts: its latency, and the larger of the
        bytes sent and received, over its bandwidth.
        """
        return max(self.lanes(rank, sent, received).values(), default=0.0)

    def __str__(self) -> str:
        if self.outside is None:
            return str(self.inside)
        return (
            f"{self.name}: nodes of {self.ranks_per_node} ranks; "
            f"inside {self.inside}; outside {self.outside}"
        )


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
    name: str | None = NONE, gbps: float | None = None, latency_us: float | None = None
) -> Link | None:
    """The link called `name`, or one of `gbps` gigabytes a second; None: communication is removed.

    Args:
        name: one of `LINKS`; None or "none": communication is removed.
        gbps: gigabytes (10⁹ bytes) in a second each way; instead of a name.
        latency_us: microseconds; by default those of the named link, 10 for one in numbers.
    """
    name = name or NONE
    if name not in (NONE, *LINKS):
        raise ValueError(f"unknown link {name!r}; choose one of {NONE}, {', '.join(LINKS)}")
    if gbps is not None and name != NONE:
        raise ValueError(f"link {name!r} and a bandwidth of {gbps:g}: give one of them")
    found = LINKS.get(name) if gbps is None else Link(OWN, gbps * 1e9, 10e-6)
    if latency_us is None:
        return found
    if found is None:
        raise ValueError(f"a latency of {latency_us:g} needs a link")
    return replace(found, latency=latency_us * 1e-6)
