"""On a GPU: kernels of others, as many as are installed, and the fused merge of their blocks."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from merging import fused_and_plain
from moving_rows import SHAPES, added, copied

import ring_flash_attn as rfa
from ring_flash_attn.kernels.base import LIBRARIES, Call, why_not
from ring_flash_attn.plan.build import route_names
from ring_flash_attn.plan.layout import layout_names
from ring_flash_attn.plan.tiles import Mask
from ring_flash_attn.verify.oracle import Rules, oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


def _expected(
    inputs: list[torch.Tensor], rules: Rules, cu_seqlens: list[int] | None
) -> list[torch.Tensor]:
    """out, dq, dk and dv in fp64."""
    q, k, v = (x.double().requires_grad_() for x in inputs[:3])
    out, _ = oracle(q, k, v, rules, cu_seqlens, cu_seqlens)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3].double())]


RULES = [
    Rules(),
    Rules(causal=True),
    Rules(causal=True, sink=torch.tensor([0.3, -1.0, 2.0, -torch.inf]).double()),
    Rules(causal=True, window_size=(40, -1)),
    Rules(window_size=(20, 30)),
]


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (192, 128)], ids=["64", "192-128"])
@pytest.mark.parametrize("kernel", LIBRARIES)
def test_libraries(kernel: str, dims: tuple[int, int], dtype: torch.dtype, packed: bool) -> None:
    """What is here of them, on every layout and route and on one device."""
    generator = torch.Generator().manual_seed(0)
    d, dv = dims
    cu_seqlens = [0, 137, 137, 142, 332, 333] if packed else None
    outer = (333,) if packed else (2, 333)
    inputs = [
        torch.randn(*outer, heads, width, generator=generator).to("cuda", dtype)
        for heads, width in ((4, d), (2, d), (2, dv), (4, dv))
    ]
    tried = 0
    every = dtype is torch.bfloat16 and d == dv
    for rules in RULES if every else RULES[:2]:  # FlashAttention-4 compiles each
        rules = replace(rules, sink=None if rules.sink is None else rules.sink.cuda())
        mask = Mask.of(rules.causal, rules.window_size)
        call = Call(inputs[0].device, dtype, 4, 2, d, dv, 0.125, mask, packed=packed)
        if why_not(kernel, call):
            continue
        want = _expected(inputs, rules, cu_seqlens)
        points = itertools.product(layout_names(), route_names(), (1, 4))
        for layout, route, world_size in points:
            leaves = [x.clone().requires_grad_() for x in inputs[:3]]
            out = rfa.virtual_ring_attention(
                *leaves,
                world_size=world_size,
                layout=layout,
                route=route,
                cu_seqlens=cu_seqlens,
                causal=rules.causal,
                window_size=rules.window_size,
                sink=rules.sink,
                kernel=kernel,
            )
            out.backward(inputs[3])
            got = [out.detach(), *(x.grad for x in leaves)]
            errors = [
                float((a.double() - b).abs().max() / b.abs().max())
                for a, b in zip(got, want, strict=True)
            ]
            where = (layout, route, world_size, rules, errors)
            assert all(error < TOLERANCE[dtype] for error in errors), where
            tried += 1
    if not tried:
        pytest.skip(f"{kernel} cannot: {why_not(kernel, call)}")


@pytest.mark.parametrize("kernel", LIBRARIES)
def test_libraries_alone_cost_nothing_more(kernel: str) -> None:
    """On one device a call allocates its output and lse, and nothing else of that size."""
    q = torch.randn(1, 4096, 16, 128, device="cuda", dtype=torch.bfloat16)
    call = Call(q.device, q.dtype, 16, 16, 128, 128, 0.1, Mask(right=0))
    if why_not(kernel, call):
        pytest.skip(f"{kernel} cannot: {why_not(kernel, call)}")
    rfa.flash_attn_func(q, q, q, causal=True, kernel=kernel)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rfa.flash_attn_func(q, q, q, causal=True, kernel=kernel)
    assert torch.cuda.max_memory_allocated() - before < 1.5 * q.numel() * q.element_size()


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_moved_and_added(shape: tuple[int, int, int, int]) -> None:
    for ours, expected in (*added("cuda", shape), *copied("cuda", shape)):
        assert torch.equal(ours, expected)


def test_the_fused_merge() -> None:
    for ours, expected in fused_and_plain("cuda"):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
