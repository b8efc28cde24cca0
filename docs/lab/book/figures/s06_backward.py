"""Figures of step 6."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from .style import BLUE, GREEN, GREY, INK, ORANGE, PALE, PURPLE, WIDTH

__all__ = ["flow", "sums"]

Point = tuple[float, float]


def _node(ax: Axes, at: Point, text: str, face: str, width: float = 1.0) -> None:
    x, y = at
    box = FancyBboxPatch(
        (x - width / 2, y - 0.27),
        width,
        0.54,
        boxstyle="round,pad=0.02,rounding_size=0.1",
        facecolor=face,
        edgecolor=GREY if face in ("white", PALE) else face,
        lw=0.8,
        zorder=3,
    )
    ax.add_patch(box)
    colour = INK if face in ("white", PALE) else "white"
    ax.text(x, y - 0.01, text, ha="center", va="center", color=colour, zorder=4)


def _arrow(ax: Axes, start: Point, end: Point) -> None:
    ax.annotate(
        "",
        end,
        start,
        arrowprops={"arrowstyle": "->", "color": INK, "lw": 1, "shrinkA": 0, "shrinkB": 1},
        zorder=2,
    )


def flow() -> Figure:
    """What is saved, what a tile computes from it, and what comes out; products are orange."""
    figure, ax = plt.subplots(figsize=(WIDTH, 5.0))
    inputs = {"$Q$": 0.0, "$K$": 1.0, "lse": 2.2, "$V$": 3.4, "$dO$": 4.4, "$O$": 5.6}
    for name, x in inputs.items():
        _node(ax, (x, 0), name, BLUE if name != "$dO$" else PURPLE, 0.72)
    _node(ax, (0.5, 1.5), "$S = QK^T$", ORANGE, 1.5)
    _node(ax, (3.9, 1.5), "$dP = dO\\,V^T$", ORANGE, 1.7)
    _node(ax, (5.33, 2.5), "$D = dO \\cdot O$", PALE, 1.4)
    _node(ax, (1.35, 3.0), "$P = e^{S - lse}$", PALE, 1.7)
    _node(ax, (3.5, 3.9), "$dS = P \\circ (dP - D)$", PALE, 2.6)
    _node(ax, (0.65, 5.4), "$dV = P^T dO$", ORANGE, 1.75)
    _node(ax, (2.85, 5.4), "$dQ = dS\\,K$", ORANGE, 1.6)
    _node(ax, (4.95, 5.4), "$dK = dS^T Q$", ORANGE, 1.75)
    for start, end in (
        ((0, 0.3), (0.3, 1.2)),
        ((1.0, 0.3), (0.7, 1.2)),
        ((2.2, 0.3), (1.6, 2.7)),
        ((0.6, 1.8), (1.1, 2.7)),
        ((3.4, 0.3), (3.7, 1.2)),
        ((4.4, 0.3), (4.1, 1.2)),
        ((4.5, 0.3), (5.2, 2.2)),
        ((5.6, 0.3), (5.45, 2.2)),
        ((3.85, 1.8), (3.6, 3.6)),
        ((5.2, 2.8), (4.5, 3.6)),
        ((2.0, 3.3), (2.6, 3.6)),
        ((1.2, 3.3), (0.8, 5.1)),
        ((3.3, 4.2), (3.0, 5.1)),
        ((3.9, 4.2), (4.7, 5.1)),
    ):
        _arrow(ax, start, end)
    ax.set(xlim=(-0.45, 6.12), ylim=(5.75, -0.35))
    ax.axis("off")
    return figure


def sums() -> Figure:
    """One tile gives a part to dK and dV of its column, and to dQ of its row."""
    rows, columns, row, column = 4, 4, 1, 2
    figure, ax = plt.subplots(figsize=(WIDTH, 3.9))
    for i in range(rows):
        for j in range(columns):
            face = "white"
            if i == row:
                face = "#cfe0fa"
            if j == column:
                face = "#cdebdf"
            if (i, j) == (row, column):
                face = ORANGE
            patch = plt.Rectangle((j, i), 0.94, 0.94, facecolor=face, edgecolor=GREY, lw=0.8)
            ax.add_patch(patch)
    middle = (column + 0.47, row + 0.47)
    ax.text(*middle, "$P$, $dS$", ha="center", va="center", color="white")
    for i in range(rows):
        ax.text(-0.12, i + 0.47, f"$Q_{i}$, $dO_{i}$", ha="right", va="center")
    for j in range(columns):
        ax.text(j + 0.47, -0.12, f"$K_{j}$, $V_{j}$", ha="center", va="bottom")
    line = {"arrowstyle": "->", "lw": 2}
    at = (columns + 0.55, row + 0.47)
    ax.annotate("", at, (columns - 0.02, row + 0.47), arrowprops={**line, "color": BLUE})
    ax.text(at[0] + 0.08, at[1], f"$dQ_{row}$: sum\nover keys", color=BLUE, va="center")
    at = (column + 0.47, rows + 0.5)
    ax.annotate("", at, (column + 0.47, rows - 0.04), arrowprops={**line, "color": GREEN})
    words = f"$dK_{column}$, $dV_{column}$: sum over queries"
    ax.text(at[0], at[1] + 0.05, words, color=GREEN, ha="center", va="top")
    ax.set(xlim=(-1.3, columns + 1.75), ylim=(rows + 0.9, -0.45), aspect="equal")
    ax.axis("off")
    return figure
