"""Native kernels: the lowering of tiles, the merge, and the wrappers."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_library import WRAPPERS, PlainLibrary, wrapper
from strategies import problems

import ring_flash_attn as rfa
from ring_flash_attn.kernels import base
from ring_flash_attn.kernels.base import BLOCK, FIRST, LAST, Rows, State
from ring_flash_attn.kernels.merge import merge_rows
from ring_flash_attn.kernels.native import blocks
from ring_flash_attn.kernels.native.lowering import LibraryCall, Rect, in_order, lower
from ring_flash_attn.plan.build import make_plan, route_names
from ring_flash_attn.plan.layout import get_layout, layout_names
from ring_flash_attn.plan.problem import Problem
from ring_flash_attn.plan.tiles import Mask, Tile
from ring_flash_attn.verify.oracle import Rules, oracle

# The lowering.


def pairs_of(rect: Rect, window: tuple[int, int]) -> list[tuple[int, int]]:
    """What a library computes, told nothing but the window; every row must see a key."""
    left, right = window
    rows, columns = rect.q_end - rect.q, rect.k_end - rect.k
    found = []
    for i in range(rows):
        diagonal = i + columns - rows
        seen = [
            j
            for j in range(columns)
            if (left < 0 or j >= diagonal - left) and (right < 0 or j <= diagonal + right)
        ]
        assert seen
        found += [(rect.q + i, rect.k + j) for j in seen]
    return found


def check_rows(tiles: tuple[Tile, ...], calls: tuple[LibraryCall, ...]) -> None:
    """Each row is started once, in its first call, and finished once, in its last."""
    bits: dict[int, list[tuple[int, int]]] = {}
    for number, call in enumerate(calls):
        for rows in call.rows:
            for row in range(rows.start, rows.end):
                bits.setdefault(row, []).append((number, rows.bits))
    for tile in tiles:
        for row in range(tile.query.start, tile.query.start + tile.query.length):
            mine = bits.get(row, [])
            having = [n for n, c in enumerate(calls) if any(r.q <= row < r.q_end for r in c.rects)]
            assert [number for number, each in mine if each & BLOCK] == having
            assert [bool(each & FIRST) for _, each in mine[:1]] == [tile.first] * bool(mine)
            assert [bool(each & LAST) for _, each in mine[-1:]] == [tile.last] * bool(mine)
            assert sum(bool(each & FIRST) for _, each in mine) == tile.first
            assert sum(bool(each & LAST) for _, each in mine) == tile.last


@pytest.mark.parametrize("route", route_names())
@pytest.mark.parametrize("layout", layout_names())
@given(data=st.data(), packs=st.booleans(), square=st.booleans())
@settings(max_examples=40, deadline=None)
def test_calls_compute_the_tiles(
    layout: str, route: str, data: st.DataObject, packs: bool, square: bool
) -> None:
    problem = data.draw(problems(layout))
    rank = data.draw(st.integers(0, problem.world_size - 1))
    for work in (w for step in make_plan(route, problem, rank).steps for w in step.work):
        calls = lower(work.tiles, packs, square)
        found = [pair for c in calls for r in c.rects for pair in pairs_of(r, c.window)]
        expected = {
            (tile.query.start + i, tile.key.start + j)
            for tile in work.tiles
            for i, j in product(range(tile.query.length), range(tile.key.length))
            if tile.low <= j - i <= tile.high
        }
        assert len(found) == len(expected)
        assert set(found) == expected
        for call in calls:
            for one, next_one in zip(call.rects, call.rects[1:], strict=False):
                assert packs
                assert one.q_end <= next_one.q
                assert one.k_end <= next_one.k
            left, right = call.window
            assert right <= 0
            for rect in call.rects:
                rows, columns = rect.q_end - rect.q, rect.k_end - rect.k
                assert rows <= columns or (left, right) == (-1, -1)
                assert not square or (left, right) != (-1, 0) or rows == columns
        check_rows(work.tiles, calls)


@pytest.mark.parametrize("lengths", [(64,), (31, 32, 16)], ids=["one", "three"])
@pytest.mark.parametrize("rank", range(8))
def test_a_zigzag_step_is_one_call(rank: int, lengths: tuple[int, ...]) -> None:
    whole = tuple(8 * length for length in lengths)
    problem = Problem(get_layout("zigzag"), whole, whole, 8, Mask(right=0))
    for step in make_plan("ring", problem, rank).steps:
        for work in step.work:
            assert len(lower(work.tiles, packs=True, square=False)) == 1


def test_many_documents_are_few_calls_in_order() -> None:
    """Zigzag × all-gather leaves shards of many documents whole: in order they are two calls."""
    whole = (160, 80, 48, 32, 96)
    problem = Problem(get_layout("zigzag"), whole, whole, 8, Mask(right=0))
    for rank in range(8):
        (work,) = [w for s in make_plan("all_gather", problem, rank).steps for w in s.work]
        ordered, rows = in_order(work.tiles)
        assert len(lower(work.tiles, packs=True, square=False)) > 4
        assert len(lower(ordered, packs=True, square=False)) <= 2
        gathered = [row for start, end in rows for row in range(start, end)]
        for old, new in zip(work.tiles, ordered, strict=True):
            there = gathered[new.key.start : new.key.start + new.key.length]
            assert there == list(range(old.key.start, old.key.start + old.key.length))


# The kernel around a library, with one in plain torch.


LIBRARIES = [PlainLibrary(packs, square) for packs in (False, True) for square in (False, True)]
RULES = [
    Rules(),
    Rules(causal=True),
    Rules(causal=True, window_size=(7, -1)),
    Rules(window_size=(5, 3)),
    Rules(causal=True, sink=torch.tensor([0.3, -1.0, 2.0, -torch.inf]).double()),
]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(base, "_ENTRIES", dict(base._ENTRIES))
    for library in LIBRARIES:
        module = types.ModuleType(f"{library.name}_kernel")
        module.KERNEL = blocks.LibraryKernel(library)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        base.register_kernel(library.name, module.__name__)
    yield
    base.load_kernel.cache_clear()


def inputs_of(cu_seqlens: list[int] | None, headdim_v: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    outer = (2, 29) if cu_seqlens is None else (cu_seqlens[-1],)
    return [
        torch.randn(*outer, heads, width, dtype=torch.float64, generator=generator)
        for heads, width in ((4, 8), (2, 8), (2, headdim_v), (4, headdim_v))
    ]


def check(
    kernel: str,
    layout: str,
    route: str,
    rules: Rules,
    cu_seqlens: list[int] | None,
    world_size: int = 3,
    sources: int | None = None,
    headdim_v: int = 8,
) -> None:
    """Out, lse and gradients, of virtual ranks, to fp64's precision."""
    q, k, v, dout = inputs_of(cu_seqlens, headdim_v)
    options = {"causal": rules.causal, "window_size": rules.window_size}
    results = []
    for ours in (True, False):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        sink = None if rules.sink is None else rules.sink.clone().requires_grad_()
        if ours:
            out, lse, _ = rfa.virtual_ring_attention(
                *leaves,
                world_size=world_size,
                layout=layout,
                route=route,
                kernel=kernel,
                cu_seqlens=cu_seqlens,
                sink=sink,
                return_attn_probs=True,
                sources_per_launch=sources,
                **options,
            )
        else:
            out, lse = oracle(*leaves, Rules(sink=sink, **options), cu_seqlens, cu_seqlens)
        leaves += [] if sink is None else [sink]
        results.append([out, lse, *torch.autograd.grad(out, leaves, dout)])
    for ours_one, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours_one, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.product(6)
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
@pytest.mark.parametrize("layout", layout_names())
@pytest.mark.usefixtures("plain", "nan_memory")
def test_blocks_are_merged(layout: str, library: PlainLibrary) -> None:
    for number, (route, rules) in enumerate(product(route_names(), RULES)):
        cu_seqlens = [None, [0, 11, 11, 30, 31, 37]][number % 2]
        check(library.name, layout, route, rules, cu_seqlens, headdim_v=[8, 6][number // 2 % 2])
    for rules, cu_seqlens in product(RULES, [None, [0, 4, 4, 9, 37]]):
        check(library.name, layout, "ring", rules, cu_seqlens, 4, sources=2)


@pytest.mark.usefixtures("plain")
def test_one_device_takes_the_librarys_own_result() -> None:
    """Nothing is merged, and the library is called once."""
    library = LIBRARIES[2]
    for cu_seqlens in (None, [0, 11, 30, 37]):
        q, k, v, dout = inputs_of(cu_seqlens)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        expected = [x.clone().requires_grad_() for x in (q, k, v)]
        library.calls.clear()
        if cu_seqlens is None:
            out = rfa.flash_attn_func(*leaves, causal=True, kernel=library.name)
        else:
            cu = torch.tensor(cu_seqlens, dtype=torch.int32)
            out = rfa.flash_attn_varlen_func(
                *leaves, cu, cu, 19, 19, causal=True, kernel=library.name
            )
        assert len(library.calls) == 1
        want, _ = oracle(*expected, Rules(causal=True), cu_seqlens, cu_seqlens)
        torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-10)
        grads = torch.autograd.grad(out, leaves, dout)
        for ours, theirs in zip(grads, torch.autograd.grad(want, expected, dout), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("plain")
def test_keys_are_gathered_where_that_spares_calls() -> None:
    """Zigzag × all-gather, shards of five documents: two calls a rank at most."""
    library = LIBRARIES[2]
    cu_seqlens = [0, 32, 80, 96, 128, 192]
    q, k, v = (torch.randn(192, 2, 8, dtype=torch.float64) for _ in range(3))
    library.calls.clear()
    rfa.virtual_ring_attention(
        q,
        k,
        v,
        world_size=4,
        layout="zigzag",
        route="all_gather",
        cu_seqlens=cu_seqlens,
        causal=True,
        kernel=library.name,
    )
    assert len(library.calls) <= 2 * 4


@pytest.mark.usefixtures("plain")
def test_single_queries_beside_none() -> None:
    """FlashAttention-2 would take a longest block of 1 for one query in every block."""
    library = LIBRARIES[2]
    q, k, v = (torch.randn(n, 2, 8, dtype=torch.float64) for n in (2, 12, 12))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 1, 2], [0, 5, 8, 12]))
    library.calls.clear()
    out = rfa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 1, 5, kernel=library.name)
    (block,) = library.calls
    assert block.max_seqlen_q > 1
    assert block.cu_seqlens_q is not None
    assert block.cu_seqlens_q.tolist() == [0, 1, 1, 2]
    want, _ = oracle(q, k, v, Rules(), cu_q.tolist(), cu_k.tolist())
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("plain")
def test_any_strides() -> None:
    """Libraries want the numbers of a row side by side; users may have them otherwise."""
    q, k, v, dout = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in inputs_of(None))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    assert all(x.stride(-1) != 1 for x in (*leaves, dout))
    # At once, and with a sink, which has to be merged.
    for sink in (None, torch.randn(4, dtype=torch.float64)):
        results = []
        for kernel in (LIBRARIES[0].name, "reference"):
            out = rfa.flash_attn_func(*leaves, causal=True, sink=sink, kernel=kernel)
            results.append([out, *torch.autograd.grad(out, leaves, dout)])
        for ours, expected in zip(*results, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("plain")
def test_the_gradient_of_lse_is_refused() -> None:
    q, k, v, _ = inputs_of(None)
    q.requires_grad_()
    _, lse, _ = rfa.flash_attn_func(q, k, v, return_attn_probs=True, kernel=LIBRARIES[0].name)
    with pytest.raises(NotImplementedError, match="cannot differentiate through lse"):
        lse.sum().backward()


@pytest.mark.usefixtures("plain")
def test_auto_keeps_the_gradient_of_lse() -> None:
    """Where the caller gets lse, a kernel that cannot differentiate through it is no choice."""
    library = LIBRARIES[-1]  # registered last, so that auto tries it first
    q, k, v, _ = inputs_of(None)
    q.requires_grad_()
    library.calls.clear()
    _, lse, _ = rfa.flash_attn_func(q, k, v, return_attn_probs=True)
    assert not library.calls
    assert torch.autograd.grad(lse.sum(), q)[0].isfinite().all()
    rfa.flash_attn_func(q, k, v)
    assert library.calls


# The wrappers, with functions that have the real ones' arguments.


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.usefixtures("nan_memory")
def test_wrappers_pass_the_right_arguments(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    file, parents, module, fake = WRAPPERS[name]
    kernel = wrapper(monkeypatch, file, parents, module, fake())
    assert kernel.name == name
    monkeypatch.setattr(base, "_ENTRIES", dict(base._ENTRIES))
    ours = types.ModuleType("wrapped_kernel")
    ours.KERNEL = types.SimpleNamespace(  # type: ignore[attr-defined]
        name=name,
        blocks=True,
        why_not=lambda call: [],
        **{m: getattr(kernel, m) for m in ("forward", "backward", "alone", "alone_backward")},
    )
    monkeypatch.setitem(sys.modules, "wrapped_kernel", ours)
    base.register_kernel("wrapped", "wrapped_kernel")
    try:
        for rules, cu in product(RULES[1:4], (None, [0, 11, 11, 30, 31, 37])):
            check("wrapped", "zigzag", "ring", rules, cu)
    finally:
        base.load_kernel.cache_clear()


# The merge.


def test_the_merge_of_rows() -> None:
    """Empty sides, rows that are started or finished only, a sink, an infinite lse."""
    generator = torch.Generator().manual_seed(0)
    out, block = torch.randn(2, 2, 10, 3, 4, dtype=torch.float64, generator=generator)
    lse, block_lse = torch.randn(2, 2, 3, 10, dtype=torch.float64, generator=generator)
    block_lse[..., 1], block[:, 1] = torch.inf, torch.nan
    block_lse[..., 2], lse[..., 2] = -torch.inf, -torch.inf
    out[:, 2] = 0
    rows = (
        Rows(0, 3, BLOCK),
        Rows(3, 5, FIRST | BLOCK),
        Rows(5, 6, FIRST),
        Rows(6, 8, BLOCK | LAST),
        Rows(8, 9, LAST),
    )
    state = State(out.clone(), lse.clone(), torch.full_like(out, torch.nan))
    merge_rows(state, block, block_lse, 0, rows, sink=False)
    p, r = lse.exp(), torch.where(block_lse == torch.inf, 0.0, block_lse.exp())
    weights = ((x / (p + r)).transpose(1, 2)[..., None] for x in (p, r))
    both = sum(w * torch.nan_to_num(x) for w, x in zip(weights, (out, block), strict=True))
    both, both_lse = torch.nan_to_num(both), (p + r).log()
    assert state.result is not None
    torch.testing.assert_close(state.out[:, :3], both[:, :3])
    torch.testing.assert_close(state.lse[..., :3], both_lse[..., :3])
    torch.testing.assert_close(state.out[:, 3:5], block[:, 3:5])
    torch.testing.assert_close(state.lse[..., 3:5], block_lse[..., 3:5])
    assert not state.out[:, 5].any()
    assert (state.lse[..., 5] == -torch.inf).all()
    torch.testing.assert_close(state.result[:, 6:8], both[:, 6:8])
    torch.testing.assert_close(state.result[:, 8], out[:, 8])
    assert state.result[:, :6].isnan().all()
    torch.testing.assert_close(state.out[:, 9], out[:, 9])
