"""Pieces: every row of a shard has one place in a buffer, in order of document and position."""

from __future__ import annotations

from itertools import accumulate, pairwise
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import document_lengths, world_sizes

from ring_flash_attn.plan import pieces as library
from ring_flash_attn.plan.layout import Span, get_layout, layout_names, spans
from ring_flash_attn.plan.pieces import MOST_PIECES, Piece, arrange, cut, lay
from ring_flash_attn.plan.problem import Problem
from ring_flash_attn.plan.tiles import Mask

Shards = list[tuple[Span, ...]]


def shards_of(layout: str, lengths: tuple[int, ...], world_size: int) -> Shards:
    """Spans of all ranks."""
    return [spans(get_layout(layout), lengths, rank, world_size) for rank in range(world_size)]


@pytest.mark.parametrize("layout", layout_names())
@given(lengths=document_lengths, world_size=world_sizes, data=st.data())
@settings(max_examples=40, deadline=None)
def test_some_shards_in_one_buffer(
    layout: str, lengths: tuple[int, ...], world_size: int, data: st.DataObject
) -> None:
    """Pieces cover their shard and fill a buffer; spans lie where their pieces do."""
    shards = shards_of(layout, lengths, world_size)
    with mock.patch.object(library, "MOST_PIECES", 99):
        pieces = cut(shards)
    for rank, (own, found) in enumerate(zip(shards, pieces)):
        ends = list(accumulate((p.length for p in found), initial=0))
        assert [p.start for p in found] == ends[:-1]
        assert ends[-1] == sum(span.length for span in own)
        assert all(p.owner == rank for p in found)
        assert {p.start for p in found} <= {span.start for span in own}, "cut between spans"
    owners = data.draw(st.lists(st.sampled_from(range(world_size)), min_size=1, unique=True))
    rows = arrange([pieces[owner] for owner in owners])
    by_row = sorted(rows, key=lambda piece: rows[piece])
    assert [rows[p] for p in by_row] == list(accumulate([p.length for p in by_row], initial=0))[:-1]
    if len(owners) > 1:
        check_order(shards, owners, lay([(shards[o], pieces[o]) for o in owners]))


def check_order(shards: Shards, owners: list[int], found: list[Span]) -> None:
    """The tokens of a buffer are those of all spans, sorted; no two spans could be one."""
    expected = sorted(
        ((s.document, s.position, owner), s) for owner in owners for s in shards[owner]
    )
    tokens = [s.index + s.stride * n for _, s in expected for n in range(s.length)]
    assert [s.index + s.stride * n for s in found for n in range(s.length)] == tokens
    assert [s.start for s in found] == list(accumulate([s.length for s in found], initial=0))[:-1]
    for a, b in pairwise(found):
        assert a.position - a.index == b.position - b.index or a.document != b.document
        assert a.document != b.document or b.index != a.index + a.stride * a.length


@pytest.mark.parametrize(
    ("layout", "most"),
    [("flat_contiguous", 1), ("flat_zigzag", 2), ("contiguous", 2), ("zigzag", 4), ("stripe", 2)],
)
def test_number_of_pieces(layout: str, most: int) -> None:
    """Two documents: what lies together in the stream anyway stays together."""
    pieces = cut(shards_of(layout, (40, 48), 4))
    assert max(map(len, pieces)) == most


def test_the_middle_of_a_zigzag_is_one_piece() -> None:
    """The last rank's two parts follow each other."""
    assert [len(found) for found in cut(shards_of("zigzag", (64,), 4))] == [2, 2, 2, 1]


def test_of_many_documents_the_largest_are_cut() -> None:
    """And the shard stays together between them, where it may have several documents."""
    lengths = (16, 64, 8, 32, 48)  # of which every rank has two parts of an eighth each
    for rank, found in enumerate(cut(shards_of("zigzag", lengths, 4))[:-1]):
        assert [piece.start for piece in found] == [0, 12, 26, 36], rank
        assert [piece.document for piece in found] == [0, 1, 3, 4]
        assert sum(piece.length for piece in found) == 42
    *_, last = cut(shards_of("zigzag", lengths, 4))
    assert len(last) <= MOST_PIECES


def test_with_one_span_a_document_a_shard_of_many_stays_whole() -> None:
    """Nothing would be saved, and messages cost time."""
    many = (8,) * (MOST_PIECES + 1)
    for rank, found in enumerate(cut(shards_of("contiguous", many, 4))):
        assert found == (Piece(0, 2 * rank, rank, 0, 2 * len(many)),)


@pytest.mark.parametrize("documents", [1, 2, 3, 4, 10])
def test_the_upper_half_of_a_zigzag_stays_at_home(documents: int) -> None:
    """The last rank needs the lower half of the others' keys, whatever the number of documents."""
    lengths = (3104, 3200, 1600, 160, 128, 64, 64, 64, 64, 64)[:documents]
    whole = tuple(8 * length for length in lengths)
    problem = Problem(get_layout("zigzag"), whole, whole, 8, Mask(right=0))
    rows = sum(piece.length for owner in range(7) for piece in problem.pieces(owner, 7))
    assert 0 <= rows - 7 * sum(lengths) / 2 <= 7 * 400  # the upper half of small documents


def test_pieces_of_one_shard_lie_in_order_too() -> None:
    """Whatever order its layout has."""
    late = Span(start=0, length=3, position=9, stride=1, document=0, index=9)
    early = Span(start=3, length=2, position=1, stride=1, document=0, index=1)
    other = Span(start=0, length=4, position=4, stride=1, document=0, index=4)
    pieces = cut([(late, early), (other,)])
    assert arrange(pieces[:1]) == {pieces[0][0]: 2, pieces[0][1]: 0}
    assert [arrange(pieces)[p] for p in (*pieces[0], *pieces[1])] == [6, 0, 2]
