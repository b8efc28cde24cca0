"""Figures of step 13, drawn from the messages of its ranks."""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor

from ring_flash_attn.lab.steps.s13_ring import Recv, Send, ring_backward, ring_forward, run_ranks

from .style import RANKS, WIDTH

__all__ = ["gradients_come_home", "keys_go_around"]

W = 4
Cell = tuple[int, str, bool]  # whose, text, whether it is filled


def _keys_held() -> list[list[int]]:
    """For each rank, whose keys it holds, step by step."""

    def rank_main(rank: int, send: Send, recv: Recv) -> list[int]:
        held = [rank]

        def noted(source: int) -> tuple[Tensor, ...]:
            k, v = recv(source)
            held.append(int(k[0, 0]))
            return k, v

        mine = torch.full((1, W), float(rank))
        ring_forward(rank, W, torch.zeros_like(mine), mine, mine, send, noted)
        return held

    return run_ranks(W, rank_main)


def _gradients_held() -> list[list[tuple[int, list[int]]]]:
    """For each rank and step: whose dk it sends on, and who has added to it; at last, its own.

    Queries and the lse are 0, so p is 1. Rank r's dout has a 1 in column r: column r of dv tells
    whether rank r has added its part. dk is 0, which tells gradients from keys.
    """

    def rank_main(rank: int, send: Send, recv: Recv) -> list[tuple[int, list[int]]]:
        found, owner = [], rank

        def noted_send(to: int, k: Tensor, v: Tensor) -> None:
            if not k.any():
                found.append((owner, parts(v)))
            send(to, k, v)

        def noted_recv(source: int) -> tuple[Tensor, ...]:
            nonlocal owner
            k, v = recv(source)
            if k.any():
                owner = int(k[0, 0]) - 1
            return k, v

        def parts(dv: Tensor) -> list[int]:
            ranks = [(owner + hop) % W for hop in range(W)]
            return [each for each in ranks if dv[0, each]]

        zero, k, dout = torch.zeros(1, W), torch.full((1, W), rank + 1.0), torch.eye(W)[[rank]]
        given = (zero, k, zero, zero, zero[:, 0], dout)
        _, _, dv = ring_backward(rank, W, *given, noted_send, noted_recv)
        owner = rank
        return [*found, (rank, parts(dv))]

    return run_ranks(W, rank_main)


def _table(lines: list[tuple[str, list[Cell]]], inches: float, cell: float) -> Figure:
    """A line for each step, a column for each rank; arrows to the next rank."""
    figure, ax = plt.subplots(figsize=(WIDTH, inches))
    for rank in range(W):
        ax.text(rank + 0.5, -0.12, f"rank {rank}", ha="center", va="bottom")
    for row, (label, cells) in enumerate(lines):
        ax.text(-0.08, row + cell / 2, label, ha="right", va="center")
        for column, (owner, text, filled) in enumerate(cells):
            colour, place = RANKS[owner], (column + 0.06, row)
            face, shade = (colour, "white") if filled else ("white", colour)
            ax.add_patch(plt.Rectangle(place, 0.88, cell, facecolor=face, edgecolor=colour, lw=1.4))
            ax.text(column + 0.5, row + cell / 2, text, ha="center", va="center", color=shade)
            targets = [column + 1] if column + 1 < W else [W, 0]  # the last: out, and in again
            for to in targets if row + 1 < len(lines) else ():
                arrow = {"arrowstyle": "-|>", "color": colour, "shrinkA": 1, "shrinkB": 1}
                ax.annotate("", (to + 0.2, row + 1), (to - 0.2, row + cell), arrowprops=arrow)
    ax.set(xlim=(-0.7, W + 0.2), ylim=(len(lines) - 1 + cell + 0.05, -0.45))
    ax.axis("off")
    return figure


def keys_go_around() -> Figure:
    """Whose keys are where; white where the causal mask leaves nothing to do."""
    lines = []
    for step, owners in enumerate(zip(*_keys_held())):
        cells = [(owner, f"K{owner}", owner <= rank) for rank, owner in enumerate(owners)]
        lines.append((f"step {step}", cells))
    return _table(lines, 3.0, 0.58)


def gradients_come_home() -> Figure:
    """Which gradients are where, and whose parts are in them."""
    lines = []
    for step, line in enumerate(zip(*_gradients_held())):
        cells = [(owner, f"dK{owner}\n" + "+".join(map(str, parts)), True) for owner, parts in line]
        lines.append((f"step {step}" if step < W else "home", cells))
    return _table(lines, 4.2, 0.66)
