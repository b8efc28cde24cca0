"""The tables that launches read."""

from __future__ import annotations

import importlib.util
from heapq import heappop, heappush
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_flash_attn.plan.layout import Span
from ring_flash_attn.plan.tiles import Mask, Tile, make_tile

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def _span(start: int, length: int, position: int) -> Span:
    return Span(start, length, position, 1, 0, position)


def _tiles(lengths: list[int], left: int | None) -> list[Tile]:
    """Queries of one document against its keys in pieces, which lie apart from each other."""
    keys, row, position = [], 0, 0
    for length in lengths:
        keys.append(_span(row, length, position))
        row, position = row + length + 5, position + length
    mask = Mask(left, 0)
    made = (make_tile(_span(3, position, 0), key, mask) for key in keys)
    return [tile for tile in made if tile is not None]


@settings(deadline=None)  # the first one imports Triton
@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=6),
    st.none() | st.integers(0, 60),
    st.sampled_from([16, 64]),
    st.booleans(),
)
def test_a_block_walks_from_the_first_tile_it_sees_to_the_last(
    lengths: list[int], left: int | None, block: int, by_key: bool
) -> None:
    from ring_flash_attn.kernels.tables import BlockEntry, TileEntry, table

    tiles = _tiles(lengths, left)
    made = table(tiles, block, 32, by_key, torch.device("cpu"))
    others = [TileEntry(*row[: len(TileEntry._fields)]) for row in made.tiles.tolist()]
    covered = 0
    for row in made.blocks.tolist():
        own = BlockEntry(*row[: len(BlockEntry._fields)])
        assert tuple(row[len(own) : len(own) + len(TileEntry._fields)]) == others[own.tile]
        seen = []
        for tile in others[own.tile : own.last_tile]:
            pairs = sum(
                max(0, min(tile.length - 1, i + tile.high) - max(0, i + tile.low) + 1)
                for i in range(own.first, own.first + own.rows)
            )
            seen.append(pairs)
        assert own.last_tile == own.tile + 1 or (seen[0] and seen[-1])
        assert 0 < own.rows <= block
        covered += sum(seen)
    assert covered == sum(tile.pairs for tile in tiles)


@pytest.mark.parametrize(
    ("length", "halves"),
    [(128, False), (129, True), (64, True), (65, False), (2496, True), (6401, False)],
)
def test_much_work_in_half_blocks(length: int, halves: bool) -> None:
    from ring_flash_attn.kernels.tables import table

    made = table(_tiles([length], None), 128, 128, False, torch.device("cpu"))
    assert made.halves is halves


@pytest.mark.parametrize("by_key", [False, True])
def test_a_block_names_its_document(by_key: bool) -> None:
    from ring_flash_attn.kernels.tables import DOCUMENT, table

    spans = [Span(0, 40, 0, 1, 2, 0), Span(40, 100, 0, 1, 0, 40), Span(140, 7, 0, 1, 5, 140)]
    tiles = [tile for span in spans if (tile := make_tile(span, span, Mask(None, 0)))]
    made = table(tiles, 32, 32, by_key, torch.device("cpu"))
    found = sorted((row[0], row[DOCUMENT]) for row in made.blocks.tolist())
    starts = [*range(0, 40, 32), *range(40, 140, 32), 140]
    assert found == list(zip(starts, [2, 2, 0, 0, 0, 0, 5]))


@pytest.mark.parametrize("programs", [0.0, 0.1, 4.0, 1000.0])
def test_documents_of_keys_come_one_after_another_but_for_the_last(programs: float) -> None:
    """With no programs, or with too many for the work, the longest blocks come first."""
    from ring_flash_attn.kernels.tables import DOCUMENT, table

    lengths, starts = (40, 300, 7, 170, 64, 300), (0, 40, 340, 347, 517, 581)
    spans = [Span(a, n, 0, 1, d, a) for d, (n, a) in enumerate(zip(lengths, starts, strict=True))]
    tiles = [tile for span in spans if (tile := make_tile(span, span, Mask(None, 0)))]
    made = table(tiles, 32, 32, True, torch.device("cpu"), programs)
    rows = made.blocks.tolist()
    assert sorted(row[0] for row in rows) == [
        a + i for n, a in zip(lengths, starts, strict=True) for i in range(0, n, 32)
    ]
    work = [lengths[row[DOCUMENT]] - row[2] for row in rows]
    assert made.work == tuple(sorted(work, reverse=True))
    apart = {0.0: 0, 0.1: 5, 4.0: 3, 1000.0: 0}[programs]
    documents = [row[DOCUMENT] for row in rows]
    assert list(dict.fromkeys(documents))[:apart] == [1, 5, 3, 4, 0][:apart]
    rest = [1, 5, 3, 4, 0, 2][apart:]
    assert set(documents[-len(rest) :]) <= set(rest)
    count = sum(-(-lengths[n] // 32) for n in rest)
    assert work[-count:] == sorted(work[-count:], reverse=True)
    for n in range(len(rows) - count - 1):  # each document in one piece, its longest block first
        if documents[n] == documents[n + 1]:
            assert work[n] > work[n + 1]
        else:
            assert documents[n] not in documents[n + 1 :]


def test_tables_are_made_on_the_host_whatever_the_default_device_is() -> None:
    from ring_flash_attn.kernels.base import Rows
    from ring_flash_attn.kernels.fused_merge import _bits_of
    from ring_flash_attn.kernels.tables import table

    cpu = torch.device("cpu")
    tiles = _tiles([40, 3], None)
    with torch.device("meta"):
        made = table(tiles, 16, 16, False, cpu)
        bits = _bits_of([Rows(1, 3, 2)], 0, 4, cpu)
    assert made.blocks.device == made.tiles.device == bits.device == cpu
    assert made.blocks[:, 1].sum() == 43
    assert bits.tolist() == [0, 2, 2, 0]


@given(
    st.lists(st.integers(1, 700), min_size=1, max_size=5),
    st.sampled_from([(0, 64, 96), (0, 128, 64), (None, 128, 128), (None, 192, 96), (40, 64, 64)]),
)
@settings(deadline=None)
def test_a_launch_size_is_about_what_the_table_says(
    lengths: list[int], shape: tuple[int | None, int, int]
) -> None:
    """Exactly, where all queries see all keys."""
    from ring_flash_attn.kernels.tables import launch_size, table

    window, block, loop = shape
    mask = Mask(window, None if window is None else 0)
    spans, row = [], 0
    for length in lengths:
        spans.append(_span(row, length, 0))
        row += length
    tiles = [tile for span in spans if (tile := make_tile(span, span, mask))]
    found, made = (
        launch_size(tiles, block, loop),
        table(tiles, block, loop, False, torch.device("cpu")),
    )
    whole = [block * -(-each // block) * loop * -(-each // loop) for each in lengths]
    assert found.items == len(made.blocks)
    assert made.total * block <= found.total <= sum(whole)
    if window is None:
        assert found.total == sum(whole)
        assert found.longest == block * loop * -(-max(lengths) // loop)


def test_level_launches_take_whole_waves() -> None:
    from ring_flash_attn.kernels.tables import launch_size

    tile = make_tile(_span(0, 1024, 0), _span(0, 1024, 0), Mask(None, None))
    assert tile is not None
    found = launch_size([tile], 128, 128)
    assert found == (8, 1024 * 128, 8 * 1024 * 128)
    assert found.time(16, 128) == 1024 * 128
    assert found.time(17, 128) == 2 * 1024 * 128


@pytest.mark.parametrize(
    ("pairs", "count"), [(24, 84), (264, 32), (70, 11), (1664, 5), (4, 79), (800, 9), (1057, 4)]
)
def test_sections_of_keys_are_narrow_and_as_wide(
    monkeypatch: pytest.MonkeyPatch, pairs: int, count: int
) -> None:
    """So narrow that several programs share a pair's queries, and the last one not much more."""
    from ring_flash_attn.kernels import scheduler
    from ring_flash_attn.kernels.base import Call
    from ring_flash_attn.kernels.tables import table

    cpu = torch.device("cpu")
    monkeypatch.setattr(scheduler, "processors", lambda device: 132)
    tile = make_tile(_span(0, 128 * count, 0), _span(0, 128 * count, 0), Mask(None, 0))
    assert tile is not None
    call = Call(cpu, torch.bfloat16, 2, 2, 64, 64, 0.1, Mask(None, 0))
    work = table([tile], 128, 64, True, cpu)
    width = scheduler.section(pairs, 2, work, call)
    enough = -(-132 // min(8, count))
    assert min(pairs, enough) / 2 <= width <= min(pairs, 1.25 * enough)
    assert 2 * ((pairs - 1) % width + 1) > width, "the last one is too narrow"
    assert scheduler.section(pairs, 2, table([tile], 128, 64, False, cpu), call) >= min(
        pairs, width
    )


@st.composite
def _spans_of_documents(draw: st.DrawFn) -> list[Tile]:
    """Queries of some documents, each against keys in several tiles; some with a mask."""
    tiles, row, key = [], 0, 0
    for document in range(draw(st.integers(1, 4))):
        rows = draw(st.integers(1, 150))
        query, position = Span(row, rows, 1000, 1, document, key + 1000), 0
        for length in draw(st.lists(st.integers(1, 200), min_size=1, max_size=4)):
            keys = Span(key, length, position, 1, document, key)
            mask = draw(st.sampled_from([Mask(), Mask(right=0), Mask(left=1000)]))
            made = make_tile(query, keys, mask)
            if made is not None:
                tiles.append(made._replace(first=document % 2 == 0, last=document > 0))
            key, position = key + length + 3, position + length
        row += rows
    return tiles


@settings(deadline=None)
@given(_spans_of_documents(), st.integers(2, 4), st.integers(1, 12), st.sampled_from([16, 64, 128]))
def test_pieces_follow_each_other_and_leave_nothing_out(
    tiles: list[Tile], number: int, blocks: int, block: int
) -> None:
    from ring_flash_attn.kernels.tables import FIRST, LAST, MORE, PIECE, Pieces, table

    def seen(made: Any) -> dict[int, list[tuple[int, int, int, int]]]:
        """Of each row, the keys that it sees, with position and token, in the order of blocks."""
        found: dict[int, list[tuple[int, int, int, int]]] = {}
        others = made.tiles.tolist()
        for start, rows, first, tile, last, _, *place in made.blocks.tolist():
            for i in range(rows):
                keys = found.setdefault(start + i, [])
                for row, length, low, high, position, token in (x[:6] for x in others[tile:last]):
                    here = range(max(0, first + i + low), min(length, first + i + high + 1))
                    keys += [(row + j, position + j, token + j, place[0] + i) for j in here]
        return found

    whole = table(tiles, block, 32, False, torch.device("cpu"))
    made = table(tiles, block, 32, False, torch.device("cpu"), pieces=Pieces(number, blocks))
    assert seen(made) == seen(whole)
    assert made.total == whole.total
    flags = {row[0]: row[5] for row in whole.blocks.tolist()}
    of_rows: dict[int, list[int]] = {}
    for row in made.blocks.tolist():
        of_rows.setdefault(row[0], []).append(row[5])
    assert sum(len(each) > 1 for each in of_rows.values()) <= blocks
    assert made.pieces == max(map(len, of_rows.values())) <= number
    for row, each in of_rows.items():
        assert [flag // PIECE for flag in each] == list(range(len(each)))
        assert [bool(flag & MORE) for flag in each] == [True] * (len(each) - 1) + [False]
        assert [flag & FIRST for flag in each] == [flags[row] & FIRST] + [0] * (len(each) - 1)
        assert [flag & LAST for flag in each] == [0] * (len(each) - 1) + [flags[row] & LAST]
        assert len({tuple(b[1:3]) for b in made.blocks.tolist() if b[0] == row}) == 1


def _duration(made: Any, pairs: int, programs: int) -> float:
    """Of a launch, item by item in the order of the kernel; a piece waits for the one before."""
    from ring_flash_attn.kernels.scheduler import _BLOCK, _CARRY
    from ring_flash_attn.kernels.tables import MORE, PIECE

    free, ended = [0.0] * programs, dict[tuple[int, int], float]()
    tiles = made.tiles.tolist()
    for row, _, _, tile, last, flags, *_ in made.blocks.tolist():
        cost = sum(each[1] for each in tiles[tile:last]) + _BLOCK
        cost += _CARRY if flags & MORE or flags >= PIECE else 0
        for pair in range(pairs):
            before = ended[row, pair] if flags >= PIECE else 0.0
            ended[row, pair] = max(heappop(free), before) + cost
            heappush(free, ended[row, pair])
    return max(free)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(1, 14), st.sampled_from([1000, 4000, 10000, 16000, 30000])),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([4, 8, 16, 32]),
)
def test_launches_in_pieces_are_shorter(spans: list[tuple[int, int]], pairs: int) -> None:
    """Also where there are few items, and pieces would only wait for each other."""
    from ring_flash_attn.kernels import scheduler
    from ring_flash_attn.kernels.tables import WHOLE, table

    tiles, row, key = [], 0, 0
    for number, (blocks, keys) in enumerate(spans):
        query = Span(row, 128 * blocks, 10**6, 1, number, 0)
        tile = make_tile(query, Span(key, keys, 0, 1, number, 0), Mask())
        assert tile is not None
        tiles.append(tile)
        row, key = row + 128 * blocks, key + keys
    cpu = torch.device("cpu")
    whole = table(tiles, 128, 128, False, cpu)
    with mock.patch.object(scheduler, "processors", return_value=132):
        found = scheduler.pieces(whole, pairs, cpu)
    if found != WHOLE:
        made = table(tiles, 128, 128, False, cpu, pieces=found)
        before, after = (_duration(each, pairs, 132) for each in (whole, made))
        assert after < before
        predicted = scheduler.time_in_pieces(whole, pairs, 132, found)
        assert abs(predicted / after - 1) < 0.1


@pytest.mark.parametrize(
    ("items", "cut"),
    [(32, False), (64, False), (128, False), (136, True), (264, False), (704, True), (4096, True)],
)
def test_items_are_cut_where_programs_would_wait(items: int, cut: bool) -> None:
    """All as long; 264 are two waves, 4096 are 31.03, the last of which takes 3 % of the time."""
    from ring_flash_attn.kernels import scheduler
    from ring_flash_attn.kernels.tables import WHOLE, table

    query, keys = Span(0, items * 2, 0, 1, 0, 0), Span(0, 40000, 0, 1, 0, 0)
    tile = make_tile(query, keys, Mask())
    assert tile is not None
    made = table([tile], 16, 128, False, torch.device("cpu"))
    with mock.patch.object(scheduler, "processors", return_value=132):
        found = scheduler.pieces(made, 8, torch.device("cpu"))
        before, after = (scheduler.time_in_pieces(made, 8, 132, each) for each in (WHOLE, found))
    assert (found != WHOLE) is cut
    assert after < 0.985 * before if cut else after == before
