"""Figures of step 8."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ring_flash_attn.lab.steps.s08_triton_backward import PRODUCTS

from .style import PALE, RANKS, WIDTH

__all__ = ["who_sums_what"]

BLOCKS, SIZE, RESULT = 4, 0.9, 0.62


def who_sums_what() -> Figure:
    """One colour for each program: its tiles, and what it adds to."""
    figure, panels = plt.subplots(1, 3, figsize=(WIDTH, 2.85))
    for ax, (kernel, products) in zip(panels, PRODUCTS.items()):
        by_row = "dK" not in products
        _tiles(ax, by_row)
        if "dQ" in products:
            _dq(ax, by_row)
        if "dK" in products:
            _dkdv(ax)
        ax.set_title(kernel.replace(" with", "\nwith") if " " in kernel else f"{kernel}\n")
        text = f"{len(products)} products:\n{' '.join(products[:2])}\n{' '.join(products[2:])}"
        ax.text(BLOCKS / 2, BLOCKS + 1.7, text, ha="center", va="top", fontsize=9)
        ax.set(xlim=(-1.45, BLOCKS + 0.1), ylim=(BLOCKS + 3.6, -0.95), aspect="equal")
        ax.axis("off")
    return figure


def _cell(ax: Axes, x: float, y: float, width: float, height: float, colour: str) -> None:
    ax.add_patch(plt.Rectangle((x, y), width, height, facecolor=colour, edgecolor=PALE, lw=0.5))


def _tiles(ax: Axes, by_row: bool) -> None:
    """The matrix of scores, and the way of each program through it."""
    for row in range(BLOCKS):
        for column in range(BLOCKS):
            _cell(ax, column, row, SIZE, SIZE, RANKS[row if by_row else column])
    for i in range(BLOCKS):
        middle, ends = i + SIZE / 2, (0.2, BLOCKS - 0.2)
        begin, end = ((x, middle) if by_row else (middle, x) for x in ends)
        arrow = {"arrowstyle": "->", "color": "white", "lw": 1.6, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", xy=end, xytext=begin, arrowprops=arrow)


def _dq(ax: Axes, by_row: bool) -> None:
    """On the left of its rows; in stripes where every program adds to every block."""
    for row in range(BLOCKS):
        colours = [RANKS[row]] if by_row else RANKS[:BLOCKS]
        height = SIZE / len(colours)
        for i, colour in enumerate(colours):
            _cell(ax, -1.1, row + i * height, RESULT, height, colour)
    ax.text(-0.8, -0.5, "dQ", ha="center", va="center", fontsize=9)


def _dkdv(ax: Axes) -> None:
    """Below its columns."""
    for column in range(BLOCKS):
        _cell(ax, column, BLOCKS + 0.3, SIZE, RESULT, RANKS[column])
    ax.text(BLOCKS / 2 - 0.05, BLOCKS + 1.3, "dK, dV", ha="center", va="center", fontsize=9)
