"""On a GPU: the reference kernel, virtual ranks, and process groups over gloo and NCCL."""

from __future__ import annotations

import os

import pytest
import torch

import ring_flash_attn as rfa
from ring_flash_attn.cli.oracle import Rules, oracle
from ring_flash_attn.layout import layout_names
from ring_flash_attn.plan import route_names

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LENGTHS = (37, 0, 5, 90, 1)
CU_SEQLENS = [0, 37, 37, 42, 132, 133]
NAMES = ("out", "dq", "dk", "dv")


def _inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and dout of a packed stream, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((133, 4, 32), (133, 2, 32), (133, 2, 16), (133, 4, 16))
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


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("route", route_names())
@pytest.mark.parametrize("layout", layout_names())
def test_virtual_ranks(layout: str, route: str, dtype: torch.dtype) -> None:
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
        cu_seqlens=torch.tensor(CU_SEQLENS, device="cuda"),
        dropout_p=0.2,
        **options,
    )
    out.backward(inputs[3])
    torch.manual_seed(1)
    seed = int(torch.randint(1 << 62, (), dtype=torch.int64))
    want = _expected(inputs, Rules(dropout_p=0.2, seed=seed, **options))
    errors = _errors([out.detach(), q.grad, k.grad, v.grad], want)
    assert max(errors.values()) < TOLERANCE[dtype], errors


def _over_a_group(rank: int, world_size: int, dtype: torch.dtype) -> list[dict[str, float]]:
    """Errors of this rank for every layout × route, dropout included."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    inputs = _inputs(dtype)
    found = []
    for layout in layout_names():
        for route in route_names():
            torch.manual_seed(rank)  # ranks disagree: the first one's seed counts
            q, k, v, dout = (rfa.shard(x, layout, cu_seqlens=CU_SEQLENS) for x in inputs)
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out = rfa.ring_attention(
                *leaves,
                layout=layout,
                route=route,
                cu_seqlens=torch.tensor(CU_SEQLENS, device="cuda"),
                causal=True,
                dropout_p=0.1,
            )
            out.backward(dout)
            torch.manual_seed(0)
            seed = int(torch.randint(1 << 62, (), dtype=torch.int64))
            want = _expected(inputs, Rules(causal=True, dropout_p=0.1, seed=seed))
            local = [rfa.shard(x, layout, cu_seqlens=CU_SEQLENS) for x in want]
            found.append(_errors([out.detach(), *(x.grad for x in leaves)], local))
    return found


def _check(found: list[list[dict[str, float]]], dtype: torch.dtype) -> None:
    assert len(found[0]) == len(layout_names()) * len(route_names())
    for rank, errors in enumerate(found):
        for case in errors:
            assert max(case.values()) < TOLERANCE[dtype], (rank, case)


def test_gloo_stages_cuda_tensors(ranks) -> None:
    _check(ranks(4, "gloo").run(_over_a_group, torch.float64, timeout=300), torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_nccl(ranks, dtype: torch.dtype) -> None:
    """With one GPU this needs NCCL 2.30 or later and NCCL_MULTI_RANK_GPU_ENABLE=1."""
    world_size = min(torch.cuda.device_count(), 4)
    if world_size == 1:
        if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
            pytest.skip("one GPU, and NCCL_MULTI_RANK_GPU_ENABLE is not set")
        world_size = 4
    _check(ranks(world_size, "nccl").run(_over_a_group, dtype, timeout=300), dtype)


def test_no_host_synchronisation() -> None:
    """Apart from copying a new cu_seqlens, nothing waits for the device."""
    inputs = _inputs(torch.bfloat16)
    cu_seqlens = torch.tensor(CU_SEQLENS, device="cuda", dtype=torch.int32)

    def run() -> None:
        q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
        out = rfa.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 90, 90, causal=True)
        out.backward(inputs[3])

    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
