"""The CuTe DSL kernel as far as no GPU is needed: which blocks of keys it walks through."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_flash_attn.kernels.base import Call
from ring_flash_attn.kernels.cute.sizes import SHARED, WIDTHS, forward_sizes, width_of
from ring_flash_attn.plan.layout import Span
from ring_flash_attn.plan.tiles import Mask, make_tile

needs_dsl = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed"
)
PAIRS = [(d, dv) for d in WIDTHS for dv in WIDTHS if dv <= d]


@needs_dsl
@settings(deadline=None)
@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=3),
    st.integers(0, 500),
    st.none() | st.integers(0, 300),
    st.sampled_from([0, 7, None]),
    st.sampled_from([80, 96, 128, 160]),
    st.sampled_from([2, 3]),
)
def test_every_pair_of_a_band_once(
    lengths: list[int],
    before: int,
    left: int | None,
    right: int | None,
    block: int,
    consumers: int,
) -> None:
    """Producer and consumers count the same blocks, and masks leave each pair of the band once."""
    from ring_flash_attn.kernels.cute import primitives as ours
    from ring_flash_attn.kernels.tables import BlockEntry, TileEntry, table

    length = 300
    query, keys, row, position = Span(0, length, before, 1, 0, before), [], 0, 0
    for each in lengths:
        keys.append(Span(row, each, position, 1, 0, position))
        row, position = row + each + 5, position + each
    mask = Mask(left, right)
    made = [tile for tile in (make_tile(query, key, mask) for key in keys) if tile is not None]
    if not made:
        return
    rows = consumers * ours.ROWS
    work = table(made, rows, block, False, torch.device("cpu"))
    tiles = [TileEntry(*entry[:6]) for entry in work.tiles.tolist()]
    count = len(BlockEntry._fields)
    seen: dict[tuple[int, int], int] = {}
    for entry in work.blocks.tolist():
        own = BlockEntry(*entry[:count])
        loaded = sum(
            ours.blocks_in(*_of(ours, tiles[n], own, n == own.tile)[-2:], block)
            for n in range(own.tile, own.last_tile)
        )
        for c in range(consumers):
            if own.rows > c * ours.ROWS:
                assert _walk(ours, tiles, own, c, block, work.windowed, seen) == loaded
    for tile in made:
        for i in range(length):
            for j in range(tile.key.length):
                wanted = tile.low <= j - i <= tile.high
                assert seen.pop((i, tile.key.start + j), 0) == wanted
    assert not seen


def _of(ours, tile, own, is_first):  # type: ignore[no-untyped-def]
    """A tile's keys; of the first one at least one block is looked at."""
    keys = ours.keys_of(tile, own.first, own.rows)
    return keys._replace(begin=0, end=1) if is_first and keys.begin >= keys.end else keys


def _walk(ours, tiles, own, c, block, windowed, seen):  # type: ignore[no-untyped-def]
    """What consumer c does: the first block, then what `edges` says; returns how many blocks."""
    row, blocks = own.first + c * ours.ROWS, 0
    for n in range(own.tile, own.last_tile):
        keys = _of(ours, tiles[n], own, n == own.tile)
        j, last_row = keys.begin, min(ours.ROWS, own.rows - c * ours.ROWS)

        def take(j: int, masked: bool, keys=keys, last_row=last_row) -> None:  # type: ignore[no-untyped-def]
            start = ours.inside(j, keys.length, block) if masked else j
            assert start + block <= keys.length or (masked and start == 0)
            for i in range(row, row + last_row):
                low, high = start, start + block - 1
                if masked:
                    low = max(i + keys.low, j, low)
                    high = min(i + keys.high, keys.length - 1, high)
                for key in range(low, high + 1):
                    pair = i, keys.row + key
                    seen[pair] = seen.get(pair, 0) + 1

        if n == own.tile:
            take(j, bool(ours.needs_mask(j, keys, row, block)))
            j, blocks = j + block, blocks + 1
        left, right = ours.edges(keys, row, block)
        for limit, masked in ((left if windowed else j, True), (right, False), (keys.end, True)):
            while j < limit:
                take(j, masked)
                j, blocks = j + block, blocks + 1
    return blocks


@pytest.mark.parametrize(("d", "dv"), PAIRS)
def test_sizes_fit(d: int, dv: int) -> None:
    """Into shared memory, whatever the features are."""
    for many in (False, True):
        for sizes, cost in forward_sizes(d, dv, many, many):
            queries = sizes.items * sizes.consumers * 64 * width_of(d)
            keys = sizes.stages * sizes.block * (width_of(d) + dv)
            assert 2 * (queries + keys) + 2048 <= SHARED
            assert sizes.block % 16 == 0
            assert not (many and sizes.lazy)
            assert (cost < 1.0) == (sizes.consumers == 3)


def test_says_why_not() -> None:
    """Every reason at once."""
    from ring_flash_attn.kernels.cute import KERNEL

    call = Call(torch.device("cpu"), torch.float32, 4, 2, 68, 300, -1.0, Mask())
    found = " ".join(KERNEL.why_not(call))
    for word in ("Hopper", "float32", "softmax_scale", "multiples of 8"):
        assert word in found
