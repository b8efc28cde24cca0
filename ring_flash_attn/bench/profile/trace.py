"""Traces of torch.profiler: recording them, and which kernels ran, for how long and when."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from ...trace import tracing
from ..replays.results import COMPUTE, Bar
from ..timing import WARM_UP, Work, synchronize

RUNS = 3  # in a trace
_EVENTS = 100_000  # of the memory that are recorded
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace
Values = Mapping[str, Any]  # plain ones, by name


class Event(NamedTuple):
    """Of a trace, in ms; its lane is a stream of the device or a thread of the host."""

    name: str
    ms: float
    start: float
    end: float
    lane: str


def run_under(
    profiler: AbstractContextManager[object], work: Work, device: torch.device, runs: int
) -> None:
    """Run it so often while a profiler records, after runs that compile everything."""
    for _ in range(WARM_UP):
        work()
    synchronize(device)
    with profiler, tracing():
        for _ in range(runs):
            work()
        synchronize(device)


def record_trace(work: Work, device: torch.device, path: Path) -> Values:
    """Write a trace of a few runs, and say what is in it."""
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device.type == "cuda")]
    recorded = profile(activities=activities)
    run_under(recorded, work, device, RUNS)
    recorded.export_chrome_trace(str(path))
    return read_trace(path, RUNS)


def record_memory(work: Work, device: torch.device, path: Path) -> None:
    """Write which memory was taken and given back in one run; for CUDA alone."""
    work()
    synchronize(device)
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=_EVENTS)
    try:
        work()
        synchronize(device)
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def read_trace(path: Path, runs: int) -> Values:
    """What a file of `export_chrome_trace` says of so many runs; ValueError if nothing ran.

    Kernels of the GPU, or operators of the host without what they call, and ranges of this library
    in host time, longest first; how long something ran, and from the first beginning to the last
    end.
    """
    events: dict[str, list[Event]] = defaultdict(list)  # by category
    for each in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]:
        if each.get("ph") == "X":
            start, ms = float(each["ts"]) / 1e3, float(each["dur"]) / 1e3  # a trace has µs
            lane = str(each.get("args", {}).get("stream", each.get("tid")))
            events[each.get("cat", "")].append(Event(each["name"], ms, start, start + ms, lane))
    device = [event for category in _ON_DEVICE for event in events[category]]
    ran = device or events["cpu_op"]
    if not ran:
        raise ValueError("the trace holds no kernel and no operator")
    lanes: dict[str, list[Event]] = defaultdict(list)  # streams, or threads
    for event in sorted(ran, key=lambda event: (event.start, -event.end)):
        lanes[event.lane].append(event)
    return {
        "on_device": bool(device),
        "runs": runs,
        "kernels": _sums(device or chain.from_iterable(map(_without_calls, lanes.values()))),
        "ranges": _sums(events["user_annotation"]),
        "busy_ms": covered(ran),
        "span_ms": spanned(ran),
        "streams": {lane: covered(each) for lane, each in sorted(lanes.items()) if device},
    }


def _sums(events: Iterable[Event]) -> list[Values]:
    found: dict[str, list[float]] = defaultdict(list)
    for event in events:
        found[event.name].append(event.ms)
    used = [{"name": name, "calls": len(ms), "ms": sum(ms)} for name, ms in found.items()]
    return sorted(used, key=lambda each: -each["ms"])


def _without_calls(thread: Iterable[Event]) -> list[Event]:
    """Operators of a thread in order, each less what the operators that it calls take."""
    found: list[Event] = []
    under_way: list[int] = []  # places in found
    for event in thread:
        while under_way and found[under_way[-1]].end <= event.start:
            under_way.pop()
        if under_way:
            caller = found[under_way[-1]]
            found[under_way[-1]] = caller._replace(ms=caller.ms - event.ms)
        under_way.append(len(found))
        found.append(event)
    return found


def covered(events: Iterable[Event | Bar]) -> float:
    """How long at least one of them lasts."""
    total, until = 0.0, -math.inf
    for event in sorted(events, key=lambda event: event.start):
        total += max(0.0, event.end - max(event.start, until))
        until = max(until, event.end)
    return total


def spanned(events: Sequence[Event | Bar]) -> float:
    """From the first beginning to the last end."""
    return max(event.end for event in events) - min(event.start for event in events)


def overlap(bars: Sequence[Bar]) -> Values:
    """Of a timeline, in ms: kernels of the steps ran, something was on its way, both at once."""
    compute, transfers = (
        covered(bar for bar in bars if (bar.lane == COMPUTE) == is_compute)
        for is_compute in (True, False)
    )
    both, span = compute + transfers - covered(bars), spanned(bars)
    found = {"compute": compute, "transfers": transfers, "both": both, "span": span}
    return {**found, "hidden_share": both / transfers if transfers else 1.0}
