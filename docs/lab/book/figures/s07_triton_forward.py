"""Figures of step 7."""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
import triton
from matplotlib.figure import Figure

from ring_flash_attn.lab.steps.s07_triton_forward import block_sizes, moved

from .style import BLUE, GREEN, GREY, INK, ORANGE, RANKS, RED, WIDTH, chart

__all__ = ["grid_of_programs", "roofline"]

PEAK, BANDWIDTH = 989e12, 4.8e12  # H200: dense bf16 FLOP/s, bytes/s


def grid_of_programs() -> Figure:
    """Two batch elements of 150 tokens: a colour for each program, hatched where nothing exists."""
    batch, n, d = 2, 150, 24
    _, block = block_sizes(torch.empty(batch, n, d))
    blocks = triton.cdiv(n, block)
    figure, axes = plt.subplots(1, batch, figsize=(WIDTH, 2.7), sharey=True)
    for b, ax in enumerate(axes):
        for i in range(blocks):
            colour = RANKS[b * blocks + i]
            for j in range(blocks):
                at = (j * block, i * block)
                ax.add_patch(plt.Rectangle(at, block, block, facecolor=colour, edgecolor="white"))
            y = i * block + (min(n, (i + 1) * block) - i * block) / 2
            ax.annotate(
                "", (n - 6, y), (6, y), arrowprops={"arrowstyle": "->", "color": "white", "lw": 1.5}
            )
            box = {"facecolor": colour, "edgecolor": "none", "pad": 1.5}
            ax.text(n / 2 - 12, y, f"({i}, {b})", color="white", ha="center", va="center", bbox=box)
        end = blocks * block
        for corner, width, height in (((n, 0), end - n, end), ((0, n), n, end - n)):
            patch = plt.Rectangle(corner, width, height, facecolor="white", alpha=0.72, lw=0)
            ax.add_patch(patch)
            patch = plt.Rectangle(
                corner, width, height, facecolor="none", edgecolor=GREY, hatch="////", lw=0
            )
            ax.add_patch(patch)
        ax.add_patch(plt.Rectangle((0, 0), n, n, facecolor="none", edgecolor=INK, lw=1.2))
        ax.set(xlim=(-2, end + 2), ylim=(end + 2, -2), aspect="equal")
        ax.set(xticks=[0, block, n, end], yticks=[*range(0, n, block), n, end])
        ax.set(xlabel="key", title=f"batch {b}")
        ax.grid(visible=False)
        for side in ax.spines.values():
            side.set_visible(False)
    axes[0].set(ylabel="query")
    return figure


def roofline() -> Figure:
    """FLOP/s that memory allows an H200, over FLOPs for each byte."""
    n, d, size = 4096, 64, 2
    flops = 4 * n * n * d
    figure, ax = chart(3.6)
    corner = PEAK / BANDWIDTH
    ax.plot([0.2, corner, 2000], [0.2 * BANDWIDTH / 1e12, PEAK / 1e12, PEAK / 1e12], color=INK)
    points = [("weighted sum", 2 / 4, GREY)]  # step 1: 2 FLOPs for each fp32 number
    points.append(("standard", flops / moved(n, d, size, None), RED))
    for block, colour in ((16, BLUE), (64, BLUE), (128, BLUE), (256, GREEN)):
        points.append((f"{block} queries", flops / moved(n, d, size, block), colour))
    for name, intensity, colour in points:
        at = (intensity, min(PEAK, BANDWIDTH * intensity) / 1e12)
        ax.plot(*at, "o", color=colour, ms=7)
        left = colour == BLUE
        where, sides = ((-7, 3), ("right", "bottom")) if left else ((7, -3), ("left", "top"))
        ax.annotate(name, at, where, textcoords="offset points", ha=sides[0], va=sides[1])
    ax.axvline(corner, color=ORANGE, ls="--", lw=1, zorder=1)
    ax.text(corner * 1.15, 1.4, f"{corner:.0f}", color=ORANGE)
    ax.text(2.2, 14, f"{BANDWIDTH / 1e12} TB/s", ha="right")
    ax.text(2000, PEAK / 1e12 * 1.15, f"{PEAK / 1e12:.0f} TFLOP/s", ha="right")
    ax.set(xscale="log", yscale="log", xlim=(0.2, 2200), ylim=(0.8, 2500))
    ax.set(xlabel="FLOP / byte", ylabel="TFLOP/s at most")
    return figure
