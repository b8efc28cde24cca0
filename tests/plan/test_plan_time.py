"""Plans of long packs: what is found the quick way is what its definition says; and in time."""

from __future__ import annotations

import time
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import order_of_buffers, problems, spans

from ring_flash_attn.plan.buffers import BufferPlan
from ring_flash_attn.plan.build import make_plan, route_names
from ring_flash_attn.plan.columns import to_spans
from ring_flash_attn.plan.layout import Span, get_layout, layout_names
from ring_flash_attn.plan.problem import Problem
from ring_flash_attn.plan.steps import Side
from ring_flash_attn.plan.tiles import Mask, Tile, make_tile, make_tiles

layouts = pytest.mark.parametrize("layout", layout_names())


def seen_one_by_one(problem: Problem, owner: int, user: int) -> list[tuple[int, int]]:
    """(row, token) of a rank's keys that some query of another sees: pair by pair."""
    queries = [
        (span.document, position)
        for span in problem.spans(Side.QUERY, user)
        for position in span.positions
    ]
    return [
        (span.start + row, span.tokens[row])
        for span in problem.spans(Side.KEY, owner)
        for row, position in enumerate(span.positions)
        if any(d == span.document and problem.mask.allows(position - p) for d, p in queries)
    ]


def listed(found: tuple[Span, ...]) -> list[tuple[int, int]]:
    return [(s.start + row, s.tokens[row]) for s in found for row in range(s.length)]


@layouts
@settings(max_examples=40)
@given(data=st.data())
def test_rows_that_a_rank_sees_are_found_pair_by_pair(layout: str, data: st.DataObject) -> None:
    problem = data.draw(problems(layout))
    ranks = st.integers(0, problem.world_size - 1)
    owner, user = data.draw(ranks), data.draw(ranks)
    expected = seen_one_by_one(problem, owner, user)
    assert listed(to_spans(problem.seen(owner, user))) == expected
    assert [row for rows in problem.sent(owner, user) for row in rows] == [r for r, _ in expected]
    assert problem.needed(user, owner) is bool(expected)


@layouts
@settings(max_examples=25)
@given(data=st.data())
def test_an_estimate_of_one_document_is_exact(layout: str, data: st.DataObject) -> None:
    problem = data.draw(problems(layout).filter(lambda p: len(p.lengths_k) == 1))
    user = data.draw(st.integers(0, problem.world_size - 1))
    found = {
        owner: len(seen_one_by_one(problem, owner, user))
        for owner in range(problem.world_size)
        if owner != user
    }
    assert problem.received()[user] == {owner: count for owner, count in found.items() if count}


@layouts
@settings(max_examples=40)
@given(data=st.data(), by_document=st.booleans())
def test_buffers_hold_what_is_seen_in_order(
    layout: str, data: st.DataObject, by_document: bool
) -> None:
    """All tokens, each once, where `places` says; what follows in rows and tokens is one span."""
    problem = data.draw(problems(layout))
    ranks = range(problem.world_size)
    user = data.draw(st.sampled_from(ranks))
    owners = tuple(sorted(data.draw(st.sets(st.sampled_from(ranks), min_size=1))))
    with order_of_buffers(by_document):
        found = problem.arrangement(owners, user)
    place = dict(listed(found.spans))
    for owner in owners:
        at = [row for rows in found.places[owner] for row in rows]
        tokens = [token for _, token in seen_one_by_one(problem, owner, user)]
        assert [place[row] for row in at] == tokens
        assert all(rows.step == 1 for rows in found.places[owner])
        assert all(a.stop != b.start for a, b in pairwise(found.places[owner]))
    assert sorted(place) == list(range(found.size))
    for before, after in pairwise(found.spans):
        follows = before.index + before.stride * before.length == after.index
        same = (before.document, before.stride) == (after.document, after.stride)
        assert not (follows and same), "these are one span"
    if found.by_document:
        keys = [(span.document, span.position) for span in found.spans]
        assert keys == sorted(keys)


@given(
    queries=st.lists(st.integers(0, 2).flatmap(lambda d: spans(3, d)), max_size=5),
    keys=st.lists(st.integers(0, 2).flatmap(lambda d: spans(3, d)), max_size=5),
    left=st.none() | st.integers(0, 30),
    right=st.none() | st.integers(0, 30),
)
def test_tiles_are_those_of_each_pair(
    queries: list[Span], keys: list[Span], left: int | None, right: int | None
) -> None:
    mask = Mask(left, right)
    pairs: list[Tile | None] = [make_tile(query, key, mask) for query in queries for key in keys]
    assert [*make_tiles(queries, keys, mask)] == [tile for tile in pairs if tile is not None]


@pytest.mark.parametrize("route", route_names())
def test_forward_and_backward_share_their_launches(route: str) -> None:
    """Where they are the same; a plan by itself says the same."""

    def problem() -> Problem:
        return Problem(get_layout("zigzag"), (90, 3, 40), (90, 3, 40), 4, Mask(right=0), 2)

    shared, alone = problem(), problem()
    forward, backward = (make_plan(route, shared, 2, direction) for direction in (False, True))
    assert make_plan(route, alone, 2, True) == backward
    assert make_plan(route, problem(), 2, False) == forward
    works = [[w for step in plan.steps for w in step.work] for plan in (forward, backward)]
    assert len(works[0]) > 1 or route in ("all_gather", "all_to_all", "mesh")
    assert all(a is b for a, b in zip(*works, strict=True))


@pytest.mark.parametrize("route", route_names())
@layouts
def test_a_pack_is_planned_in_milliseconds(layout: str, route: str) -> None:
    """40 documents on 8 ranks, forward and backward: 2 to 8 ms on a slow core, of the process."""
    lengths = tuple(1 + 400 * (7 * n % 40) ** 2 // 100 for n in range(40))
    taken = []
    for rank in (0, 3, 7):
        sources = None if route == "ring" else 1
        problem = Problem(get_layout(layout), lengths, lengths, 8, Mask(right=0), 8, 8, sources)
        started = time.process_time()
        for backward in (False, True):
            assert BufferPlan(make_plan(route, problem, rank, backward), problem).moves
        taken.append(time.process_time() - started)
    assert min(taken) < 0.03


@pytest.mark.parametrize("layout", ["zigzag", "stripe", "contiguous", "balanced"])
def test_long_packs_on_many_ranks_are_planned_in_time(layout: str) -> None:
    """1,000 documents on 64 ranks: 20 to 150 ms on a slow core, of the process."""
    lengths = tuple(1 + 1500 * (7 * n % 1000) ** 2 // 1000_000 for n in range(1000))
    problem = Problem(get_layout(layout), lengths, lengths, 64, Mask(right=0), 8, 8, None)
    started = time.process_time()
    for backward in (False, True):
        assert BufferPlan(make_plan("ring", problem, 32, backward), problem).moves
    assert time.process_time() - started < 0.5


@layouts
@settings(max_examples=20)
@given(data=st.data())
def test_who_sees_whom_is_found_pair_by_pair(layout: str, data: st.DataObject) -> None:
    problem = data.draw(problems(layout))
    ranks = range(problem.world_size)
    for rank in ranks:
        assert problem.whose(rank) == {each for each in ranks if problem.needed(rank, each)}
        assert problem.wanted_by(rank) == {each for each in ranks if problem.needed(each, rank)}


def test_what_a_problem_shares_changes_no_plan() -> None:
    """Its documents and their spans; not what depends on heads or routes."""

    def problem(nheads_k: int, sources: int | None) -> Problem:
        lengths = (90, 3, 400)
        return Problem(
            get_layout("zigzag"), lengths, lengths, 4, Mask(right=0), nheads_k, nheads_k, sources
        )

    known, alone, shared = problem(2, None), problem(4, 2), problem(4, 2)
    for rank in range(4):
        make_plan("ring", known, rank, True)
    shared.share(known)
    for route, rank in product(route_names(), range(4)):
        for backward in (False, True):
            made = [make_plan(route, each, rank, backward) for each in (alone, shared)]
            assert made[0] == made[1]
