"""From a problem to the plan of a rank: the routes there are, and what all of them share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from .arrays import cat, counted, least_of_each, most_of_each, repeat, unique, vector
from .problem import Problem
from .steps import Heads, Payload, Plan, Side, Step, Work, users_of
from .tiles import tiles_between

Route = Callable[[Problem, int, bool], list[Step]]

BY_HEADS = ("all_gather", "all_to_all")  # routes that go by groups of KV heads (heads_k_stride)
BY_NODES = ("double_ring", "mesh")  # routes that know nodes (ranks_per_node)
BY_SOURCES = ("double_ring", "mesh", "ring")  # whose launches take several (sources_per_launch)

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
    return _finished(problem, rank, _ROUTES[route](problem, rank, backward))


def _finished(problem: Problem, rank: int, steps: Sequence[Step]) -> Plan:
    """The plan of these steps: transfers in order, tiles marked."""
    merged = any(  # somebody else's part of our queries still comes: no launch of ours is the last
        transfer.payload is Payload.RESULT and transfer.side is Side.QUERY
        for step in steps
        for transfer in step.transfers
    )
    launches = tuple(work for step in steps for work in step.work)
    # Forward and backward often have the same launches. They are kept, as the key has their ids.
    key = ("marked", rank, *map(id, launches), merged)
    _, found, covered = problem.remember(key, lambda: (launches, *_marked(launches, merged, rank)))
    marked = iter(found)
    in_order = tuple(
        Step(tuple(sorted(step.transfers)), tuple(next(marked) for _ in step.work))
        for step in steps
    )
    size = problem.size(Side.QUERY, rank) * problem.nheads_k
    return Plan(rank, in_order, complete=not merged and covered == size)


def make_work(
    problem: Problem, query_rank: int, key_ranks: Sequence[int], heads: Heads, cut: bool = False
) -> tuple[Work, ...]:
    """The launch of a rank's queries against the keys of several; nothing if the mask is empty.

    With `cut`, of another rank's keys only the needed rows are there. Those of several ranks are
    always cut, our own alone never.
    """
    owners = tuple(key_ranks)
    key = ("work", query_rank, owners, heads, cut)
    return problem.remember(key, lambda: _make_work(problem, query_rank, owners, heads, cut))


def _make_work(
    problem: Problem, query_rank: int, owners: tuple[int, ...], heads: Heads, cut: bool
) -> tuple[Work, ...]:
    if not owners:
        return ()
    cut = (cut or len(owners) > 1) and owners != (query_rank,)
    if cut:
        keys = problem.arrangement(owners, query_rank).columns
    else:
        keys = problem.columns(Side.KEY, owners[0])
    tiles = tiles_between(problem.columns(Side.QUERY, query_rank), keys, problem.mask)
    return (Work((query_rank,), owners, heads, tiles, cut),) if tiles else ()


def make_shared_work(
    problem: Problem, rank: int, queries: tuple[int, ...], keys: tuple[int, ...], heads: Heads
) -> tuple[Work, ...]:
    """The launch of `rank` on the queries of some ranks and the keys of some; both are cut.

    Nothing if the mask is empty. What is the rank's own alone is read in place.
    """
    key = ("shared work", rank, queries, keys, heads)

    def make() -> tuple[Work, ...]:
        if not queries or not keys:
            return ()
        if queries == (rank,):
            of_queries = problem.columns(Side.QUERY, rank)
        else:
            of_queries = problem.query_arrangement(queries).columns
        if keys == (rank,):
            of_keys = problem.columns(Side.KEY, rank)
        else:
            of_keys = problem.arrangement(keys, users_of(queries)).columns
        tiles = tiles_between(of_queries, of_keys, problem.mask)
        return (Work(queries, keys, heads, tiles, cut=True),) if tiles else ()

    return problem.remember(key, make)


def _marked(launches: Sequence[Work], merged: bool, rank: int) -> tuple[list[Work], int]:
    """Launches whose tiles know the first and the last one of their queries.

    And how many rows of our own queries have launches at home, summed over KV heads. If results are
    `merged` with those of other ranks, no launch is the last.
    """
    groups = sorted({work.heads for work in launches})
    assert all(a[1] <= b[0] for a, b in pairwise(groups)), f"head groups overlap: {groups}"
    together: dict[tuple[tuple[int, ...], Heads], list[int]] = {}
    for number, work in enumerate(launches):
        together.setdefault((work.queries, work.heads), []).append(number)
    found, covered = list(launches), 0
    for (queries, (start, end)), numbers in together.items():
        tiles = [launches[number].tiles for number in numbers]
        starts = cat([each.query[0] for each in tiles])
        rows = cat([each.query[1] for each in tiles])
        spans, which = unique(starts)
        if queries == (rank,):
            covered += int(most_of_each(which, rows, len(spans), 0).sum()) * (end - start)
        turns = repeat(counted(len(tiles)), vector(map(len, tiles)))
        first = least_of_each(which, turns, len(spans), len(tiles))[which] == turns
        last = (most_of_each(which, turns, len(spans), -1)[which] == turns) & (not merged)
        cuts = list(pairwise(accumulate(map(len, tiles), initial=0)))
        marks = [first[a:b] for a, b in cuts], [last[a:b] for a, b in cuts]
        for number, each, *flags in zip(numbers, tiles, *marks, strict=True):
            work = launches[number]
            found[number] = Work(queries, work.keys, work.heads, each.marked(*flags), work.cut)
    return found, covered
