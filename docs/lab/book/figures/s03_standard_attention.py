"""Figures of step 3."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from ring_flash_attn.lab.steps.s03_standard_attention import flash_bytes, predicted_bytes

from .style import BLUE, GREY, INK, ORANGE, PALE, WIDTH, chart

__all__ = ["bytes_against_length", "tensors_to_scale"]

HEADS, D = 32, 64


def tensors_to_scale() -> Figure:
    """q, k, v and P of three lengths, one scale for all: area is memory."""
    figure, ax = plt.subplots(figsize=(WIDTH, 2.1))
    left = 0.0
    for n in (128, 256, 512):
        for name in "qkv":
            ax.add_patch(plt.Rectangle((left, 0), D - 10, n, facecolor=BLUE))
            ax.text(left + D / 2 - 5, n + 12, name, ha="center", style="italic")
            left += D
        ax.add_patch(plt.Rectangle((left + 6, 0), n, n, facecolor=PALE, edgecolor=GREY, lw=0.6))
        corners = [(left + 6, 0), (left + 6, n), (left + 6 + n, 0)]
        ax.add_patch(plt.Polygon(corners, facecolor=ORANGE))
        ax.text(left + 6 + n / 2, n + 12, "P", ha="center", style="italic")
        ax.text(left + 6 + n / 2 - 1.5 * D, -16, f"{n} tokens", va="top", ha="center")
        left += n + 90
    ax.set(xlim=(-10, left - 60), ylim=(-70, 600), aspect="equal")
    ax.axis("off")
    return figure


def bytes_against_length() -> Figure:
    """One layer: 32 heads of 64, bf16, causal."""
    figure, ax = chart(3.4)
    lengths = [2**e for e in range(10, 21)]
    ways = (
        ("standard ", ORANGE, 1.3, "right", lambda n: predicted_bytes(HEADS, n, n, D, True, 2)),
        ("FlashAttention", BLUE, 0.15, "center", lambda n: flash_bytes(HEADS, n, n, D, 2)),
    )
    for name, colour, above, side, count in ways:
        gib = [count(n) / 2**30 for n in lengths]
        ax.plot(lengths, gib, color=colour, marker="o", ms=3.5)
        ax.text(lengths[7], gib[7] * above, name, color=colour, ha=side, weight="bold")
    ax.axhline(80, color=INK, ls="--", lw=1)
    ax.text(lengths[0], 85, "80 GiB", va="bottom")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=10)
    ax.set(ylabel="GiB stored", xlabel="tokens", ylim=(5e-3, 2e5))
    ax.set_xticks(lengths[::2], [f"{n // 1024}k" for n in lengths[::2]])
    ax.set_yticks(
        [0.01, 0.1, 1, 10, 100, 1000, 1e4, 1e5],
        ["0.01", "0.1", "1", "10", "100", "1,000", "10,000", "100,000"],
    )
    return figure
