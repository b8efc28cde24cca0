"""Figures of step 12."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from ring_flash_attn.lab.steps.s12_merge import COUNTS, errors, lse_of_halves

from .style import BLUE, GREEN, ORANGE, RED, WIDTH, chart

__all__ = ["error_by_parts", "weights_of_halves"]


def weights_of_halves() -> Figure:
    """For each row, the share of each half in the sum over all keys."""
    first, second, both = lse_of_halves()
    figure, ax = plt.subplots(figsize=(WIDTH, 3.2))
    left = (first - both).exp().tolist()
    right = (second - both).exp().tolist()
    for row, (a, b) in enumerate(zip(left, right)):
        for start, width, colour in ((0.0, a, BLUE), (a, b, ORANGE)):
            ax.barh(row, width, left=start, color=colour, height=0.78)
            if width > 0.1:
                middle = start + width / 2
                ax.text(middle, row, f"{width:.2f}", ha="center", va="center", color="white")
    for x, colour, keys in ((0.0, BLUE, "keys 0–3"), (1.0, ORANGE, "keys 4–7")):
        ax.text(x, -0.65, keys, color=colour, ha="right" if x else "left", va="bottom")
    ax.set(xlabel="weight", ylabel="row", yticks=range(8), xlim=(0, 1), ylim=(7.5, -1.3))
    ax.grid(visible=False)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    return figure


def error_by_parts() -> Figure:
    """The error after 2 to 128 parts, for each dtype of the running output."""
    figure, ax = chart(3.1)
    lines = zip(*map(errors, COUNTS))
    for name, colour, line in zip(("fp32", "fp16", "bf16"), (GREEN, ORANGE, RED), lines):
        ax.plot(COUNTS, line, marker="o", color=colour)
        ax.text(COUNTS[-1] * 1.25, line[-1], name, color=colour, va="center")
    ax.set(xscale="log", yscale="log", xlabel="parts", ylabel="relative error", xlim=(1.6, 270))
    ax.set_ylim(1e-7, 1e-1)
    ax.set_xticks(COUNTS, [str(count) for count in COUNTS])
    ax.minorticks_off()
    return figure
