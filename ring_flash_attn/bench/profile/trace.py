"""Traces of torch.profiler: recording them, and which kernels ran, for how long and when."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from ...trace import tracing
from ..replays.results import COMPUTE, TRANSFERS, Bar
from ..timing import WARM_UP, Work, synchronize

RUNS = 3  # in a trace
_EVENTS = 100_000  # of the memory that are recorded
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace


class Event(NamedTuple):
    """Of a trace, in ms; its lane is a stream of the device or a thread of the host."""

    name: str
    ms: float
    start: float
    end: float
    lane: str


@dataclass(frozen=True, slots=True)
class Used:
    """Time under one name, in all runs together."""

    name: str
    calls: int
    ms: float


@dataclass(frozen=True, slots=True)
class Activity:
    """One trace, of several runs in a row."""

    on_device: bool  # kernels of a GPU were seen; else these are operators of the host
    runs: int
    kernels: tuple[Used, ...]  # longest first; on the host without what they call
    ranges: tuple[Used, ...]  # of this library, host time, longest first
    busy_ms: float  # something ran
    span_ms: float  # from the first beginning to the last end
    streams: Mapping[str, float]  # how long each was busy

    @property
    def kernels_ms(self) -> float:
        """Of all kernels, added up."""
        return sum(each.ms for each in self.kernels)


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


def record_trace(work: Work, device: torch.device, path: Path) -> Activity:
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


def read_trace(path: Path, runs: int) -> Activity:
    """What a file of `export_chrome_trace` says; ValueError if nothing ran."""
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
    return Activity(
        bool(device),
        runs,
        _sums(device or (each for lane in lanes.values() for each in _without_calls(lane))),
        _sums(events["user_annotation"]),
        covered(ran),
        spanned(ran),
        {lane: covered(each) for lane, each in sorted(lanes.items()) if device},
    )


def _sums(events: Iterable[Event]) -> tuple[Used, ...]:
    found: dict[str, list[float]] = defaultdict(list)
    for event in events:
        found[event.name].append(event.ms)
    used = [Used(name, len(each), sum(each)) for name, each in found.items()]
    return tuple(sorted(used, key=lambda each: -each.ms))


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


@dataclass(frozen=True, slots=True)
class Overlap:
    """One run of a replayed rank, in ms."""

    compute: float  # kernels of the steps ran
    transfers: float  # something was on its way
    both: float  # at the same time
    span: float  # from the first beginning to the last end

    @property
    def hidden_share(self) -> float:
        """Part of the transfers during which something was computed."""
        return self.both / self.transfers if self.transfers else 1.0


def overlap(bars: Sequence[Bar]) -> Overlap:
    """Of a timeline, which is not empty."""
    compute, transfers = (
        covered(bar for bar in bars if bar.lane == lane) for lane in (COMPUTE, TRANSFERS)
    )
    return Overlap(compute, transfers, compute + transfers - covered(bars), spanned(bars))
