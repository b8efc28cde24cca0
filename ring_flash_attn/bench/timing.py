"""Times and memory of implementations: GPU events, interleaved rounds, a cold cache."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch

from .results import Peak
from .workload import dtype_name, find_dtype

Name = TypeVar("Name", bound=Hashable)
Work = Callable[[], object]

WARM_UP = 3  # runs; compiles kernels
_FLUSH = 1 << 28  # 1/4 GiB of zeros: a cold L2, and time to queue in
_MOST_LEAD, _MARGIN = 40.0, 1.25  # ms; of the host's time
_VARIES = 4  # times as long as the first time, the host may take and still find the device busy
_MOST_RUNS = 8  # of a short work in a round
_RUNS = 7
_SIZE = 8192  # of the square matrices whose product is timed
_BYTES = 1 << 30  # of the tensor that is copied
_SLOW, _ENOUGH, _FEWEST = 4, 1000.0, 5  # times the median work; ms of all its runs; rounds


@dataclass(frozen=True, slots=True)
class Prepared:
    """Work that needs something to be done before it, which is not timed: `prepare` returns it."""

    prepare: Callable[[], Work]

    def __call__(self) -> object:
        return self.prepare()()


@dataclass(frozen=True, slots=True)
class Timing:
    """One run, in ms."""

    device: float  # from the first launch to the end of the last
    host: float  # until everything was queued; on the CPU the same


@dataclass(frozen=True, slots=True)
class Samples:
    """The runs of one work, in ms, in the order in which they were made."""

    device: tuple[float, ...]
    host: tuple[float, ...]

    def __truediv__(self, number: int) -> Samples:
        device, host = (tuple(ms / number for ms in each) for each in (self.device, self.host))
        return Samples(device, host)

    @property
    def median(self) -> Timing:
        """Half of the runs took longer."""
        return Timing(statistics.median(self.device), statistics.median(self.host))


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Everything inside is queued on it by default."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Times one piece of work; on a GPU behind other work that lasts while it is queued."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._flush = torch.empty(_FLUSH, dtype=torch.uint8, device=device) if self._cuda else None
        if self._cuda:  # twice, because the first finds the device asleep
            times = (self._between(lambda: self._clear(20)).device for _ in range(2))
            self._flush_ms = min(times) / 20

    def _clear(self, times: int) -> None:
        assert self._flush is not None
        for _ in range(times):
            self._flush.zero_()

    def lead(self, host: float) -> None:
        """Give the device something to do while the host queues what is timed, for `host` ms."""
        if self._cuda:
            self._clear(1 + math.ceil(min(_MARGIN * host, _MOST_LEAD) / self._flush_ms))

    def time(self, work: Work, host: float = 1.0, ready: Work | None = None) -> Timing:
        """Run it once, after `ready`, which is not timed; it is queued in about `host` ms."""
        if isinstance(work, Prepared):
            work = work.prepare()
        self.lead(host)
        if ready is not None:
            ready()
        if not self._cuda:
            start = time.perf_counter()
            work()
            passed = (time.perf_counter() - start) * 1e3
            return Timing(passed, passed)
        return self._between(work)

    def _between(self, work: Work) -> Timing:
        """Between two events on the device's stream."""
        stream = torch.cuda.current_stream(self._device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start = time.perf_counter()
        begin.record(stream)
        work()
        end.record(stream)
        host = (time.perf_counter() - start) * 1e3
        end.synchronize()
        return Timing(begin.elapsed_time(end), host)


def interleaved(
    works: Mapping[Name, Work], watch: Stopwatch, rounds: int, report: Callable[[str], None]
) -> dict[Name, Samples]:
    """All runs of works that take turns, each round beginning with another one.

    A short work has several runs in each round, as many as a long one's time allows: one disturbed
    run is a large part of it. One that is far slower than the others sits rounds out.
    """
    tried: dict[Name, Timing] = {}
    for name, work in works.items():
        report(f"warming up: {name}")
        for _ in range(WARM_UP):
            work()
        tried[name] = watch.time(work)
    usual = statistics.median(each.device for each in tried.values())
    turns = {name: _every(each.device, usual, rounds) for name, each in tried.items()}
    longest = max(each.device for name, each in tried.items() if turns[name] == 1)
    found: dict[Name, list[Timing]] = {name: [] for name in works}
    host = {name: each.host for name, each in tried.items()}  # the longest so far
    order = list(works)
    for number in range(rounds):
        report(f"round {number + 1} of {rounds}")
        first = number % len(order)
        for name in order[first:] + order[:first]:
            if number % turns[name]:
                continue
            runs = int(longest / max(tried[name].device, 1e-6))
            for _ in range(max(1, min(_MOST_RUNS, runs))):
                timing = watch.time(works[name], min(host[name], _VARIES * tried[name].host))
                host[name] = max(host[name], timing.host)
                found[name].append(timing)
    return {
        name: Samples(tuple(each.device for each in runs), tuple(each.host for each in runs))
        for name, runs in found.items()
    }


def _every(own: float, usual: float, rounds: int) -> int:
    """It takes part in every so many rounds."""
    if own <= _SLOW * usual:
        return 1
    return max(1, min(math.ceil(own * rounds / _ENOUGH), rounds // _FEWEST))


def peak_bytes(work: Work, device: torch.device) -> int | None:
    """Most that is held above what is there before, less what the work returns; None on the CPU."""
    if device.type != "cuda":
        return None
    work()  # fills caches
    gc.collect()  # nothing else is freed meanwhile
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    results = work()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    left = torch.cuda.memory_allocated(device) - before
    del results
    return peak - left


def measure_peak(device: torch.device, dtype: str) -> Peak | None:
    """Time a product of matrices and a copy: what a kernel can be compared with.

    None on the CPU: a product in half precision may take minutes there, and kernels use fp32.
    """
    if device.type == "cpu":
        return None

    def median(work: Work) -> float:
        for _ in range(WARM_UP):
            work()
        return statistics.median(watch.time(work).device for _ in range(_RUNS))

    with on_device(device):
        watch = Stopwatch(device)
        a, b = (torch.randn(_SIZE, _SIZE, device=device).to(find_dtype(dtype)) for _ in range(2))
        product = median(lambda: torch.mm(a, b))
        source = torch.empty(_BYTES, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copy = median(lambda: target.copy_(source))
    return Peak(2 * _SIZE**3 / product / 1e9, 2 * _BYTES / copy / 1e6, dtype_name(dtype))
