"""Results of all kinds for reports, small and made by hand, but for one real replay."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from replays import small

from ring_flash_attn.bench import replay
from ring_flash_attn.bench.replays.results import replay_rows
from ring_flash_attn.bench.results import Results, Row

EVIL = '</script><img src=x onerror="window.hacked=1"><b>&amp;\''
FAST, SLOW, CPU = "GPU fast", "GPU slow", "cpu (test)"
PEAK = {"dtype": "bfloat16", "tflops": 600.0, "gbps": 3000.0}
LENGTHS = (128, 1024, 8192)


def workload(seqlen: int, dtype: str = "bfloat16", **changes: Any) -> dict[str, Any]:
    """Eight query heads, two KV heads, causal."""
    return {
        "batch": 1,
        "seqlen": seqlen,
        "nheads": 8,
        "nheads_k": 2,
        "headdim": 64,
        "causal": True,
        "window": [-1, -1],
        "dtype": dtype,
        **changes,
    }


def bench_rows() -> Iterator[Row]:
    """Two implementations, both passes, three lengths; one ran out of memory."""
    for factor, name in enumerate(("triton", EVIL), start=1):
        for passes in ("forward", "backward"):
            for length in LENGTHS:
                speed = 100.0 * factor + length / 100
                samples = (1.0 * factor, 3.0 * factor, 2.0 * factor)
                yield Row("bench", name, passes, workload(length), {}, samples, speed, 3 << 20)
    yield Row("bench", "flex", "forward", workload(8192), failed="out of memory, =1+1")


def compare_rows() -> Iterator[Row]:
    """A single length without a mask, as times only."""
    for name, ms in (("triton", 2.0), ("cudnn", 1.0)):
        yield Row("compare", name, "forward", workload(4096, causal=False), {}, (ms,))


def ring_rows() -> Iterator[Row]:
    """Two layouts on one, two and four ranks; the last rank is the slowest."""
    for layout, loss in (("zigzag", 2.0), ("contiguous", 12.0)):
        for world_size in (1, 2, 4):
            for rank in range(world_size):
                placement = {"world_size": world_size, "layout": layout, "route": "ring"}
                slowest = rank == world_size - 1
                efficiency = 100 - loss * world_size + (0 if slowest else 1)
                yield Row(
                    "ring",
                    "triton",
                    "both",
                    workload(2048),
                    {**placement, "rank": rank},
                    (5.0,),
                    4 * efficiency,
                    values={"efficiency_percent": efficiency, "slowest": float(slowest)},
                )


def error(largest: Any, limit: float = 1e-3) -> dict[str, Any]:
    """Of one tensor."""
    passed = isinstance(largest, float) and largest <= limit
    return {
        "max": largest,
        "mean": largest,
        "rmse": largest,
        "relative": largest,
        "limit": limit,
        "passed": passed,
    }


def verify_rows() -> Iterator[Row]:
    """A good case on two ranks, one beyond its limit, one that is exact, one without end."""
    cases: tuple[tuple[str, tuple[Any, ...]], ...] = (
        ("causal", (1e-5, 4e-4)),
        ("window", (2e-3,)),
        ("sink", (0.0,)),
        ("alibi", ("inf",)),
    )
    for feature, sizes in cases:
        for rank, size in enumerate(sizes):
            yield Row(
                "verify",
                "reference",
                "both",
                workload(64, "float32", feature=feature),
                {"world_size": 2, "layout": "stripe", "route": "ring", "rank": rank},
                errors={"out": error(size), "dq": error(1e-6)},
            )


@cache
def replayed() -> Results:
    """A real replay with a timeline."""
    found = replay(**small(), link="nvlink4", timeline=True)
    rows = tuple(replay_rows(found))
    details = {"replays": {found.ours.name: found.to_dict()}}
    return Results("rfa replay", {"device": CPU, "kind": "cpu"}, {}, None, {}, rows, details)


def results(device: str, rows: Iterator[Row], **machine: Any) -> Results:
    """As a command would make them."""
    where = {"device": device, "kind": "cuda", **machine}
    return Results("rfa test", where, {"torch": "9.9"}, "abc1234", {"repeats": 3}, tuple(rows))


def all_results() -> dict[str, Results]:
    """By the names of files."""
    return {
        "bench.json": results(FAST, bench_rows(), peak=PEAK),
        "compare.json": results(SLOW, compare_rows()),
        "ring.json": results(FAST, ring_rows()),
        "verify.json": results(CPU, verify_rows()),
        "replay.json": replayed(),
    }


def write_all(folder: Path) -> list[Path]:
    """The same as files."""
    for name, each in all_results().items():
        each.save(folder / name)
    return [folder / name for name in all_results()]
