"""Figures of step 16."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ring_flash_attn.bench.results import load
from ring_flash_attn.kernels.triton.hopper.host import _FORWARD, _HALF
from ring_flash_attn.lab.steps.s15_communication import RESULTS
from ring_flash_attn.lab.steps.s16_hopper import FLOPS, clocks

from .style import BLUE, GREEN, GREY, INK, ORANGE, PALE, PURPLE, RED, WIDTH, chart

__all__ = ["ping_pong", "roofs", "rooms"]

COPY = 512  # clocks of a copy, as drawn
END = 6144  # clocks
DEEP = "#1d4793"


def roofs() -> Figure:
    """Rates of the forward pass, head dimension 128, and what an H200's units allow."""
    found = load(RESULTS / "compare_full_d128_h200.json")
    rates = {row.implementation: row.tflops or 0.0 for row in found.rows if row.passes == "forward"}
    names = {"fa2": "FlashAttention-2", "cudnn": "cuDNN", "fa4": "FlashAttention-4"}
    names |= {"triton": "ours"}
    figure, ax = chart(2.9)
    for i, (key, name) in enumerate(names.items()):
        ax.barh(i, rates[key], 0.6, color=GREEN if name == "ours" else GREY)
        ax.text(15, i, f"{rates[key]:.0f}", va="center", color="white")
    product = found.machine["peak"]["tflops"]
    ax.barh(len(names), product, 0.6, color=PALE)
    ax.text(15, len(names), f"{product:.0f}", va="center")
    ax.set_yticks(range(5), [*names.values(), "one large product"])
    products, powers = clocks(128)
    peak = FLOPS * found.machine["processors"] * 1.83e9 / 1e12
    turn = peak * products / (products + powers)
    for x, name, colour in ((turn, "in turn", RED), (peak, "at once", INK)):
        ax.vlines(x, -0.5, 4.5, color=colour, lw=1.6, ls="--")
        ax.text(x, 4.6, f"{name}: {x:.0f}", ha="center", va="bottom", color=colour)
    ax.set(xlabel="TFLOP/s", xlim=(0, 1130), ylim=(-0.5, 5.2))
    ax.grid(axis="y", visible=False)
    return figure


def rooms() -> Figure:
    """What of an SM's shared memory and registers the forward kernel takes, in KiB."""
    d, sizes = 128, _FORWARD[128]
    stages = sizes.stages * sizes.block * d * 2 // 1024
    shared = [("q", 2 * 2 * _HALF * d * 2 // 1024, PURPLE), ("k", stages, BLUE)]
    shared += [("v", stages, GREEN)]
    each = 128 * 4 / 1024  # KiB of one register in all threads of a warpgroup
    consumer = [("out", 64, ORANGE), ("s", 64, RED), ("p", 32, PURPLE), ("rest", 80, GREY)]
    parts = [(name, number * each, colour) for name, number, colour in consumer]
    registers = [*parts, *parts, ("", 24 * each, INK)]
    figure, axes = plt.subplots(2, 1, figsize=(WIDTH, 2.9), sharex=True)
    for ax, row, room, title in (
        (axes[0], shared, 227, "shared memory"),
        (axes[1], registers, 256, "registers: consumer 0, consumer 1, producer"),
    ):
        left = 0.0
        ax.barh(0, room, 0.8, color=PALE)
        for name, size, colour in row:
            ax.barh(0, size, 0.8, left=left, color=colour, edgecolor="white", lw=0.8)
            at = left + size / 2
            if name:
                ax.text(at, 0.12, name, ha="center", va="center", color="white")
                ax.text(at, -0.2, f"{size:.0f}", ha="center", va="center", color="white")
            left += size
        ax.set_title(f"{title}: {left:.0f} of {room} KiB", loc="left")
        ax.set(yticks=[], ylim=(-0.5, 0.5))
        ax.grid(visible=False)
        ax.spines["left"].set_visible(False)
    axes[1].set(xlabel="KiB", xticks=range(0, 257, 64), xlim=(0, 258))
    return figure


def _box(ax: Axes, row: float, begin: float, length: float, colour: str, name: str) -> None:
    ax.barh(row, length, 0.42, left=begin, color=colour, edgecolor="white", lw=0.8)
    if name and begin + length <= END:
        ax.text(begin + length / 2, row, name, ha="center", va="center", color="white")


def _in_turn(ax: Axes, blocks: int) -> None:
    """One warpgroup that waits for each of its products."""
    products, powers = clocks(128)
    now = 0.0
    for j in range(blocks):
        _box(ax, 0, now, products / 2, BLUE, f"S{j}")
        _box(ax, 0.44, now + products / 2, 2 * powers, ORANGE, "softmax")
        now += products / 2 + 2 * powers
        _box(ax, 0, now, products / 2, DEEP, "PV")
        now += products / 2


def _turns(ax: Axes, blocks: int, stages: int) -> None:
    """Two consumers that take turns at the tensor cores, and the copies that they allow."""
    products, powers = clocks(128)
    one = products / 2
    ready, free = [0.0, 0.0], 0.0
    k_free, v_free = [0.0] * blocks, [0.0] * blocks  # when both consumers have read block j's
    for j in range(blocks):
        for c in (0, 1):
            row = 1.3 + 1.1 * c
            begin = max(ready[c], free)
            _box(ax, row, begin, one, BLUE, f"S{j}")
            _box(ax, 3.42, begin, one, BLUE, "")
            k_free[j] = begin + one
            free = begin + one
            if j:
                _box(ax, row, free, one, DEEP, "PV")
                _box(ax, 3.42, free, one, DEEP, "")
                free += one
                v_free[j - 1] = free
            _box(ax, row + 0.44, begin + one, 2 * powers, ORANGE, "softmax")
            ready[c] = max(begin + one + 2 * powers, free)
    now = -1.0 * COPY
    for j in range(blocks):
        for name, since in (("K", k_free), ("V", v_free)):
            if j >= stages:
                now = max(now, since[j - stages])
            _box(ax, 0.2, now, COPY, GREEN, f"{name}{j}")
            now += COPY


def ping_pong() -> Figure:
    """Above, products and softmax in turn; below, two consumers and a producer."""
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(WIDTH, 4.6), height_ratios=(1, 3.2), sharex=True
    )
    _in_turn(above, 4)
    _turns(below, 5, _FORWARD[128].stages)
    above.set(ylim=(0.75, -0.3), yticks=[0.22])
    above.set_yticklabels(["one\nwarpgroup"])
    above.set_title("in turn", loc="left")
    below.set(ylim=(3.72, -0.1), yticks=[0.2, 1.52, 2.62, 3.42])
    below.set_yticklabels(["TMA", "consumer\n0", "consumer\n1", "tensor\ncores"])
    below.set_title("ping-pong", loc="left")
    below.set(xlabel="clocks", xlim=(-530, END), xticks=range(0, END, 1024))
    for ax in (above, below):
        ax.grid(axis="y", visible=False)
        ax.tick_params(axis="y", length=0)
    return figure
