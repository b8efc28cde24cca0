"""Schedules of the library's own plans as scenes: what every rank does in every step."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from ..bench.workload import Placement, Workload, problem_of
from ..draw.schedule import DIGITS, Schedule, colour
from ..plan.build import route_names
from ..plan.layout import FLAT_PREFIX, layout_names

_TOKENS = {2: 16, 4: 16, 8: 32}  # by number of ranks
WORLD_SIZES = tuple(_TOKENS)
_ONE = "one sequence"
_DOCUMENTS = {_ONE: (1.0,), "three documents": (0.3125, 0.25, 0.4375)}
_OPTIONS: dict[str, dict[str, Any]] = {  # of routes, in words
    "ring": {
        "ring, one source a launch": {"sources_per_launch": 1},
        "ring, up to four sources a launch": {"sources_per_launch": 4},
    },
    "all_gather": {"all_gather, two groups of heads": {"heads_k_stride": 1}},
    "double_ring": {"double_ring, nodes of two": {"ranks_per_node": 2, "sources_per_launch": 1}},
    "mesh": {"mesh, nodes of two": {"ranks_per_node": 2, "sources_per_launch": 1}},
}


def scenes() -> dict[str, Any]:
    """All scenes by layout, route, documents, pass and number of ranks; and the ranks' colours."""
    found = [
        _scene(Placement(world_size, layout, route, **options), label, documents, backward)
        for documents in _DOCUMENTS
        for layout in layout_names()
        if documents != _ONE or not layout.startswith(FLAT_PREFIX)
        for route in route_names()
        for label, options in _OPTIONS.get(route, {route: {}}).items()
        for world_size in WORLD_SIZES
        for backward in (False, True)
    ]
    colours = {size: [colour(rank, size) for rank in range(size)] for size in WORLD_SIZES}
    return {"scenes": found, "colours": colours}


def _scene(placement: Placement, label: str, documents: str, backward: bool) -> dict[str, Any]:
    tokens = _TOKENS[placement.world_size]
    lengths = (int(part * tokens) for part in _DOCUMENTS[documents])
    nheads = 1 if placement.heads_k_stride is None else 2  # groups of one
    # Ranks of a node have a head each, and compute the queries of all of its ranks.
    by_head = {"all_to_all": placement.world_size, "mesh": 2}.get(placement.route, 0)
    nheads = by_head or nheads
    offsets = tuple(accumulate(lengths, initial=0))
    workload = Workload(1, tokens, nheads, nheads, causal=True, cu_seqlens=offsets)
    schedule = Schedule(placement.route, problem_of(workload, placement), backward)
    steps = [_step(schedule, number) for number in range(len(schedule.turns))]
    # Where queries travel, who holds a key computes with it.
    by_key = not by_head and any(
        queries != [rank] for step in steps for rank, queries, *_ in step["work"]
    )
    return {
        "layout": placement.layout,
        "route": label,
        "documents": documents,
        "world_size": placement.world_size,
        "passes": "backward" if backward else "forward",
        "owners": schedule.owners(),
        "by_key": by_key,
        "by_head": by_head,
        "busy": round(schedule.busy, 4),
        "steps": steps,
        "fills": [_fill(schedule, tokens, head) for head in range(nheads)],
    }


def _step(schedule: Schedule, number: int) -> dict[str, Any]:
    """Launches [rank, owners of queries, owners of keys, heads] and messages [what, from, to]."""
    work = [
        [plan.rank, list(each.queries), list(each.keys), list(range(*each.heads))]
        for plan in schedule.plans
        for each in plan.steps[number].work
    ]
    turns, moves = schedule.turns[number], []
    for turn in turns:
        for message in turn.sends:
            what, _, target = message.rpartition(" → ")
            moves.append([what, turn.rank, int(target)])
    return {"work": work, "pairs": [turn.pairs for turn in turns], "moves": moves}


def _fill(schedule: Schedule, tokens: int, head: int) -> str:
    """The step that computes each (query, key) of a head, a character each, row by row."""
    grid = ["."] * (tokens * tokens)
    for patch in schedule.patches(head):
        for query, key in patch.pairs:
            grid[query * tokens + key] = DIGITS[patch.step]
    return "".join(grid)
