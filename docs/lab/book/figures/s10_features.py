"""Figures of step 10."""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from ring_flash_attn.lab.definition import visible
from ring_flash_attn.lab.steps.s10_features import by_group, cache_size, effect_of_sink, key_range

from .style import BLUE, GREEN, ORANGE, PALE, RANKS, WIDTH, chart, tiles

__all__ = ["groups", "share_of_a_sink", "window"]


def groups() -> Figure:
    """Which query heads read which KV head; and how large the cache is."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(WIDTH, 3.6), height_ratios=[1.15, 1])
    heads, heads_k = 8, 2
    members = by_group(torch.arange(heads)[None, None, :, None], heads_k)[0, :, :, 0, 0].tolist()
    for kv, group in enumerate(members):
        colour, middle = RANKS[kv], sum(group) / len(group)
        for head in group:
            above.plot((head, middle), (0.32, 1.18), color=colour, lw=1.3, zorder=0)
            _box(above, head, 0, 0.8, f"q{head}", colour)
        _box(above, middle, 1.5, 1.8, f"k{kv}, v{kv}", colour)
    above.set(xlim=(-0.6, heads - 0.4), ylim=(1.9, -0.4))
    above.axis("off")
    sizes = {heads_k: cache_size(heads_k) for heads_k in (32, 8, 1)}
    names = [f"{heads_k} KV heads" if heads_k > 1 else "1 KV head" for heads_k in sizes]
    below.barh(names, sizes.values(), color=(BLUE, ORANGE, GREEN), height=0.6)
    for y, size in enumerate(sizes.values()):
        below.text(size + 30, y, f"{size:.0f} MiB", va="center")
    below.set(xlim=(0, 2600), title="cache of 32 query heads, 128k tokens, one layer", xticks=())
    below.grid(visible=False)
    below.invert_yaxis()
    return figure


def _box(ax: plt.Axes, x: float, y: float, width: float, text: str, colour: str) -> None:
    ax.add_patch(plt.Rectangle((x - width / 2, y - 0.32), width, 0.64, facecolor=colour))
    ax.text(x, y + 0.02, text, ha="center", va="center", color="white")


def window() -> Figure:
    """Who sees whom; and the keys that each block of queries reads."""
    rows, block, left = 16, 4, 4
    figure, ax = chart(3.6)
    seen = visible(rows, rows, True, (left, 0)).tolist()
    tiles(ax, [[BLUE if each else PALE for each in row] for row in seen])
    for first in range(0, rows, block):
        begin, end = key_range(first, first + block, rows, rows, True, (left, 0))
        corner = (begin - 0.03, first - 0.03)
        ax.add_patch(
            plt.Rectangle(corner, end - begin, block, fill=False, edgecolor=ORANGE, lw=2.2)
        )
        ax.text(rows + 0.5, first + block / 2, f"{end - begin} keys", va="center")
    ax.text(rows / 2, -0.4, "keys", ha="center")
    ax.text(-0.4, rows / 2, "queries", va="center", ha="right", rotation=90)
    ax.set(xlim=(-1.6, rows + 4), ylim=(rows + 0.1, -1.4))
    return figure


def share_of_a_sink() -> Figure:
    """Its part of the weight, and the length of the output, over its value."""
    figure, ax = chart(2.7)
    sinks = [x / 2 for x in range(-4, 25)]
    shares, lengths = zip(*map(effect_of_sink, sinks))
    ax.plot(sinks, shares, color=ORANGE, lw=2)
    ax.plot(sinks, [x / lengths[0] for x in lengths], color=BLUE, lw=2)
    ax.text(11.9, 0.78, "weight of the sink", color=ORANGE, ha="right", va="top")
    ax.text(3.1, 1.0, "|out|", color=BLUE, ha="left")
    ax.set(xlabel="sink", ylim=(0, 1.1), xlim=(-2, 12))
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    return figure
