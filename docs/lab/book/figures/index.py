"""The figure of the first page: the whole course at a glance."""

from __future__ import annotations

import math

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from .style import BLUE, GREY, INK, ORANGE, PALE, RANKS, WIDTH, tiles

__all__ = ["tiles_and_ring"]

BLOCKS, ROW, COLUMN = 6, 2, 3  # of the matrix; the tile at work
WORLD_SIZE, STEP = 4, 1  # of the ring


def tiles_and_ring() -> Figure:
    """Left: tiles of a matrix that is never stored. Right: the same work, spread over ranks."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 2.7))
    _matrix(left)
    _ring(right)
    return figure


def _matrix(ax: Axes) -> None:
    """One tile exists; of the rows above only the output is left."""
    colours: list[list[str | None]] = [[None] * BLOCKS for _ in range(BLOCKS)]
    colours[ROW] = [PALE] * COLUMN + [BLUE] + [None] * (BLOCKS - COLUMN - 1)
    tiles(ax, colours)
    for row in range(BLOCKS):
        face = ORANGE if row < ROW else "#f7d3a8" if row == ROW else "white"
        ax.add_patch(
            plt.Rectangle((BLOCKS + 0.5, row), 0.8, 0.94, facecolor=face, edgecolor=PALE, lw=0.8)
        )
    arrow = FancyArrowPatch((0.4, ROW + 0.47), (COLUMN, ROW + 0.47), color=GREY, lw=1.2)
    arrow.set(arrowstyle="->", mutation_scale=10)
    ax.add_patch(arrow)
    ax.text(BLOCKS / 2, -0.4, "keys", ha="center")
    ax.text(-0.4, BLOCKS / 2, "queries", rotation=90, va="center", ha="center")
    ax.text(BLOCKS + 0.9, -0.4, "out", ha="center")
    ax.set(xlim=(-1, BLOCKS + 1.5), ylim=(BLOCKS + 0.8, -1.7), title="one tile at a time")


def _ring(ax: Axes) -> None:
    """Queries stay, keys go to the next rank; here after one hop."""
    places = [(-1.0, 1.0), (1.0, 1.0), (1.0, -1.0), (-1.0, -1.0)]
    for rank, (x, y) in enumerate(places):
        source = (rank - STEP) % WORLD_SIZE
        box = FancyBboxPatch((x - 0.62, y - 0.45), 1.24, 0.9, boxstyle="round,pad=0.02")
        box.set(facecolor="white", edgecolor=RANKS[rank], lw=1.6)
        ax.add_patch(box)
        ax.text(x, y + 0.27, f"rank {rank}", ha="center", va="center", color=INK)
        for dx, name, owner in ((-0.3, "q", rank), (0.3, "k v", source)):
            chip = FancyBboxPatch((x + dx - 0.22, y - 0.33), 0.44, 0.36, boxstyle="round,pad=0.02")
            chip.set(facecolor=RANKS[owner], edgecolor="none")
            ax.add_patch(chip)
            ax.text(x + dx, y - 0.16, name, ha="center", va="center", color="white")
        (a, b), length = places[(rank + 1) % WORLD_SIZE], 0.3
        norm = math.hypot(a - x, b - y)
        ux, uy, mx, my = (a - x) / norm, (b - y) / norm, (a + x) / 2, (b + y) / 2
        start, end = (mx - length * ux, my - length * uy), (mx + length * ux, my + length * uy)
        arrow = FancyArrowPatch(start, end, color=RANKS[source], lw=2)
        arrow.set(arrowstyle="->", mutation_scale=12)
        ax.add_patch(arrow)
    ax.set(xlim=(-1.75, 1.75), ylim=(-1.75, 1.75), aspect="equal")
    ax.set_title("then over a ring of ranks")
    ax.axis("off")
