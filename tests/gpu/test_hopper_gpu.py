"""The Hopper kernels on a Hopper GPU: rings, streams and graphs, repeats, strided tensors."""

from __future__ import annotations

import itertools
from unittest import mock

import maxima
import pytest
import torch

import ring_flash_attn as rfa
from ring_flash_attn.plan.build import route_names
from ring_flash_attn.plan.layout import layout_names
from ring_flash_attn.verify.oracle import Rules, oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]

LENGTHS = (700, 129, 37, 1, 300)
CU_SEQLENS = [0, *itertools.accumulate(LENGTHS)]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}  # of the largest entry
REPEATS = 1000


def _inputs(headdim: int, dtype: torch.dtype, *lengths: int) -> list[torch.Tensor]:
    """q, k, v and dout, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(*lengths, heads, headdim, generator=generator).to("cuda", dtype)
        for heads in (4, 2, 2, 4)
    ]


def _rings(rank: int, world_size: int) -> list[str]:
    """What fails of this process's part of layouts × routes × dtypes and head dimensions."""
    from ring_flash_attn.kernels.triton.hopper import host

    torch.cuda.set_device(rank % torch.cuda.device_count())
    failures = []
    kinds = [(64, torch.bfloat16), (128, torch.float16)]
    cases = list(itertools.product(layout_names(), route_names(), kinds))
    for layout, route, (headdim, dtype) in cases[rank::world_size]:
        inputs = _inputs(headdim, dtype, CU_SEQLENS[-1])
        leaves = [x.clone().requires_grad_() for x in inputs[:3]]
        with mock.patch.object(host, "launch", wraps=host.launch) as launches:
            out = rfa.virtual_ring_attention(
                *leaves,
                world_size=4,
                layout=layout,
                route=route,
                cu_seqlens=torch.tensor(CU_SEQLENS, device="cuda"),
                causal=True,
                kernel="triton",
            )
            got = [out, *torch.autograd.grad(out, leaves, inputs[3])]
        exact = [x.double().clone().requires_grad_() for x in inputs[:3]]
        want, _ = oracle(*exact, Rules(causal=True), CU_SEQLENS, CU_SEQLENS)
        wanted = [want, *torch.autograd.grad(want, exact, inputs[3].double())]
        errors = [
            float((a.double() - b).abs().max() / b.abs().max())
            for a, b in zip(got, wanted, strict=True)
        ]
        if not launches.called or not all(error < TOLERANCE[dtype] for error in errors):
            failures.append(f"{layout} {route} {headdim} {dtype}: {launches.call_count} {errors}")
    return failures


@pytest.mark.timeout(600)
def test_rings(ranks) -> None:
    """Every layout and route, with documents shorter than a block and longer ones."""
    failures = [line for part in ranks(12, "gloo").run(_rings, timeout=580) for line in part]
    assert not failures, "\n".join(failures)


def _in_one_order(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, **options: bool
) -> list[torch.Tensor]:
    """out, dk and dv, which are the same to the bit in every run; dq need not be."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = rfa.triton_flash_attn_func(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)[1:]]


def test_streams_and_graphs_do_not_share_work() -> None:
    """Kernels that run at the same time each do all of their own pieces of work."""
    inputs = [_inputs(64, torch.bfloat16, 8, length) for length in (1200, 1500)]
    # More pieces than multiprocessors: else programs take none from the counter.
    assert torch.cuda.get_device_properties(0).multi_processor_count < 8 * 2 * 10
    wanted = [_in_one_order(*x, causal=True) for x in inputs]
    torch.cuda.synchronize()
    graphs, outs = [], []
    for x in inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append([_in_one_order(*x, causal=True) for _ in range(3)])
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in range(4)]
    for _ in range(50):
        eager = []
        for number in (0, 1):
            with torch.cuda.stream(streams[number]):
                graphs[number].replay()
            with torch.cuda.stream(streams[2 + number]):
                eager.append(_in_one_order(*inputs[number], causal=True))
        torch.cuda.synchronize()
        for number in (0, 1):
            for found in (eager[number], *outs[number]):
                for x, want in zip(found, wanted[number], strict=True):
                    assert torch.equal(x, want)
                    x.zero_()


@pytest.mark.parametrize(("headdim", "headdim_v"), [(64, 64), (128, 128), (256, 128)])
def test_repeats(headdim: int, headdim_v: int) -> None:
    """Forward and ordered backward to the bit; dQ that is added as it comes to some roundings."""
    q, k, v, dout = _inputs(headdim, torch.bfloat16, 16, 777)  # programs have several pieces
    leaves = [x.requires_grad_() for x in (q, k, v[..., :headdim_v])]
    dout = dout[..., :headdim_v]

    def results(deterministic: bool) -> list[torch.Tensor]:
        out = rfa.triton_flash_attn_func(*leaves, causal=True, deterministic=deterministic)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    ordered = results(True)
    for _ in range(REPEATS):
        assert all(torch.equal(a, b) for a, b in zip(results(True), ordered, strict=True))
    limit = 2 * torch.finfo(torch.bfloat16).eps
    for _ in range(REPEATS):
        out, dq, dk, dv = results(False)
        assert torch.equal(out, ordered[0])
        for a, b in ((dq, ordered[1]), (dk, ordered[2]), (dv, ordered[3])):
            assert float((a - b).abs().max() / b.abs().max()) < limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_a_maximum_may_come_anywhere(headdim: int, dtype: torch.dtype) -> None:
    for kind, causal in itertools.product(maxima.KINDS, (False, True)):
        error, lse_error = maxima.errors(kind, 1024, headdim, dtype, "cuda", causal)
        assert error < TOLERANCE[dtype], (kind, causal)
        assert lse_error < 1e-5, (kind, causal)
    assert maxima.nans(700, headdim, "cuda") == (0, 350, 0)


def test_views_are_read_where_they_are() -> None:
    """Packed q, k and v, and heads before rows, give the same results, without copies."""
    from ring_flash_attn.kernels.triton.hopper import host

    qkv = torch.randn(2, 300, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    views = qkv.unbind(2)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in views]
    want = rfa.triton_flash_attn_func(*(x.contiguous() for x in views), causal=True)
    for given in (views, heads_first):
        assert all(host.fit(x) is x for x in given)
        assert torch.equal(rfa.triton_flash_attn_func(*given, causal=True), want)


def test_multiprocessors_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from ring_flash_attn.kernels import launches, scheduler
    from ring_flash_attn.kernels.triton.hopper import host

    inputs = _inputs(128, torch.bfloat16, 2, 1000)
    wanted = _in_one_order(*inputs)
    left = torch.cuda.get_device_properties(0).multi_processor_count - 2
    monkeypatch.setenv(scheduler.MARGIN, str(left))
    launches._launches.clear()
    scheduler.free_processors.cache_clear()
    with mock.patch.object(host, "first", wraps=host.first) as first:
        got = _in_one_order(*inputs)
    monkeypatch.undo()
    launches._launches.clear()
    scheduler.free_processors.cache_clear()
    assert [call.args[2][0] for call in first.call_args_list] == [2, 2]
    assert all(torch.equal(x, want) for x, want in zip(got, wanted, strict=True))


@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_launches_without_triton(headdim: int) -> None:
    """Those that were made before go to the driver directly; with a hook, through Triton again."""
    import triton

    from ring_flash_attn.kernels import launches

    hook, told = triton.knobs.runtime.launch_enter_hook, []
    launches._launches.clear()
    wanted = _in_one_order(*_inputs(headdim, torch.bfloat16, 2, 1000))
    assert all(each.flat is not None for each in launches._launches._entries.values())
    for hooks in ([], [told.append], []):
        hook.calls[:] = hooks
        got = _in_one_order(*_inputs(headdim, torch.bfloat16, 2, 1000))
        assert all(torch.equal(x, want) for x, want in zip(got, wanted, strict=True))
    assert len(told) >= 3


@pytest.mark.parametrize(
    ("headdim", "headdim_v", "nheads", "nheads_k"),
    [(64, 64, 8, 1), (80, 80, 12, 3), (128, 128, 32, 2), (192, 128, 6, 1), (256, 256, 8, 1)],
)
def test_packed_heads(headdim: int, headdim_v: int, nheads: int, nheads_k: int) -> None:
    """Documents that end inside of blocks, on one device and in a ring, also with a window."""
    from ring_flash_attn.kernels.triton.hopper import host

    generator = torch.Generator().manual_seed(nheads + headdim)
    lengths = torch.randint(1, 300, (9,), generator=generator).tolist()
    offsets = [0, *itertools.accumulate(lengths)]
    shapes = [(nheads, headdim), (nheads_k, headdim), (nheads_k, headdim_v)]
    exact = [torch.randn(offsets[-1], *shape, generator=generator).bfloat16() for shape in shapes]
    q, k, v = (x.cuda() for x in exact)
    failures = []
    for options in ({}, {"window_size": (100, 0)}, {"softcap": 5.0}):
        causal = {"causal": True, **options}
        want, want_lse = oracle(
            *(x.double().cuda() for x in exact), Rules(**causal), offsets, offsets
        )
        for world_size in (1, 3):
            with mock.patch.object(host, "launch", wraps=host.launch) as launches:
                out, lse, _ = rfa.virtual_ring_attention(
                    q,
                    k,
                    v,
                    world_size=world_size,
                    layout="flat_contiguous",
                    route="ring",
                    cu_seqlens=torch.tensor(offsets, device="cuda"),
                    kernel="triton",
                    return_attn_probs=True,
                    **causal,
                )
            packs = {call.args[7]["PACK_GQA"] for call in launches.call_args_list}
            error = float((out.double() - want).abs().max() / want.abs().max())
            of_lse = float((lse.double() - want_lse).abs().max())
            if max(packs) == 1 or not error < TOLERANCE[q.dtype] or not of_lse < 1e-3:
                failures.append(f"{options} {world_size} {packs}: {error} {of_lse}")
    assert not failures, "\n".join(failures)


def test_pieces_wait_for_each_other() -> None:
    """Blocks whose keys come in pieces, on all SMs at once: the same bits every time."""
    from ring_flash_attn.kernels.device_cache import DeviceCache
    from ring_flash_attn.kernels.tables import Pieces
    from ring_flash_attn.kernels.triton.hopper import host

    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 6000, heads, 128) for heads in (16, 2, 2)]
    q, k, v = (torch.randn(*shape, generator=generator).bfloat16().cuda() for shape in shapes)

    def run() -> torch.Tensor:
        return rfa.virtual_ring_attention(
            q, k, v, world_size=3, layout="contiguous", route="ring", kernel="triton"
        )

    wanted = run()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for pieces in (Pieces(2, 1000), Pieces(4, 9), Pieces(4, 1000)):
        with (
            mock.patch.object(host, "_forward_tables", DeviceCache()),
            mock.patch.object(host, "pieces", return_value=pieces),
        ):
            with mock.patch.object(host, "launch", wraps=host.launch) as launches:
                first = run()
            assert any(call.args[7]["PIECES"] for call in launches.call_args_list)
            assert (first - wanted).abs().max() < 2e-2 * wanted.abs().max()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = run()
            for _ in range(100):
                graph.replay()
                assert torch.equal(captured, first)
                found = []
                torch.cuda.synchronize()
                for stream in streams:  # at the same time
                    with torch.cuda.stream(stream):
                        found.append(run())
                torch.cuda.synchronize()
                assert all(torch.equal(each, first) for each in found)
