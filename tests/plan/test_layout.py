"""Layouts: every token is held exactly once, where the layout's definition says."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import document_lengths, world_sizes

from ring_flash_attn.plan import layout as layouts
from ring_flash_attn.plan.layout import (
    FLAT_PREFIX,
    SplitLayout,
    get_layout,
    layout_names,
    register_layout,
    spans,
)
from ring_flash_attn.plan.problem import Problem
from ring_flash_attn.plan.steps import Side
from ring_flash_attn.plan.tiles import Mask


def tokens_of(name: str, lengths: tuple[int, ...], world_size: int) -> list[list[int]]:
    """Tokens of every rank, in local order."""
    held = (spans(get_layout(name), lengths, rank, world_size) for rank in range(world_size))
    return [[token for span in shard for token in span.tokens] for shard in held]


# (layout, document lengths, world size): tokens of every rank, in local order, by hand
BY_HAND = [
    ("contiguous", (8,), 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ("contiguous", (5,), 2, [[0, 1], [2, 3, 4]]),
    ("contiguous", (2, 4), 2, [[0, 2, 3], [1, 4, 5]]),
    ("contiguous", (2,), 4, [[], [0], [], [1]]),
    ("zigzag", (8,), 2, [[0, 1, 6, 7], [2, 3, 4, 5]]),
    ("zigzag", (12,), 3, [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]),
    ("zigzag", (4, 8), 2, [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]),
    ("zigzag", (5,), 2, [[0, 3, 4], [1, 2]]),
    ("stripe", (7,), 3, [[0, 3, 6], [1, 4], [2, 5]]),
    ("stripe", (3, 4), 2, [[0, 2, 3, 5], [1, 4, 6]]),
    ("flat_contiguous", (2, 4), 2, [[0, 1, 2], [3, 4, 5]]),
    ("flat_zigzag", (3, 5), 2, [[0, 1, 6, 7], [2, 3, 4, 5]]),
    ("flat_stripe", (3, 4), 2, [[0, 2, 4, 6], [1, 3, 5]]),
]


@pytest.mark.parametrize(("name", "lengths", "world_size", "expected"), BY_HAND)
def test_tokens_by_hand(
    name: str, lengths: tuple[int, ...], world_size: int, expected: list[list[int]]
) -> None:
    assert tokens_of(name, lengths, world_size) == expected
    problem = Problem(get_layout(name), lengths, lengths, world_size, Mask())
    sizes = [problem.size(Side.KEY, rank) for rank in range(world_size)]
    assert sizes == [len(e) for e in expected]


@pytest.mark.parametrize("name", layout_names())
@given(lengths=document_lengths, world_size=world_sizes)
@settings(deadline=None)
def test_every_token_is_held_once(name: str, lengths: tuple[int, ...], world_size: int) -> None:
    held = tokens_of(name, lengths, world_size)
    assert sorted(token for tokens in held for token in tokens) == list(range(sum(lengths)))
    positions = [position for length in lengths for position in range(length)]
    for rank in range(world_size):
        for span in spans(get_layout(name), lengths, rank, world_size):
            assert list(span.positions) == [positions[token] for token in span.tokens]
            assert span.length == len(span.tokens)


@pytest.mark.parametrize("name", layout_names())
@given(lengths=document_lengths, world_size=world_sizes, data=st.data())
@settings(deadline=None)
def test_spans_describe_consecutive_rows(
    name: str, lengths: tuple[int, ...], world_size: int, data: st.DataObject
) -> None:
    number = len(lengths)
    shifts = data.draw(st.lists(st.integers(-9, 9), min_size=number, max_size=number))
    starts = [0, *accumulate(lengths)]
    for rank in range(world_size):
        row = 0
        for span in spans(get_layout(name), lengths, rank, world_size, shifts):
            assert span.start == row
            assert span.length >= 1
            assert span.stride >= 1
            last = span.index + span.stride * (span.length - 1)
            assert starts[span.document] <= span.index <= last < starts[span.document + 1]
            assert span.position == span.index - starts[span.document] + shifts[span.document]
            row += span.length


@pytest.mark.parametrize("name", layout_names())
@given(length=st.integers(0, 200), world_size=world_sizes)
def test_shards_of_a_document_are_nearly_equal(name: str, length: int, world_size: int) -> None:
    """Sizes differ by at most 1 a part: 1 for contiguous and stripe, 2 for zigzag's two parts."""
    sizes = [len(tokens) for tokens in tokens_of(name, (length,), world_size)]
    assert max(sizes) - min(sizes) <= (2 if "zigzag" in name else 1)


@pytest.mark.parametrize("name", layout_names())
def test_one_document_is_the_same_flat_and_not(name: str) -> None:
    twin = name.removeprefix(FLAT_PREFIX)
    for rank in range(5):
        flat, alone = (spans(get_layout(n), (23,), rank, 5) for n in (name, twin))
        assert flat == alone


def test_positions_of_queries_count_from_the_end() -> None:
    """With 7 keys and 3 queries, the queries have positions 4, 5, 6; with 2 keys −1, 0, 1."""
    longer = spans(get_layout("contiguous"), (3, 3), 0, 1, shifts=[4, -1])
    assert [(s.position, s.length, s.index) for s in longer] == [(4, 3, 0), (-1, 3, 3)]


def test_moved_changes_the_row_and_nothing_else() -> None:
    (span,) = spans(get_layout("stripe"), (9,), 1, 2)
    moved = span.moved(5)
    assert moved.start == span.start + 5
    assert moved.moved(-5) == span


def test_an_unknown_layout_is_named_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"'zickzack'.*contiguous.*flat_stripe"):
        get_layout("zickzack")


def test_a_new_layout_is_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "_LAYOUTS", dict(layouts._LAYOUTS))

    @register_layout("reversed")
    def backwards(length: int, rank: int, world_size: int) -> list[range]:
        return get_layout("contiguous").split(length, world_size - 1 - rank, world_size)

    assert layout_names()[-2:] == ("reversed", "flat_reversed")
    assert get_layout("reversed") == SplitLayout("reversed", backwards)
    assert tokens_of("flat_reversed", (2, 4), 2) == [[3, 4, 5], [0, 1, 2]]
