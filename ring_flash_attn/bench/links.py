"""Links and topologies: what lies between ranks, inside a node and between nodes.

Importing it loads no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

FORMAT, VERSION, SUFFIX = "ring_flash_attn topology", 1, ".json"  # of files
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
        return f"{self.name}: {speed:.4g} GB/s each way{shared}, {delay:.4g} µs for each post"


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


# Bandwidths are the makers' nominal ones, each way; they state NVLink's for both ways together.
# Latencies are assumptions: a grouped send and receive of a few bytes, from the launch on one GPU
# to its end there, is of this order with NCCL.
LINKS = {
    link.name: link
    for link in (
        Link("nvlink4", 450e9, 10e-6),  # H100, H200: 18 links of 25 GB/s
        Link("nvlink-h800", 200e9, 10e-6),  # 8 links
        Link("nvlink3", 300e9, 10e-6),  # A100: 12 links of 25 GB/s
        Link("nvlink-a800", 200e9, 10e-6),  # 8 links
        Link("nvlink5", 900e9, 10e-6),  # B200: 18 links of 50 GB/s
        Link("pcie5", 64e9, 15e-6),  # 16 lanes
        Link("pcie4", 32e9, 15e-6),
        Link("ib400", 50e9, 20e-6),  # 400 Gbit/s for each GPU
        Link("ib200", 25e9, 20e-6),
    )
}
_NODE = 8  # GPUs
_INSIDE = {  # of a node, by its GPUs
    "h100": "nvlink4",
    "h200": "nvlink4",
    "h800": "nvlink-h800",
    "a100": "nvlink3",
    "a800": "nvlink-a800",
    "b200": "nvlink5",
}
# Estimates: cards without NVLink, of which two share what a PCIe switch or a CPU passes on, and all
# share an adapter. (Published for 8 RTX 5090 on PCIe 5, which are no faster for it than 8 RTX 4090:
# 28 GB/s in an all-reduce, NVIDIA/nccl issue 1639.)
_SHARED_PCIE = replace(LINKS["pcie4"], shared_by=2)
_ON_PCIE = ("l20", "rtx4090")
TOPOLOGIES = {
    topology.name: topology
    for topology in (
        *(
            Topology(f"{gpu}-{adapter}", LINKS[inside], LINKS[adapter], _NODE)
            for gpu, inside in _INSIDE.items()
            for adapter in ("ib400", "ib200")
        ),
        *(Topology(f"{gpu}-pcie", _SHARED_PCIE) for gpu in _ON_PCIE),
        *(
            Topology(f"{gpu}-ib200", _SHARED_PCIE, replace(LINKS["ib200"], shared_by=_NODE), _NODE)
            for gpu in _ON_PCIE
        ),
    )
}
_LATENCY, _NETWORK_LATENCY = 10e-6, 20e-6  # of links in numbers


def find_link(
    name: str | None = NONE,
    gbps: float | None = None,
    latency_us: float | None = None,
    network_gbps: float | None = None,
    network_latency_us: float | None = None,
    gpus_per_node: int | None = None,
) -> Link | Topology | None:
    """What is called `name`, or a link in numbers; None: communication is removed.

    Args:
        name: one of `LINKS` or `TOPOLOGIES`, or a topology file (`*.json`); None or "none":
            communication is removed.
        gbps: gigabytes (10⁹ bytes) in a second each way, inside a node; instead of a name.
        latency_us: microseconds; by default those of the named link, 10 for one in numbers.
        network_gbps: gigabytes in a second each way, of a GPU to other nodes; for a link inside
            a node that has no network yet.
        network_latency_us: by default the named network's, 20 for one in numbers.
        gpus_per_node: GPUs of a node, where there is a network; by default the named topology's.
    """
    if gbps is not None and name not in (None, NONE):
        raise ValueError(f"link {name!r} and a bandwidth of {gbps:g}: give one of them")
    found = _named(name or NONE) if gbps is None else Link(OWN, gbps * 1e9, _LATENCY)
    if found is None:
        numbers = {"latency_us": latency_us, "network_gbps": network_gbps}
        numbers |= {"network_latency_us": network_latency_us, "gpus_per_node": gpus_per_node}
        for what, value in numbers.items():
            if value is not None:
                raise ValueError(f"{what} {value:g} needs a link")
        return None
    whole = Topology.of(found)
    if latency_us is not None:
        whole = replace(whole, inside=replace(whole.inside, latency=latency_us * 1e-6))
    whole = _with_network(whole, network_gbps, network_latency_us, gpus_per_node)
    return whole.inside if isinstance(found, Link) and whole.outside is None else whole


def _with_network(
    found: Topology, gbps: float | None, latency_us: float | None, gpus_per_node: int | None
) -> Topology:
    """With these numbers of its network, where they go together."""
    outside = found.outside
    size = found.ranks_per_node if gpus_per_node is None else gpus_per_node
    if gbps is not None:
        if outside is not None:
            raise ValueError(f"network_gbps {gbps:g}: link {found.name!r} has a network")
        if size is None:
            raise ValueError(f"network_gbps {gbps:g} needs gpus_per_node")
        if not 0 < gbps < math.inf:
            raise ValueError(f"network_gbps must be positive, not {gbps:g}")
        outside = Link(OWN, gbps * 1e9, _NETWORK_LATENCY)
    if outside is None:
        for what, value in (("network_latency_us", latency_us), ("gpus_per_node", gpus_per_node)):
            if value is not None:
                raise ValueError(f"{what} {value:g}: link {found.name!r} has no network")
        return found
    if latency_us is not None:
        if not 0 <= latency_us < math.inf:
            raise ValueError(f"network_latency_us must not be negative, but is {latency_us:g}")
        outside = replace(outside, latency=latency_us * 1e-6)
    return replace(found, outside=outside, ranks_per_node=size)


def _named(name: str) -> Link | Topology | None:
    if name.endswith(SUFFIX):
        return load_topology(Path(name))
    known = {NONE: None, **LINKS, **TOPOLOGIES}
    if name not in known:
        raise ValueError(
            f"unknown link {name!r}; choose one of {', '.join(known)}, or a file *{SUFFIX}"
        )
    return known[name]


# In files.


def link_from_dict(values: Mapping[str, Any] | None) -> Link | Topology | None:
    """What `dataclasses.asdict` made of a link or topology."""
    if values is None:
        return None
    if "inside" not in values:
        return Link(**values)
    outside = values["outside"]
    ends = {"inside": Link(**values["inside"]), "outside": outside and Link(**outside)}
    return Topology(**{**values, **ends})


def load_topology(path: Path) -> Topology:
    """Of a file that `rfa link` wrote; ValueError for any other."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise ValueError(f"{path} is not JSON") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(f"{path} is not a topology file: format is not {FORMAT!r}")
    if values.get("version") != VERSION:
        raise ValueError(f"{path} has version {values.get('version')}, not {VERSION}")
    try:
        found = link_from_dict(values["topology"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: its topology is incomplete: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(found, Topology):
        raise ValueError(f"{path}: its topology has no link inside")
    return found
