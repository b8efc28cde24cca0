"""Tiles: the band in local rows is the mask in global positions, by brute force."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import document_lengths, masks, spans, world_sizes

from ring_flash_attn.plan.build import make_plan
from ring_flash_attn.plan.layout import Span, get_layout, layout_names
from ring_flash_attn.plan.layout import spans as spans_of
from ring_flash_attn.plan.problem import Problem
from ring_flash_attn.plan.tiles import FAR, Mask, Tiles, make_tile, make_tiles

MANY = settings(max_examples=400, deadline=None)


def allowed(query: Span, key: Span, mask: Mask) -> set[tuple[int, int]]:
    """The (i, j) of two spans with −left <= key position − query position <= right."""
    left = 10**9 if mask.left is None else mask.left
    right = 10**9 if mask.right is None else mask.right
    found = set()
    for i in range(query.length):
        for j in range(key.length):
            q, k = query.position + query.stride * i, key.position + key.stride * j
            if -left <= k - q <= right:
                found.add((i, j))
    return found


@given(causal=st.booleans(), left=st.integers(-1, 5), right=st.integers(-1, 5))
def test_mask_means_what_flash_attn_means(causal: bool, left: int, right: int) -> None:
    mask = Mask.of(causal, (left, right))
    for distance in range(-8, 9):
        hidden = (
            (left >= 0 and distance < -left)
            or (right >= 0 and distance > right)
            or (causal and distance > 0)
        )
        assert mask.allows(distance) is not hidden


@pytest.mark.parametrize("far", [1 << 40, FAR - 1, FAR, sys.maxsize, 1 << 70])
@pytest.mark.parametrize("layout", ["zigzag", "stripe", "balanced"])
def test_a_window_wider_than_all_documents_hides_nothing(layout: str, far: int) -> None:
    def pairs(mask: Mask) -> list[int]:
        problem = Problem(get_layout(layout), (24, 40), (64, 40), 3, mask)
        return [make_plan("ring", problem, rank, backward=False).pairs for rank in range(3)]

    assert sum(pairs(Mask())) == 24 * 64 + 40 * 40
    assert pairs(Mask(far, far)) == pairs(Mask(None, far)) == pairs(Mask(far)) == pairs(Mask())
    assert pairs(Mask(far, 3)) == pairs(Mask(right=3))
    assert pairs(Mask(3, far)) == pairs(Mask(left=3))


@given(data=st.data(), stride=st.integers(1, 7), mask=masks)
@MANY
def test_the_band_is_the_mask(data: st.DataObject, stride: int, mask: Mask) -> None:
    query, key = data.draw(spans(stride)), data.draw(spans(stride))
    expected = allowed(query, key, mask)
    tile = make_tile(query, key, mask)
    if tile is None:
        assert not expected
        return
    band = {
        (i, j)
        for i in range(query.length)
        for j in range(key.length)
        if tile.low <= j - i <= tile.high
    }
    assert band == expected
    assert expected
    assert tile.pairs == len(expected) == int(Tiles.of([tile]).pairs[0])
    assert tile.low >= 1 - query.length
    assert tile.high <= key.length - 1
    assert (tile.query, tile.key) == (query, key)
    assert (tile.first, tile.last) == (False, False), "only a plan knows"


@given(data=st.data(), mask=masks)
def test_documents_do_not_see_each_other(data: st.DataObject, mask: Mask) -> None:
    assert make_tile(data.draw(spans(1, 0)), data.draw(spans(1, 1)), mask) is None


@pytest.mark.parametrize("name", layout_names())
@given(lengths=document_lengths, world_size=world_sizes, mask=masks, data=st.data())
@settings(max_examples=40, deadline=None)
def test_tiles_of_two_shards(
    name: str, lengths: tuple[int, ...], world_size: int, mask: Mask, data: st.DataObject
) -> None:
    ranks = st.integers(0, world_size - 1)
    layout = get_layout(name)
    queries, keys = (spans_of(layout, lengths, data.draw(ranks), world_size) for _ in range(2))
    tiles = make_tiles(queries, keys, mask)
    expected = {
        (query.start, key.start): len(allowed(query, key, mask))
        for query in queries
        for key in keys
        if query.document == key.document
    }
    found = {(tile.query.start, tile.key.start): tile.pairs for tile in tiles}
    assert found == {at: pairs for at, pairs in expected.items() if pairs}
    assert len(found) == len(tiles)
    rows = [tile.query.start for tile in tiles]
    assert rows == sorted(rows)


def test_pairs_of_a_long_causal_tile() -> None:
    """S·(S+1)/2, without counting: 2⁴⁰ tokens."""
    length = 1 << 40
    span = Span(0, length, 0, 1, 0, 0)
    tile = make_tile(span, span, Mask(right=0))
    assert tile is not None
    assert tile.pairs == length * (length + 1) // 2
