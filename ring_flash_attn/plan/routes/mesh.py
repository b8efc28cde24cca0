"""Mesh: tokens are exchanged for heads inside a node; keys of a rank's heads come from all nodes.

    step 0              step 1              step 2              step 3
    get Q, K            Q·K of our node     Q·K of a node       return out, or dQ and dK
    (of my heads,       get K of a node
    of our node)

The scheme of USP: all-to-all inside, ring outside, or all-gather if one launch takes the keys of
all nodes. A key goes once to each node that needs it, straight to the rank that has its heads.
"""

from __future__ import annotations

from itertools import pairwise

from ..build import register_route
from ..problem import Problem
from ..shares import Exchange, Shares, share_out
from ..steps import Step, Transfer, Work

_FEW_TOKENS = 8192  # a rank: up to so many, launches are small, and take the keys of more nodes
_LAUNCHES = 8


@register_route("mesh")
def mesh(problem: Problem, rank: int, backward: bool) -> list[Step]:
    """Steps of `rank`: the keys of the next nodes arrive while those of some are worked on."""
    node_size = problem.ranks_per_node or problem.world_size
    nodes = [
        tuple(range(first, first + node_size)) for first in range(0, problem.world_size, node_size)
    ]

    def share_all() -> Shares:
        return {user: each for node in nodes for user, each in share_out(problem, node).items()}

    exchange = Exchange(problem, rank, problem.remember(("shares", node_size), share_all))
    hops = _hops(problem, len(nodes))
    moves: list[list[Transfer]] = [[] for _ in range(len(hops) + 2)]
    works: list[list[Work]] = [[] for _ in range(len(hops) + 2)]
    for user, shares in exchange.shares.items():
        home = user // node_size
        for number, group in enumerate(hops):
            if user == rank:  # we get the keys of these nodes
                away = sorted((home - hop) % len(nodes) for hop in group)
                among = tuple(owner for node in away for owner in nodes[node])
            elif (home - rank // node_size) % len(nodes) in group:  # they get ours
                among = (rank,)
            else:
                continue
            for share in shares:
                moves[number] += exchange.keys_come(user, share, among)
                if backward:
                    moves[number + 2] += exchange.gradients_leave(user, share, among)
                if user == rank:
                    works[number + 1] += exchange.work(share, among)
        for share in shares:
            moves[0] += exchange.queries_come(user, share)
            moves[-1] += exchange.results_leave(user, share)
    steps = [Step(tuple(m), tuple(w)) for m, w in zip(moves, works, strict=True)]
    if problem.world_size == 1:
        return steps[1:2]
    return steps if backward or exchange.returns else steps[:-1]


def _hops(problem: Problem, nodes: int) -> list[list[int]]:
    """For each launch, how far away the nodes are whose keys it takes; our own come first."""
    most = problem.sources_per_launch
    if most is None:
        shard = -(-sum(problem.lengths_k) // problem.world_size)
        most = max(4 if shard <= _FEW_TOKENS else 2, -(-(nodes - 1) // (_LAUNCHES - 1)))
        most = min(most, max(1, nodes - 1))
    if most >= nodes:
        return [list(range(nodes))]
    count = -(-(nodes - 1) // most)
    cuts = [1 + number * (nodes - 1) // count for number in range(count + 1)]
    return [[0], *(list(range(a, b)) for a, b in pairwise(cuts))]
