"""Figures of step 11."""

from __future__ import annotations

from itertools import pairwise

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from ring_flash_attn.lab.steps.s11_packed import BATCHES, EXAMPLE, work_items

from .style import INK, PALE, RANKS, WIDTH, chart, tiles

__all__ = ["mask", "padding"]


def mask() -> Figure:
    """Documents on the diagonal, causal; a frame for each work item."""
    tokens, block = EXAMPLE[-1], 4
    figure, ax = chart(3.7)
    colours = [[PALE] * tokens for _ in range(tokens)]
    for document, (begin, end) in enumerate(pairwise(EXAMPLE)):
        for row in range(begin, end):
            colours[row][begin : row + 1] = [RANKS[document]] * (row + 1 - begin)
    tiles(ax, colours)
    for number, item in enumerate(work_items(EXAMPLE, block)):
        corner, rows = (item.begin - 0.03, item.first - 0.03), item.last - item.first
        ax.add_patch(
            plt.Rectangle(corner, item.last - item.begin, rows, fill=False, edgecolor=INK, lw=2)
        )
        ax.text(tokens + 0.3, item.first + rows / 2, f"item {number}", va="center")
    for end in EXAMPLE:
        ax.text(end, -0.25, str(end), ha="center", va="bottom")
    ax.text(-0.3, -0.25, "cu_seqlens", ha="right", va="bottom")
    ax.set(xlim=(-3.1, tokens + 2.4), ylim=(tokens + 0.1, -1.1))
    return figure


def padding() -> Figure:
    """Causal pairs of each document, and what padding adds to them."""
    lengths = BATCHES["1000, 37, 4000, 3155"]
    longest = max(lengths)
    figure, panels = plt.subplots(1, len(lengths), figsize=(WIDTH, 1.65))
    for number, (ax, length) in enumerate(zip(panels, lengths)):
        for size, colour in ((longest, PALE), (length, RANKS[number])):
            ax.add_patch(plt.Polygon([(0, 0), (0, size), (size, size)], color=colour, lw=0))
        share = length * (length + 1) / longest / (longest + 1)
        ax.set_title(f"{length}")
        text = f"{share:.0%}" if share > 0.01 else f"{share:.2%}"
        ax.text(longest / 2, longest * 1.06, text, ha="center", va="top")
        ax.set(xlim=(0, longest), ylim=(longest * 1.22, 0), aspect="equal")
        ax.axis("off")
    return figure
