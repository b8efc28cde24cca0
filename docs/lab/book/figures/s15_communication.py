"""Figures of step 15."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from ring_flash_attn.bench.links import LINKS
from ring_flash_attn.lab.steps.s15_communication import (
    SHOWN,
    causal_pairs,
    predict,
    published,
    replays,
)
from ring_flash_attn.plan import Payload, Problem, make_plan
from ring_flash_attn.plan.layout import get_layout
from ring_flash_attn.plan.tiles import Mask

from .style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, WIDTH, chart, tiles

__all__ = ["hidden_from", "predicted_and_measured", "what_travels_when"]


def _rank(n: int, link: str) -> dict[str, float]:
    """A rank of 8 with n tokens: seconds of its forward pass."""
    numbers = LINKS[link].bandwidth, LINKS[link].latency
    return predict(causal_pairs(8 * n), 8 * n, 8, 32, 8, 128, 700e12, *numbers)


def _first_hidden(link: str) -> int:
    """The fewest tokens of a rank with which all hops hide."""
    low, high = 1, 1 << 17
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if _rank(middle, link)["exposed"] else (low, middle)
    return low


def hidden_from() -> Figure:
    """One hop on each link, and one step of work, by tokens of a rank; where they cross."""
    figure, ax = chart(3.7)
    tokens = [2**i for i in range(8, 16)]
    work = [_rank(n, "nvlink4")["compute"] / 8 * 1e6 for n in tokens]
    ax.loglog(tokens, work, color=INK, lw=2.5, label="one step of work")
    for link, colour in zip(SHOWN, (BLUE, GREEN, PURPLE, ORANGE), strict=True):
        hops = [_rank(n, link)["communication"] / 7 * 1e6 for n in tokens]
        n = _first_hidden(link)
        ax.loglog(tokens, hops, color=colour, lw=1.8, label=f"hop, {link}: hidden from {n:,} on")
        ax.plot(n, _rank(n, link)["compute"] / 8 * 1e6, "o", color=colour, ms=6)
    ax.set(xlabel="tokens of a rank", ylabel="µs", ylim=(0.5, 3e5))
    ax.set_xticks(tokens, [f"{n:,}" if n < 1024 else f"{n // 1024}k" for n in tokens])
    ax.minorticks_off()
    ax.legend(loc="upper left")
    return figure


def what_travels_when() -> Figure:
    """The library's plan of a backward pass on 4 ranks: work and messages of rank 0, by step."""
    ranks, lengths = 4, (4096,)
    problem = Problem(get_layout("zigzag"), lengths, lengths, ranks, Mask.of(causal=True))
    steps = make_plan("ring", problem, 0, True).steps
    colours: list[list[str | None]] = [[], [], []]
    for number, step in enumerate(steps):
        sent = {each.payload for each in step.transfers if each.source == 0}
        alone = number >= ranks  # nobody computes
        colours[0].append(None if alone else GREEN)
        colours[1].append(BLUE if Payload.INPUT in sent else None)
        colours[2].append((RED if alone else ORANGE) if Payload.RESULT in sent else None)
    figure, ax = plt.subplots(figsize=(WIDTH, 2.4))
    tiles(ax, colours)
    ax.set(xlim=(-0.95, len(steps)), ylim=(3.5, -0.1), aspect="auto")
    for row, name in enumerate(("work", "k, v", "dk, dv")):
        ax.text(-0.12, row + 0.49, name, ha="right", va="center")
    for number in range(len(steps)):
        ax.text(number + 0.47, 3.25, f"step {number}", ha="center", va="center")
    ax.text(ranks + 0.47, 2.49, "exposed", ha="center", va="center", color="white", size=9)
    return figure


def predicted_and_measured() -> Figure:
    """Forward passes of 8 ranks: ours as replays, those of others on 8 GPUs."""
    ours = [
        (name, compute + exposed, row.ms or 0.0)
        for name, passes, compute, exposed, row in replays()
        if passes == "forward"
    ][:3]
    theirs = [
        (name.partition(":")[0], ms, found)
        for name, passes, ms, found in published()
        if passes == "forward"
    ]
    figure, axes = plt.subplots(2, 1, figsize=(WIDTH, 4.4))
    titles = "H200, Triton: one rank, links emulated", "8 × H800, flash-attn 2, NCCL (published)"
    for ax, rows, title in zip(axes, (ours, theirs), titles, strict=True):
        for i, (_, predicted, found) in enumerate(rows):
            for shift, ms, colour in ((-0.19, predicted, GREY), (0.19, found, BLUE)):
                ax.barh(i + shift, ms, 0.34, color=colour)
                ax.annotate(
                    f"{ms:.1f}", (ms, i + shift), (3, 0), textcoords="offset points", va="center"
                )
        ax.set_yticks(range(len(rows)), [name for name, _, _ in rows])
        ax.invert_yaxis()
        ax.set_title(title, loc="left")
        ax.set_xlim(0, 1.14 * max(max(row[1:]) for row in rows))
        ax.grid(axis="y", visible=False)
    axes[0].text(7.6, 1 - 0.19, "predicted", color="#5d6775", va="center")
    axes[0].text(7.6, 1 + 0.19, "measured", color=BLUE, va="center")
    axes[1].set_xlabel("ms, forward")
    return figure
