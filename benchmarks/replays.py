"""One rank of 8, replayed on one GPU: every kernel that is here, several sources a launch, packs.

    python benchmarks/replays.py results/replays_h200.json [part of a name ...]

Zigzag's first and last rank, which receive and which merge the most; all ranks where they are not
balanced. NVLink 4 is emulated.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from ring_flash_attn.bench import Replay, replay
from ring_flash_attn.bench.machine import make_results
from ring_flash_attn.bench.replays.results import replay_rows
from ring_flash_attn.bench.results import Results
from ring_flash_attn.bench.workload import BOTH, FORWARD, Workload, call_of
from ring_flash_attn.kernels.base import why_not

PACK = [8 * end for end in (0, 3104, 6304, 7904, 8064, 8192)]
SHAPE = {"nheads": 32, "nheads_k": 8, "headdim": 128, "seqlen": 8192, "world_size": 8}
KERNELS = ("fa4", "cudnn", "fa2", "triton")
REPEATS = 7
COMMAND = "python benchmarks/replays.py"


def replayed() -> dict[str, dict]:
    """Arguments by name; those of kernels that are not here are left out."""
    found: dict[str, dict] = {}
    for kernel in KERNELS:
        for sources in (1, 2, 4):
            name = f"zigzag x ring x {kernel}, {sources} in a launch"
            found[name] = {"kernel": kernel, "sources_per_launch": sources}
    for kernel in ("fa2", "fa4"):
        found[f"zigzag x ring x {kernel}, 1 in a launch"]["baseline"] = kernel
    for kernel in ("fa4", "fa2", "triton"):
        packed = {"kernel": kernel, "cu_seqlens": PACK}
        for sources in (1, 2, 4):
            name = f"documents, zigzag x ring x {kernel}, {sources} in a launch"
            found[name] = {**packed, "sources_per_launch": sources}
        for layout, ranks in (("flat_contiguous", None), ("zigzag", [0, 7])):
            name = f"documents, {layout} x all_gather x {kernel}"
            gathered = {"layout": layout, "route": "all_gather", "heads_k_stride": 4}
            found[name] = {**packed, **gathered, "ranks": ranks}
    return {name: each for name, each in found.items() if not _lacks(each["kernel"])}


def _lacks(kernel: str) -> list[str]:
    workload = Workload(nheads=32, nheads_k=8, headdim=128, causal=True)
    return why_not(kernel, call_of(workload, torch.device("cuda", 0)))


def line(name: str, found: Replay) -> str:
    """The slowest rank: efficiency, that against full blocks, exposed ms, MiB over the base's."""
    cells = []
    for design in found.designs:
        rank = design.slowest(BOTH)
        first, both = (design.values(rank, passes) for passes in (FORWARD, BOTH))
        peak, base = rank.measured.peak, design.base.peak
        whole, full = "efficiency_percent", "full_rate_efficiency_percent"
        text = (
            f"{first[whole]:6.1f} {both[whole]:6.1f} %  full {first[full]:6.1f} {both[full]:6.1f} %"
        )
        if "exposed_ms" in both:
            text += f"  exposed {first['exposed_ms']:5.2f} {both['exposed_ms']:5.2f} ms"
        if peak and base:
            text += f"  {peak[BOTH] >> 20} MiB, {base[BOTH] >> 20} alone"
        cells.append(text + "  HOST" * rank.measured.is_host_bound)
    return f"{name:58s} " + "\n    baseline ".join(cells)


def main(path: str, *parts: str) -> None:
    replays: dict[str, Replay] = {}
    for name, options in replayed().items():
        if parts and not any(part in name for part in parts):
            continue
        replays[name] = replay(
            **{**SHAPE, "ranks": [0, 7], "link": "nvlink4", "repeats": REPEATS, **options}
        )
        print(line(name, replays[name]), flush=True)
        results(replays).save(Path(path))


def results(replays: dict[str, Replay]) -> Results:
    """What is known so far."""
    rows = [row for each in replays.values() for row in replay_rows(each)]
    details = {"replays": {name: each.to_dict() for name, each in replays.items()}}
    where, how = torch.device("cuda", 0), {"repeats": REPEATS}
    return replace(make_results(rows, where, how, details=details), command=COMMAND)


if __name__ == "__main__":
    main(*sys.argv[1:])
