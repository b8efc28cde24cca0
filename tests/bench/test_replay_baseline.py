"""The baseline, ring-flash-attn 0.1.8's zigzag design: it is right, and is replayed beside ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_library import register_plain
from replays import TorchBlock, baseline_in_threads, small

from ring_flash_attn.bench import replay
from ring_flash_attn.bench.replays.baseline import NativeAttention, merge, scripted_merge
from ring_flash_attn.kernels import base
from ring_flash_attn.verify.oracle import Rules, oracle


def check(world_size: int, block: Any, merged: Any) -> None:
    """Out and gradients of all ranks, against the oracle."""
    torch.manual_seed(world_size)
    shapes = [(2, 12 * world_size, heads, 8) for heads in (4, 2, 2, 4)]
    q, k, v, dout = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    expected, _ = oracle(*leaves, Rules(causal=True))
    want = [expected.detach(), *torch.autograd.grad(expected, leaves, dout)]
    qkv = [x.detach() for x in leaves]
    got = baseline_in_threads(qkv, dout, world_size, block, merged)
    for ours, theirs in zip(got, want, strict=True):
        assert (ours - theirs).abs().max() < 1e-12 * theirs.abs().max()


@pytest.mark.parametrize("merged", [merge, scripted_merge()], ids=["plain", "scripted"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_baseline_is_right(world_size: int, merged: Any) -> None:
    check(world_size, TorchBlock(), merged)


def test_the_baseline_is_replayed_beside_ours() -> None:
    found = replay(**small(layout="stripe"), link="nvlink4", baseline=TorchBlock())
    assert found.baseline is not None
    assert [each.rank for each in found.baseline.ranks] == [0, 1, 2]
    # zigzag: every rank has its share
    assert 3 * found.baseline.ranks[0].pairs == sum(each.pairs for each in found.ours.ranks)
    assert all(each.measured.linked is not None for each in found.baseline.ranks)


def test_flash_attention_2_takes_these_arguments() -> None:
    """By torch's own rules for shapes: no GPU is needed."""
    block = NativeAttention("fa2")
    q, k = (
        torch.empty(1, n, h, 64, dtype=torch.bfloat16, device="meta") for n, h in ((8, 4), (6, 2))
    )
    out, lse = block.forward(q, k, k, causal=False)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (1, 4, 8), torch.float32)
    grads = block.backward(out, q, k, k, out, lse, causal=False)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]


def test_it_runs_on_any_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here one in plain torch, under the name of one that is not installed."""
    register_plain(monkeypatch, "fa4")
    monkeypatch.setattr(base, "_registered", ["fa4"])
    base.load_kernel.cache_clear()
    try:
        check(3, NativeAttention("fa4"), merge)
        found = replay(**small(), existing="fa4")
    finally:
        base.load_kernel.cache_clear()
    assert found.baseline is not None
    assert found.baseline.name == "baseline on fa4"
