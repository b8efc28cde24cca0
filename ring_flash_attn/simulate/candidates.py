"""Candidates: every layout, route and parameter that a workload could be spread by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from ..bench.links import Topology
from ..bench.workload import Placement, Workload, problem_of
from ..plan.balanced import Balanced
from ..plan.build import route_names
from ..plan.layout import SplitLayout, get_layout, layout_names
from ..plan.steps import Side

_NODE = 64  # ranks: of more that exchange heads, only what the topology says
_PIECES = 10_000  # spans of all ranks: each route and kernel would take seconds a rank
_EACH = 32  # so many for each rank are never too many
_MANY = 256  # ranks: beyond them, every layout takes the planner seconds
_MOST_PIECES = 500_000  # of layouts that the user names: more would take minutes
_SOURCES = (1, 2, 4, 8)  # sources_per_launch, besides the library's own choice
Refused = tuple[Placement, str]  # and why


def candidates(
    workload: Workload,
    world_size: int,
    topology: Topology,
    kernel: str,
    layouts: Sequence[str] = (),
    routes: Sequence[str] = (),
) -> tuple[list[Placement], list[Refused]]:
    """What there is to choose from, and what cannot be, with the reason.

    A parameter that does not go with a route is left out; what a route itself refuses is listed.
    """
    found: list[Placement] = []
    refused: list[Refused] = []
    most = _MOST_PIECES if layouts else max(_PIECES, _EACH * world_size)
    for layout in layouts or _layouts(workload, world_size, topology):
        pieces = _pieces(workload, Placement(world_size, layout, "ring", kernel))
        if pieces > most:
            why = f"it cuts documents into {pieces:,} pieces, more than {most:,}"
            refused += [
                (Placement(world_size, layout, route, kernel), why)
                for route in routes or route_names()
            ]
            continue
        for route in routes or route_names():
            plain = Placement(world_size, layout, route, kernel)
            reason = _why_not(workload, plain)
            if reason is not None:
                refused.append((plain, reason))
                continue
            more = (
                Placement(world_size, layout, route, kernel, **parameters)
                for parameters in _parameters(workload, world_size, topology)
            )
            found += [each for each in (plain, *more) if _why_not(workload, each) is None]
    return found, refused


def _pieces(workload: Workload, placement: Placement) -> int:
    """About how many spans all ranks have together."""
    problem = problem_of(workload, placement)
    return len(problem.spans(Side.QUERY, placement.world_size // 2)) * placement.world_size


def _layouts(workload: Workload, world_size: int, topology: Topology) -> Iterator[str]:
    """All; of one sequence flat layouts are those per document; for a pack on several nodes also a
    "balanced" that knows them, and of many ranks that one alone.
    """
    node = topology.ranks_per_node or world_size
    for name in layout_names():
        layout = get_layout(name)
        flat = isinstance(layout, SplitLayout) and layout.flat
        if flat and len(workload.lengths) == 1:
            continue
        if name == Balanced().name and workload.packed and node < world_size:
            yield Balanced(ranks_per_node=node).name
            if world_size > _MANY:
                continue
        yield name


def _parameters(
    workload: Workload, world_size: int, topology: Topology
) -> Iterator[dict[str, Any]]:
    """Each by itself; routes refuse those that they do not have."""
    heads = workload.nheads_k
    divisors = (n for n in range(2, min(world_size, _NODE + 1)) if world_size % n == 0)
    nodes = [topology.ranks_per_node] if topology.ranks_per_node else []
    yield from chain(
        ({"sources_per_launch": n} for n in _SOURCES if n < world_size),
        ({"heads_k_stride": n} for n in (1, 2, 4, heads // 2) if n < heads and heads % n == 0),
        ({"ranks_per_node": n} for n in sorted({*divisors, *nodes}) if world_size % n == 0),
    )


def _why_not(workload: Workload, placement: Placement) -> str | None:
    try:
        problem_of(workload, placement)
    except ValueError as error:
        return str(error)
    return None
