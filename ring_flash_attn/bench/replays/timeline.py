"""Recording a timeline: when each launch and each transfer of one run begins and ends."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...kernels.base import Kernel
from ...plan.steps import Plan
from ..workload import FORWARD
from .results import COMPUTE, Bar


class Recorder:
    """Collects bars: events of the current stream on a GPU, the host's clock elsewhere.

    Attributes:
        direction: what the next bars belong to.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.direction = FORWARD
        self._open: dict[str, tuple[str, Any]] = {}
        self._closed: list[tuple[str, str, str, Any, Any]] = []
        self._zero = self._now()

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self, lane: str, label: str) -> None:
        """What follows in the current stream is a bar, until `end`."""
        self._open[lane] = label, self._now()

    def end(self, lane: str) -> None:
        """The bar of this lane is over."""
        label, start = self._open.pop(lane)
        self.add(lane, label, start, self._now())

    def add(self, lane: str, label: str, start: Any, end: Any) -> None:
        """A bar between two events, or two times of time.perf_counter."""
        self._closed.append((lane, self.direction, label, start, end))

    @contextmanager
    def span(self, lane: str, label: str) -> Iterator[None]:
        """A bar of all that is queued inside."""
        self.begin(lane, label)
        yield
        self.end(lane)

    def bars(self) -> tuple[Bar, ...]:
        """All bars; waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        return tuple(
            Bar(lane, direction, label, self._since(start), self._since(end))
            for lane, direction, label, start, end in self._closed
        )

    def _since(self, moment: Any) -> float:
        if self._cuda:
            return float(self._zero.elapsed_time(moment))
        return float(moment - self._zero) * 1e3


class RecordedKernel:
    """A kernel that records its launches, labelled with the steps of these plans."""

    def __init__(self, kernel: Kernel, recorder: Recorder, plans: Iterable[Plan]) -> None:
        self._kernel, self._recorder = kernel, recorder
        self._steps = itertools.chain.from_iterable(map(_launch_steps, plans))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def forward(self, *args: Any) -> None:
        """A launch of the forward pass."""
        with self._recorder.span(COMPUTE, str(next(self._steps))):
            self._kernel.forward(*args)

    def backward(self, *args: Any) -> None:
        """A launch of the backward pass."""
        with self._recorder.span(COMPUTE, str(next(self._steps))):
            self._kernel.backward(*args)


def _launch_steps(plan: Plan) -> list[int]:
    return [number for number, step in enumerate(plan.steps) for _ in step.work]
