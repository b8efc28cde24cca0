"""What kernels make of (lse, delta), they make once for all launches on a rank's own queries."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import ring_flash_attn as rfa
from ring_flash_attn.kernels.base import Saved
from ring_flash_attn.kernels.reference import KERNEL


def made(route: str, **options: Any) -> tuple[int, int]:
    """How many launches the backward passes of 4 ranks have; how often something new is made."""
    x = [torch.randn(32, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    seen: list[Saved] = []
    backward = KERNEL.backward

    def noted(*given: Any) -> None:
        (saved,) = (each for each in given if isinstance(each, Saved))
        sums = saved.remember("sums", lambda: (saved.lse.sum(), saved.delta.sum()))
        assert torch.equal(torch.stack(sums), torch.stack([saved.lse.sum(), saved.delta.sum()]))
        seen.append(saved)
        backward(*given)

    options = {"layout": "zigzag", "cu_seqlens": [0, 32], "causal": True, **options}
    out = rfa.virtual_ring_attention(*x, world_size=4, route=route, kernel="reference", **options)
    with mock.patch.object(type(KERNEL), "backward", staticmethod(noted)):
        torch.autograd.grad(out.sum(), x)
    return len(seen), len({id(each) for each in seen})


@pytest.mark.parametrize("sources", [1, 2, None])
def test_made_once_where_queries_stay(sources: int | None) -> None:
    launches, kinds = made("ring", sources_per_launch=sources)
    assert launches > 4
    assert kinds == 4


def test_made_anew_where_queries_travel_or_heads_differ() -> None:
    launches, kinds = made("query_ring")
    assert kinds == launches
    launches, kinds = made("all_gather", heads_k_stride=1)
    assert kinds == launches == 8
