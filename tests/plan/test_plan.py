"""Plans: every allowed pair is computed once, everything is there in time and comes home once."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate import (
    Simulation,
    allowed,
    between,
    causal,
    plans_of,
    useless_inputs,
)
from strategies import order_of_buffers, problems, world_sizes

from ring_flash_attn.plan import build as planning
from ring_flash_attn.plan.buffers import BufferPlan
from ring_flash_attn.plan.build import (
    BY_NODES,
    make_own_work,
    make_plan,
    make_work,
    register_route,
    route_names,
)
from ring_flash_attn.plan.layout import get_layout, layout_names
from ring_flash_attn.plan.problem import Problem
from ring_flash_attn.plan.steps import Payload, Plan, Side, Step, Transfer, Work
from ring_flash_attn.plan.tiles import Mask

POINTS = [(layout, route) for layout in layout_names() for route in route_names()]
SPREADING = ("all_to_all", "mesh")  # heads, whatever the mask
BALANCED = [(name, route) for name, route in POINTS if "zigzag" in name or "stripe" in name]


@pytest.mark.product(4)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("layout", "route"), POINTS)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_every_allowed_pair_once_and_home(
    layout: str, route: str, backward: bool, data: st.DataObject
) -> None:
    """Random documents, 1 to 16 ranks, any mask; the simulation asserts the order of events."""
    problem = data.draw(problems(layout))
    with order_of_buffers(data.draw(st.booleans())):
        simulation = Simulation(route, problem, backward)
        simulation.run()
    expected = allowed(problem)
    assert simulation.computed == Counter(expected)
    for rank in range(problem.world_size):
        for side in Side:
            tokens = set(simulation.tokens[side, rank])
            ours = Counter(each for each in expected if each[side] in tokens)
            if side is Side.KEY and not backward:
                ours = Counter()  # the forward pass has no results for keys
            assert simulation.home[rank, side] == ours
    assert sum(plan.pairs for plan in simulation.plans) == len(expected)
    assert not useless_inputs(simulation.plans)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("layout", "route"), POINTS)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_first_last_and_complete(
    layout: str, route: str, backward: bool, data: st.DataObject
) -> None:
    """Marks are what they say, row by row and head by head."""
    problem = data.draw(problems(layout))
    for plan in plans_of(route, problem, backward):
        merged = any(
            t.payload is Payload.RESULT and t.side is Side.QUERY
            for step in plan.steps
            for t in step.transfers
        )
        launches = [work for step in plan.steps for work in step.work]
        touched = [
            [
                {
                    (work.queries, row, head)
                    for row in range(tile.query.start, tile.query.start + tile.query.length)
                    for head in range(*work.heads)
                }
                for tile in work.tiles
            ]
            for work in launches
        ]
        final = set()
        for number, work in enumerate(launches):
            earlier = {row for launch in touched[:number] for rows in launch for row in rows}
            later = {row for launch in touched[number + 1 :] for rows in launch for row in rows}
            for tile, rows in zip(work.tiles, touched[number]):
                assert tile.first is not bool(rows & earlier)
                assert tile.last is not (merged or bool(rows & later))
                final |= rows if tile.last else set()
        size = problem.size(Side.QUERY, plan.rank)
        everything = {
            ((plan.rank,), row, head) for row in range(size) for head in range(problem.nheads_k)
        }
        assert plan.complete is (not merged and final >= everything)


def launches_of(plan: Plan) -> list[Work]:
    """All launches, in order."""
    return [work for step in plan.steps for work in step.work]


@pytest.mark.parametrize("sources", [1, 2, 3, 4, 5, 7, 20])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 11])
def test_a_launch_takes_as_many_sources_as_asked_for(world_size: int, sources: int) -> None:
    """As few launches as possible, nearly equal, the smaller ones first."""
    lengths = (8 * world_size,)
    problem = Problem(get_layout("zigzag"), lengths, lengths, world_size, Mask(), 1, 1, sources)
    for backward in (False, True):
        for plan in plans_of("ring", problem, backward):
            own, *others = [len(work.keys) for work in launches_of(plan)]
            assert own == 1
            assert sum(others) == world_size - 1
            assert others == sorted(others)
            assert len(others) == -(-sum(others) // sources)
            assert not others or others[0] >= others[-1] - 1
            assert max(others, default=0) <= sources


@pytest.mark.parametrize("mask", [Mask(right=0), Mask(), Mask(2000, 0), Mask(300, 300)])
@pytest.mark.parametrize("layout", ["balanced", "zigzag", "stripe", "contiguous"])
@pytest.mark.parametrize(
    "lengths",
    [(65536,), (9000, 300, 20000, 1500, 7000, 12000), (60000, 100, 5000), (500, 2500) * 10],
)
def test_a_third_of_our_own_keys_comes_first(
    lengths: tuple[int, ...], layout: str, mask: Mask
) -> None:
    """Each row of keys is in one of the two launches, and both together are the one of all."""
    problem = Problem(get_layout(layout), lengths, lengths, 8, mask, sources_per_launch=None)
    for rank in range(8):
        (whole,) = make_work(problem, rank, (rank,), (0, 1))
        parts = make_own_work(problem, rank, (0, 1))
        pairs = [int(work.tiles.pairs.sum()) for part in parts for work in part]
        total = int(whole.tiles.pairs.sum())
        assert sum(pairs) == total
        if total < 1 << 20:
            assert parts == ((whole,), ())
            continue
        (first,), (rest,) = parts
        assert 0.2 <= pairs[0] / total <= 0.5
        assert min(each.key.start for each in first.tiles) >= max(
            each.key.start + each.key.length for each in rest.tiles
        )
        assert (first.queries, first.keys, first.cut) == ((rank,), (rank,), False)


def test_seven_hops_by_four() -> None:
    """3 + 4; backward, gradients go home in the step after their launch."""
    lengths = (64,)
    problem = Problem(get_layout("stripe"), lengths, lengths, 8, Mask(), 1, 1, 4)
    plan = make_plan("ring", problem, 2)
    assert [work.keys for work in launches_of(plan)] == [(2,), (0, 1, 7), (3, 4, 5, 6)]
    arriving = [[t.source for t in step.transfers if t.target == 2] for step in plan.steps]
    assert arriving == [[0, 1, 7], [3, 4, 5, 6], []]
    backward = make_plan("ring", problem, 2, backward=True)
    assert [work.keys for work in launches_of(backward)] == [(2,), (0, 1, 7), (3, 4, 5, 6)]
    returning = [
        [t.owner for t in step.transfers if t.payload is Payload.RESULT and t.source == 2]
        for step in backward.steps
    ]
    assert returning == [[], [], [0, 1, 7], [3, 4, 5, 6]]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("route", ["ring", "query_ring"])
@pytest.mark.parametrize("layout", layout_names())
def test_one_source_a_launch_cuts_nothing(layout: str, route: str, backward: bool) -> None:
    """As many messages as shards on their way."""
    lengths = (40, 0, 3, 21)
    problem = Problem(get_layout(layout), lengths, lengths, 5, Mask(right=0))
    for plan in plans_of(route, problem, backward):
        assert all(len(work.keys) == len(work.queries) == 1 for work in launches_of(plan))
        assert not any(t.cut for step in plan.steps for t in step.transfers)


@pytest.mark.parametrize("sources", [7, 8, 100])
def test_all_sources_in_one_launch(sources: int) -> None:
    """Causal zigzag: two launches a rank, and in the second, one range of keys for each span."""
    problem = causal("zigzag", 16 * 24, 8, sources=sources)
    with order_of_buffers(by_document=True):
        plans = plans_of("ring", problem, backward=False)
    for plan in plans:
        own, others = launches_of(plan)
        assert (own.keys, len(others.keys)) == ((plan.rank,), 7)
        for span in problem.spans(Side.QUERY, plan.rank):
            seen = [t for t in others.tiles if t.query.start == span.start]
            rows = sorted((t.key.start, t.key.start + t.key.length) for t in seen)
            assert all(t.pairs == t.query.length * t.key.length for t in seen)
            assert all(a[1] == b[0] for a, b in pairwise(rows)), "no gaps"
            assert len(rows) <= 2, "what follows in the document is one tile: a gap for our own"
            before = span.position // 24 - (1 if span.position >= 8 * 24 else 0)
            assert sum(end - start for start, end in rows) == 24 * before
            assert not rows or rows[0][0] == 0


@pytest.mark.parametrize("sources", [2, 3, 7])
def test_gradients_of_a_group_go_straight_home(sources: int) -> None:
    """From each user, once, in the step after the launch."""
    problem = causal("zigzag", 16 * 24, 8, sources=sources)
    for plan in plans_of("ring", problem, backward=True):
        for number, step in enumerate(plan.steps[1:], start=1):
            sent = {
                t.owner: t
                for t in step.transfers
                if t.payload is Payload.RESULT and t.source == plan.rank
            }
            assert all(t.target == owner for owner, t in sent.items())
            before = {owner for work in plan.steps[number - 1].work for owner in work.keys}
            assert set(sent) == before - {plan.rank}


def test_what_a_group_does_not_need_is_not_sent() -> None:
    """Zigzag with a short window: of seven hops, next-door shards alone."""
    problem = causal("zigzag", 16 * 10, 8, window=5, sources=7)
    plans = plans_of("ring", problem, backward=False)
    for plan in plans:
        arriving = {
            t.owner
            for step in plan.steps
            for t in step.transfers
            if t.target == plan.rank and t.payload is Payload.INPUT
        }
        used = {owner for work in launches_of(plan) for owner in work.keys} - {plan.rank}
        assert used == {plan.rank - 1, plan.rank + 1} & set(range(8))
        assert used == arriving


def imbalance(plans: list[Plan]) -> float:
    """The busiest rank's pairs over the mean; 1 is perfect."""
    pairs = [plan.pairs for plan in plans]
    return max(pairs) * len(pairs) / sum(pairs)


@pytest.mark.parametrize(("layout", "route"), BALANCED)
@given(seqlen=st.integers(1, 1 << 20), world_size=world_sizes)
@settings(max_examples=25, deadline=None)
def test_causal_work_is_balanced(layout: str, route: str, seqlen: int, world_size: int) -> None:
    """max / mean of the pairs per rank, one causal document of S tokens on W ranks, any S >= W:

    zigzag: at most 1 + 2·W/S, and exactly 1 where 2·W divides S;
    stripe: at most 1 + (W−1)/(S+1) + W²/(4·S·(S+1)), which is about 1 + W/S.

    S = 1,000,003 on 8 ranks: at most 1.000016 and 1.000008. Contiguous sits at 2 − 1/W.
    """
    seqlen = max(seqlen, world_size)
    found = imbalance(plans_of(route, causal(layout, seqlen, world_size), backward=False))
    bound = 1 + 2 * world_size / seqlen
    if "stripe" in layout:
        bound = 1 + (world_size - 1 + world_size**2 / (4 * seqlen)) / (seqlen + 1)
    elif seqlen % (2 * world_size) == 0:
        bound = 1.0
    assert found <= bound * (1 + 1e-12)


@pytest.mark.parametrize("route", route_names())
@pytest.mark.parametrize("world_size", [2, 3, 8, 16])
def test_contiguous_causal_work_is_not_balanced(route: str, world_size: int) -> None:
    """2 − 1/W: what zigzag and stripe are for."""
    found = imbalance(plans_of(route, causal("contiguous", 4096 * world_size, world_size), False))
    assert found == pytest.approx(2 - 1 / world_size, rel=1e-3)


@pytest.mark.parametrize("seqlen", [96, 97, 1000, 1001])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_stripe_is_balanced_in_every_step(seqlen: int, world_size: int) -> None:
    """In each ring step ranks differ by at most one diagonal and one row: 2·ceil(S/W) pairs."""
    plans = plans_of("ring", causal("stripe", seqlen, world_size), backward=False)
    for steps in zip(*(plan.steps for plan in plans)):
        pairs = [sum(t.pairs for work in step.work for t in work.tiles) for step in steps]
        assert max(pairs) - min(pairs) <= 2 * -(-seqlen // world_size)


@pytest.mark.parametrize("route", route_names())
@pytest.mark.parametrize("layout", ["zigzag", "stripe"])
@given(
    lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=6).map(tuple),
    world_size=world_sizes,
)
@settings(max_examples=15, deadline=None)
def test_packed_causal_work_is_balanced(
    layout: str, route: str, lengths: tuple[int, ...], world_size: int
) -> None:
    """Every document by itself is, so their sum is: at most S + W pairs above the mean for each.

    (Flat layouts cut the stream without regard to documents: there is no such bound.)
    """
    problem = Problem(get_layout(layout), lengths, lengths, world_size, Mask(right=0))
    pairs = [plan.pairs for plan in plans_of(route, problem, backward=False)]
    mean = sum(pairs) / world_size
    assert max(pairs) <= mean + sum(length + world_size for length in lengths)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("sources", [1, 3])
@pytest.mark.parametrize("route", route_names())
@pytest.mark.parametrize("world_size", [2, 3, 8, 16])
def test_a_small_window_talks_to_the_neighbour_only(
    route: str, world_size: int, sources: int, backward: bool
) -> None:
    """Shards of 10 tokens, a window of 10: keys of the rank below are all that is needed."""
    problem = causal("contiguous", 10 * world_size, world_size, window=10, sources=sources)
    plans = plans_of(route, problem, backward)
    inputs = {
        (t.owner, t.source, t.target)
        for plan in plans
        for step in plan.steps
        for t in step.transfers
        if t.payload is Payload.INPUT and t.source != t.target
    }
    below = [(rank, rank + 1) for rank in range(world_size - 1)]
    if route == "query_ring":
        assert inputs == {(query, query, key) for key, query in below}
    else:
        assert inputs == {(key, key, query) for key, query in below}
    results = [
        t
        for plan in plans
        for step in plan.steps
        for t in step.transfers
        if t.payload is Payload.RESULT and t.source == plan.rank != t.target
    ]
    assert len(results) == (len(below) if backward or route == "query_ring" else 0)
    assert all(t.target == t.owner for t in results)


@pytest.mark.parametrize("route", [each for each in route_names() if each not in SPREADING])
@pytest.mark.parametrize("layout", layout_names())
def test_a_window_of_ones_own_token_needs_no_messages(layout: str, route: str) -> None:
    """Whatever the layout, nothing is sent, and nothing waits (others spread heads)."""
    lengths = (5, 0, 7)
    for sources in (1, 2):
        problem = Problem(get_layout(layout), lengths, lengths, 4, Mask(0, 0), 2, 1, sources)
        for plan in plans_of(route, problem, backward=True):
            moves = [t for step in plan.steps for t in step.transfers]
            assert moves == []
            if route != "all_gather":  # which has a step for every head group
                assert len(plan.steps) == 1


@pytest.mark.parametrize("route", ["ring", "all_gather"])
def test_nobody_gets_keys_of_the_future(route: str) -> None:
    """Contiguous and causal: keys travel upwards only, and the last rank's stay at home."""
    plans = plans_of(route, causal("contiguous", 23, 5), backward=False)
    moves = {(t.owner, t.target) for plan in plans for step in plan.steps for t in step.transfers}
    assert all(owner <= target for owner, target in moves)
    assert {owner for owner, target in moves if target != owner} == {0, 1, 2, 3}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_all_gather_goes_by_head_groups(backward: bool) -> None:
    """Group g + 1 is fetched, and the gradients of g − 1 go back, while group g is worked on."""
    problem = Problem(get_layout("zigzag"), (24,), (24,), 3, Mask(right=0), 6, 2)
    groups = [(0, 2), (2, 4), (4, 6)]
    for plan in plans_of("all_gather", problem, backward):
        assert len(plan.steps) == 4 + backward
        for number, step in enumerate(plan.steps):
            arriving = {t.heads for t in step.transfers if t.payload is Payload.INPUT}
            leaving = {t.heads for t in step.transfers if t.payload is Payload.RESULT}
            working = {work.heads for work in step.work}
            assert arriving == set(groups[number : number + 1])
            assert working == set(groups[number - 1 : number] if number else [])
            expected = groups[number - 2 : number - 1] if backward and number >= 2 else []
            assert leaving == set(expected)


def test_an_unknown_route_is_named_with_the_choices() -> None:
    names = ", ".join(route_names())
    assert {"ring", "all_gather"} <= set(route_names())
    with pytest.raises(ValueError, match=f"'carrier_pigeon'.*{names}"):
        make_plan("carrier_pigeon", causal("zigzag", 8, 2), 0)


def test_a_new_route_is_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """A route that gathers whole shards at once, proved by the same simulation."""
    monkeypatch.setattr(planning, "_ROUTES", dict(planning._ROUTES))

    @register_route("at_once")
    def at_once(problem: Problem, rank: int, backward: bool) -> list[Step]:
        ranks = range(problem.world_size)
        moves = {
            Transfer(Payload.INPUT, Side.KEY, owner, problem.all_heads, owner, user, cut=True)
            for owner in ranks
            for user in ranks
            if rank in (owner, user) and problem.needed(user, owner)
        }
        owners = [owner for owner in ranks if problem.needed(rank, owner)]
        work = make_work(problem, rank, owners, problem.all_heads)
        return [Step(tuple(moves)), Step((), work)]

    assert "at_once" in route_names()
    problem = causal("zigzag", 21, 3, nheads_k=2)
    simulation = Simulation("at_once", problem, backward=False)
    simulation.run()
    assert simulation.computed == Counter(allowed(problem))
    assert all(plan.complete for plan in simulation.plans)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("route", "sources"), [*((route, 1) for route in route_names()), ("ring", 4)]
)
def test_a_thousand_ranks_can_be_planned(route: str, sources: int) -> None:
    """Two neighbours of 1,024 ranks, 2²⁰ tokens, causal zigzag; they agree on their messages."""
    problem = causal("zigzag", 1 << 20, 1024, nheads_k=8, sources=sources)
    problem = replace(problem, ranks_per_node=8 if route in BY_NODES else None)
    started = time.perf_counter()
    low, high = (make_plan(route, problem, rank, True) for rank in (517, 518))
    assert all(BufferPlan(plan, problem).moves for plan in (low, high))
    seconds = time.perf_counter() - started
    print(f"\n{route}: {seconds / 2:.1f} s a rank, of 1,024")
    assert len(low.steps) == len(high.steps)
    for number in range(len(low.steps)):
        for source, target in ((517, 518), (518, 517)):
            messages = between(low, number, source, target)
            assert messages == between(high, number, source, target)
            assert len(set(messages)) == len(messages)
    assert low.pairs == high.pairs, "2W divides S: the balance is perfect"
    assert seconds < 90
