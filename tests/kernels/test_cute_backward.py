"""The CuTe DSL backward as far as no GPU is needed: which blocks of queries it walks through."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_flash_attn.kernels.base import Call
from ring_flash_attn.kernels.cute.sizes import SHARED, WIDTHS, backward_launches
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
    st.sampled_from([32, 64, 80, 96, 128]),
    st.booleans(),
)
def test_every_pair_of_a_band_once(
    lengths: list[int],
    queries: int,
    before: int,
    left: int | None,
    right: int | None,
    block: int,
    by_keys: bool,
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
    work = table(made, KEYS, block, by_keys, torch.device("cpu"))
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
                            pair = key, tiles[n].row + i
                            if by_keys:
                                pair = i, own.row + key - own.first
                            seen[pair] = seen.get(pair, 0) + 1
    for tile in made:
        for i in range(queries):
            for j in range(tile.key.length):
                wanted = tile.low <= j - i <= tile.high
                assert seen.pop((i, tile.key.start + j), 0) == wanted
    assert not seen


@needs_dsl
@pytest.mark.parametrize(("d", "dv"), [(d, dv) for d in WIDTHS for dv in WIDTHS if dv <= d])
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_launches(d: int, dv: int, many: bool, fp16: bool, ordered: bool) -> None:
    """They fit into shared memory, and compute each gradient once, dQ in an order if wanted."""
    from ring_flash_attn.kernels.cute.traits import BackwardTraits

    found = []
    rules = many, fp16, ordered
    launches = list(backward_launches(d, dv, *rules))
    narrower = max([0, *(each for each in WIDTHS if each < d)]) + 8
    assert dv > narrower or list(backward_launches(narrower, dv, *rules)) == launches, "padded"
    launches += [each._replace(sizes=each.for_few) for each in launches if each.for_few]
    for launch in launches:
        traits = BackwardTraits(
            d=d,
            dv=dv,
            softcap=many,
            dropout=many,
            alibi=many,
            dq=launch.dq,
            only=launch.only,
            exchanged=launch.exchanged,
            **launch.sizes._asdict(),
        )
        assert traits.shared <= SHARED
        assert not (ordered and traits.dq)
        if launch.for_few == launch.sizes:
            continue
        found += ["dq"] * launch.dq
        found += ["dq"] if launch.exchanged else [launch.only] if launch.only else ["dk", "dv"]
    assert sorted(found) == ["dk", "dq", "dv"]
    folded = {launch.sizes.folded for launch in launches}
    assert len(folded) == 1, "all read the same lse"
    assert not (fp16 and True in folded)


@needs_dsl
@pytest.mark.parametrize("block", [64, 80, 128])
def test_places_in_shared_memory(block: int) -> None:
    """Where threads put ds and a transposed dQ is where products and TMA look for them."""
    from wgmma_operands import line_of, swizzled

    from ring_flash_attn.kernels.cute.backward_consumer import ds_place, swapped_place

    line = line_of(block)
    for row in range(64):
        for g in range(0, block // 8, 2):
            for half in range(2):
                byte = 16 * (g + half)
                wanted = byte // line * 64 * line + row * line + byte % line
                assert ds_place(row, g, half, block) == swizzled(wanted, line)
    found = {}
    for thread in range(128):
        warp, lane = thread // 32, thread % 32
        for g in range(block // 8):
            for r in range(2):
                for e in range(2):
                    place = swapped_place(warp, lane, r, e, block) + 1024 * g
                    query, column = 8 * g + lane % 4 * 2 + e, 16 * warp + lane // 4 + 8 * r
                    wanted = column // 32 * block * 128 + query * 128 + column % 32 * 4
                    assert place == swizzled(wanted, 128)
                    found[place] = None
    assert len(found) == block * 64


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("headdim", [64, 256])
@pytest.mark.parametrize("kind", ["rounded", "fresh", "added", "uneven"])
def test_gradients_of_all_launches(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool, headdim: int, kind: str
) -> None:
    """Each launch writes or adds what it computes where it belongs; the reference stands in."""
    from ring_flash_attn.kernels.base import Grads, Saved
    from ring_flash_attn.kernels.cute import backward_host
    from ring_flash_attn.kernels.reference import ReferenceKernel

    dtype = torch.bfloat16 if kind == "rounded" else torch.float32
    call = Call(
        torch.device("cpu"),
        torch.float32,
        4,
        2,
        headdim,
        headdim,
        0.1,
        Mask(None, 0),
        deterministic=deterministic,
    )
    span = Span(0, 50, 0, 1, 0, 0)
    tile = make_tile(span, span, call.mask)
    assert tile is not None
    shapes = [(1, 50, heads, headdim) for heads in (4, 2, 2, 4)]
    q, k, v, dout = (torch.randn(shape) for shape in shapes)
    saved = Saved(torch.randn(1, 4, 50) + 4, torch.randn(1, 4, 50))
    wanted = Grads(*(torch.zeros(shape) for shape in shapes[:3]))
    ReferenceKernel().backward(dout, q, k, v, [tile], saved, wanted, call)
    computed: list[str] = []

    def launch(inputs, stats, written, work, parts, fresh, call, launch) -> None:  # type: ignore[no-untyped-def]
        order = (k, q, dout, v) if launch.exchanged else (q, k, v, dout)
        assert all(a is b for a, b in zip(inputs, order, strict=True))
        assert parts == 1
        assert len(work.blocks) == 1
        names = ["dk", "dv"] if not launch.only else [launch.only]
        for name in names:
            to = written[1 if name == "dk" else 2]
            name = "dq" if launch.exchanged else name
            computed.append(name)
            found = getattr(wanted, name)
            to.copy_(found if fresh else to + found)
        if launch.dq:
            computed.append("dq")
            written[0].add_(wanted.dq)

    def row_stats(
        saved: Saved, dout: torch.Tensor, zeros: torch.Tensor | None, shift: float
    ) -> None:
        folded = not deterministic
        assert shift == (pytest.approx(math.log2(10)) if folded else 0.0)
        if zeros is not None:
            zeros.zero_()

    monkeypatch.setattr(backward_host, "_launch", launch)
    monkeypatch.setattr(backward_host.row_stats, "row_stats", row_stats)
    monkeypatch.setattr(backward_host, "split", lambda *_: 1)
    before = [torch.randn(shape).to(dtype) for shape in shapes[:3]]
    given = [x.clone() for x in before]
    if kind == "uneven":  # TMA cannot add to it
        room = torch.zeros(1, 50, 4, headdim + 1)
        given[0] = room[..., :headdim].copy_(before[0])
    fresh = kind in ("rounded", "fresh")
    if fresh:
        for x in given:
            x.fill_(torch.nan)
    backward_host.backward(
        dout, q, k, v, [tile], saved, Grads(*given, fresh_q=fresh, fresh_k=fresh), call
    )
    assert sorted(computed) == ["dk", "dq", "dv"]
    for x, old, right in zip(given, before, (wanted.dq, wanted.dk, wanted.dv), strict=True):
        right = right if fresh else old + right
        assert torch.allclose(x.float(), right.to(dtype).float(), atol=1e-5)


@pytest.mark.parametrize(
    ("headdim", "queries", "few"),
    [(64, 900, True), (64, 1100, False), (80, 400, True), (80, 600, False), (96, 100, False)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sizes_where_keys_are_seen_by_few_queries(
    monkeypatch: pytest.MonkeyPatch, headdim: int, queries: int, few: bool, dtype: torch.dtype
) -> None:
    """All see all here, in two documents."""
    from ring_flash_attn.kernels.base import Grads
    from ring_flash_attn.kernels.cute import backward_host

    call = Call(torch.device("cpu"), dtype, 1, 1, headdim, headdim, 0.1, Mask(None, None))
    spans = [Span(n * queries, queries, 0, 1, n, n * queries) for n in range(2)]
    tiles = [tile for span in spans if (tile := make_tile(span, span, call.mask))]
    q, k, v, dout = (torch.zeros(1, 2 * queries, 1, headdim, dtype=dtype) for _ in range(4))
    taken = []
    monkeypatch.setattr(backward_host, "_launch", lambda *given: taken.append(given[-1].sizes))
    monkeypatch.setattr(backward_host, "split", lambda *_: 1)
    (launch,) = backward_host.launches_of(call)
    grads = Grads(*(torch.zeros_like(x) for x in (q, k, v)), fresh_q=True, fresh_k=True)
    backward_host._keys((q, k, v, dout), tiles, (q, q), grads.dq, grads, call, launch)
    assert taken == [launch.for_few if few else launch.sizes]
    assert launch.for_few != launch.sizes
    for sizes in (launch.sizes, launch.for_few or launch.sizes):
        assert sizes.folded == (dtype is torch.bfloat16), "in fp16 small p would lose digits"
