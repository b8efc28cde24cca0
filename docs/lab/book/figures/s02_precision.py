"""Figures of step 2."""

from __future__ import annotations

import itertools

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from ring_flash_attn.lab.steps.s02_precision import accumulate, gap

from .style import BLUE, GREEN, INK, ORANGE, PURPLE, WIDTH, chart

__all__ = ["error_against_precision", "gaps_between_neighbours"]

VALUE = 0.01
FORMATS = (
    ("bf16", torch.bfloat16, ORANGE),
    ("fp16", torch.float16, GREEN),
    ("fp32", torch.float32, BLUE),
)


def ticks(low: int, high: int) -> tuple[list[float], list[str]]:
    """Every second power of ten, in letters that are not small."""
    at = [10.0**e for e in range(low, high + 1, 2)]
    return at, [f"{x:g}".replace("e-0", "e-") for x in at]


def gaps_between_neighbours() -> Figure:
    """The gap at each power of two, and from where on it is more than twice 0.01."""
    figure, ax = chart(3.4)
    for name, dtype, colour in FORMATS:
        powers = [2.0**e for e in range(-4, 16 if dtype == torch.float16 else 21)]
        gaps = [gap(x, dtype) for x in powers]
        ends = min(2 * powers[-1], torch.finfo(dtype).max)
        ax.step([*powers, ends], [*gaps, gaps[-1]], where="post", color=colour, lw=1.8)
        ax.text(powers[0] / 1.4, gaps[0], name, color=colour, ha="right", va="center")
        stop = next(x for x in powers if gap(x, dtype) > 2 * VALUE)
        ax.plot(stop, 2 * VALUE, "o", color=colour, zorder=3)
        right = dtype == torch.float16  # left of it runs another line
        label = {"xytext": (6, -12) if right else (-4, 6), "ha": "left" if right else "right"}
        label |= {"textcoords": "offset points", "color": colour, "weight": "bold"}
        ax.annotate(f"{stop:,.0f}", (stop, 2 * VALUE), **label)
        if dtype == torch.float16:
            ax.plot(ends, gaps[-1], "|", color=colour, ms=12, mew=2)
            ax.text(ends * 1.4, gaps[-1], f"ends at\n{ends:,.0f}", color=colour, va="center")
    ax.axhline(2 * VALUE, color=INK, ls="--", lw=1)
    ax.text(2.0**-6.8, 2 * VALUE * 1.5, "2 × 0.01")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=10)
    ax.set(xlabel="number", ylabel="gap to the next one", xlim=(2.0**-7, 2.0**21.4))
    ax.set_xticks([2.0**e for e in range(-4, 21, 4)], ["1/16", "1", "16", "256", "4k", "64k", "1M"])
    ax.set_yticks(*ticks(-8, 4))
    return figure


def error_against_precision() -> Figure:
    """The sums, and the largest of their relative errors so far, while 0.01 is added."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(WIDTH, 5.2), sharex=True)
    at = range(20, 4001, 40)
    exact = [n * VALUE for n in at]
    mixed = ("fp32 += fp16", torch.float16, PURPLE)
    places = {"bf16": (4000, 5), "fp16": (4000, 27), "fp32": (3750, 38)}  # of names, above
    for name, dtype, colour in (*FORMATS, mixed):
        into = torch.float32 if name == mixed[0] else dtype
        sums = [accumulate(into, dtype, False, n) for n in at]
        errors = [abs(total - true) / true for total, true in zip(sums, exact)]
        below.plot(at, list(itertools.accumulate(errors, max)), color=colour, lw=1.8)
        place = 0.03 if name == "fp16" else 1.5 * max(errors)
        below.text(4000, place, name, color=colour, ha="right", va="bottom")
        if name != mixed[0]:
            above.plot(at, sums, color=colour, lw=1.8)
            above.text(*places[name], name, color=colour, ha="right", va="bottom")
    above.set(ylabel="sum", ylim=(0, 42))
    below.set(ylabel="largest relative error so far", xlabel="additions of 0.01")
    below.set(yscale="log", ylim=(3e-8, 8))
    below.set_yticks(*ticks(-6, 0))
    return figure
