"""One look for all figures, and what several of them draw.

A figure is at most WIDTH inches wide and its letters are 9 points or more, so that a phone shows
them in a readable size.
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH = 4.8
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = (
    "#2f6fde", "#e8871e", "#2a9d6f", "#d1435b", "#8257c9", "#9aa4b2",
)  # fmt: skip
PALE = "#e6ebf2"
INK = "#222b36"
RANKS = (BLUE, ORANGE, GREEN, RED, PURPLE, "#0fa3b1", "#b0793a", "#6b7a8f")  # by rank

STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.prop_cycle": plt.cycler(color=RANKS),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "figure.constrained_layout.use": True,
    "font.size": 9.5,
    "grid.color": PALE,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "svg.fonttype": "none",  # letters stay letters: small, sharp, and found by a search
    "svg.hashsalt": "book",  # the same file each time
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def chart(height: float = 3.0) -> tuple[Figure, Axes]:
    """A figure with one pair of axes."""
    return plt.subplots(figsize=(WIDTH, height))


def tiles(
    ax: Axes, colours: Sequence[Sequence[str | None]], texts: Sequence[Sequence[str]] = ()
) -> None:
    """A grid of cells, row 0 on top; None is an empty one."""
    for row, line in enumerate(colours):
        for column, colour in enumerate(line):
            face = colour or "white"
            ax.add_patch(
                plt.Rectangle((column, row), 0.94, 0.94, facecolor=face, edgecolor=PALE, lw=0.8)
            )
            if texts and texts[row][column]:
                light = "white" if colour else INK
                middle = (column + 0.47, row + 0.49)
                ax.text(*middle, texts[row][column], ha="center", va="center", color=light)
    ax.set(xlim=(-0.1, len(colours[0])), ylim=(len(colours), -0.1), aspect="equal")
    ax.axis("off")
