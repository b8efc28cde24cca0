"""Relayouts as plain data: every row arrives once, in its place, and only rows that move travel."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import document_lengths, world_sizes

from ring_flash_attn.plan.layout import Layout, SplitLayout, get_layout, layout_names, spans
from ring_flash_attn.plan.problem import Problem
from ring_flash_attn.plan.relayout import Packing, Relayout, make_relayout
from ring_flash_attn.plan.tiles import Mask


def dealt(parts: int, flat: bool) -> Layout:
    """Every `parts`-th token is one part, and the parts are dealt out: any stride, many spans."""

    def split(length: int, rank: int, world_size: int) -> list[range]:
        return [range(part, length, parts) for part in range(rank, parts, world_size)]

    return SplitLayout(f"dealt {parts}", split, flat)


def block_cyclic(size: int, flat: bool) -> Layout:
    """Blocks of tokens are dealt out; the last come first in a shard."""

    def split(length: int, rank: int, world_size: int) -> list[range]:
        starts = range(rank * size, length, world_size * size)
        return [range(start, min(start + size, length)) for start in reversed(starts)]

    return SplitLayout(f"blocks of {size}", split, flat)


layouts = st.one_of(
    st.sampled_from(layout_names()).map(get_layout),
    st.builds(dealt, st.integers(1, 7), st.booleans()),
    st.builds(block_cyclic, st.integers(1, 5), st.booleans()),
)


def relayouts(
    before: Layout, after: Layout, lengths: tuple[int, ...], world_size: int
) -> list[Relayout]:
    """What every rank does."""
    old, new = (Problem(x, lengths, lengths, world_size, Mask()) for x in (before, after))
    return [make_relayout(old, new, rank) for rank in range(world_size)]


def held(layout: Layout, lengths: tuple[int, ...], world_size: int) -> list[list[int]]:
    """Tokens of every rank, row by row."""
    shards = [spans(layout, lengths, rank, world_size) for rank in range(world_size)]
    return [[token for span in shard for token in span.tokens] for shard in shards]


def numbers(packing: Packing) -> list[int]:
    """The rows in the order of the buffer."""
    return [row for rows in packing.rows for row in rows]


def by_peer(packing: Packing) -> dict[int, list[int]]:
    """The rows of each peer's message."""
    rows, found = numbers(packing), {}
    for peer, count in packing.counts:
        assert peer not in found, "one message for each peer"
        assert count > 0, "no message for nothing"
        found[peer], rows = rows[:count], rows[count:]
    assert not rows
    return found


def check(before: Layout, after: Layout, lengths: tuple[int, ...], world_size: int) -> None:
    """Against the tokens of both layouts, one by one."""
    plans = relayouts(before, after, lengths, world_size)
    old, new = (held(layout, lengths, world_size) for layout in (before, after))
    sent = [by_peer(plan.sends) for plan in plans]
    received = [by_peer(plan.receives) for plan in plans]
    for rank, plan in enumerate(plans):
        assert plan.rank == rank
        assert (plan.size_before, plan.size_after) == (len(old[rank]), len(new[rank]))
        assert plan.has_messages == bool(sent[rank] or received[rank])
        assert rank not in {*sent[rank], *received[rank]}, "what stays is not sent"
        stays, stay_at = numbers(plan.stays), numbers(plan.stay_at)
        assert [old[rank][row] for row in stays] == [new[rank][row] for row in stay_at]
        assert {new[rank][row] for row in stay_at} == {*old[rank]} & {*new[rank]}
        leaving = [row for rows in sent[rank].values() for row in rows]
        assert sorted(stays + leaving) == list(range(len(old[rank]))), "every row goes once"
        arriving = [row for rows in received[rank].values() for row in rows]
        assert sorted(stay_at + arriving) == list(range(len(new[rank]))), "and arrives once"
    for source, target in product(range(world_size), repeat=2):
        if source != target:
            leaving, arriving = sent[source].get(target, []), received[target].get(source, [])
            tokens = [old[source][row] for row in leaving]
            assert tokens == [new[target][row] for row in arriving], "both ends know the order"
            assert {*tokens} == {*old[source]} & {*new[target]}, "what the target needs, no more"


@pytest.mark.parametrize("names", list(product(layout_names(), repeat=2)), ids="-".join)
@given(lengths=document_lengths, world_size=world_sizes)
@settings(max_examples=20, deadline=None)
def test_every_row_arrives_once_in_its_place(
    names: tuple[str, str], lengths: tuple[int, ...], world_size: int
) -> None:
    check(*map(get_layout, names), lengths, world_size)


@given(before=layouts, after=layouts, lengths=document_lengths, world_size=world_sizes)
@settings(max_examples=400, deadline=None)
def test_layouts_of_any_strides(
    before: Layout, after: Layout, lengths: tuple[int, ...], world_size: int
) -> None:
    check(before, after, lengths, world_size)


@given(before=layouts, after=layouts, lengths=document_lengths, world_size=world_sizes)
@settings(max_examples=100, deadline=None)
def test_the_way_back_is_the_other_relayout(
    before: Layout, after: Layout, lengths: tuple[int, ...], world_size: int
) -> None:
    there = relayouts(before, after, lengths, world_size)
    back = relayouts(after, before, lengths, world_size)
    for ours, theirs in zip((plan.reversed() for plan in there), back, strict=True):
        for name in ("sends", "receives", "stays", "stay_at"):
            mine, other = getattr(ours, name), getattr(theirs, name)
            assert (mine.rows, mine.counts) == (other.rows, other.counts), name
        assert ours.rank == theirs.rank


@pytest.mark.parametrize("layout", layout_names())
def test_nothing_is_sent_where_nothing_moves(layout: str) -> None:
    for plan in relayouts(get_layout(layout), get_layout(layout), (37, 0, 5, 20), 5):
        assert not plan.has_messages
        assert plan.stays.slice == plan.stay_at.slice == slice(0, plan.size_before)


def test_one_document_of_zigzag_needs_no_packing() -> None:
    """Its halves go, and arrive, from where they lie: one slice for all messages of a rank."""
    zigzag, contiguous = get_layout("zigzag"), get_layout("contiguous")
    first, *_, last = relayouts(zigzag, contiguous, (32,), 4)
    assert (first.sends.rows, first.sends.counts) == ((range(4, 8),), ((3, 4),))
    assert (first.receives.rows, first.receives.counts) == ((range(4, 8),), ((1, 4),))
    assert (first.stays.rows, first.stay_at.rows) == ((range(4),), (range(4),))
    assert (last.sends.rows, last.sends.counts) == ((range(8),), ((1, 4), (2, 4)))
    assert (last.receives.rows, last.receives.counts) == ((range(8),), ((1, 4), (0, 4)))
    for world_size in range(1, 20):
        for plan in relayouts(zigzag, contiguous, (8 * world_size,), world_size):
            assert plan.sends.slice is not None
            assert plan.receives.slice is not None


def test_stripes_by_hand() -> None:
    """9 tokens on 2 ranks: 0 2 4 6 8 and 1 3 5 7 become 0 1 2 3 and 4 5 6 7 8."""
    first, last = relayouts(get_layout("stripe"), get_layout("contiguous"), (9,), 2)
    assert (numbers(first.stays), numbers(first.stay_at)) == ([0, 1], [0, 2])
    assert by_peer(first.sends) == {1: [2, 3, 4]}
    assert by_peer(last.receives) == {0: [0, 2, 4]}
    assert by_peer(last.sends) == {0: [0, 1]}
    assert by_peer(first.receives) == {1: [1, 3]}
    assert (numbers(last.stays), numbers(last.stay_at)) == ([2, 3], [1, 3])
    assert last.receives.rows == (range(0, 5, 2),), "one range, however many rows"


@pytest.mark.parametrize("names", [("zigzag", "contiguous"), ("stripe", "flat_stripe")])
def test_long_sequences_are_few_ranges(names: tuple[str, str]) -> None:
    """The size of a plan goes by the spans, not by the tokens."""
    for plan in relayouts(*map(get_layout, names), (10**9,), 8):
        for packing in (plan.sends, plan.receives, plan.stays, plan.stay_at):
            assert len(packing.rows) <= 2
