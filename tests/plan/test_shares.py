"""Shares: every head of every rank's queries has one rank, and all ranks have as many."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate import causal, plans_of
from strategies import problems

from ring_flash_attn.plan.buffers import BufferPlan
from ring_flash_attn.plan.layout import get_layout, layout_names
from ring_flash_attn.plan.problem import Problem
from ring_flash_attn.plan.shares import Share, share_out
from ring_flash_attn.plan.steps import Payload, Plan, Side
from ring_flash_attn.plan.tiles import Mask


@pytest.mark.parametrize("layout", ["contiguous", "flat_zigzag"])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_every_unit_has_one_rank(layout: str, data: st.DataObject) -> None:
    problem = data.draw(problems(layout))
    everybody = tuple(range(problem.world_size))
    units = Counter(
        (head, owner)
        for shares in share_out(problem, everybody).values()
        for share in shares
        for head in range(*share.heads)
        for owner in share.queries
    )
    seeing = [rank for rank in everybody if problem.asking(rank)]
    assert units == Counter(product(range(problem.nheads_k), seeing))


@pytest.mark.parametrize("nheads_k", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_work_is_even_whatever_the_heads(layout: str, world_size: int, nheads_k: int) -> None:
    """Zigzag exactly; contiguous shards, of which the last cost most, nearly, if there are several
    to choose from."""
    problem = causal(layout, 64 * world_size, world_size, nheads_k=nheads_k)
    pairs = [plan.pairs for plan in plans_of("all_to_all", problem, backward=False)]
    assert sum(pairs) == nheads_k * 32 * world_size * (64 * world_size + 1)
    if layout == "zigzag" or nheads_k % world_size == 0:
        assert len(set(pairs)) == 1
    elif nheads_k > 1:
        assert max(pairs) * world_size <= 1.5 * sum(pairs)


def test_whole_heads_where_they_divide() -> None:
    problem = causal("zigzag", 64, 4, nheads_k=8)
    everybody = (0, 1, 2, 3)
    shares = share_out(problem, everybody)
    assert shares == {rank: (Share((2 * rank, 2 * rank + 2), everybody),) for rank in everybody}


def test_ranks_that_share_a_head_keep_their_own_queries() -> None:
    problem = causal("zigzag", 64, 4, nheads_k=2)
    shares = share_out(problem, (0, 1, 2, 3))
    assert [each[0].heads for each in shares.values()] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert all(rank in each[0].queries for rank, each in shares.items())
    assert all(len(each[0].queries) == 2 for each in shares.values())


def received(plan: Plan, problem: Problem, payloads: tuple[Payload, ...], side: Side) -> int:
    """Rows times KV heads that come from other ranks."""
    return sum(
        move.rows * len(range(*move.transfer.heads))
        for moves in BufferPlan(plan, problem).moves
        for move in moves
        if move.transfer.target == plan.rank != move.transfer.source
        and (move.transfer.payload, move.transfer.side) in product(payloads, [side])
    )


@pytest.mark.parametrize("layout", layout_names())
@pytest.mark.parametrize("nheads_k", [1, 2, 3, 4, 6, 8])
def test_sharing_a_head_moves_no_more_than_replicating_it(layout: str, nheads_k: int) -> None:
    """A rank with all tokens of a part of a head's query heads would get 3/4 of its queries from
    others, and all keys of the head. Where costs differ, queries go where there is least to do."""
    lengths, world_size = (96, 40, 24), 4
    problem = Problem(get_layout(layout), lengths, lengths, world_size, Mask(right=0), nheads_k)
    rows = sum(lengths)
    for plan in plans_of("all_to_all", problem, backward=False):
        own = problem.size(Side.KEY, plan.rank)
        heads = Counter(h for s in plan.steps for w in s.work for h in range(*w.heads))
        queries = received(plan, problem, (Payload.INPUT,), Side.QUERY)
        keys = received(plan, problem, (Payload.INPUT,), Side.KEY)
        assert keys <= len(heads) * (rows - own)
        if layout in ("zigzag", "stripe"):
            assert queries <= nheads_k * (rows - own) // world_size + nheads_k
        outputs = received(plan, problem, (Payload.FINAL, Payload.RESULT), Side.QUERY)
        assert outputs <= nheads_k * own
        if nheads_k == 1:
            assert queries == outputs == 0, "an all-gather"


@pytest.mark.parametrize("sources", [1, 2, 9, None])
@pytest.mark.parametrize("nheads_k", [4, 3, 1])
def test_keys_cross_to_a_node_once(nheads_k: int, sources: int | None) -> None:
    """With as many heads as ranks in a node. Queries and outputs stay in their node."""
    lengths = (160,)
    problem = Problem(get_layout("zigzag"), lengths, lengths, 12, Mask(), nheads_k, 1, sources, 4)
    crossed: Counter[tuple[int, int]] = Counter()  # owner, node of the target
    for plan in plans_of("mesh", problem, backward=True):
        launches = sum(len(step.work) for step in plan.steps)
        assert launches == (1 if sources == 9 else 3 if sources == 1 else 2) * len(
            {work.heads for step in plan.steps for work in step.work}
        )
        for moves in BufferPlan(plan, problem).moves:
            for move in moves:
                t = move.transfer
                if t.side is Side.QUERY:
                    assert t.source // 4 == t.target // 4
                elif t.payload is Payload.INPUT and t.source // 4 != plan.rank // 4:
                    assert t.source == t.owner
                    crossed[t.owner, plan.rank // 4] += move.rows * len(range(*t.heads))
    for (owner, _), rows in crossed.items():
        size = problem.size(Side.KEY, owner)
        assert rows == nheads_k * size if nheads_k == 4 else rows <= 2 * nheads_k * 4 * size
    assert len(crossed) == 12 * 2
