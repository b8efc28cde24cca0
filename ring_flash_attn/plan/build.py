"""From a problem to the plan of a rank: the routes there are, and what all of them share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from .arrays import (
    cat,
    counted,
    filled,
    insertion_points,
    least_of_each,
    minimum,
    most_of_each,
    repeat,
    sum_of_each,
    unique,
    vector,
)
from .columns import DOCUMENT, LENGTH, START, Columns, part_of
from .problem import Problem
from .rows import BLOCK
from .steps import Heads, Payload, Plan, Side, Step, Work, users_of
from .tiles import Mask, Tiles, tiles_between

Route = Callable[[Problem, int, bool], list[Step]]

BY_HEADS = ("all_gather", "all_to_all")  # routes that go by groups of KV heads (heads_k_stride)
BY_NODES = ("double_ring", "mesh")  # routes that know nodes (ranks_per_node)
BY_SOURCES = ("double_ring", "mesh", "ring")  # whose launches take several (sources_per_launch)

_SPLIT_PAIRS = 1 << 20  # of a launch: an H200 takes 0.2 ms for them with 64/8 heads of 128

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


def make_own_work(
    problem: Problem, rank: int, heads: Heads
) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """The launch of a rank's queries against its own keys, in two: keys from some row on, the rest.

    The first has about a third of the pairs. Little work is not split: it is all in the first.
    """
    key = ("own work", rank, heads)
    return problem.remember(key, lambda: _make_own_work(problem, rank, heads))


def _make_own_work(
    problem: Problem, rank: int, heads: Heads
) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    whole = make_work(problem, rank, (rank,), heads)
    if not whole or int(whole[0].tiles.pairs.sum()) < _SPLIT_PAIRS:
        return whole, ()
    queries, keys = (problem.columns(side, rank) for side in Side)
    cut = _third(queries, keys, whole[0].tiles, problem.mask)
    before = (cut - keys[START]).clip(min=0)
    before = minimum(before, keys[LENGTH])
    parts = (before, keys[LENGTH] - before), (filled(len(before), 0), before)
    tiles = [tiles_between(queries, part_of(keys, *part), problem.mask) for part in parts]
    first, rest = ((Work((rank,), (rank,), heads, each),) if each else () for each in tiles)
    return first, rest


def _third(queries: Columns, keys: Columns, tiles: Tiles, mask: Mask) -> int:
    """The row from which on keys have about a third of the pairs.

    Where a span begins, if a fifth to a half is there; otherwise after whole blocks of one.
    """
    span = insertion_points(keys[START], tiles.key[0])
    pairs = sum_of_each(span, tiles.pairs, keys.shape[1])
    total = int(pairs.sum())
    after = total - pairs.cumsum(0)  # those of the spans that follow
    from_here = (after + pairs).tolist()
    nearest = min(range(len(from_here)), key=lambda n: abs(3 * from_here[n] - total))
    if total <= 5 * from_here[nearest] and 2 * from_here[nearest] <= total:
        return int(keys[START][nearest])
    number = next(n for n, rest in enumerate(after.tolist()) if 3 * rest <= total)
    span_alone = keys[:, number : number + 1]
    wanted = total // 3 - int(after[number])
    of_document = queries[:, queries[DOCUMENT] == span_alone[DOCUMENT]]
    low, high = 0, int(span_alone[LENGTH][0]) // BLOCK
    while high - low > 1:
        middle = (low + high) // 2
        skipped = filled(1, middle * BLOCK)
        rest = part_of(span_alone, skipped, span_alone[LENGTH] - skipped)
        found = int(tiles_between(of_document, rest, mask).pairs.sum())
        low, high = (middle, high) if found > wanted else (low, middle)
    return int(span_alone[START][0]) + high * BLOCK


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
