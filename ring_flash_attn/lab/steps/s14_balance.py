"""Step 14: zigzag and stripe: why layouts decide how long the ring takes.

What we want. In step 13 rank 0 was idle in all steps but the first, while the last rank had a full
tile in each. Ranks wait for each other in every step, so a step lasts as long as its busiest rank.
With n rows for each of W ranks, causal and contiguous:

    work of all            ≈ (W n)² / 2 pairs
    work of the last rank  ≈ W n² − n² / 2
    last over mean         = 2 − 1/W             nearly twice the time it should take

The mask is a triangle: early queries see little, late ones much. So give each rank some of both.

Zigzag. Cut the sequence into 2 W chunks. Rank r gets chunk r, early, and chunk 2 W − 1 − r, late:

    W = 4    chunk  0 1 2 3 4 5 6 7
             rank   0 1 2 3 3 2 1 0

Which halves see each other? Let source be the rank whose keys are here:

    source = rank    all queries, all keys, causal: rows are in order, so the usual mask is right
    source < rank    its early chunk is before both of ours, its late chunk after both of ours:
                     all queries × early keys, no mask
    source > rank    both its chunks are before our late one, and after our early one:
                     late queries × all keys, no mask

Every case has n² / 2 pairs (and n / 2 more where it is causal). Nobody waits, and no tile but our
own needs a mask.

Stripe. Rank r gets the tokens r, r + W, r + 2 W, … Each tile is then a triangle, with its diagonal
if source ≤ rank and without it if source > rank. It is as balanced, and stays so for packed
documents however they lie. But every tile has a mask, and blocks at the diagonal compute pairs in
vain.

The pairs below are counted from the plans that the library runs: `ring_flash_attn.plan`.

Exercise 14. Write `zigzag_shard` and `zigzag_steps`. `rfa lab check 14 DIR` looks at it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...draw.schedule import DIGITS, Schedule
from ...plan import Problem
from ...plan.layout import get_layout, spans
from ...plan.tiles import Mask
from ..definition import attention, visible

LAYOUTS = ("contiguous", "zigzag", "stripe")


def zigzag_shard(length: int, rank: int, world_size: int) -> Tensor:
    """Positions of the tokens that a rank holds, in order."""
    ends = [part * length // (2 * world_size) for part in range(2 * world_size + 1)]
    early, late = rank, 2 * world_size - 1 - rank
    return torch.cat([torch.arange(ends[part], ends[part + 1]) for part in (early, late)])


def zigzag_steps(rank: int, world_size: int) -> list[tuple[int, str, str, bool]]:
    """(source, queries, keys, causal) of each ring step."""
    steps = [(rank, "all", "all", True)]
    for step in range(1, world_size):
        source = (rank - step) % world_size
        steps.append(
            (source, "all", "early", False) if source < rank else (source, "late", "all", False)
        )
    return steps


def schedule(layout: str, length: int, world_size: int) -> Schedule:
    """What all ranks do, read from the library's plans; causal, on the ring."""
    lengths = (length,)
    problem = Problem(get_layout(layout), lengths, lengths, world_size, Mask.of(causal=True))
    return Schedule("ring", problem)


def pairs(layout: str, length: int, world_size: int) -> list[list[int]]:
    """Allowed (query, key) pairs, by step, then by rank."""
    return [[turn.pairs for turn in step] for step in schedule(layout, length, world_size).turns]


def check() -> None:
    """Zigzag attention from `zigzag_steps` alone; the library's layout; the formulas above."""
    torch.manual_seed(0)
    for length, world_size in ((48, 3), (64, 4), (20, 1)):
        q, k, v = torch.randn(3, 1, length, 16, dtype=torch.float64)
        want, _ = attention(q, k, v, causal=True)
        for rank in range(world_size):
            own = zigzag_shard(length, rank, world_size)
            (early, late) = spans(get_layout("zigzag"), (length,), rank, world_size)
            assert own.tolist() == [*early.positions, *late.positions], f"rank {rank}'s tokens"
            seen = torch.zeros(length, length, dtype=torch.int)
            for source, of_queries, of_keys, causal in zigzag_steps(rank, world_size):
                theirs = zigzag_shard(length, source, world_size)
                rows = own[len(own) // 2 :] if of_queries == "late" else own
                keys = theirs[: len(theirs) // 2] if of_keys == "early" else theirs
                tile = visible(len(rows), len(keys), causal).int()
                seen[rows[:, None], keys] += tile
            truth = visible(length, length, True).int()
            wrong = (seen[own] != truth[own]).sum().item()
            assert not wrong, f"rank {rank} of {world_size}: {wrong} pairs missing, twice, or later"
            scores = (q[0] @ k[0].T / 4).masked_fill(seen == 0, float("-inf"))[own]
            torch.testing.assert_close(scores.softmax(-1) @ v[0], want[0, own])
    for world_size in (2, 4, 8):
        n = 64
        for name, expected in (("contiguous", 2 - 1 / world_size), ("zigzag", 1), ("stripe", 1)):
            each = [sum(rank) for rank in zip(*pairs(name, n * world_size, world_size))]
            found = max(each) * world_size / sum(each)
            assert abs(found - expected) < 1 / n, f"{name}, {world_size} ranks: {found:.3f}"


def pictures(length: int, world_size: int) -> list[str]:
    """The masks of all layouts side by side: in each cell the step that computes the pair."""
    columns = []
    for name in LAYOUTS:
        plan = schedule(name, length, world_size)
        cell = {pair: patch.step for patch in plan.patches() for pair in patch.pairs}
        lines = [f"{name:{2 * length + 3}}"]
        for query, owner in enumerate(plan.owners()):
            steps = (cell.get((query, key)) for key in range(length))
            signs = " ".join("·" if step is None else DIGITS[step] for step in steps)
            lines.append(f"{owner} │ {signs}")
        columns.append(lines)
    return ["   ".join(lines) for lines in zip(*columns)]


def show() -> None:
    """Pictures, pairs of each rank and step, and the time that they make."""
    print("left of │ the rank that holds the query, right of it the step that computes the pair")
    print("\n".join(pictures(12, 3)))
    print("\nthe same in colour, with transfers: rfa draw contiguous zigzag stripe")

    print(
        "\npairs in thousands, 4096 tokens over 4 ranks; a step lasts as long as its busiest rank"
    )
    for name in LAYOUTS:
        table = pairs(name, 4096, 4)
        print(f"\n  {name:14}" + "".join(f"rank {rank}   " for rank in range(4)) + "step takes")
        for number, step in enumerate(table):
            cells = "".join(f"{count / 1e3:6.0f}   " for count in step)
            print(f"    step {number}     {cells}{max(step) / 1e3:9.0f}")
        time, work = sum(map(max, table)), sum(map(sum, table))
        print(f"    busy {work / time / 4:4.0%}{'all steps':>37}{time / 1e3:12.0f}")

    print("\nbusiest rank over mean   W = 2      4      8     16     (contiguous: 2 − 1/W)")
    for name in LAYOUTS:
        ratios = []
        for world_size in (2, 4, 8, 16):
            each = [sum(rank) for rank in zip(*pairs(name, 4096, world_size))]
            ratios.append(max(each) * world_size / sum(each))
        print(f"  {name:22}" + "".join(f"{ratio:7.2f}" for ratio in ratios))


def main() -> None:
    check()
    show()


if __name__ == "__main__":
    main()
