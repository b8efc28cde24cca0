"""What of several shards is in one buffer: each row has one place, by owner or by document."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import document_lengths, order_of_buffers, world_sizes

from ring_flash_attn.plan.columns import to_columns, vector
from ring_flash_attn.plan.layout import Span, get_layout, layout_names, spans
from ring_flash_attn.plan.problem import Problem
from ring_flash_attn.plan.rows import BLOCK, Arrangement, arrange
from ring_flash_attn.plan.steps import Side
from ring_flash_attn.plan.tiles import Mask

Shards = list[tuple[Span, ...]]


def arranged(shards: Shards, owners: list[int], queries: dict[int, int]) -> Arrangement:
    """All rows of some shards."""
    known = to_columns([(owner, shards[owner]) for owner in owners])
    return arrange(owners, known, vector(queries[n] for n in range(len(queries))))


def rows_of(shards: Shards, owner: int) -> list[int]:
    """Tokens, row by row."""
    return [token for span in shards[owner] for token in span.tokens]


@pytest.mark.parametrize("by_document", [False, True])
@pytest.mark.parametrize("layout", layout_names())
@given(lengths=document_lengths, world_size=world_sizes, data=st.data())
@settings(max_examples=30, deadline=None)
def test_some_shards_in_one_buffer(
    layout: str, by_document: bool, lengths: tuple[int, ...], world_size: int, data: st.DataObject
) -> None:
    """Every row has one place; spans say what lies there; no two of them could be one."""
    shards = [spans(get_layout(layout), lengths, rank, world_size) for rank in range(world_size)]
    owners = data.draw(st.lists(st.sampled_from(range(world_size)), min_size=1, unique=True))
    queries = dict.fromkeys(range(len(lengths)), 10)
    with order_of_buffers(by_document):
        found = arranged(shards, owners, queries)
    buffer: dict[int, int] = {}
    for owner in owners:
        places = [row for rows in found.places[owner] for row in rows]
        assert len(found.places[owner]) <= 1 or found.by_document, "a message as it lies"
        for row, token in zip(places, rows_of(shards, owner), strict=True):
            assert buffer.setdefault(row, token) == token
    assert sorted(buffer) == list(range(found.size))
    tokens = [token for span in found.spans for token in span.tokens]
    assert [buffer[row] for row in range(found.size)] == tokens
    ends = list(accumulate((span.length for span in found.spans), initial=0))
    assert [span.start for span in found.spans] == ends[:-1]
    for a, b in pairwise(found.spans):
        assert not (a.document == b.document and b.index == a.index + a.stride * a.length)
    if found.by_document:
        keys = [(span.document, span.position) for span in found.spans]
        assert keys == sorted(keys)


def test_owners_lie_by_their_first_tokens() -> None:
    """Slices of a document on ranks that go down are one span, without a copy."""
    late, middle, early = ((Span(0, 8, position, 1, 0, position),) for position in (16, 8, 0))
    found = arranged([late, middle, early], [0, 1, 2], {0: 1 << 20})
    assert found.spans == (Span(0, 24, 0, 1, 0, 0),)
    assert found.places == {2: (range(8),), 1: (range(8, 16),), 0: (range(16, 24),)}
    assert not found.by_document


@pytest.mark.parametrize(("queries", "by_document"), [(10, False), (1000, True)])
def test_crumbs_of_documents_are_sorted_where_that_pays(queries: int, by_document: bool) -> None:
    """Zigzag: 16 parts of a document fill one block, or have one each."""
    lengths = (BLOCK,) * 4
    shards = [spans(get_layout("zigzag"), lengths, rank, 8) for rank in range(8)]
    found = arranged(shards, list(range(8)), dict.fromkeys(range(4), queries))
    assert found.by_document is by_document
    assert len(found.spans) == (4 if by_document else 4 * 15)


def test_stripes_stay_as_they_are() -> None:
    """Nothing of them could be joined."""
    lengths = (4096,) * 4
    shards = [spans(get_layout("stripe"), lengths, rank, 8) for rank in range(8)]
    assert not arranged(shards, [0, 3, 5], dict.fromkeys(range(4), 1 << 20)).by_document


@pytest.mark.parametrize("documents", [1, 2, 3, 4, 10])
def test_the_upper_half_of_a_zigzag_stays_at_home(documents: int) -> None:
    """The last rank needs the lower half of the others' keys, whatever the number of documents."""
    lengths = (3104, 3200, 1600, 160, 128, 64, 64, 64, 64, 64)[:documents]
    long = tuple(8 * length for length in lengths)
    problem = Problem(get_layout("zigzag"), long, long, 8, Mask(right=0))
    rows = sum(len(rows) for owner in range(7) for rows in problem.sent(owner, 7))
    assert rows == 7 * sum(lengths) / 2


def test_documents_in_between_stay_at_home() -> None:
    """Rank 0 has the first and the last part of a document, and another one in between."""
    problem = Problem(get_layout("flat_zigzag"), (3, 2, 19), (3, 2, 19), 4, Mask())
    assert problem.spans(Side.KEY, 1) == (
        Span(0, 2, 0, 1, 1, 3),
        Span(2, 1, 0, 1, 2, 5),
        Span(3, 3, 13, 1, 2, 18),
    )
    assert problem.sent(1, 0) == (range(2, 6),)
    assert problem.sent(0, 1) == (range(3, 6),)
