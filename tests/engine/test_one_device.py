"""One device: calls that are alike are checked and planned once, and share nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import ring_flash_attn as rfa


def test_calls_that_are_alike_share_nothing_they_should_not() -> None:
    """One device plans once for calls that agree; what differs, however it looks, is honoured."""
    q, k, v = (torch.randn(1, 12, 2, 8) for _ in range(3))

    def run(**options: Any) -> torch.Tensor:
        return rfa.flash_attn_func(q, k, v, kernel="reference", **options)

    scale = torch.tensor(0.1)
    run(softmax_scale=scale)
    scale.fill_(2.0)
    assert torch.equal(run(softmax_scale=scale), run(softmax_scale=2.0))
    slopes = torch.tensor([0.1, 0.5])
    first = run(alibi_slopes=slopes)
    assert not torch.equal(run(alibi_slopes=2 * slopes), first)
    assert torch.equal(run(alibi_slopes=slopes.clone()), first)
    sinks = [run(sink=torch.tensor(x)) for x in ([0.0, 0.0], [1.0, 2.0])]
    assert not torch.equal(*sinks)
    run(window_size=(1, 0))
    with pytest.raises(ValueError, match="window_size must be two integers"):
        run(window_size=(1.0, 0.0))


def test_forward_mode_is_refused() -> None:
    q = torch.randn(1, 5, 2, 8)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.randn_like(q))
        with pytest.raises(NotImplementedError):
            rfa.flash_attn_func(dual, q, q)
