"""Groups of ranks that are a mesh of two axes: all of them, those of a node, those across nodes."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class NodeGroups:
    """This rank's groups: `everybody` of its mesh, its node, and its peers in other nodes."""

    everybody: ProcessGroup
    node: ProcessGroup
    across: ProcessGroup


def make_node_groups(ranks_per_node: int, nodes: int) -> NodeGroups:
    """Cut the default group into meshes of so many nodes; all ranks call it.

    ValueError if they do not divide its ranks.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    size = ranks_per_node * nodes
    if world_size % size:
        raise ValueError(
            f"{ranks_per_node} × {nodes} ranks do not divide the default group's {world_size}"
        )
    meant: dict[str, list[list[int]]] = {"everybody": [], "node": [], "across": []}
    for first in range(0, world_size, size):
        everybody = range(first, first + size)
        meant["everybody"].append(list(everybody))
        meant["node"] += [
            list(everybody[start : start + ranks_per_node])
            for start in range(0, size, ranks_per_node)
        ]
        meant["across"] += [list(everybody[i::ranks_per_node]) for i in range(ranks_per_node)]
    found = {}
    for name, groups in meant.items():
        for ranks in groups:
            group = dist.new_group(ranks)  # by all ranks, in one order
            if rank in ranks:
                found[name] = group
    return NodeGroups(**found)
