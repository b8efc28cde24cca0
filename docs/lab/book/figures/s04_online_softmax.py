"""Figures of step 4."""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from ring_flash_attn.lab.steps.s04_online_softmax import ROW, history

from .style import BLUE, GREY, ORANGE, WIDTH

__all__ = ["history_of_a_row"]


def history_of_a_row() -> Figure:
    """Scores with the maximum so far; the sum, with what is left of the old one."""
    row, n = torch.tensor(ROW), 3
    found = list(history(row, n))
    figure, (above, below) = plt.subplots(2, 1, figsize=(WIDTH, 4.0), sharex=True)
    above.bar(range(len(row)), row, color=BLUE, width=0.7)
    for i, (_, m, _, _) in enumerate(found):
        above.hlines(m, n * i - 0.5, n * i + n - 0.5, color=ORANGE, lw=2)
    above.set(ylabel="score")
    above.text(-0.4, 1.2, "maximum so far", color=ORANGE)
    old = 0.0
    for i, (_, _, alpha, total) in enumerate(found):
        kept, middle = old * alpha if i else 0.0, n * i + n / 2 - 0.5
        below.bar(middle, kept, width=2.4, color=GREY)
        below.bar(middle, total - kept, bottom=kept, width=2.4, color=BLUE)
        label = f"× {alpha:.2f}" if i else ""
        below.text(middle, total + 0.08, label, ha="center")
        old = total
    below.set(ylabel="sum", xticks=[1, 4, 7, 10], ylim=(0, 3))
    below.set_xticklabels([f"block {i}" for i in range(4)])
    below.grid(axis="x", visible=False)
    return figure
