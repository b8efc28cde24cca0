"""From a problem to the plan of a rank: the routes there are, and what all of them share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from .layout import Span
from .problem import Problem
from .steps import Heads, Payload, Plan, Side, Step, Work
from .tiles import Tile, make_tiles

Route = Callable[[Problem, int, bool], list[Step]]

_ROUTES: dict[str, Route] = {}


def register_route(name: str) -> Callable[[Route], Route]:
    """Make `route(problem, rank, backward)` available as `name`."""

    def register(route: Route) -> Route:
        _ROUTES[name] = route
        return route

    return register


def route_names() -> tuple[str, ...]:
    """All routes, in order of registration."""
    return tuple(_ROUTES)


def check_route(name: str) -> None:
    """ValueError that lists the choices if there is no route `name`."""
    if not isinstance(name, str) or name not in _ROUTES:
        raise ValueError(f"unknown route {name!r}; choose one of {', '.join(_ROUTES)}")


def make_plan(route: str, problem: Problem, rank: int, backward: bool = False) -> Plan:
    check_route(route)
    steps = _ROUTES[route](problem, rank, backward)
    in_order = tuple(Step(tuple(sorted(step.transfers)), step.work) for step in steps)
    return _marked(rank, in_order, problem.size(Side.QUERY, rank), problem.nheads_k)


def make_work(
    problem: Problem, query_rank: int, key_ranks: Sequence[int], heads: Heads, cut: bool = False
) -> tuple[Work, ...]:
    """The launch of a rank's queries against the keys of several; nothing if the mask is empty.

    With `cut`, of another rank's keys only the needed rows are there. Those of several ranks are
    always cut, our own alone never.
    """
    owners = tuple(key_ranks)
    cut = (cut or len(owners) > 1) and owners != (query_rank,)
    keys: Sequence[Span] = ()
    if cut:
        keys = problem.arrangement(owners, query_rank).spans
    elif owners:
        keys = problem.spans(Side.KEY, owners[0])
    tiles = make_tiles(problem.spans(Side.QUERY, query_rank), keys, problem.mask)
    return (Work((query_rank,), owners, heads, tiles, cut),) if tiles else ()


def _marked(rank: int, steps: tuple[Step, ...], size: int, nheads_k: int) -> Plan:
    """A plan whose tiles know the first and the last launch of their queries."""
    launches = [work for step in steps for work in step.work]
    groups = sorted({work.heads for work in launches})
    assert all(a[1] <= b[0] for a, b in pairwise(groups)), f"head groups overlap: {groups}"
    uses: dict[tuple[tuple[int, ...], Heads, int], tuple[int, int, int]] = {}  # first, last, rows
    for number, work in enumerate(launches):
        for tile in work.tiles:
            key = (work.queries, work.heads, tile.query.start)
            first = uses[key][0] if key in uses else number
            uses[key] = first, number, tile.query.length
    merged = any(  # somebody else's part of our queries still comes: no launch of ours is the last
        transfer.payload is Payload.RESULT and transfer.side is Side.QUERY
        for step in steps
        for transfer in step.transfers
    )
    numbers = iter(range(len(launches)))

    def mark(work: Work) -> Work:
        number = next(numbers)
        tiles = []
        for tile in work.tiles:
            key = (work.queries, work.heads, tile.query.start)
            first, last, _ = uses[key]
            is_first, is_last = first == number, not merged and last == number
            if is_first or is_last:
                tile = Tile(tile.query, tile.key, tile.low, tile.high, is_first, is_last)
            tiles.append(tile)
        return replace(work, tiles=tuple(tiles))

    marked = tuple(Step(step.transfers, tuple(map(mark, step.work))) for step in steps)
    covered = sum(rows * (end - start) for (_, (start, end), _), (_, _, rows) in uses.items())
    return Plan(rank, marked, complete=not merged and covered == size * nheads_k)
