"""Emulated ranks and the links to them: what a replayed rank has in place of all others.

docs/design.md (Replays) says what is emulated and what is not. A `Recorder` notes what one run
launches and sends, and when.
"""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...comm import Message
from ...kernels.base import Kernel
from ...plan.steps import Plan
from ..links import INSIDE, OUTSIDE, Link, Topology
from ..timing import synchronize
from ..workload import BACKWARD, FORWARD
from .results import COMPUTE, NETWORK, TRANSFERS, Bar

Copies = Sequence[tuple[Tensor, Tensor]]  # (target, source)
Wait = Callable[[], None]
_HEAD_START = 1000  # cycles, about half a microsecond
_LANES = {INSIDE: TRANSFERS, OUTSIDE: NETWORK}
_PRIORITIES = {INSIDE: (-2, -1), OUTSIDE: (-3, -1)}  # of streams: torch has these three
_USUAL_LSE = 9.0  # about the log-sum-exp of 8192 scores


def _is_row(tensor: Tensor) -> bool:
    """Whether a message holds a number for each row and head, rather than a vector."""
    return tensor.dim() == 3


class RandomData:
    """What arrives: normally distributed; a number for each row is around a usual lse."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[tuple[torch.dtype, bool], Tensor] = {}

    def like(self, tensor: Tensor) -> Tensor:
        """Data for a message (seqlen, batch, nheads, …); all of one kind share memory."""
        row = _is_row(tensor)
        made = self._made.get((tensor.dtype, row))
        if made is None or made.numel() < tensor.numel():
            synchronize(self._device)  # a copy on another stream may still read the smaller one
            made = torch.randn(tensor.numel(), dtype=tensor.dtype, device=self._device)
            self._made[tensor.dtype, row] = made.add_(_USUAL_LSE) if row else made
        return made[: tensor.numel()].view(tensor.shape)


class Recorder:
    """Notes launches and posts: events of the current stream on a GPU, the host's clock elsewhere.

    What comes next belongs to `direction`; `costs` are those of each, as in `PassCost`.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.direction = FORWARD
        names = ("launches", "posts", "sent", "received")
        self.costs = {each: dict.fromkeys(names, 0) for each in (FORWARD, BACKWARD)}
        self._bars: list[tuple[str, str, str, Any, Any]] = []
        self._zero = self.now()

    def now(self) -> Any:
        """An event of the current stream, or a time of time.perf_counter."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def count(self, **costs: int) -> None:
        for name, number in costs.items():
            self.costs[self.direction][name] += number

    def add(self, lane: str, label: str, start: Any, end: Any) -> None:
        """A bar between two moments, see `now`."""
        self._bars.append((lane, self.direction, label, start, end))

    def bars(self) -> tuple[Bar, ...]:
        """All bars; waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()

        def since(moment: Any) -> float:
            if self._cuda:
                return float(self._zero.elapsed_time(moment))
            return float(moment - self._zero) * 1e3

        return tuple(
            Bar(lane, direction, label, since(start), since(end))
            for lane, direction, label, start, end in self._bars
        )


class RecordedKernel:
    """A kernel whose launches are recorded, labelled with the steps of a plan."""

    def __init__(self, kernel: Kernel, plan: Plan, recorder: Recorder) -> None:
        self._kernel, self._recorder = kernel, recorder
        self._steps = (number for number, step in enumerate(plan.steps) for _ in step.work)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._kernel, name)
        if name not in ("forward", "backward"):
            return found

        def launch(*args: Any) -> None:
            self._recorder.count(launches=1)
            start = self._recorder.now()
            found(*args)
            self._recorder.add(COMPUTE, str(next(self._steps)), start, self._recorder.now())

        return launch


class CpuLink:
    """Without streams: copies are made at once, and waiting sleeps until a post would be there."""

    def __init__(self, level: str) -> None:
        self._lane = _LANES[level]
        self._free_at = 0.0  # seconds of time.perf_counter

    def post(self, copies: Copies, seconds: float, label: str, recorder: Recorder | None) -> Wait:
        """Copy, and note when the link would be done; returns what waits until then."""
        begin = max(time.perf_counter(), self._free_at)
        for target, source in copies:
            target.copy_(source)
        self._free_at = max(begin + seconds, time.perf_counter())
        if recorder is not None:
            recorder.add(self._lane, label, begin, self._free_at)
        return functools.partial(_sleep_until, self._free_at)


def _sleep_until(moment: float) -> None:
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)


class CudaLink:
    """Two streams of high priority beside the others: one takes the time, one copies meanwhile.

    What takes the time is a single kernel. The current stream gives it a head start: it would often
    wait for work that gets there before it, which a real link does not. (None while an earlier post
    holds the link.)
    """

    def __init__(self, device: torch.device, level: str) -> None:
        self._device, self._lane = device, _LANES[level]
        # Of different priorities: a GPU works off two streams of the same high one in turns.
        self._timing, self._copying = (
            torch.cuda.Stream(device, priority=p) for p in _PRIORITIES[level]
        )
        self._posted = self._awaited = 0  # posts, and those that the current stream waited for

    def post(self, copies: Copies, seconds: float, label: str, recorder: Recorder | None) -> Wait:
        """Spin for as long as the link takes, and copy; returns what waits for both."""
        current = torch.cuda.current_stream(self._device)
        self._timing.wait_stream(current)
        begin = self._timing.record_event()
        with torch.cuda.stream(self._timing):
            start = None if recorder is None else recorder.now()
            if seconds:
                _spin(seconds)
        self._copying.wait_event(begin)
        with torch.cuda.stream(self._copying):
            _copy(copies)
        self._timing.wait_stream(self._copying)
        if seconds and self._posted == self._awaited:
            current.wait_event(begin)
            torch.cuda._sleep(_HEAD_START)
        self._posted += 1
        if recorder is not None:
            with torch.cuda.stream(self._timing):
                recorder.add(self._lane, label, start, recorder.now())
        return functools.partial(self._wait, self._timing.record_event(), self._posted)

    def _wait(self, event: torch.cuda.Event, posts: int) -> None:
        """The current stream waits for it, the host does not."""
        torch.cuda.current_stream(self._device).wait_event(event)
        self._awaited = max(self._awaited, posts)


def _copy(copies: Copies) -> None:
    """All of one dtype at once: a post is one kernel to NCCL, however many messages it has.

    One by one they would wait for room on the GPU one by one, behind kernels that fill it.
    """
    kinds: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for pair in copies:
        kinds.setdefault(pair[0].dtype, []).append(pair)
    for pairs in kinds.values():
        targets, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(targets, sources, non_blocking=True)


def _spin(seconds: float) -> None:
    from .spin import spin  # needs triton

    spin(seconds)


@functools.cache
def link_of(device: torch.device, level: str) -> CpuLink | CudaLink:
    """One for each device and level of a topology: all transports share it."""
    return CudaLink(device, level) if device.type == "cuda" else CpuLink(level)


def check_link(link: Link | Topology | None, device: torch.device) -> None:
    """ValueError where the link cannot be emulated."""
    if link is None or device.type != "cuda":
        return
    if torch.version.hip is not None:
        raise ValueError(f"link {link.name!r}: AMD's GPUs have no clock that can be read here")
    if importlib.util.find_spec("triton") is None:
        raise ValueError(f"link {link.name!r}: emulating it on a GPU needs triton")


class EmulatedRanks:
    """All other ranks of a group, for `rank`, which runs without them.

    Inside a node and between nodes a post takes its own time, and waits for those before it.

    Without a link, messages cost nothing: a buffer gets random data when it is seen for the first
    time, and is then left as it is, so buffers have to stay the same (`PersistentPool`). With
    `always_copies` they get it each time: in fp32 and fp64, what kernels read lies where gradients
    were, and would grow from run to run. Numbers of rows, which are few, are always copied: as an
    lse, what a state left behind may be −inf.
    """

    def __init__(
        self,
        device: torch.device,
        link: Link | Topology | None,
        data: RandomData,
        rank: int = 0,
        always_copies: bool = False,
    ) -> None:
        self.topology = None if link is None else Topology.of(link)
        self._data, self._rank, self.always_copies = data, rank, always_copies
        self.recorder: Recorder | None = None
        self._device = device
        self._filled: set[tuple[int, torch.Size, torch.dtype]] = set()

    def transport(self) -> ReplayTransport:
        """An end for one pass."""
        return ReplayTransport(self)

    def post(self, messages: Sequence[Message], number: int) -> dict[str, Wait]:
        """Start messages, the n-th post of a pass; returns what waits for them, by level."""
        if self.recorder is not None:
            sent, received = _bytes(messages)
            self.recorder.count(posts=1, sent=sent, received=received)
        if self.topology is None:
            wait = self._fill(messages, number)
            return {} if wait is None else {INSIDE: wait}
        levels: dict[str, list[Message]] = {}
        for message in messages:
            levels.setdefault(self.topology.level(self._rank, message.peer), []).append(message)
        return {
            level: self._start(
                level, each, self.topology.at(level).seconds(*_bytes(each)), number, self.recorder
            )
            for level, each in levels.items()
        }

    def _fill(self, messages: Sequence[Message], number: int) -> Wait | None:
        """Messages that cost nothing: random data, where there has to be some."""
        new = [each for each in messages if each.receive and self._needs_data(each.tensor)]
        return self._start(INSIDE, new, 0.0, number, None) if new else None

    def _start(
        self,
        level: str,
        messages: Sequence[Message],
        seconds: float,
        number: int,
        recorder: Recorder | None,
    ) -> Wait:
        arriving = [message.tensor for message in messages if message.receive]
        copies = [(tensor, self._data.like(tensor)) for tensor in arriving]
        return link_of(self._device, level).post(copies, seconds, str(number), recorder)

    def _needs_data(self, tensor: Tensor) -> bool:
        key = tensor.data_ptr(), tensor.shape, tensor.dtype
        is_new = key not in self._filled
        self._filled.add(key)
        return is_new or self.always_copies or _is_row(tensor)


def _bytes(messages: Iterable[Message]) -> tuple[int, int]:
    """Sent and received."""
    sizes = [0, 0]
    for message in messages:
        sizes[message.receive] += message.tensor.nbytes
    return sizes[0], sizes[1]


class ReplayTransport:
    """A replayed rank's transport: posts queue on each level, in order; `wait` is for all."""

    def __init__(self, others: EmulatedRanks) -> None:
        self._others, self._posts = others, 0
        self._waits: dict[str, Wait] = {}

    def post(self, messages: Sequence[Message]) -> None:
        if messages:
            self._waits |= self._others.post(messages, self._posts)
        self._posts += 1

    def wait(self) -> None:
        """Wait for the last post of each level, and so for those before it."""
        for wait in self._waits.values():
            wait()
        self._waits.clear()

    def abandon(self, steps: Sequence[bool], drain: bool) -> None:
        """Nobody else is there."""
