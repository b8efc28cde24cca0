"""Traces of torch.profiler: recording them, and which kernels ran, for how long and when."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ...trace import tracing
from ..replays.results import COMPUTE, TRANSFERS, Bar
from ..timing import WARM_UP, Work, synchronize

RUNS = 3  # in a trace
_EVENTS = 100_000  # of the memory that are recorded
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})  # categories of a trace
_OPERATOR, _RANGE = "cpu_op", "user_annotation"
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Used:
    """Time under one name, in all runs together."""

    name: str
    calls: int
    ms: float


@dataclass(frozen=True, slots=True)
class Activity:
    """One trace, of several runs in a row.

    Attributes:
        on_device: whether kernels of a GPU were seen; else these are operators of the host.
        runs: how many.
        kernels: by time, longest first; on the host without what they call.
        ranges: of this library, host time, longest first.
        busy_ms: something ran.
        span_ms: from the first beginning to the last end.
        streams: how long each was busy.
    """

    on_device: bool
    runs: int
    kernels: tuple[Used, ...]
    ranges: tuple[Used, ...]
    busy_ms: float
    span_ms: float
    streams: Mapping[str, float]

    @property
    def kernels_ms(self) -> float:
        """Of all kernels, added up."""
        return sum(each.ms for each in self.kernels)

    @property
    def idle_share(self) -> float:
        """Part of the time in which nothing ran."""
        return 1 - self.busy_ms / self.span_ms if self.span_ms else 0.0


def read_trace(path: Path, runs: int) -> Activity:
    """What a file of `export_chrome_trace` says; ValueError if nothing ran."""
    values = json.loads(path.read_text(encoding="utf-8"))
    events = [event for event in values["traceEvents"] if event.get("ph") == "X"]
    device = [event for event in events if event.get("cat") in _ON_DEVICE]
    operators = [event for event in events if event.get("cat") == _OPERATOR]
    ran = device or operators
    if not ran:
        raise ValueError("the trace holds no kernel and no operator")
    times = [_interval(event) for event in ran]
    streams: dict[str, list[Interval]] = defaultdict(list)
    for event in device:
        streams[str(event.get("args", {}).get("stream", "?"))].append(_interval(event))
    alone = [(event["name"], float(event["dur"]) / 1e3) for event in device]
    return Activity(
        bool(device),
        runs,
        _sums(alone or _self_times(operators)),
        _sums((e["name"], float(e["dur"]) / 1e3) for e in events if e.get("cat") == _RANGE),
        length(union(times)),
        max(end for _, end in times) - min(start for start, _ in times),
        {name: length(union(each)) for name, each in sorted(streams.items())},
    )


def _interval(event: Mapping[str, Any]) -> Interval:
    """In ms; a trace has µs."""
    start = float(event["ts"]) / 1e3
    return start, start + float(event["dur"]) / 1e3


def _sums(times: Iterable[tuple[str, float]]) -> tuple[Used, ...]:
    found: dict[str, list[float]] = defaultdict(list)
    for name, ms in times:
        found[name].append(ms)
    used = [Used(name, len(each), sum(each)) for name, each in found.items()]
    return tuple(sorted(used, key=lambda each: -each.ms))


def _self_times(operators: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Of each operator, less what the operators that it calls take."""
    threads: dict[object, list[tuple[float, float, str]]] = defaultdict(list)
    for event in operators:
        threads[event.get("tid")].append((*_interval(event), event["name"]))
    found: list[tuple[str, float]] = []
    for events in threads.values():
        under_way: list[tuple[float, int]] = []  # (end, place in found)
        for start, end, name in sorted(events, key=lambda event: (event[0], -event[1])):
            while under_way and under_way[-1][0] <= start:
                under_way.pop()
            if under_way:
                caller, ms = found[under_way[-1][1]]
                found[under_way[-1][1]] = caller, ms - (end - start)
            under_way.append((end, len(found)))
            found.append((name, end - start))
    return found


# Intervals.


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time, without overlaps, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """How long they are together."""
    return sum(end - start for start, end in intervals)


def common(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """How long two unions have in common."""
    return length(first) + length(second) - length(union([*first, *second]))


@dataclass(frozen=True, slots=True)
class Overlap:
    """One run of a replayed rank, in ms.

    Attributes:
        compute: kernels of the steps ran.
        transfers: something was on its way.
        both: at the same time.
        span: from the first beginning to the last end.
    """

    compute: float
    transfers: float
    both: float
    span: float

    @property
    def hidden_share(self) -> float:
        """Part of the transfers during which something was computed."""
        return self.both / self.transfers if self.transfers else 1.0


def overlap(bars: Sequence[Bar]) -> Overlap:
    """Of a timeline, which is not empty."""
    compute, transfers = (
        union((bar.start, bar.end) for bar in bars if bar.lane == lane)
        for lane in (COMPUTE, TRANSFERS)
    )
    span = max(bar.end for bar in bars) - min(bar.start for bar in bars)
    return Overlap(length(compute), length(transfers), common(compute, transfers), span)


# Recording.


def record_trace(work: Work, device: torch.device, path: Path) -> Activity:
    """Write a trace of a few runs, and say what is in it."""
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device.type == "cuda")]
    for _ in range(WARM_UP):
        work()
    synchronize(device)
    with profile(activities=activities) as recorded, tracing():
        for _ in range(RUNS):
            work()
        synchronize(device)
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
