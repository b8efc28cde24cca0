"""Attention whose scores have their maxima in particular places, against fp64."""

from __future__ import annotations

from typing import Any

import torch

import ring_flash_attn as rfa
from ring_flash_attn.verify.oracle import Rules, oracle

# Of a key at t = 0 … 1, about how large its scores are.
KINDS = {
    "rising": lambda t: 60 * t,
    "rising_far": lambda t: 600 * t,
    "falling": lambda t: 60 * (1 - t),
    "jump": lambda t: 60.0 * (t > 0.7),
    "hump": lambda t: 60.0 * ((t > 0.2) & (t < 0.4)),
    "last": lambda t: 80.0 * (t > 0.998) - 40,
    "low": lambda t: 0 * t - 200,
}


def inputs(
    kind: str, length: int, headdim: int, dtype: torch.dtype, device: str
) -> list[torch.Tensor]:
    """q, k, v: (1, length, 2, headdim)."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (0.1 * torch.randn(1, length, 2, headdim, generator=generator) for _ in range(3))
    t = torch.arange(length)[None, :, None, None] / length
    one = headdim**-0.25  # so that q · k, scaled, is the factor
    return [x.to(device, dtype) for x in (q + one, k + one * KINDS[kind](t), v)]


def errors(
    kind: str,
    length: int,
    headdim: int,
    dtype: torch.dtype,
    device: str,
    causal: bool,
    softcap: float = 0.0,
    kernel: str = "triton",
) -> tuple[float, float]:
    """Of the output, relative to its largest entry, and of lse, to its size."""
    given = inputs(kind, length, headdim, dtype, device)
    options = {"causal": causal, "softcap": softcap}
    out, lse, _ = rfa.flash_attn_func(*given, **options, return_attn_probs=True, kernel=kernel)
    return _errors(out, lse, given, Rules(**options))


def errors_in_a_ring(kind: str, device: str, kernel: str = "triton") -> tuple[float, float]:
    """The same on two ranks, where the second step goes on from the first."""
    given = inputs(kind, 640, 64, torch.float16, device)
    out, lse = _ring(given, kernel, causal=True)
    return _errors(out, lse, given, Rules(causal=True))


def _ring(
    given: list[torch.Tensor], kernel: str, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    options |= {"layout": "contiguous", "route": "ring", "kernel": kernel}
    out, lse, _ = rfa.virtual_ring_attention(
        *given, world_size=2, return_attn_probs=True, sources_per_launch=1, **options
    )
    return out, lse


def _errors(
    out: torch.Tensor, lse: torch.Tensor, given: list[torch.Tensor], rules: Rules
) -> tuple[float, float]:
    want, want_lse = oracle(*(x.double() for x in given), rules)
    lse_error = (lse - want_lse).abs() / (1 + want_lse.abs())
    return float((out - want).abs().max() / want.abs().max()), float(lse_error.max())


def nans(length: int, headdim: int, device: str, kernel: str = "triton") -> tuple[int, int, int]:
    """Rows that are NaN where one key is: before it, from it on, and of the other head."""
    q, k, v = inputs("rising", length, headdim, torch.float16, device)
    at = length // 2
    k[0, at, 0] = torch.nan
    options = {"causal": True, "return_attn_probs": True, "kernel": kernel}
    out, lse, _ = rfa.flash_attn_func(q, k, v, **options)
    rows = out[0].isnan().all(-1)
    assert torch.equal(rows.T, lse[0].isnan())
    return int(rows[:at, 0].sum()), int(rows[at:, 0].sum()), int(rows[:, 1].sum())


def nans_in_a_ring(device: str, kernel: str = "triton") -> tuple[int, int]:
    """Rows of out and of lse, of one head, that are NaN on two ranks where 51 see such a key."""
    q, k, v = inputs("rising", 300, 64, torch.float16, device)
    k[0, 220, 0] = torch.nan  # those on rank 1: they see no key of rank 0, which comes later
    out, lse = _ring([q, k, v], kernel, causal=True, window_size=(50, 0))
    return int(out[0, :, 0].isnan().all(-1).sum()), int(lse[0, 0].isnan().sum())
