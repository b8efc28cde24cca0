"""Double ring: keys cross the network once for each node, and are spread inside it.

    step 0             step 1             step 2             step 3
    Q·K of our own     Q·K of our node    Q·K of a node      Q·K of another
    get K of our node
    fetch a node's K   spread it
                       fetch another's    spread it

Rank i of a node fetches from rank i of another node the rows that any rank of its own node needs,
each over its own adapter. It is their relay: in the next step it sends each rank of its node what
that one needs. Gradients go back the same way, and are summed by the relay before they cross.

With nodes of one rank, or one node of all, this is the ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ..build import make_work, register_route
from ..groups import LAUNCHES, Groups, by_size, split
from ..problem import Problem
from ..steps import Heads, Payload, Side, Step, Transfer
from .ring import ring

# Whose keys and values a launch takes, unless a node has more: so many, or if there would be more
# launches than a few, the most.
_MANY_TOKENS = 144 * 1024
_MOST_TOKENS = 192 * 1024

Node = tuple[int, ...]  # its ranks


@register_route("double_ring")
def double_ring(problem: Problem, rank: int, backward: bool) -> list[Step]:
    """Steps of `rank`: while some nodes' keys are worked on, those of the next ones arrive."""
    size = problem.ranks_per_node or problem.world_size
    if size in (1, problem.world_size):
        return ring(problem, rank, backward)
    nodes = [tuple(range(first, first + size)) for first in range(0, problem.world_size, size)]
    key = ("launches of nodes", size, backward)
    launches = problem.remember(key, lambda: _launches(problem, nodes, backward))
    return _steps(problem, nodes, rank, launches, backward)


@dataclass(frozen=True, slots=True)
class _NodeLaunch:
    """Whose keys a launch takes: in all nodes ranks as far below, and for each node other nodes."""

    hops: list[int]
    sources: list[list[int]]


def _launches(problem: Problem, nodes: list[Node], backward: bool) -> list[_NodeLaunch]:
    """All launches but the first, which is on a rank's own keys; that of step 1 comes first.

    Backward, the last ones are on keys of our own node, while gradients of others go home.
    """
    hops = [
        hop
        for hop in range(1, len(nodes[0]))
        if any(problem.needed(rank, _below(nodes, rank, hop)) for node in nodes for rank in node)
    ]
    groups = _groups(problem, nodes, LAUNCHES - 2 - 2 * backward)
    first, *last = _parts(hops, len(groups[0])) if backward else [hops]
    nobody: list[list[int]] = [[] for _ in nodes]
    across = [_NodeLaunch([], list(sources)) for sources in zip(*groups, strict=True)]
    found = [_NodeLaunch(first, nobody), *across, *(_NodeLaunch(part, nobody) for part in last)]
    return found if hops or across else []


def _parts(hops: list[int], groups: int) -> list[list[int]]:
    """Backward, what of our node comes before the launches on other nodes, and what after them.

    With several groups, a third each: for the start, and for both steps that the last gradients
    take home. With one, all of them are for the end: fewer launches. With none, the last one is a
    single rank, as nothing hides the way home of its gradients.
    """
    if not groups:
        return [part for part in (hops[:-1], hops[-1:]) if part] or [[]]
    if groups == 1:
        return [[], hops] if hops else [[]]
    start = -(-len(hops) // 3)
    end = start + (len(hops) - start) // 2
    return [hops[:start], hops[start:end], hops[end:]] if len(hops) > 1 else [hops]


def _groups(problem: Problem, nodes: list[Node], few: int) -> list[Groups]:
    """Of each node, the nodes of each launch: those that it needs, the next ones below first.

    As few launches as memory allows: ranks wait for their relays in each of them.
    """
    numbers, most = range(len(nodes)), problem.sources_per_launch
    needs = [problem.sources(node) for node in nodes]
    members = [sum(1 << rank for rank in node) for node in nodes]
    below = [[(number - hop) % len(nodes) for hop in numbers[1:]] for number in numbers]
    sources = [[n for n in each if needs[number] & members[n]] for number, each in enumerate(below)]
    if most is not None:
        count = -(-max(map(len, sources)) // most)
        return [split(each, count) for each in sources]
    received = problem.received()

    def brings(user: int, sources: list[int]) -> dict[int, int]:
        rows = received[user]
        return {n: sum(rows.get(owner, 0) for owner in nodes[n]) for n in sources}

    rows = [  # of the rank that gets most
        max((brings(user, each) for user in node), key=lambda found: sum(found.values()))
        for node, each in zip(nodes, sources, strict=True)
    ]
    return by_size(sources, rows, _MANY_TOKENS, _MANY_TOKENS, few, _MOST_TOKENS)


def _below(nodes: list[Node], rank: int, hop: int) -> int:
    """The rank of the same node that is so far below, in a circle."""
    number, place = divmod(rank, len(nodes[0]))
    return nodes[number][(place - hop) % len(nodes[0])]


def _steps(
    problem: Problem, nodes: list[Node], rank: int, launches: list[_NodeLaunch], backward: bool
) -> list[Step]:
    heads = problem.all_heads
    ends = [1 + n + backward * (1 + any(launch.sources)) for n, launch in enumerate(launches, 1)]
    moves: list[list[Transfer]] = [[] for _ in range(max(ends, default=1))]
    works = [make_work(problem, rank, (rank,), heads)]
    for step, launch in enumerate(launches, 1):
        for ahead, leg in _legs(problem, nodes, rank, launch):
            moves[step - ahead].append(_transfer(Payload.INPUT, heads, *leg))
            if backward:
                moves[step + ahead].append(_transfer(Payload.RESULT, heads, *leg))
        own = nodes[rank // len(nodes[0])]
        away = launch.sources[rank // len(own)]
        owners = [_below(nodes, rank, hop) for hop in launch.hops]
        owners += [owner for number in away for owner in nodes[number]]
        owners = sorted(owner for owner in owners if problem.needed(rank, owner))
        works.append(make_work(problem, rank, owners, heads, cut=True))
    works += [()] * (len(moves) - len(works))
    return [Step(tuple(m), work) for m, work in zip(moves, works, strict=True)]


def _transfer(
    payload: Payload, heads: Heads, owner: int, source: int, target: int, users: Node
) -> Transfer:
    """Keys of an owner, from a source to a target; or their gradients, which go back."""
    ends = (source, target) if payload is Payload.INPUT else (target, source)
    return Transfer(payload, Side.KEY, owner, heads, *ends, cut=True, relayed_for=users)


_Leg = tuple[int, int, int, Node]  # owner, source and target of keys; whom they are relayed for


def _legs(
    problem: Problem, nodes: list[Node], rank: int, launch: _NodeLaunch
) -> Iterator[tuple[int, _Leg]]:
    """How keys for a launch leave or reach this rank, and how many steps ahead of it.

    Gradients go back as many steps after it.
    """
    number, place = divmod(rank, len(nodes[0]))
    own = nodes[number]
    for hop, back in product(launch.hops, (False, True)):
        user = _below(nodes, rank, -hop) if back else rank
        owner = rank if back else _below(nodes, rank, hop)
        if problem.needed(user, owner):
            yield 1, (owner, owner, user, ())
    for source in launch.sources[number]:
        for owner, relay in zip(nodes[source], own, strict=True):
            users = own if relay == rank else (rank,)
            users = tuple(user for user in users if problem.needed(user, owner))
            yield from ((1, (owner, relay, user, own)) for user in users)
            if users and relay == rank:
                yield 2, (owner, owner, rank, own)
    for target, sources in zip(nodes, launch.sources, strict=True):
        if number in sources and any(problem.needed(user, rank) for user in target):
            yield 2, (rank, rank, target[place], target)
