"""Buffers of a plan in one piece of memory."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from ring_flash_attn.plan.arena import Extent, _most_at_once, place


def extents_of(steps: int) -> st.SearchStrategy[list[Extent]]:
    span = st.tuples(st.integers(0, steps), st.integers(0, steps)).map(sorted)
    extent = st.builds(lambda size, span: Extent(size, *span), st.integers(0, 9), span)
    return st.lists(extent, max_size=12)


def most_at_once(extents: list[Extent]) -> int:
    last = max((extent.last for extent in extents), default=0)
    return max(
        sum(extent.size for extent in extents if extent.first <= step <= extent.last)
        for step in range(last + 1)
    )


@given(extents_of(steps=6))
def test_what_is_in_use_at_once_lies_apart(extents: list[Extent]) -> None:
    offsets, size = place(extents)
    ranges = [range(start, start + b.size) for start, b in zip(offsets, extents, strict=True)]
    for (one, mine), (other, theirs) in combinations(zip(extents, ranges, strict=True), 2):
        if one.first <= other.last and other.first <= one.last and mine and theirs:
            assert mine.stop <= theirs.start or theirs.stop <= mine.start
    assert size == max((each.stop for each in ranges), default=0)
    assert (
        most_at_once(extents)
        == _most_at_once(extents)
        <= size
        <= sum(extent.size for extent in extents)
    )


@given(st.lists(st.integers(1, 9), min_size=2, max_size=20).map(sorted))
def test_groups_that_grow_need_no_more_than_two_of_them(sizes: list[int]) -> None:
    """The ring: one group at work, the next on its way."""
    extents = [Extent(size, step, step + 1) for step, size in enumerate(sizes)]
    assert place(extents)[1] == most_at_once(extents) == sum(sizes[-2:])
