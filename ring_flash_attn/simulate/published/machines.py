"""Machines of the published tables: what lies between their GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from ...bench.links import Link, Topology
from . import gpus
from .constants import Constants
from .rows import PublishedRow

LATENCY, LATENCY_OUTSIDE = (
    10e-6,
    20e-6,
)  # seconds of a post: assumed, as of the links that have names
# Bytes in a second: shards of 64 MiB on 8 H100 (pytorch #182850).
ALL_GATHER = {"H100": 382.7e9}
H100_ADAPTER = 50e9  # bytes in a second for each GPU, 400 Gbit/s: assumed, no source says


@dataclass(frozen=True, slots=True)
class Fabric:
    """Between nodes: bytes in a second of a node's adapters, for all of its GPUs together."""

    ranks: int  # of a node
    node: float  # at most
    communicator: float  # what one NCCL communicator of each GPU reaches
    message: float  # what one GPU reaches alone

    def link(self, senders: int, communicators: int) -> Link:
        """What each of so many GPUs of a node gets."""
        shared = min(self.node, self.communicator * communicators)
        return Link("between nodes", min(self.message, shared / senders), LATENCY_OUTSIDE)


def fabric(machine: str, constants: Constants, ulysses: int = 1) -> Fabric | None:
    """Between the nodes of a machine.

    Nodes of a PCIe machine are two GPUs on one switch; if all of its GPUs share heads, they are the
    four GPUs of a socket, because what crosses sockets takes longest.
    """
    c = constants
    switches = Fabric(2, c.l20_host, c.l20_host, c.l20_pair)
    sockets = Fabric(4, c.l20_sockets, c.l20_sockets, c.l20_pair)
    return {
        "A800 4 nodes": Fabric(8, c.a800_node, c.a800_communicator, c.a800_message),
        "H100 2 nodes": Fabric(8, 8 * H100_ADAPTER, 8 * H100_ADAPTER, H100_ADAPTER),
        "L20 PCIe": sockets if ulysses == 8 else switches,
    }.get(machine)


def topology(row: PublishedRow, constants: Constants, communicators: int = 1) -> Topology:
    """Of a row's machine, with so many communicators of each GPU at work at once."""
    bandwidth = min(gpus.nvlink(row.machine.split()[0]), constants.nvlink) or constants.l20_pair
    inside = Link("inside", bandwidth, LATENCY)
    between = fabric(row.machine, constants, row.ulysses)
    if between is None:
        return Topology(row.machine, inside)
    outside = between.link(senders(row, between), communicators)
    return Topology(row.machine, inside, outside, between.ranks)


def several(row: PublishedRow, constants: Constants) -> float:
    """How much faster NCCL is to several peers of a node than to one, where a source states it."""
    stated = ALL_GATHER.get(row.machine.split()[0], constants.nvlink)
    return max(1.0, stated / constants.nvlink)


def senders(row: PublishedRow, between: Fabric) -> int:
    """GPUs of a node that send to another one at the same time."""
    if row.scheme in ("burst single ring", "Megatron p2p", "ring p2p"):
        return 1
    return min(between.ranks, row.ulysses) if row.source == "yunchang" else between.ranks
