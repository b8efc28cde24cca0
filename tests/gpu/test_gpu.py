"""On a GPU: the kernels, virtual ranks, and process groups over gloo and NCCL."""

from __future__ import annotations

import itertools
import os
import time

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import ring_flash_attn as rfa
from ring_flash_attn.cache import Cache
from ring_flash_attn.kernels.base import load_kernel
from ring_flash_attn.kernels.device_cache import DeviceCache
from ring_flash_attn.plan.build import route_names
from ring_flash_attn.plan.layout import layout_names
from ring_flash_attn.verify.oracle import Rules, oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LENGTHS = (37, 0, 5, 90, 1)
CU_SEQLENS = [0, 37, 37, 42, 132, 133]
NAMES = ("out", "dq", "dk", "dv")


def _inputs(dtype: torch.dtype, headdim_v: int = 16) -> list[torch.Tensor]:
    """q, k, v and dout of a packed stream, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((133, 4, 32), (133, 2, 32), (133, 2, headdim_v), (133, 4, headdim_v))
    return [torch.randn(s, generator=generator).to("cuda", dtype) for s in shapes]


def _expected(inputs: list[torch.Tensor], rules: Rules) -> list[torch.Tensor]:
    q, k, v = (x.double().clone().requires_grad_() for x in inputs[:3])
    out, _ = oracle(q, k, v, rules, CU_SEQLENS, CU_SEQLENS)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3].double())]


def _errors(got: list[torch.Tensor], want: list[torch.Tensor]) -> dict[str, float]:
    return {
        name: float((a.double() - b).abs().max() / b.abs().max())
        for name, a, b in zip(NAMES, got, want, strict=True)
    }


TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 3e-3,
}


KERNELS = [
    *(("reference", dtype) for dtype in TOLERANCE),
    *(("triton", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
]


# Routes, and how many sources a launch of the ring takes; on 4 ranks 2 of 3 hops are 1 and 2.
WAYS = [*((route, None) for route in route_names()), ("ring", 1), ("ring", 2)]


def _on_virtual_ranks(
    layout: str, route: str, sources: int | None, kernel: str, dtype: torch.dtype
) -> dict[str, float]:
    inputs = _inputs(dtype)
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0], device="cuda")
    options = {"causal": True, "window_size": (40, -1), "softcap": 5.0, "alibi_slopes": slopes}
    torch.manual_seed(1)
    out = rfa.virtual_ring_attention(
        q,
        k,
        v,
        world_size=4,
        layout=layout,
        route=route,
        sources_per_launch=sources,
        cu_seqlens=torch.tensor(CU_SEQLENS, device="cuda"),
        dropout_p=0.2,
        kernel=kernel,
        **options,
    )
    out.backward(inputs[3])
    torch.manual_seed(1)
    seed = int(torch.randint(1 << 62, (), dtype=torch.int64))
    want = _expected(inputs, Rules(dropout_p=0.2, seed=seed, **options))
    return _errors([out.detach(), q.grad, k.grad, v.grad], want)


def _virtual(rank: int, world_size: int) -> list[str]:
    """What fails of this process's part of layouts × routes × kernels × dtypes."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    failures = []
    cases = list(itertools.product(layout_names(), WAYS, KERNELS))
    for layout, (route, sources), (kernel, dtype) in cases[rank::world_size]:
        errors = _on_virtual_ranks(layout, route, sources, kernel, dtype)
        if not all(error < TOLERANCE[dtype] for error in errors.values()):
            failures.append(f"{layout} {route} {sources} {kernel} {dtype}: {errors}")
    return failures


@pytest.mark.timeout(600)
def test_virtual_ranks(ranks) -> None:
    """Every layout, route, kernel and dtype; on 12 processes, since compiling takes long."""
    failures = [line for part in ranks(12, "gloo").run(_virtual, timeout=580) for line in part]
    assert not failures, "\n".join(failures)


HEADDIMS = [(16, 16), (40, 40), (59, 111), (64, 128), (96, 80), (128, 128), (192, 128), (256, 256)]
LENGTHS_Q_K = [(1, 1), (1, 9), (239, 1), (113, 203), (640, 128), (1023, 1024)]
ALL_LENGTHS_Q_K = [
    *LENGTHS_Q_K,
    *((64, 128), (799, 3), (108, 256), (512, 256), (1024, 1023), (4096, 4096), (4224, 4224)),
]
FEATURES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (100, 30)},
    "softcap": {"causal": True, "softcap": 15.0},
    "alibi": {"causal": True, "alibi_slopes": True},
    "dropout": {"causal": True, "dropout_p": 0.17},
}
HALVES = (torch.bfloat16, torch.float16)
GRID = [
    *((headdims, "causal", dtype) for headdims in HEADDIMS for dtype in HALVES),
    *((headdims, "causal", torch.float32) for headdims in ((40, 40), (64, 64), (128, 128))),
    *(((64, 64), feature, dtype) for feature in FEATURES for dtype in HALVES),
    *(((59, 111), feature, torch.bfloat16) for feature in FEATURES),
]


def _lengths(headdims: tuple[int, int], feature: str) -> list[tuple[int, int]]:
    """All lengths where few other things are odd."""
    return ALL_LENGTHS_Q_K if headdims[0] == headdims[1] >= 64 else LENGTHS_Q_K


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.detach().double() - want).abs().max())


def _grid(rank: int, world_size: int) -> tuple[int, list[str]]:
    """Number of comparisons, and those that fail, of this process's part of the grid."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    count, failures = 0, []
    for headdims, feature, dtype in GRID[rank::world_size]:
        for lengths in _lengths(headdims, feature):
            for name, error, limit in _compare(headdims, feature, dtype, lengths):
                count += 1
                if not error <= limit:
                    failures.append(
                        f"{name} {headdims} {feature} {dtype} {lengths}: {error} > {limit}"
                    )
            torch.cuda.empty_cache()  # the processes share a GPU
    return count, failures


def _compare(
    headdims: tuple[int, int], feature: str, dtype: torch.dtype, lengths: tuple[int, int]
) -> list[tuple[str, float, float]]:
    """Errors against fp64, and their limits: twice those of plain torch in this dtype, and a band.

    The band is some roundings of the result. A query that sees one key has dq = 0 as the difference
    of two equal terms, dp and delta, of which delta comes from the rounded output; for dk likewise.
    There it is some roundings of these terms.
    """
    options = dict(FEATURES[feature])
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.linspace(0.05, 0.5, 6, device="cuda")
    torch.manual_seed(0)
    (d, dv), (seqlen_q, seqlen_k) = headdims, lengths
    batch = 1 if seqlen_q > 2000 else 2  # the oracle keeps all scores
    shapes = ((seqlen_q, 6, d), (seqlen_k, 2, d), (seqlen_k, 2, dv), (seqlen_q, 6, dv))
    q, k, v, dout = (torch.randn(batch, *s, device="cuda").to(dtype) for s in shapes)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.manual_seed(1)
    out = rfa.triton_flash_attn_func(*leaves, **options)
    got = [out, *torch.autograd.grad(out, leaves, dout)]
    torch.manual_seed(1)
    rules = Rules(seed=int(torch.randint(1 << 62, (), dtype=torch.int64)), **options)
    exact, plain = (
        _plain([x.to(kind) for x in (q, k, v)], dout.to(kind), rules)
        for kind in (torch.float64, dtype)
    )
    terms = dict.fromkeys(NAMES, 0.0)
    if seqlen_k == 1:
        values = v.repeat_interleave(3, 2)  # of each query head
        dp = float((dout * values).abs().sum(-1).max()) / (1 - options.get("dropout_p", 0))
        terms["dq"] = dp * float(k.abs().max()) * d**-0.5
        terms["dk"] = dp * float(q.abs().max()) * d**-0.5 * (3 * seqlen_q) ** 0.5
    eps = torch.finfo(dtype).eps
    return [
        (
            name,
            _error(a, b),
            2 * _error(c, b) + 4 * eps * float(b.abs().max()) + eps * terms[name] + 1e-6,
        )
        for name, a, b, c in zip(NAMES, got, exact, plain, strict=True)
    ]


@pytest.mark.timeout(600)
def test_triton(ranks) -> None:
    """Head dimensions, lengths, features, dtypes; on 12 processes, since compiling takes long."""
    parts = ranks(12, "gloo").run(_grid, timeout=580)
    cases = sum(len(_lengths(headdims, feature)) for headdims, feature, _ in GRID)
    assert sum(count for count, _ in parts) == cases * len(NAMES)
    failures = [failure for _, failures in parts for failure in failures]
    assert not failures, "\n".join(failures)


def _plain(inputs: list[torch.Tensor], dout: torch.Tensor, rules: Rules) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out, _ = oracle(*leaves, rules)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def test_triton_loses_nothing_by_distributing() -> None:
    """RMS errors on 8 ranks are those on one, in bf16."""
    torch.manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, 2048, heads, 128, device="cuda").bfloat16() for heads in (4, 2, 2, 4)
    )
    exact = _plain([x.double() for x in (q, k, v)], dout.double(), Rules(causal=True))

    def errors(world_size: int) -> list[float]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = rfa.virtual_ring_attention(
            *leaves,
            world_size=world_size,
            layout="zigzag",
            route="ring",
            kernel="triton",
            causal=True,
        )
        got = [out, *torch.autograd.grad(out, leaves, dout)]
        return [float((a.detach().double() - b).square().mean().sqrt()) for a, b in zip(got, exact)]

    for name, one, eight in zip(NAMES, errors(1), errors(8), strict=True):
        assert eight <= 1.1 * one, (name, eight / one)


def test_triton_is_deterministic() -> None:
    q, k, v, dout = _inputs(torch.bfloat16)
    cu_seqlens = torch.tensor(CU_SEQLENS, device="cuda", dtype=torch.int32)

    def grads() -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = rfa.triton_flash_attn_varlen_func(
            *leaves, cu_seqlens, cu_seqlens, 90, 90, causal=True, deterministic=True
        )
        return list(torch.autograd.grad(out, leaves, dout))

    first = grads()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(grads(), first, strict=True))


def test_triton_keeps_documents_apart() -> None:
    """A NaN in one document stays there, although blocks do not divide documents."""
    q, k, v, dout = _inputs(torch.bfloat16)
    clean = [x.clone().requires_grad_() for x in (q, k, v)]
    dirty = [x.clone() for x in (q, k, v)]
    for x in dirty:
        x[37:42] = torch.nan
        x.requires_grad_()
    cu_seqlens = torch.tensor(CU_SEQLENS, device="cuda", dtype=torch.int32)
    results = []
    for leaves in (clean, dirty):
        out = rfa.triton_flash_attn_varlen_func(
            *leaves, cu_seqlens, cu_seqlens, 90, 90, causal=True
        )
        results.append([out, *torch.autograd.grad(out, leaves, dout)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a[:37], b[:37])
        assert torch.equal(a[42:], b[42:])


def test_triton_follows_cu_seqlens() -> None:
    """Packs of one shape that take turns, and one that is edited in place."""
    q, k, v, dout = _inputs(torch.bfloat16)
    packs = [
        torch.tensor(offsets, device="cuda", dtype=torch.int32)
        for offsets in ([0, 37, 42, 133], [0, 64, 128, 133])
    ]

    def results(cu_seqlens: torch.Tensor, kernel: str) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = rfa.flash_attn_varlen_func(
            *leaves, cu_seqlens, cu_seqlens, 133, 133, causal=True, kernel=kernel
        )
        return [out, *torch.autograd.grad(out, leaves, dout)]

    wanted = [results(pack, "reference") for pack in packs]
    for number in (0, 1, 0, 1, 1, 0):
        for a, b in zip(results(packs[number], "triton"), wanted[number], strict=True):
            assert torch.allclose(a, b, atol=0.05)
    packs[0].copy_(packs[1])
    for a, b in zip(results(packs[0], "triton"), wanted[1], strict=True):
        assert torch.allclose(a, b, atol=0.05)


def test_triton_in_a_full_graph() -> None:
    q, k, v, dout = (x.unflatten(0, (1, -1)) for x in _inputs(torch.bfloat16))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return rfa.triton_flash_attn_func(q, k, v, causal=True)

    results = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, dout)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_triton_draws_the_same_dropout_again(compiled: bool) -> None:
    """Layers that are computed again in backward drop the same entries."""
    q, k, v, dout = (x.unflatten(0, (1, -1)) for x in _inputs(torch.bfloat16))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return rfa.triton_flash_attn_func(q, k, v, causal=True, dropout_p=0.3)

    def again(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return checkpoint(attend, q, k, v, use_reentrant=False)

    results = []
    for function in (attend, again):
        if compiled:
            function = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.manual_seed(7)
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, dout)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("form", ["func", "qkvpacked_func"])
def test_triton_host_time(form: str) -> None:
    """Forward calls return within 100 microseconds; twice that here, for slower hosts."""
    x = torch.randn(1, 64, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    inputs = [x] if form == "qkvpacked_func" else list(x.unbind(2))
    function = getattr(rfa, f"triton_flash_attn_{form}")
    times = []
    with torch.no_grad():
        for _ in range(20):
            function(*inputs, causal=True)
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(20):
                function(*inputs, causal=True)
            times.append((time.perf_counter() - start) / 20 * 1e6)
    assert min(times) < 200


def test_triton_needs_no_more_memory() -> None:
    """Less than 1.2 times the peak of torch's FlashAttention-2, forward and backward."""
    q, k, v, dout = (
        torch.randn(1, 4096, heads, 128, device="cuda", dtype=torch.bfloat16)
        for heads in (16, 4, 4, 16)
    )

    def fa2(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return rfa.triton_flash_attn_func(q, k, v, causal=True)

    peaks = []
    for function in (ours, fa2):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        torch.autograd.grad(function(*leaves), leaves, dout)  # tables, workspaces
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(function(*leaves), leaves, dout)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] < 1.2 * peaks[1], peaks


def _over_a_group(
    rank: int, world_size: int, kernel: str, dtype: torch.dtype
) -> list[dict[str, float]]:
    """Errors of this rank for every layout × route, with dropout where the kernel has it."""
    dropout_p = 0.0 if kernel == "fa2" else 0.1
    torch.cuda.set_device(rank % torch.cuda.device_count())
    inputs = _inputs(dtype, 32 if kernel == "fa2" else 16)
    found = []
    for layout in layout_names():
        for route, sources in WAYS:
            torch.manual_seed(rank)  # ranks disagree: the first one's seed counts
            q, k, v, dout = (rfa.shard(x, layout, cu_seqlens=CU_SEQLENS) for x in inputs)
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out = rfa.ring_attention(
                *leaves,
                layout=layout,
                route=route,
                sources_per_launch=sources,
                cu_seqlens=torch.tensor(CU_SEQLENS, device="cuda"),
                causal=True,
                dropout_p=dropout_p,
                kernel=kernel,
            )
            out.backward(dout)
            torch.manual_seed(0)
            seed = int(torch.randint(1 << 62, (), dtype=torch.int64))
            want = _expected(inputs, Rules(causal=True, dropout_p=dropout_p, seed=seed))
            local = [rfa.shard(x, layout, cu_seqlens=CU_SEQLENS) for x in want]
            found.append(_errors([out.detach(), *(x.grad for x in leaves)], local))
    return found


def _check(found: list[list[dict[str, float]]], dtype: torch.dtype) -> None:
    assert len(found[0]) == len(layout_names()) * len(WAYS)
    for rank, errors in enumerate(found):
        for case in errors:
            assert all(error < TOLERANCE[dtype] for error in case.values()), (rank, case)


_ANY_STREAM = pytest.mark.parametrize(
    ("kernel", "dtype"),
    [("triton", torch.bfloat16), ("triton", torch.float32), ("fa2", torch.bfloat16)],
    ids=["hopper", "portable", "fa2"],
)


def _packed_gradients(x: torch.Tensor, lengths: list[int], kernel: str) -> list[torch.Tensor]:
    """out and gradient of packed documents; the host waits for nothing."""
    cu = [0, *itertools.accumulate(lengths)]
    x, longest = x.detach().requires_grad_(), max(lengths)
    out = rfa.flash_attn_varlen_func(x, x, x, cu, cu, longest, longest, causal=True, kernel=kernel)
    return [out.detach(), *torch.autograd.grad(out.sum(), x)]


@_ANY_STREAM
def test_one_plan_on_two_streams_of_which_one_is_held_back(kernel: str, dtype: torch.dtype) -> None:
    """The second stream's kernels read tables whose copy the first has only queued."""
    x = torch.randn(1000, 4, 64, device="cuda", dtype=dtype)
    _packed_gradients(x, [300, 2, 698], kernel)  # compiles
    lengths = [301, 2, 697]  # a new plan
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    found = []
    for stream in streams:
        with torch.cuda.stream(stream):
            if stream is streams[0]:
                torch.cuda._sleep(10**9)  # more than half a second
            found.append(_packed_gradients(x, lengths, kernel))
    assert not streams[0].query(), "it was not held back"
    torch.cuda.synchronize()
    want = _packed_gradients(x, lengths, kernel)
    for got in found:
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


@_ANY_STREAM
def test_evicted_tables_outlive_the_kernels_of_other_streams(
    monkeypatch: pytest.MonkeyPatch, kernel: str, dtype: torch.dtype
) -> None:
    """More plans than are kept, while a stream that is held back has yet to read its tables."""
    from ring_flash_attn.kernels import launches, tables

    def small() -> DeviceCache:
        cache: DeviceCache = DeviceCache()
        cache._newest = Cache(4, cache._retire)  # those of one call
        return cache

    monkeypatch.setattr(tables, "_tables", small())
    monkeypatch.setattr(launches, "_launches", Cache(1))
    if kernel == "fa2":
        monkeypatch.setattr(load_kernel(kernel), "_launches", small())
    x = torch.randn(1000, 4, 64, device="cuda", dtype=dtype)
    lengths = [301, 2, 697]
    for first in (1, 39):  # compiles
        _packed_gradients(x, [first, 2, 998 - first], kernel)
    want = _packed_gradients(x, lengths, kernel)  # tables are made on this stream
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(4 * 10**9)  # two seconds
        got = _packed_gradients(x, lengths, kernel)
    for first in range(1, 40):  # evicts, and takes the memory of what was evicted
        _packed_gradients(x, [first, 2, 998 - first], kernel)
    assert not stream.query(), "it has read its tables by now: hold it back for longer"
    torch.cuda.synchronize()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kernel", ["auto", "triton", "native", "reference"])
def test_the_default_device_may_be_the_gpu(kernel: str) -> None:
    x = torch.randn(600, 4, 64, device="cuda", dtype=torch.bfloat16)
    want = _packed_gradients(x, [123, 477], kernel)
    torch.set_default_device("cuda")
    try:
        got = _packed_gradients(x, [122, 478], kernel)
        got = _packed_gradients(x, [123, 477], kernel)
        rfa.flash_attn_func(x[None], x[None], x[None], dropout_p=0.1, kernel="triton")
        rfa.virtual_ring_attention(
            x, x, x, world_size=2, layout="zigzag", route="ring", cu_seqlens=[0, 600], kernel=kernel
        )
    finally:
        torch.set_default_device(None)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


_OVER_A_GROUP = pytest.mark.parametrize(
    ("kernel", "dtype"),
    [("reference", torch.float64), ("triton", torch.bfloat16), ("fa2", torch.bfloat16)],
    ids=["reference", "triton", "fa2"],
)


@pytest.mark.parametrize("sources", [1, 2, None])
@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
def test_rings_of_much_work(layout: str, sources: int | None) -> None:
    """Own keys in two launches, groups under way one step ahead, sums by one kernel."""
    lengths = [3000, 40, 5000, 700, 1260, 2000]
    cu_seqlens = [0, *itertools.accumulate(lengths)]
    torch.manual_seed(0)
    shape = (sum(lengths), 4, 64)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    k, v = k[:, :2].contiguous(), v[:, :2].contiguous()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    most = max(lengths)
    want = rfa.flash_attn_varlen_func(
        *leaves, cu_seqlens, cu_seqlens, most, most, causal=True, kernel="triton"
    )
    expected = [want, *torch.autograd.grad(want, leaves, dout)]
    got = rfa.virtual_ring_attention(
        *leaves,
        world_size=4,
        layout=layout,
        route="ring",
        sources_per_launch=sources,
        cu_seqlens=cu_seqlens,
        causal=True,
        kernel="triton",
    )
    found = [got, *torch.autograd.grad(got, leaves, dout)]
    errors = _errors([x.detach() for x in found], [x.detach() for x in expected])
    assert all(error < TOLERANCE[torch.bfloat16] for error in errors.values()), errors


@_OVER_A_GROUP
def test_gloo_stages_cuda_tensors(ranks, kernel: str, dtype: torch.dtype) -> None:
    _check(ranks(4, "gloo").run(_over_a_group, kernel, dtype, timeout=300), dtype)


def _nccl_ranks() -> int:
    """How many; with one GPU this needs NCCL 2.30 or later and NCCL_MULTI_RANK_GPU_ENABLE=1."""
    world_size = min(torch.cuda.device_count(), 4)
    if world_size == 1:
        if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
            pytest.skip("one GPU, and NCCL_MULTI_RANK_GPU_ENABLE is not set")
        world_size = 4
    return world_size


@_OVER_A_GROUP
def test_nccl(ranks, kernel: str, dtype: torch.dtype) -> None:
    _check(ranks(_nccl_ranks(), "nccl").run(_over_a_group, kernel, dtype, timeout=300), dtype)


def _captured(rank: int, world_size: int) -> None:
    """Forward and backward in one CUDA graph; each replay gives the bits of an eager call."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    generator = torch.Generator().manual_seed(0)
    lengths = [700, 300, 24]
    cu_seqlens = [0, *itertools.accumulate(lengths)]
    whole = [torch.randn(1024, 4, 64, generator=generator) for _ in range(8)]
    for layout, route in (("balanced", "ring"), ("zigzag", "all_gather"), ("zigzag", "mesh")):
        first, second = (
            [
                rfa.shard(x.to("cuda", torch.bfloat16), layout, cu_seqlens=cu_seqlens)
                for x in whole[n : n + 4]
            ]
            for n in (0, 4)
        )

        def run(q, k, v, dout, layout=layout, route=route):
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = rfa.ring_attention(
                *leaves,
                layout=layout,
                route=route,
                cu_seqlens=cu_seqlens,
                causal=True,
                deterministic=True,
                kernel="triton",
            )
            return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

        expected = [run(*each) for each in (first, second)]
        static = [x.clone() for x in first]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(*static)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = run(*static)
        for inputs, want in zip((first, second, first), (*expected, expected[0]), strict=True):
            for x, new in zip(static, inputs, strict=True):
                x.copy_(new)
            graph.replay()
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True)), (layout, route)


def test_graphs_with_nccl(ranks) -> None:
    ranks(_nccl_ranks(), "nccl").run(_captured, timeout=300)


def _refused(rank: int, world_size: int) -> None:
    torch.cuda.set_device(0)
    q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16)
    rfa.zigzag_ring_flash_attn_func(q, q, q, causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    refused = pytest.raises(RuntimeError, match="gloo's messages go through the host")
    with refused, torch.cuda.graph(graph):
        rfa.zigzag_ring_flash_attn_func(q, q, q, causal=True)
    rfa.zigzag_ring_flash_attn_func(q, q, q, causal=True)


def test_graphs_with_gloo_are_refused(ranks) -> None:
    ranks(2, "gloo").run(_refused, timeout=300)


def _relayouts(rank: int, n: int) -> None:
    """Of packed documents and of a batch, with gradients; and of dtypes that NCCL does not know."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(133, 3, 8, generator=generator).to("cuda", torch.bfloat16)
    batch = torch.randn(2, 37, 5, generator=generator).cuda()
    for before, after in itertools.product(layout_names(), repeat=2):
        for x, lengths in ((packed, {"cu_seqlens": CU_SEQLENS}), (batch, {})):
            seqlen = {} if lengths else {"seqlen": 37}
            ours = rfa.shard(x, before, **lengths).requires_grad_()
            out = rfa.relayout(ours, before, after, **lengths, **seqlen)
            assert torch.equal(out, rfa.shard(x, after, **lengths))
            (grad,) = torch.autograd.grad(out, ours, rfa.shard(x.cos(), after, **lengths))
            assert torch.equal(grad, rfa.shard(x.cos(), before, **lengths))
    for dtype in (torch.bool, torch.int16, torch.complex128, torch.float8_e4m3fn):
        size = torch.empty(0, dtype=dtype).element_size()
        bits = torch.randint(0, 2, (133, size), generator=generator).to("cuda", torch.uint8)
        ours = rfa.shard(bits, "zigzag", cu_seqlens=CU_SEQLENS).view(dtype)
        out = rfa.relayout(ours, "zigzag", "flat_stripe", cu_seqlens=CU_SEQLENS)
        expected = rfa.shard(bits, "flat_stripe", cu_seqlens=CU_SEQLENS)
        assert torch.equal(out.view(torch.uint8), expected)


def test_relayout_with_gloo(ranks) -> None:
    ranks(4, "gloo").run(_relayouts, timeout=300)


def test_relayout_with_nccl(ranks) -> None:
    ranks(_nccl_ranks(), "nccl").run(_relayouts, timeout=300)


@pytest.mark.parametrize("kernel", ["reference", "triton"])
def test_no_host_synchronisation(kernel: str) -> None:
    """Apart from copying a new cu_seqlens, nothing waits for the device."""
    inputs = _inputs(torch.bfloat16)
    cu_seqlens = torch.tensor(CU_SEQLENS, device="cuda", dtype=torch.int32)

    def run() -> None:
        q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
        out = rfa.flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, 90, 90, causal=True, kernel=kernel
        )
        out.backward(inputs[3])

    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cu_seqlens_on_the_cpu() -> None:
    """Read at every call, without waiting for the device, whoever wrote to it."""
    q, k, v, _ = _inputs(torch.bfloat16)
    offsets = torch.tensor(CU_SEQLENS, dtype=torch.int32)

    def run(cu_seqlens: torch.Tensor) -> torch.Tensor:
        return rfa.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 133, 133, causal=True)

    others = torch.tensor([0, 64, 64, 70, 100, 133], dtype=torch.int32)
    expected = [run(x.cuda()) for x in (offsets, others)]
    run(offsets)  # tables of the plan
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [run(offsets)]
        offsets.numpy()[:] = others.numpy()
        found.append(run(offsets))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_cu_seqlens_written_behind_the_version() -> None:
    """The next call but one says so; who goes on gets right results."""
    q, k, v, _ = _inputs(torch.bfloat16)
    first, second = (
        torch.tensor(offsets, device="cuda") for offsets in ([0, 37, 42, 133], [0, 64, 128, 133])
    )

    def run(cu_seqlens: torch.Tensor) -> torch.Tensor:
        return rfa.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 133, 133, causal=True)

    buffer = first.clone()
    assert torch.equal(run(buffer), run(first))
    buffer.data.copy_(second)
    run(buffer)  # nobody can know yet
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=r"cu_seqlens_q for \[0, 37, 42, 133\].*\[0, 64, 128"):
        run(first)
    assert torch.equal(run(buffer), run(second))
