"""Figures of step 1."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ring_flash_attn.lab.steps.s01_weighted_sum import SMALL

from .style import BLUE, GREEN, INK, ORANGE, PALE, WIDTH

__all__ = ["tiles_of_a_matrix", "two_kinds_of_sums"]

ROWS, D, BLOCK_ROWS, BLOCK_D = SMALL
PROGRAMS, BLOCKS = -(-ROWS // BLOCK_ROWS), -(-D // BLOCK_D)
COLOURS = (BLUE, ORANGE)  # by program


def cell(ax: Axes, column: float, row: float, colour: str | None) -> None:
    """One element; None is one that does not exist."""
    face, hatch = (PALE, "////") if colour is None else (colour, None)
    box = plt.Rectangle((column, row), 0.9, 0.9, facecolor=face, hatch=hatch, edgecolor="white")
    box.set_linewidth(0)
    ax.add_patch(box)


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Where a sum goes."""
    style = {"arrowstyle": "-|>", "color": INK, "lw": 1.2, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", end, start, arrowprops=style)


def canvas(
    height: float, columns: tuple[float, float], rows: tuple[float, float]
) -> tuple[Figure, Axes]:
    """Axes without a frame, in units of elements, row 0 on top."""
    figure, ax = plt.subplots(figsize=(WIDTH, height))
    ax.set(xlim=columns, ylim=rows[::-1], aspect="equal")
    ax.axis("off")
    return figure, ax


def tiles_of_a_matrix() -> Figure:
    """Who has which element, in which pass of its loop, and what is masked."""
    space = 0.7
    figure, ax = canvas(2.1, (-5.8, 30.2), (-3.2, 11.6))
    for i in range(PROGRAMS * BLOCK_ROWS):
        top = i + i // BLOCK_ROWS * space
        colour = COLOURS[i // BLOCK_ROWS]
        for j in range(BLOCKS * BLOCK_D):
            exists = i < ROWS and j < D
            cell(ax, j + j // BLOCK_D * space, top, colour if exists else None)
        cell(ax, 29.0, top, colour if i < ROWS else None)
    for block in range(BLOCKS):
        middle = block * (BLOCK_D + space) + BLOCK_D / 2
        ax.text(middle, -0.7, f"start = {block * BLOCK_D}", ha="center")
    for program in range(PROGRAMS):
        middle = program * (BLOCK_ROWS + space) + BLOCK_ROWS / 2
        ax.text(
            -0.6, middle, f"program\n{program}", ha="right", va="center", color=COLOURS[program]
        )
        arrow(ax, (26.2, middle), (28.6, middle))
    ax.text(13, -2.2, "x", ha="center", style="italic", fontsize=11)
    ax.text(29.45, -0.7, "y", ha="center", style="italic", fontsize=11)
    cell(ax, 0, 10.2, None)
    ax.text(1.4, 10.7, "masked: loaded as 0, not stored", va="center")
    return figure


def two_kinds_of_sums() -> Figure:
    """y: along a row, inside of a program. dw: down the columns, across programs."""
    figure, ax = canvas(2.9, (-3.4, 26.6), (-2.0, 15.4))
    for i in range(ROWS):
        colour = COLOURS[i // BLOCK_ROWS]
        for j in range(D):
            cell(ax, j, i, colour)
        cell(ax, 24.4, i, colour)
        arrow(ax, (D + 0.4, i + 0.45), (24.0, i + 0.45))
    for program in range(PROGRAMS):
        for j in range(D):
            cell(ax, j, 9.4 + program, COLOURS[program])
    for j in range(D):
        cell(ax, j, 14.2, GREEN)
    for j in range(2, D, 5):
        arrow(ax, (j + 0.45, ROWS + 0.3), (j + 0.45, 9.0))
        arrow(ax, (j + 0.45, 11.8), (j + 0.45, 13.8))
    for text, at in (("x", 2.95), ("parts", 10.35), ("dw", 14.65)):
        ax.text(-0.6, at, text, ha="right", va="center", style="italic")
    ax.text(24.85, -0.6, "y", ha="center", style="italic")
    ax.text(D + 0.6, 7.7, "inside of\na program", va="center")
    ax.text(D + 0.6, 12.8, "across\nprograms", va="center", color=GREEN)
    return figure
