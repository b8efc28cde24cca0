"""Figures of step 5."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ring_flash_attn.lab.steps.s05_tiled_forward import one_row, tiled_forward

from .style import BLUE, GREEN, GREY, INK, ORANGE, PALE, PURPLE, RANKS, WIDTH, chart

__all__ = ["shares_of_the_tiles", "walk_over_the_keys"]


def _box(
    ax: Axes, x: float, y: float, w: float, h: float, face: str, text: str = "", style: str = "-"
) -> None:
    edge = GREY if face in ("white", PALE) else face
    ax.add_patch(plt.Rectangle((x, y), w, h, facecolor=face, edgecolor=edge, lw=0.8, ls=style))
    colour = INK if face in ("white", PALE) else "white"
    ax.text(x + w / 2, y + h / 2, text, ha="center", va="center", color=colour)


def walk_over_the_keys() -> Figure:
    """One block of queries, in the middle of its walk over the blocks of keys and values."""
    rows, columns, row, now = 4, 5, 1, 2
    figure, ax = plt.subplots(figsize=(WIDTH, 3.6))
    for j in range(columns):
        here = j == now
        _box(ax, j, -1.0, 0.92, 0.72, GREEN if here else "white", f"$K_{j}$")
        _box(ax, j, rows + 0.2, 0.92, 0.72, PURPLE if here else "white", f"$V_{j}$")
    for i in range(rows):
        mine = i == row
        _box(ax, -1.0, i, 0.72, 0.92, BLUE if mine else "white", f"$Q_{i}$")
        _box(ax, columns + 1.55, i, 0.72, 0.92, PALE if i < row else "white", f"$O_{i}$")
        for j in range(columns):
            if mine and j == now:
                _box(ax, j, i, 0.92, 0.92, ORANGE, "$S$, $P$")
            elif i < row or (mine and j < now):
                _box(ax, j, i, 0.92, 0.92, PALE, "gone")
            else:
                _box(ax, j, i, 0.92, 0.92, "white", style="--")
    _box(ax, columns + 0.2, row, 1.0, 0.92, ORANGE, "$m$, $\\ell$\n$acc$")
    onwards = {"arrowstyle": "->", "color": ORANGE, "lw": 2}
    ax.annotate("", (columns - 0.1, row + 0.46), (now + 1.0, row + 0.46), arrowprops=onwards)
    after = {"arrowstyle": "->", "color": INK, "lw": 1}
    ax.annotate("", (columns + 1.53, row + 0.46), (columns + 1.22, row + 0.46), arrowprops=after)
    ax.set(xlim=(-1.1, columns + 2.35), ylim=(rows + 1.05, -1.1), aspect="equal")
    ax.axis("off")
    return figure


def shares_of_the_tiles() -> Figure:
    """One row, five tiles: what part of the result so far is made of which tile."""
    q, k, v = one_row()
    starts = range(0, k.shape[1], 64)
    alone = [tiled_forward(q, k[:, j : j + 64], v[:, j : j + 64], False)[1] for j in starts]
    figure, ax = chart(2.9)
    for seen in range(1, len(starts) + 1):
        _, lse = tiled_forward(q, k[:, : 64 * seen], v[:, : 64 * seen], False)
        below = 0.0
        for tile in range(seen):
            share = (alone[tile] - lse).exp().item()
            ax.bar(seen - 1, share, bottom=below, width=0.72, color=RANKS[tile])
            if share > 0.06:
                words = f"{share:.0%}"
                ax.text(seen - 1, below + share / 2, words, ha="center", va="center", color="white")
            below += share
    names = [f"{64 * (i + 1)}" for i in range(len(starts))]
    ax.set(xticks=range(len(starts)), xlabel="keys seen", ylabel="part of the result so far")
    ax.set_xticklabels(names)
    ax.yaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    ax.grid(axis="x", visible=False)
    return figure
