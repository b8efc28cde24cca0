"""How long a new pack takes the host of one rank: both plans, where shards lie, launch tables.

    python benchmarks/plan_time.py [FILE]

Of packs that no cache knows, the median of five: milliseconds of the plans, of the forward tables
and of the backward ones (blocks of 128 rows), as `prepare` and the first launches make them. With
FILE, the rows go there with the machine and versions.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from pathlib import Path

import torch

from ring_flash_attn.bench.machine import machine, versions
from ring_flash_attn.kernels.tables import table
from ring_flash_attn.plan.buffers import BufferPlan
from ring_flash_attn.plan.build import make_plan
from ring_flash_attn.plan.layout import get_layout
from ring_flash_attn.plan.problem import Problem
from ring_flash_attn.plan.tiles import Mask

CASES = [(1, 1), (40, 1), (1, 8), (40, 8), (1000, 8), (1000, 64)]  # documents, ranks
POINTS = [
    ("balanced", "ring"),
    ("zigzag", "ring"),
    ("zigzag", "all_gather"),
    ("flat_contiguous", "all_gather"),
]
TOKENS = 8192  # a rank


def pack(documents: int, ranks: int, seed: int) -> tuple[int, ...]:
    """Log-normal lengths, short and long."""
    draws = random.Random(seed)
    sizes = [draws.lognormvariate(0, 1.2) for _ in range(documents)]
    lengths = [max(1, int(size / sum(sizes) * TOKENS * ranks)) for size in sizes]
    return tuple(lengths)


def measured(layout: str, route: str, documents: int, ranks: int, seed: int) -> list[float]:
    """Milliseconds of the plans, the forward tables, the backward tables."""
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    lengths = pack(documents, ranks, seed)
    started = time.perf_counter()
    problem = Problem(
        get_layout(layout), lengths, lengths, ranks, Mask(right=0), 8, 8, sources_per_launch=None
    )
    plans = [make_plan(route, problem, ranks // 2, backward) for backward in (False, True)]
    buffers = [BufferPlan(plan, problem) for plan in plans]
    times = [time.perf_counter()]
    for made, by_key, programs in zip(buffers, (False, True), (0.0, 132.0), strict=True):
        for work in (work for step in made.plan.steps for work in step.work):
            table(work.tiles, 128, 128, by_key, device, programs)
        times.append(time.perf_counter())
    return [1e3 * (b - a) for a, b in zip([started, *times], times, strict=False)]


def main() -> None:
    rows = []
    print("layout × route, documents, ranks: plans, forward tables, backward tables (ms)")
    for layout, route in POINTS:
        for documents, ranks in CASES:
            measured(layout, route, documents, ranks, 0)
            found = [measured(layout, route, documents, ranks, seed) for seed in range(1, 6)]
            medians = [statistics.median(column) for column in zip(*found, strict=True)]
            shown = "  ".join(f"{value:7.2f}" for value in medians)
            print(f"{layout + ' × ' + route:30} {documents:5} {ranks:3}  {shown}", flush=True)
            names = ("plans_ms", "forward_tables_ms", "backward_tables_ms")
            case = {"layout": layout, "route": route, "documents": documents, "ranks": ranks}
            rows.append({**case, **dict(zip(names, medians, strict=True))})
    if len(sys.argv) > 1:
        device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        made = {"machine": machine(device), "versions": versions(), "rows": rows}
        Path(sys.argv[1]).write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
