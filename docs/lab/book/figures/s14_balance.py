"""Figures of step 14."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from ring_flash_attn.draw.schedule import colour
from ring_flash_attn.draw.svg import draw_svg
from ring_flash_attn.lab.steps.s14_balance import LAYOUTS, pairs, schedule

from .style import GREY, WIDTH

__all__ = ["contiguous", "stripe", "work_by_rank", "zigzag"]

W = 4


def contiguous() -> str:
    """16 tokens over 4 ranks, each with neighbouring tokens."""
    return draw_svg([schedule("contiguous", 16, W)])


def zigzag() -> str:
    """The same, each with an early and a late chunk."""
    return draw_svg([schedule("zigzag", 16, W)])


def stripe() -> str:
    """The same, dealt like cards."""
    return draw_svg([schedule("stripe", 16, W)])


def work_by_rank() -> Figure:
    """A lane for each rank, 4096 tokens: a step begins when all ranks have ended the one before."""
    figure, panels = plt.subplots(3, 1, figsize=(WIDTH, 4.8), sharex=True)
    for ax, name in zip(panels, LAYOUTS):
        start = 0.0
        for number, step in enumerate(pairs(name, 1024 * W, W)):
            for rank, count in enumerate(step):
                if count:
                    width, fill = count / 1e6, colour(rank, W)
                    ax.barh(rank, width, left=start, color=fill, height=0.8, edgecolor="white")
                    place = (start + width / 2, rank + 0.02)
                    ax.text(*place, str(number), ha="center", va="center", color="white")
            start += max(step) / 1e6
        ax.axvline(start, color=GREY, ls="--")
        ax.text(start + 0.04, 1.5, f"{start:.2f}", va="center")
        ax.set(yticks=range(W), ylim=(W - 0.45, -0.55), ylabel="rank", xlim=(0, 4.15))
        ax.set_title(name, loc="left")
        ax.grid(axis="y", visible=False)
    panels[-1].set(xlabel="time, in millions of pairs")
    return figure
