"""Attention whose scores have their maxima in particular places, against fp64."""

from __future__ import annotations

import torch

import ring_flash_attn as rfa
from ring_flash_attn.cli.oracle import Rules, oracle

# Of a key at t = 0 … 1, about how large its scores are.
KINDS = {
    "rising": lambda t: 60 * t,
    "rising_far": lambda t: 600 * t,
    "falling": lambda t: 60 * (1 - t),
    "jump": lambda t: 60.0 * (t > 0.7),
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
    kind: str, length: int, headdim: int, dtype: torch.dtype, device: str, causal: bool
) -> tuple[float, float]:
    """Of the output, relative to its largest entry, and of lse, to its size."""
    q, k, v = inputs(kind, length, headdim, dtype, device)
    out, lse, _ = rfa.triton_flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    bounds = [0, length]
    want, want_lse = oracle(
        *(x[0].double() for x in (q, k, v)), Rules(causal=causal), bounds, bounds
    )
    lse_error = (lse[0] - want_lse).abs() / (1 + want_lse.abs())
    return float((out[0] - want).abs().max() / want.abs().max()), float(lse_error.max())


def nans(length: int, headdim: int, device: str) -> tuple[int, int, int]:
    """Rows that are NaN where one key is: before it, from it on, and of the other head."""
    q, k, v = inputs("rising", length, headdim, torch.float16, device)
    at = length // 2
    k[0, at, 0] = torch.nan
    out, lse, _ = rfa.triton_flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    rows = out[0].isnan().all(-1)
    assert torch.equal(rows.T, lse[0].isnan())
    return int(rows[:at, 0].sum()), int(rows[at:, 0].sum()), int(rows[:, 1].sum())
