"""The CuTe DSL backward as far as no GPU is needed: which blocks of queries it walks through."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_flash_attn.kernels.base import Call
from ring_flash_attn.plan.layout import Span
from ring_flash_attn.plan.tiles import Mask, make_tile

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
needs_dsl = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed"
)
KEYS = 128  # of an item


@needs_dsl
@settings(deadline=None)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=3),
    st.integers(1, 300),
    st.integers(0, 300),
    st.none() | st.integers(0, 200),
    st.sampled_from([0, 7, None]),
    st.sampled_from([64, 128]),
)
def test_every_pair_of_a_band_once(
    lengths: list[int], queries: int, before: int, left: int | None, right: int | None, block: int
) -> None:
    """Masks leave each pair of the band once, and blocks without one have nothing to hide."""
    from ring_flash_attn.kernels.cute import primitives as ours
    from ring_flash_attn.kernels.tables import BlockEntry, TileEntry, table

    query, keys, row, position = Span(7, queries, before, 1, 0, before), [], 0, 0
    for each in lengths:
        keys.append(Span(row, each, position, 1, 0, position))
        row, position = row + each + 5, position + each
    mask = Mask(left, right)
    made = [tile for tile in (make_tile(query, key, mask) for key in keys) if tile is not None]
    if not made:
        return
    work = table(made, KEYS, block, True, torch.device("cpu"))
    tiles = [TileEntry(*entry[:6]) for entry in work.tiles.tolist()]
    seen: dict[tuple[int, int], int] = {}
    for entry in work.blocks.tolist():
        own = BlockEntry(*entry[: len(BlockEntry._fields)])
        end = own.first + own.rows
        for n in range(own.tile, own.last_tile):
            span = ours.keys_of(tiles[n], own.first, own.rows)
            for j in range(span.begin, span.end, block):
                start = ours.inside(j, span.length, block)
                assert start + block <= span.length or (work.short and start == 0)
                for c in range(KEYS // ours.ROWS):
                    first = own.first + c * ours.ROWS
                    low, high = ours.edges(span, first, block)
                    high = high if first + ours.ROWS <= end else 0
                    masked = j < low or j >= high
                    assert masked or start == j
                    for key in range(first, first + ours.ROWS):
                        begin, last = start, start + block - 1
                        if masked:
                            begin = max(key + span.low, j)
                            last = min(key + span.high, span.length - 1, last) if key < end else -1
                        for i in range(begin, last + 1):
                            pair = i, own.row + key - own.first
                            seen[pair] = seen.get(pair, 0) + 1
    for tile in made:
        for i in range(queries):
            for j in range(tile.key.length):
                wanted = tile.low <= j - i <= tile.high
                assert seen.pop((i, tile.key.start + j), 0) == wanted
    assert not seen


@needs_dsl
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("many", [False, True])
def test_sizes_fit(d: int, many: bool) -> None:
    """Into shared memory, whatever the features are."""
    from ring_flash_attn.kernels.cute.sizes import SHARED, backward_sizes
    from ring_flash_attn.kernels.cute.traits import BackwardTraits

    sizes = backward_sizes(d, d, many)
    assert sizes is not None
    traits = BackwardTraits(d=d, dv=d, softcap=many, dropout=many, alibi=many, **sizes._asdict())
    assert traits.shared <= SHARED
    assert sizes.block in (64, 128)


def test_says_why_not() -> None:
    """Head dimensions that it has no blocks for, and an order that it does not keep."""
    from ring_flash_attn.kernels.cute import backward_host

    call = Call(torch.device("cpu"), torch.bfloat16, 4, 2, 128, 128, 0.1, Mask())
    assert backward_host.why_not(call) == []
    (reason,) = backward_host.why_not(replace(call, deterministic=True))
    assert "order" in reason
    for headdim in (192, 256):
        (reason,) = backward_host.why_not(replace(call, headdim=headdim))
        assert str(headdim) in reason
