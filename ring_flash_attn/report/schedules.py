"""Schedules of the library's own plans as scenes: what every rank does in every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

from ..bench.workload import Placement, Workload, problem_of
from ..draw.schedule import Schedule, colour
from ..plan.build import route_names
from ..plan.layout import FLAT_PREFIX, layout_names

WORLD_SIZES = (2, 4, 8)
_TOKENS = {2: 16, 4: 16, 8: 32}
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"  # steps, one character each
_NONE = "."
_DOCUMENTS = {"one sequence": (1.0,), "three documents": (0.3125, 0.25, 0.4375)}


def scenes() -> dict[str, Any]:
    """All scenes by layout, route, documents, pass and number of ranks; and the ranks' colours."""
    found = [
        _scene(
            replace(placement, layout=layout, world_size=world_size),
            label,
            documents,
            nheads_k,
            backward,
        )
        for documents in _DOCUMENTS
        for layout in layout_names()
        if documents != "one sequence" or not layout.startswith(FLAT_PREFIX)
        for label, placement, nheads_k in _placements()
        for world_size in WORLD_SIZES
        for backward in (False, True)
    ]
    colours = {size: [colour(rank, size) for rank in range(size)] for size in WORLD_SIZES}
    return {"scenes": found, "colours": colours}


def _placements() -> Iterator[tuple[str, Placement, int]]:
    """In words, the route with its options, and KV heads: two where it goes by groups of them."""
    for route in route_names():
        if route == "ring":
            for sources, words in ((1, "one source"), (4, "up to four sources")):
                placement = Placement(route=route, sources_per_launch=sources)
                yield f"ring, {words} a launch", placement, 1
        elif route == "all_gather":
            yield "all_gather, two groups of heads", Placement(route=route, heads_k_stride=1), 2
        else:
            yield route, Placement(route=route), 1


def _scene(
    placement: Placement, label: str, documents: str, nheads_k: int, backward: bool
) -> dict[str, Any]:
    tokens = _TOKENS[placement.world_size]
    lengths = (int(part * tokens) for part in _DOCUMENTS[documents])
    offsets = tuple(accumulate(lengths, initial=0))
    workload = Workload(1, tokens, nheads_k, nheads_k, causal=True, cu_seqlens=offsets)
    schedule = Schedule(placement.route, problem_of(workload, placement), backward)
    queries_travel = any(  # so that who holds a key computes with it
        work.queries != (plan.rank,)
        for plan in schedule.plans
        for step in plan.steps
        for work in step.work
    )
    return {
        "layout": placement.layout,
        "route": label,
        "documents": documents,
        "world_size": placement.world_size,
        "passes": "backward" if backward else "forward",
        "owners": schedule.owners(),
        "by_key": queries_travel,
        "busy": round(schedule.busy, 4),
        "steps": [_step(schedule, number) for number in range(len(schedule.turns))],
        "fills": [_fill(schedule, tokens, head) for head in range(nheads_k)],
    }


def _step(schedule: Schedule, number: int) -> dict[str, Any]:
    """Launches [rank, owners of queries, owners of keys, heads] and messages [what, from, to]."""
    turns = schedule.turns[number]
    work = [
        [plan.rank, list(each.queries), list(each.keys), list(range(*each.heads))]
        for plan in schedule.plans
        for each in plan.steps[number].work
    ]
    moves = []
    for turn in turns:
        for message in turn.sends:
            what, _, target = message.rpartition(" → ")
            moves.append([what, turn.rank, int(target)])
    return {"work": work, "pairs": [turn.pairs for turn in turns], "moves": moves}


def _fill(schedule: Schedule, tokens: int, head: int) -> str:
    """The step that computes each (query, key) of a head, a character each, row by row."""
    grid = [_NONE] * (tokens * tokens)
    for patch in schedule.patches(head):
        for query, key in patch.pairs:
            grid[query * tokens + key] = _DIGITS[patch.step]
    return "".join(grid)
