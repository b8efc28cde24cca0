"""Paths: where shards lie on their way, which rows travel, and what results begin with."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate import buffer_rows, causal, needed, needed_rows, plans_of, tokens_of
from strategies import order_of_buffers, problems

from ring_flash_attn.plan import build as planning
from ring_flash_attn.plan.buffers import BufferPlan, Move
from ring_flash_attn.plan.build import make_plan, make_work, route_names
from ring_flash_attn.plan.layout import get_layout, layout_names
from ring_flash_attn.plan.problem import Problem
from ring_flash_attn.plan.rows import Rows
from ring_flash_attn.plan.steps import Payload, Side, Step, Transfer
from ring_flash_attn.plan.tiles import Mask, Tiles

POINTS = [(layout, route) for layout in layout_names() for route in route_names()]


@pytest.mark.product(6)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("layout", "route"), POINTS)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_messages_lead_to_the_rows_that_launches_read(
    layout: str, route: str, backward: bool, data: st.DataObject
) -> None:
    """Both ends of a transfer cut the shard alike, and have each part where its tokens belong."""
    problem = data.draw(problems(layout))
    with order_of_buffers(data.draw(st.booleans())):
        buffer_plans = [BufferPlan(plan, problem) for plan in plans_of(route, problem, backward)]
    parts: dict[tuple[int, Transfer], list[Rows]] = {}
    for buffer_plan in buffer_plans:
        for number, moves in enumerate(buffer_plan.moves):
            for move in moves:
                t = move.transfer
                parts.setdefault((number, t), []).append(move.of_shard)
                shard = tokens_of(t.owner, problem.spans(t.side, t.owner))
                sent = [shard[n] for rows in move.of_shard for n in rows]
                assert sent == (needed_rows(problem, t) if t.cut else shard)
                check_packing(move, buffer_plan.plan.rank)
                if t.relayed_for:
                    check_relay(problem, move, buffer_plan)
                launched = not t.relayed_for or move.relay or not relays(t, buffer_plan.plan.rank)
                if launched and (not t.cut or t.user == buffer_plan.plan.rank):
                    users = (t.queries or (t.user,)) if t.cut else None
                    there = buffer_rows(problem, t.side, move.slot.owners, users)
                    assert buffer_plan.rows(move.slot) == len(there)
                    assert [there[n] for rows in move.of_slot for n in rows] == sent
    for (_, t), ends in parts.items():
        assert len(ends) == (1 if t.source == t.target else 2)
        assert ends[0] == ends[-1]


def relays(t: Transfer, rank: int) -> bool:
    """Whether a rank has a shard of another node for its own."""
    hop = t.owner in (t.source, t.target)
    return rank != t.owner if hop else rank % len(t.relayed_for) == t.owner % len(t.relayed_for)


def check_relay(problem: Problem, move: Move, buffer_plan: BufferPlan) -> None:
    """What is relayed holds what any rank of the node needs, in the order of the shard."""
    t, rank = move.transfer, buffer_plan.plan.rank
    if not relays(t, rank):
        assert move.relay is None
        assert move.slot.relayed_for == ()
        return
    assert rank in t.relayed_for
    slot, rows = (move.relay, move.of_relay) if move.relay else (move.slot, move.of_slot)
    assert (move.relay is not None) is (t.source == t.target)
    assert (slot.owners, slot.relayed_for) == ((t.owner,), t.relayed_for)
    there = [place for part in needed(problem, t.owner, t.relayed_for) for place in part]
    assert buffer_plan.rows(slot) == len(there)
    tokens = [token for _, token in needed_rows(problem, t)]
    assert [there[n][2] for run in rows for n in run] == tokens


def check_packing(move: Move, rank: int) -> None:
    """Rows of a message that lie apart on this rank have their place in what is packed."""
    t, packing = move.transfer, move.packing
    if t.source == t.target:
        assert (packing is None) is (move.home is None)
        ours = move.of_relay if move.relay else move.of_shard
        assert packing is not None or max(len(ours), len(move.of_slot)) <= 1
        assert packing is None or (packing.rows, move.home.rows) == (move.of_slot, ours)
        return
    at_home = t.owner == rank and (t.source == rank) is (t.payload is Payload.INPUT)
    here = move.of_shard if at_home else move.of_slot
    adds = t.target == rank and t.payload is not Payload.INPUT
    assert (packing is None) is (adds or len(here) <= 1)
    if packing is not None:
        everything = [n for rows in packing.rows for n in rows]
        assert len(everything) == packing.total == sum(count for _, count in packing.counts)
        assert [everything[n] for n in move.place] == [n for rows in here for n in rows]
        assert (t.target if t.source == rank else t.source, len(move.place)) in packing.counts


def test_the_upper_half_of_a_zigzag_shard_goes_to_lower_ranks_alone() -> None:
    """Rank 3 of 8 by 7 sources: half of the shards below, all of those above; in order."""
    problem = causal("zigzag", 16 * 10, 8, sources=7)
    buffer_plan = BufferPlan(make_plan("ring", problem, 3), problem)
    rows = {
        move.transfer.owner: move.rows for move in buffer_plan.moves[0] if move.transfer.target == 3
    }
    assert rows == {0: 10, 1: 10, 2: 10, 4: 20, 5: 20, 6: 20, 7: 20}
    (slot,) = {move.slot for move in buffer_plan.moves[0] if move.transfer.target == 3}
    assert buffer_plan.rows(slot) == sum(rows.values())


def sent_rows(layout: str, lengths: tuple[int, ...], mask: Mask, route: str) -> list[list[int]]:
    """For each of 4 ranks, rows that it receives, owner by owner."""
    problem = Problem(get_layout(layout), lengths, lengths, 4, mask, 1, 1, 2)
    found = [[0] * 4 for _ in range(4)]
    for plan in plans_of(route, problem, backward=False):
        for moves in BufferPlan(plan, problem).moves:
            for move in moves:
                if move.transfer.target == plan.rank != move.transfer.source:
                    rows = move.rows
                    found[plan.rank][move.transfer.owner] += rows
    return found


@pytest.mark.parametrize("route", ["ring", "all_gather"])
def test_what_of_a_shard_nobody_sees_is_not_sent(route: str) -> None:
    """A window reaches 5 keys into the shard below; a document that crosses a border brings its own
    part of it along."""
    window = sent_rows("contiguous", (40,), Mask(left=5, right=0), route)
    assert window == [[0, 0, 0, 0], [5, 0, 0, 0], [0, 5, 0, 0], [0, 0, 5, 0]]
    documents = sent_rows("flat_contiguous", (7, 6, 21, 6), Mask(right=0), route)
    assert documents == [[0, 0, 0, 0], [3, 0, 0, 0], [0, 7, 0, 0], [0, 7, 10, 0]]
    both_ways = sent_rows("flat_contiguous", (7, 6, 21, 6), Mask(), route)
    assert both_ways == [[0, 3, 0, 0], [3, 0, 10, 4], [0, 7, 0, 4], [0, 7, 10, 0]]


def test_a_shard_is_cut_if_its_launch_wants_it_so() -> None:
    """A route that forgets to say so, or says it of others, is found out when its plan is made
    ready."""
    problem = causal("zigzag", 24, 3)
    plan = make_plan("all_gather", problem, 1)
    whole = [
        replace(step, transfers=tuple(replace(t, cut=False) for t in step.transfers))
        for step in plan.steps
    ]
    with pytest.raises(AssertionError, match="goes whole, but"):
        BufferPlan(replace(plan, steps=tuple(whole)), problem)
    plan = make_plan("ring", problem, 1)
    cut = [
        replace(step, transfers=tuple(replace(t, cut=True) for t in step.transfers))
        for step in plan.steps
    ]
    with pytest.raises(AssertionError, match="is cut, but"):
        BufferPlan(replace(plan, steps=tuple(cut)), problem)


def begins(problem: Problem, *steps: Step) -> list[bool]:
    """For queries and keys of rank 1, whether these steps begin with every row."""
    buffer_plan = BufferPlan(planning._finished(problem, 1, steps), problem)
    return [buffer_plan.begins[side] for side in Side]


def test_results_begin_where_launches_name_every_row_first() -> None:
    problem = causal("zigzag", 24, 2, nheads_k=4)
    low, high, all_heads = (make_work(problem, 1, [1], h) for h in ((0, 2), (2, 4), (0, 4)))
    assert begins(problem, Step(work=all_heads)) == [True, True]
    assert begins(problem, Step(work=low), Step(work=high)) == [True, True]
    assert begins(problem, Step(work=low)) == [False, False]
    with pytest.raises(AssertionError, match="head groups overlap"):
        begins(problem, Step(work=low), Step(work=all_heads))
    assert begins(problem, Step(work=make_work(problem, 1, [0], (0, 4)))) == [True, False]
    window = causal("zigzag", 24, 2, window=0, nheads_k=4)
    part = replace(all_heads[0], tiles=Tiles.of(make_work(window, 1, [1], (0, 4))[0].tiles[:1]))
    assert begins(problem, Step(work=(part,)), Step(work=all_heads)) == [False, False]
    home = Transfer(Payload.RESULT, Side.KEY, 1, (0, 4), 0, 1)
    assert begins(problem, Step((home,)), Step(work=all_heads)) == [True, False]
    assert begins(problem, Step(work=all_heads), Step((home,))) == [True, True]
    assert begins(problem, Step((home,), all_heads)) == [True, True]
    in_place = Transfer(Payload.RESULT, Side.KEY, 1, (0, 4), 1, 1)
    assert begins(problem, Step((in_place,), all_heads)) == [True, False]
