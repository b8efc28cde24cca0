"""The reference kernel on one device: every feature, every odd size, memory, rounding, dropout."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import Results, Sample, check, expected_of, make_sample, results_of, rms
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from ring_flash_attn import flash_attn_func, flash_attn_varlen_func, virtual_ring_attention
from ring_flash_attn.kernels import dropout, reference
from ring_flash_attn.kernels.base import State
from ring_flash_attn.kernels.merge import merge
from ring_flash_attn.verify import oracle as oracle_module
from ring_flash_attn.verify.oracle import Rules

SEED = 2
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "left": {"window_size": (3, -1)},
    "right": {"window_size": (-1, 2)},
    "both": {"window_size": (4, 1)},
    "causal left": {"causal": True, "window_size": (0, -1)},
    "causal, right ignored": {"causal": True, "window_size": (2, 5)},
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"softmax_scale": 1.3},
    "softcap": {"softcap": 0.8},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.0, 1.25, -0.3])},
    "alibi of each sequence": {"alibi_slopes": torch.linspace(-0.2, 1.5, 8).view(2, 4)},
    "sink": {"sink": torch.tensor([0.4, -1.0, 30.0, -40.0], dtype=torch.float64)},
    "dropout": {"dropout_p": 0.35},
}


def run(sample: Sample, kernel: str = "reference") -> Results:
    """Forward and backward on one device."""
    options = dict(sample.options)
    sink = options.pop("sink", None)

    def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        torch.manual_seed(SEED)
        arguments = {**options, "sink": sink, "return_attn_probs": True, "kernel": kernel}
        if not sample.packed:
            return flash_attn_func(q, k, v, **arguments)[:2]
        cu_q, cu_k = (torch.tensor(cu) for cu in (sample.cu_seqlens_q, sample.cu_seqlens_k))
        longest = (int(cu_q.diff().max()), int(cu_k.diff().max()))
        return flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest, **arguments)[:2]

    return results_of(attend, sample, sink)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("mask", MASKS)
def test_every_feature_under_every_mask(mask: str, feature: str) -> None:
    for seqlens in ((17, 17), (5, 13), (13, 5)):
        sizes = dict(zip(("seqlen_q", "seqlen_k"), seqlens))
        sample = make_sample(**sizes, **MASKS[mask], **FEATURES[feature])
        check(run(sample), expected_of(sample, SEED), 1e-12)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), list(itertools.product((0, 1, 2, 7), repeat=2)))
@pytest.mark.parametrize("causal", [False, True])
def test_short_lengths(seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    """Nothing, one token, few: batch and as one of several packed documents."""
    batch = make_sample(seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=causal)
    check(run(batch), expected_of(batch, SEED), 1e-12)
    packed = make_sample((3, seqlen_q, 4), (3, seqlen_k, 6), causal=causal)
    check(run(packed), expected_of(packed, SEED), 1e-12)


@pytest.mark.parametrize(("headdim", "headdim_v"), [(1, 1), (3, 7), (64, 32), (96, 128), (129, 5)])
@pytest.mark.parametrize(("nheads", "nheads_k"), [(1, 1), (6, 6), (6, 3), (6, 1)])
def test_head_counts_and_dimensions(
    nheads: int, nheads_k: int, headdim: int, headdim_v: int
) -> None:
    heads: dict[str, int] = {"nheads": nheads, "nheads_k": nheads_k}
    dims: dict[str, int] = {"headdim": headdim, "headdim_v": headdim_v}
    sample = make_sample(seqlen_q=11, seqlen_k=14, causal=True, dropout_p=0.1, **heads, **dims)
    check(run(sample), expected_of(sample, SEED), 1e-12)


@pytest.mark.parametrize("feature", FEATURES)
def test_many_blocks(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 queries and 8 keys, so that bands start, end and lie inside of blocks."""
    monkeypatch.setattr(reference, "_SCORES", {"cpu": 1, "cuda": 1})
    monkeypatch.setattr(reference, "_COLUMNS", {"cpu": 8, "cuda": 8})
    for mask in ({"causal": True}, {"window_size": (19, 3)}, {"window_size": (0, 0)}, {}):
        sample = make_sample(seqlen_q=45, seqlen_k=53, **mask, **FEATURES[feature])
        check(run(sample), expected_of(sample, SEED), 1e-12)


def test_long_sequences_in_blocks_of_the_real_size() -> None:
    sample = make_sample(batch=1, seqlen_q=1100, nheads=2, nheads_k=1, causal=True)
    check(run(sample), expected_of(sample, SEED), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("feature", FEATURES)
def test_rows_without_keys(feature: str, dtype: torch.dtype) -> None:
    """out 0, lse −inf (with a sink: lse = sink), gradients 0; never a NaN."""
    options = dict(FEATURES[feature])
    sample = make_sample(seqlen_q=13, seqlen_k=5, causal=True, dtype=dtype, **options)
    actual = run(sample)
    for name, tensor in actual.items():
        assert not tensor.isnan().any(), name
    assert not actual["out"][:, :8].any()
    assert not actual["dq"][:, :8].any()
    blind = actual["lse"][..., :8].double()
    sink = sample.options.get("sink", torch.full((4,), -torch.inf)).double()
    assert torch.equal(blind, sink.to(actual["lse"].dtype).double()[:, None].expand_as(blind))
    assert torch.isfinite(actual["lse"][..., 8:]).all()


def test_a_sink_of_minus_infinity_is_no_sink() -> None:
    """Rows that see keys and rows that see none; its gradient is 0."""
    for seqlen_k in (17, 5):
        sizes: dict[str, Any] = {"seqlen_q": 17, "seqlen_k": seqlen_k, "causal": True}
        plain = run(make_sample(**sizes))
        none = run(make_sample(**sizes, sink=torch.full((4,), -torch.inf, dtype=torch.float64)))
        assert not none.pop("dsink").any()
        check(none, plain, 1e-15)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float16, 0.01), (torch.bfloat16, 0.05)]
)
def test_documents_without_keys(dtype: torch.dtype, tolerance: float) -> None:
    sample = make_sample((4, 5, 0), (0, 6, 3), dtype=dtype)
    actual = run(sample)
    assert not actual["out"][:4].any()
    assert (actual["lse"][:, :4] == -torch.inf).all()
    assert not actual["dk"][6:].any(), "keys that no query sees"
    check(actual, expected_of(sample, SEED), tolerance)


@pytest.mark.parametrize("scale", [1e3, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_enormous_scores(scale: float, dtype: torch.dtype) -> None:
    """Neither exp nor the rescaling overflows where one key takes all."""
    sample = make_sample(seqlen_q=9, causal=True, softmax_scale=scale, dtype=dtype)
    actual = run(sample)
    assert all(torch.isfinite(tensor).all() for tensor in actual.values())
    expected = expected_of(sample, SEED)
    assert rms(actual["out"], expected["out"]) < (1e-2 if dtype is torch.float32 else 1e-9)


@pytest.mark.parametrize("packed", [False, True])
def test_strided_inputs(packed: bool) -> None:
    """Views into larger tensors: heads first, every second row, a part of the last dimension."""
    sample = make_sample((7, 9) if packed else None, seqlen_q=16, causal=True)
    q = sample.q.transpose(-2, -3).contiguous().transpose(-2, -3)
    k = torch.stack([sample.k, sample.k], dim=-3).flatten(-4, -3)[..., ::2, :, :]
    v = torch.cat([sample.v, sample.v], dim=-1)[..., :6]
    assert not any(x.is_contiguous() for x in (q, k, v))
    dout = sample.dout[..., :1].expand_as(sample.dout)
    expanded = Sample(q, k, v, dout, sample.dlse, sample.cu_seqlens_q, sample.cu_seqlens_k)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def attend(*_: Any) -> tuple[Tensor, Tensor]:
        if not packed:
            return flash_attn_func(*leaves, return_attn_probs=True)[:2]
        cu = torch.tensor(sample.cu_seqlens_q)
        return flash_attn_varlen_func(*leaves, cu, cu, 9, 9, return_attn_probs=True)[:2]

    out, lse = attend()
    ((out * dout).sum() + (lse * sample.dlse).sum()).backward()
    actual = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *(x.grad for x in leaves))))
    check({n: x.detach() for n, x in actual.items()}, expected_of(expanded), 1e-12)


class LargestTensor(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation returns."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, Tensor):
                self.entries = max(self.entries, each.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("feature", FEATURES)
def test_memory_is_linear(feature: str) -> None:
    """No tensor is larger than a block of scores, whose size is fixed; S² entries would be 64 MiB.

    One head of dimension 4: at S = 4096 the inputs are far smaller than a block.
    """
    options = {n: x[..., :1] if isinstance(x, Tensor) else x for n, x in FEATURES[feature].items()}
    options = {n: x[:1] if n == "alibi_slopes" and x.dim() == 2 else x for n, x in options.items()}
    largest = []
    for seqlen in (2048, 4096):
        sizes: dict[str, Any] = {"batch": 1, "nheads": 1, "nheads_k": 1, "headdim": 4}
        sample = make_sample(seqlen_q=seqlen, dtype=torch.float32, **sizes, **options)
        with LargestTensor() as mode:
            run(sample)
        largest.append(mode.entries)
    block = 4 * reference._SCORES["cpu"]
    assert largest[1] <= 2 * block, "one block, of fp32 or int64"
    assert largest[0] == largest[1], f"grows with the sequence: {largest}"


def rounding_sample(dtype: torch.dtype) -> Sample:
    """Long enough for rounding errors to be smooth."""
    sizes: dict[str, Any] = {"batch": 1, "nheads": 2, "nheads_k": 1, "headdim": 32}
    return make_sample(seqlen_q=768, dtype=dtype, causal=True, **sizes)


def virtual(sample: Sample, world_size: int, layout: str, route: str) -> Results:
    """Forward and backward over virtual ranks, without a gradient through lse."""
    leaves = [x.clone().requires_grad_() for x in (sample.q, sample.k, sample.v)]
    out = virtual_ring_attention(
        *leaves,
        world_size=world_size,
        layout=layout,
        route=route,
        kernel="reference",
        **sample.options,
    )
    assert isinstance(out, Tensor)
    out.backward(sample.dout)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *(x.grad for x in leaves))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("layout", "route"),
    [("zigzag", "ring"), ("stripe", "query_ring"), ("contiguous", "all_gather")],
)
def test_distributing_costs_no_accuracy(layout: str, route: str, dtype: torch.dtype) -> None:
    """RMS error against fp64 over 4 and 8 ranks: at most 1.1 × that on one device."""
    sample = rounding_sample(dtype)
    exact = virtual(sample.to(torch.float64), 1, layout, route)
    alone = virtual(sample, 1, layout, route)
    for world_size in (4, 8):
        spread = virtual(sample, world_size, layout, route)
        for name, tensor in exact.items():
            ratio = rms(spread[name], tensor) / rms(alone[name], tensor)
            assert ratio <= 1.1, f"{name} on {world_size} ranks: {ratio:.3f} x one device"


@pytest.mark.slow
@pytest.mark.parametrize("route", ["ring", "all_gather", "query_ring"])
def test_fp16_at_256k_keys(route: str) -> None:
    """16 queries against 2¹⁸ keys: the state does not fall into fp16's subnormals."""
    sizes: dict[str, Any] = {"batch": 1, "nheads": 1, "nheads_k": 1, "headdim": 8}
    sample = make_sample(seqlen_q=16, seqlen_k=1 << 18, dtype=torch.float16, **sizes)
    q, k, v = (x.double()[0, :, 0] for x in (sample.q, sample.k, sample.v))
    exact = torch.softmax(q @ k.T * 8**-0.5, dim=-1) @ v
    with torch.no_grad():
        alone = flash_attn_func(sample.q, sample.k, sample.v, kernel="reference")
        floor = rms(exact.half(), exact)  # one rounding of the right answer
        assert rms(alone[0, :, 0], exact) <= 1.1 * floor
        for world_size in (4, 8):
            point: dict[str, Any] = {"layout": "zigzag", "route": route, "kernel": "reference"}
            out = virtual_ring_attention(
                sample.q, sample.k, sample.v, world_size=world_size, **point
            )
            assert rms(out[0, :, 0], exact) <= 1.1 * rms(alone[0, :, 0], exact)


@pytest.mark.slow
def test_speed_is_near_that_of_torchs_own() -> None:
    """B1 H8 S4096 D64 fp32 forward, one thread each, the best of interleaved repeats.

    It takes less than twice as long; a little more where others use the memory.
    """
    q, k, v = (torch.randn(1, 4096, 8, 64) for _ in range(3))
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    ours, torchs = [], []
    with torch.no_grad():
        for _ in range(4):
            ours.append(seconds(lambda: flash_attn_func(q, k, v, kernel="reference")))
            torchs.append(seconds(lambda: scaled_dot_product_attention(*heads_first)))
    assert min(ours) <= 2.5 * min(torchs), f"{min(ours):.3f} s against {min(torchs):.3f} s"


def seconds(call: Callable[[], Any]) -> float:
    """How long this thread computes, whoever else uses the machine."""
    started = time.thread_time()
    call()
    return time.thread_time() - started


def test_merge_of_two_halves() -> None:
    """Softmax over all keys from two halves, with rows that saw nothing on one side or both."""
    torch.manual_seed(0)
    scores, values = torch.randn(1, 2, 5, 12).double(), torch.randn(1, 2, 12, 3).double()
    scores[:, :, 1, :7] = -torch.inf
    scores[:, :, 2, 7:] = -torch.inf
    scores[:, :, 3] = -torch.inf

    def part(at: slice) -> tuple[Tensor, Tensor]:
        lse = torch.logsumexp(scores[..., at], -1)
        p = (scores[..., at] - torch.where(lse > -torch.inf, lse, 0.0)[..., None]).exp()
        return (p @ values[:, :, at]).transpose(1, 2).contiguous(), lse

    state = State(*part(slice(0, 7)))
    merge(state, *part(slice(7, 12)))
    out, lse = part(slice(0, 12))
    check({"out": state.out, "lse": state.lse}, {"out": out, "lse": lse}, 1e-14)


# Dropout's hash.


def kept(seed: int, batch: int, heads: int, rows: int, columns: int, p: float = 0.5) -> Tensor:
    """(batch, heads, rows, columns), bool."""
    keys = dropout.row_keys(torch.tensor(seed), batch, range(heads), torch.arange(rows))
    return dropout.kept(keys, torch.arange(columns), p)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_dropout_keeps_the_right_fraction(p: float) -> None:
    """Of 2²⁰ entries, within 5 standard deviations; of every row, column and head, too."""
    keep = kept(123456789, 2, 8, 256, 256, p).double()
    for dims in ((0, 1, 2, 3), (0, 1, 3), (0, 1, 2), (0, 2, 3), (1, 2, 3)):
        count = keep.numel() // keep.mean(dims).numel()
        off = (keep.mean(dims) - (1 - p)).abs().max()
        assert off < 5 * (p * (1 - p) / count) ** 0.5


@pytest.mark.parametrize("shift", [1, 2, 3, 16, 32, 64])
@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_dropout_entries_are_independent(dim: int, shift: int) -> None:
    """Correlation with neighbours along batch, heads, rows, columns: noise of 5 deviations."""
    shape = [2, 2, 66, 1030]
    shape[dim] = max(shape[dim], shift + 2)
    signs = kept(987654321, *shape).float() * 2 - 1
    a, b = (signs.narrow(dim, start, shape[dim] - shift) for start in (0, shift))
    assert (a * b).mean().abs() < 5 / a.numel() ** 0.5


@pytest.mark.parametrize("bit", [0, 1, 16, 31, 32, 33, 47, 61])
def test_dropout_seeds_are_independent(bit: int) -> None:
    """Every bit of the seed matters, the upper half too."""
    a, b = (kept(seed, 1, 4, 128, 512).float() * 2 - 1 for seed in (99, 99 ^ (1 << bit)))
    assert (a * b).mean().abs() < 5 / a.numel() ** 0.5


def test_dropout_rows_and_columns_are_not_symmetric() -> None:
    """keep[i, j] and keep[j, i] are two draws."""
    keep = kept(5, 1, 4, 256, 256).float() * 2 - 1
    above = torch.ones(256, 256).triu(1).bool()
    products = (keep * keep.mT)[..., above]
    assert products.mean().abs() < 5 / products.numel() ** 0.5


@pytest.mark.parametrize("seed", [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, (1 << 62) - 1, 3 << 40])
@pytest.mark.parametrize("p", [1e-9, 0.3, 0.999])
def test_dropout_is_the_documented_hash(seed: int, p: float) -> None:
    """The oracle's own implementation, in 64-bit arithmetic, keeps the same entries."""
    rules = Rules(dropout_p=p, seed=seed)
    for batch in (0, 3):
        expected = oracle_module._kept(rules, batch, (0, 0), torch.empty(3, 70, 90)) > 0
        assert torch.equal(kept(seed, 4, 3, 70, 90, p)[batch], expected)


def test_dropout_far_down_the_stream() -> None:
    """Token numbers near 2³¹, and head numbers of a later head group."""
    first = (1 << 31) - 40
    keys = dropout.row_keys(torch.tensor(7), 1, range(5, 8), torch.arange(first, first + 30))
    actual = dropout.kept(keys, torch.arange(first, first + 35), 0.4)
    rules = Rules(dropout_p=0.4, seed=7)
    expected = oracle_module._kept(rules, 0, (first, first), torch.empty(8, 30, 35)) > 0
    assert torch.equal(actual[0], expected[5:8])
