"""Times and memory of contenders: GPU events, interleaved rounds, a cold cache."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

Name = TypeVar("Name", bound=Hashable)
Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Work that needs something to be done before it, which is not timed: `prepare` returns it."""

    prepare: Callable[[], Work]

    def __call__(self) -> object:
        return self.prepare()()


WARM_UP = 3  # runs; compiles kernels
_FLUSH, _FLUSH_MS = 1 << 28, 0.05  # 1/4 GiB of zeros: a cold L2, and at least so long to queue in
_MOST_LEAD = 400  # times: 20 to 40 ms
_MOST_RUNS = 8  # of a short work in a round


@dataclass(frozen=True, slots=True)
class Timing:
    """One run, in ms.

    Attributes:
        device: from the first launch to the end of the last.
        host: until everything was queued; on the CPU the same.
    """

    device: float
    host: float


@dataclass(frozen=True, slots=True)
class Samples:
    """The runs of one contender, in ms, in the order in which they were made."""

    device: tuple[float, ...]
    host: tuple[float, ...]

    def __truediv__(self, number: int) -> Samples:
        return Samples(
            tuple(each / number for each in self.device), tuple(each / number for each in self.host)
        )

    @property
    def median(self) -> Timing:
        """Half of the runs took longer."""
        return Timing(statistics.median(self.device), statistics.median(self.host))


class Stopwatch:
    """Times one piece of work; on a GPU behind other work that lasts while it is queued."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._flush = torch.empty(_FLUSH, dtype=torch.uint8, device=device) if self._cuda else None

    def lead(self, host: float) -> None:
        """Give the device something to do while the host queues what is timed, for `host` ms."""
        if self._flush is not None:
            for _ in range(min(1 + math.ceil(host / _FLUSH_MS), _MOST_LEAD)):
                self._flush.zero_()

    def time(self, work: Work, host: float = 1.0) -> Timing:
        """Run it once; it is queued in about `host` ms."""
        if isinstance(work, Prepared):
            work = work.prepare()
        if not self._cuda:
            start = time.perf_counter()
            work()
            passed = (time.perf_counter() - start) * 1e3
            return Timing(passed, passed)
        self.lead(host)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start = time.perf_counter()
        begin.record()
        work()
        end.record()
        host = (time.perf_counter() - start) * 1e3
        end.synchronize()
        return Timing(begin.elapsed_time(end), host)


def interleaved(
    works: Mapping[Name, Work], watch: Stopwatch, rounds: int, report: Callable[[str], None]
) -> dict[Name, Samples]:
    """All runs of works that take turns, each round beginning with another one.

    A short work has several runs in each round, as many as a long one's time allows: one disturbed
    run is a large part of it.
    """
    tried: dict[Name, Timing] = {}
    for name, work in works.items():
        report(f"warming up: {name}")
        for _ in range(WARM_UP):
            work()
        tried[name] = watch.time(work)
    longest = max(each.device for each in tried.values())
    found: dict[Name, list[Timing]] = {name: [] for name in works}
    order = list(works)
    for number in range(rounds):
        report(f"round {number + 1} of {rounds}")
        first = number % len(order)
        for name in order[first:] + order[:first]:
            for _ in range(_runs(tried[name].device, longest)):
                found[name].append(watch.time(works[name], tried[name].host))
    return {
        name: Samples(tuple(each.device for each in runs), tuple(each.host for each in runs))
        for name, runs in found.items()
    }


def _runs(own: float, longest: float) -> int:
    return max(1, min(_MOST_RUNS, int(longest / max(own, 1e-6))))


def peak_bytes(work: Work, device: torch.device) -> int | None:
    """Most that is held above what is there before, less what the work returns; None on the CPU."""
    if device.type != "cuda":
        return None
    work()  # what is kept for later is made now
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    results = work()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    left = torch.cuda.memory_allocated(device) - before
    del results
    return peak - left
