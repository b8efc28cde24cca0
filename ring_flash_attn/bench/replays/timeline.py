"""Recording a timeline: when each launch and each transfer of one run begins and ends."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
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
        self._bars: list[tuple[str, str, str, Any, Any]] = []
        self._zero = self.now()

    def now(self) -> Any:
        """An event of the current stream, or a time of time.perf_counter."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, lane: str, label: str, start: Any, end: Any) -> None:
        """A bar between two moments, see `now`."""
        self._bars.append((lane, self.direction, label, start, end))

    def bars(self) -> tuple[Bar, ...]:
        """All bars; waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        return tuple(
            Bar(lane, direction, label, self._since(start), self._since(end))
            for lane, direction, label, start, end in self._bars
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
        self._launch(self._kernel.forward, args)

    def backward(self, *args: Any) -> None:
        """A launch of the backward pass."""
        self._launch(self._kernel.backward, args)

    def _launch(self, launch: Callable[..., None], args: Any) -> None:
        start = self._recorder.now()
        launch(*args)
        self._recorder.add(COMPUTE, str(next(self._steps)), start, self._recorder.now())


def _launch_steps(plan: Plan) -> list[int]:
    return [number for number, step in enumerate(plan.steps) for _ in step.work]
