"""Schedules of the library's own plans as scenes: what every rank does in every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..draw.schedule import Schedule, colour, make_schedule
from ..engine.entry import make_problem
from ..engine.prepare import Options
from ..plan import routes as _routes  # registers them
from ..plan.build import make_plan, route_names
from ..plan.layout import FLAT_PREFIX, layout_names
from ..plan.problem import Problem
from ..plan.steps import Plan
from ..plan.tiles import Tile

del _routes

WORLD_SIZES = (2, 4, 8)
_TOKENS = {2: 16, 4: 16, 8: 32}
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"  # steps, one character each
_NONE = "."
_DOCUMENTS = {"one sequence": (1.0,), "three documents": (0.3125, 0.25, 0.4375)}


@dataclass(frozen=True, slots=True)
class Way:
    """A route and how it is taken.

    Attributes:
        label: in words.
        route: its name.
        nheads_k: KV heads; two where a route goes by head groups, so that there are two groups.
        heads_k_stride, sources_per_launch: None: the library's choice.
    """

    label: str
    route: str
    nheads_k: int = 1
    heads_k_stride: int | None = None
    sources_per_launch: int | None = None


def scenes() -> dict[str, Any]:
    """All scenes by layout, route, documents, pass and number of ranks; and the ranks' colours."""
    found = [
        _scene(layout, way, documents, world_size, backward)
        for documents in _DOCUMENTS
        for layout in layout_names()
        if documents != "one sequence" or not layout.startswith(FLAT_PREFIX)
        for way in _ways()
        for world_size in WORLD_SIZES
        for backward in (False, True)
    ]
    colours = {size: [colour(rank, size) for rank in range(size)] for size in WORLD_SIZES}
    return {"scenes": found, "colours": colours}


def _ways() -> Iterator[Way]:
    for route in route_names():
        if route == "ring":
            yield Way("ring, one source a launch", route, sources_per_launch=1)
            yield Way("ring, up to four sources a launch", route, sources_per_launch=4)
        elif route == "all_gather":
            yield Way("all_gather, two groups of heads", route, 2, heads_k_stride=1)
        else:
            yield Way(route, route)


def _scene(
    layout: str, way: Way, documents: str, world_size: int, backward: bool
) -> dict[str, Any]:
    tokens = _TOKENS[world_size]
    lengths = tuple(int(part * tokens) for part in _DOCUMENTS[documents])
    problem = make_problem(
        layout,
        way.route,
        lengths,
        lengths,
        world_size,
        Options(causal=True),
        way.nheads_k,
        way.heads_k_stride,
        way.sources_per_launch,
    )
    schedule = make_schedule(way.route, problem, backward)
    plans = [make_plan(way.route, problem, rank, backward) for rank in range(world_size)]
    return {
        "layout": layout,
        "route": way.label,
        "documents": documents,
        "world_size": world_size,
        "passes": "backward" if backward else "forward",
        "owners": schedule.owners(),
        "by_key": any(_queries_travel(plan) for plan in plans),
        "busy": round(schedule.busy, 4),
        "steps": [_step(schedule, plans, number) for number in range(len(schedule.turns))],
        "fills": [_fill(problem, plans, head) for head in range(way.nheads_k)],
    }


def _queries_travel(plan: Plan) -> bool:
    """Whether it is keys that stay, so that who holds a key computes with it."""
    return any(work.queries != (plan.rank,) for step in plan.steps for work in step.work)


def _step(schedule: Schedule, plans: list[Plan], number: int) -> dict[str, Any]:
    """Launches [rank, owners of queries, owners of keys, heads] and messages [what, from, to]."""
    turns = schedule.turns[number]
    work = [
        [plan.rank, list(each.queries), list(each.keys), list(range(*each.heads))]
        for plan in plans
        for each in plan.steps[number].work
    ]
    moves = []
    for turn in turns:
        for message in turn.sends:
            what, _, target = message.rpartition(" → ")
            moves.append([what, turn.rank, int(target)])
    return {"work": work, "pairs": [turn.pairs for turn in turns], "moves": moves}


def _fill(problem: Problem, plans: list[Plan], head: int) -> str:
    """The step that computes each (query, key) of a head, a character each, row by row."""
    size = sum(problem.lengths_k)
    grid = [_NONE] * (size * size)
    for plan in plans:
        for number, tile in _tiles(plan, head):
            for query, key in _pairs(tile):
                grid[query * size + key] = _DIGITS[number]
    return "".join(grid)


def _tiles(plan: Plan, head: int) -> Iterator[tuple[int, Tile]]:
    """Steps and tiles of one head."""
    for number, step in enumerate(plan.steps):
        for work in step.work:
            if work.heads[0] <= head < work.heads[1]:
                yield from ((number, tile) for tile in work.tiles)


def _pairs(tile: Tile) -> Iterator[tuple[int, int]]:
    """Places in the stream of the queries and keys that the mask leaves."""
    query, key = tile.query, tile.key
    for i in range(query.length):
        for j in range(key.length):
            if tile.low <= j - i <= tile.high:
                yield query.index + i * query.stride, key.index + j * key.stride
