"""One rank's part: it tries each function, then times them all in rounds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ...comm import launch
from ..results import BOTH
from ..timing import WARM_UP, Stopwatch, Timing, Work, peak_bytes
from .calls import Call, Place, on_one_device, on_rank
from .meeting import DONE, Meeting
from .target import Target

# Of these a rank can go on if all ranks had the same; anything else ends it.
EXPECTED = (torch.OutOfMemoryError, NotImplementedError, ValueError)
Key = tuple[str, str]  # who, passes


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of a target's first runs: most memory by passes, or why it cannot be timed."""

    peaks: dict[str, int | None] = field(default_factory=dict)
    failed: str | None = None


Round = dict[Key, float]  # ms


def measure_on_rank(
    rank: int,
    world_size: int,
    targets: Sequence[Target],
    passes: tuple[str, ...],
    repeats: int,
    device: str,
) -> Iterator[Trial | Round]:
    """A trial for each target, then `repeats` rounds with all that can be timed."""
    bench = _Bench(Place(rank, world_size, launch.rank_device(device, rank)), passes)
    for target in targets:
        yield bench.attempt(target)
    for number in range(repeats):
        yield bench.round(number)


class _Bench:
    """What this rank can run, by whom and passes."""

    def __init__(self, place: Place, passes: tuple[str, ...]) -> None:
        self._place, self._passes = place, passes
        self._meeting, self._watch = Meeting(place.device), Stopwatch(place.device)
        self._works: dict[Key, tuple[Work, int]] = {}  # and how often in a row
        self._host: dict[Key, float] = {}  # ms that queueing takes

    def attempt(self, target: Target) -> Trial:
        """Make the target ready and run it a few times; all ranks come to the same end."""
        peaks: dict[str, int | None] = {}
        outcome, reason = DONE, None
        try:
            self._make_ready(target, peaks)
        except EXPECTED as error:
            outcome, reason = type(error).__name__, in_words(error)
        try:
            self._meeting.agree_on(target.name, outcome)
        except (ValueError, RuntimeError):
            if reason is None:
                raise
            who = f"{target.name} on rank {self._place.rank}"
            raise RuntimeError(f"{who}, and not alike on all ranks: {reason}") from None
        if reason is not None:
            self._forget(target.name)
            return Trial(failed=reason)
        return Trial(peaks)

    def _make_ready(self, target: Target, peaks: dict[str, int | None]) -> None:
        """One device works as often in a row as it takes to equal a rank, at the same clocks."""
        place = self._place
        if any((target.base, passes) not in self._works for passes in self._passes):
            self._add(target.base, on_one_device(target, place), place.world_size)
        call = on_rank(target, place)
        self._add(target.name, call, 1)
        for passes in self._passes:
            peaks[passes] = peak_bytes(_work(call, passes), place.device)

    def _add(self, who: str, call: Call, often: int) -> None:
        for passes in self._passes:
            key, work = (who, passes), _work(call, passes)
            for _ in range(WARM_UP):
                work()
            self._works[key] = work, often
            self._host[key] = self._time(key).host

    def _forget(self, who: str) -> None:
        self._works = {key: each for key, each in self._works.items() if key[0] != who}
        if self._place.device.type == "cuda":
            torch.cuda.empty_cache()

    def round(self, number: int) -> Round:
        """Everything once, beginning with another one each time."""
        order = list(self._works)
        first = number % max(1, len(order))
        return {key: self._time(key).device for key in order[first:] + order[:first]}

    def _time(self, key: Key) -> Timing:
        """One run of all ranks together, the lead and the wait for the others not counted."""
        work, often = self._works[key]
        if self._place.device.type != "cuda":
            self._meeting.wait_for_all()
            start = time.perf_counter()
            _repeat(work, often)
            passed = (time.perf_counter() - start) * 1e3 / often
            return Timing(passed, passed)
        self._watch.lead(self._host.get(key, 1.0) * often)
        self._meeting.wait_for_all()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start = time.perf_counter()
        begin.record()
        _repeat(work, often)
        end.record()
        host = (time.perf_counter() - start) * 1e3 / often
        end.synchronize()
        return Timing(begin.elapsed_time(end) / often, host)


def _repeat(work: Work, times: int) -> None:
    for _ in range(times):
        work()


def _work(call: Call, passes: str) -> Work:
    return call.both if passes == BOTH else call.forward


def in_words(error: Exception) -> str:
    """Why something cannot be timed."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return str(error).strip() or type(error).__name__
