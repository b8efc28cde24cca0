"""Figures of step 9."""

from __future__ import annotations

from math import ceil

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ring_flash_attn.lab.definition import visible
from ring_flash_attn.lab.steps.s09_causal import SHAPES, visible_blocks

from .style import BLUE, INK, ORANGE, PALE, RED, WIDTH, chart

__all__ = ["blocks", "who_sees_whom"]


def who_sees_whom() -> Figure:
    """Query by query, for as many keys as queries, more, and fewer."""
    figure, ax = chart(2.5)
    left, bottom = 0, 8
    for queries, keys in ((6, 6), (4, 8), (8, 4)):
        seen = visible(queries, keys, causal=True)
        for row, line in enumerate(seen.tolist()):
            for key, each in enumerate(line):
                colour = BLUE if each else PALE if any(line) else RED
                corner = (left + key, bottom - queries + row)
                ax.add_patch(plt.Rectangle(corner, 0.92, 0.92, facecolor=colour))
        middle, shift = left + keys / 2, f"{keys - queries}".replace("-", "−")
        ax.text(middle, bottom + 0.4, f"shift {shift}", ha="center", va="top")
        size = f"{queries} queries\n{keys} keys"
        ax.text(middle, bottom - queries - 0.4, size, ha="center", va="bottom")
        left += keys + 2
    ax.set(xlim=(-0.5, left - 1.5), ylim=(bottom + 1.6, -2.6), aspect="equal")
    ax.axis("off")
    return figure


def blocks() -> Figure:
    """What `visible_blocks` says of the shapes that the step prints."""
    figure, panels = plt.subplots(2, 2, figsize=(WIDTH, 4.9), width_ratios=[1, 1.05])
    colours = {None: "white", False: BLUE, True: ORANGE}
    for ax, (rows_q, rows_k, block_q, block_k) in zip(panels.flat, SHAPES):
        needs_mask = {
            (i, j): mask for i, j, mask in visible_blocks(rows_q, rows_k, block_q, block_k, True)
        }
        for i in range(ceil(rows_q / block_q)):
            for j in range(ceil(rows_k / block_k)):
                ax.add_patch(
                    plt.Rectangle(
                        (j * block_k, i * block_q), block_k, block_q,
                        facecolor=colours[needs_mask.get((i, j))], edgecolor=PALE, lw=0.8,
                    )
                )  # fmt: skip
        shift = rows_k - rows_q
        ax.plot((shift, rows_k), (0, rows_q), color=INK, lw=1)
        ax.set_title(f"{rows_q} × {rows_k}\nblocks {block_q} × {block_k}", fontsize=9.5)
        ax.set(xlim=(-5, rows_k + 5), ylim=(rows_q + 5, -5), aspect="equal")
        ax.axis("off")
    legend = panels[1, 1]
    legend.axis("off")
    names = {"no mask": BLUE, "mask": ORANGE, "skipped": "white"}
    legend.legend(
        handles=[Patch(facecolor=c, edgecolor=PALE, label=n) for n, c in names.items()],
        loc="center", fontsize=10,
    )  # fmt: skip
    return figure
