"""The emulated link: what stands in for all other ranks, and takes as long as they would.

A post goes to streams of its own, behind the current stream and earlier posts. There, what would
arrive is copied from prepared data, while the link's time is waited out. So a kernel that needs a
message waits as it would, and one that does not is not held up.
"""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Protocol, cast

import torch
from torch import Tensor

from ..comm import Message
from .link import Link
from .timeline import TRANSFERS, Recorder

Copies = Sequence[tuple[Tensor, Tensor]]  # (target, source)
_HEAD_START = 1000  # cycles, about half a microsecond
_ROW = 9.0  # about the log-sum-exp of 8192 scores


def is_row(tensor: Tensor) -> bool:
    """Whether a message holds a number for each row and head, rather than a vector."""
    return tensor.dim() == 3


class Bank:
    """Prepared data of each kind: normally distributed, numbers of rows around an usual lse."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[tuple[torch.dtype, bool], Tensor] = {}

    def like(self, tensor: Tensor) -> Tensor:
        """Data for a message (seqlen, batch, nheads, …); the same memory for all of its kind."""
        row = is_row(tensor)
        kept = self._kept.get((tensor.dtype, row))
        if kept is None or kept.numel() < tensor.numel():
            kept = torch.randn(tensor.numel(), dtype=tensor.dtype, device=self._device)
            self._kept[tensor.dtype, row] = kept.add_(_ROW) if row else kept
        return kept[: tensor.numel()].view(tensor.shape)


class Wire(Protocol):
    """A queue of posts that is worked off beside the computation."""

    def carry(self, copies: Copies, seconds: float, label: str, recorder: Recorder | None) -> None:
        """Queue one post, which takes the copies and `seconds`, whichever is longer."""
        ...

    def ticket(self) -> object:
        """What stands for all posts so far."""
        ...

    def join(self, ticket: object) -> None:
        """Later work of the current stream begins when these posts are done."""
        ...


class CpuWire:
    """Without streams: copies are made at once, and `join` sleeps until a post would be there."""

    def __init__(self) -> None:
        self._free_at = 0.0  # seconds of time.perf_counter

    def carry(self, copies: Copies, seconds: float, label: str, recorder: Recorder | None) -> None:
        """Copy, and remember when the link would be done."""
        begin = max(time.perf_counter(), self._free_at)
        for target, source in copies:
            target.copy_(source)
        self._free_at = max(begin + seconds, time.perf_counter())
        if recorder is not None:
            recorder.add(TRANSFERS, label, begin, self._free_at)

    def ticket(self) -> float:
        """When the posts so far are done."""
        return self._free_at

    def join(self, ticket: object) -> None:
        """Sleep until then."""
        assert isinstance(ticket, float)
        while (left := ticket - time.perf_counter()) > 0:
            time.sleep(left)


class CudaWire:
    """Streams beside the others, of high priority: one takes its time, one copies meanwhile.

    What takes the time is a single kernel. The current stream gives it a head start: it would often
    wait for work that gets there before it, which a real link does not. (None while an earlier post
    holds the link.)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Of different priorities: a GPU works off two streams of the same high one in turns.
        self._stream, self._copying = (torch.cuda.Stream(device, priority=p) for p in (-2, -1))
        self._posted = self._joined = 0  # posts, and those that the current stream has waited for

    def carry(self, copies: Copies, seconds: float, label: str, recorder: Recorder | None) -> None:
        """Spin for as long as the link takes; copy; be done when both are."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        begin = self._stream.record_event()
        with torch.cuda.stream(self._stream):
            if recorder is not None:
                recorder.begin(TRANSFERS, label)
            if seconds:
                _clock().spin(seconds)
        self._copying.wait_event(begin)
        with torch.cuda.stream(self._copying):
            _copy(copies)
        self._stream.wait_stream(self._copying)
        if seconds and self._posted == self._joined:
            current.wait_event(begin)
            torch.cuda._sleep(_HEAD_START)
        self._posted += 1
        if recorder is not None:
            with torch.cuda.stream(self._stream):
                recorder.end(TRANSFERS)

    def ticket(self) -> tuple[torch.cuda.Event, int]:
        """An event behind the posts so far, and how many these are."""
        return self._stream.record_event(), self._posted

    def join(self, ticket: object) -> None:
        """The current stream waits for it, the host does not."""
        event, posts = cast(tuple[torch.cuda.Event, int], ticket)
        torch.cuda.current_stream(self._device).wait_event(event)
        self._joined = max(self._joined, posts)


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


def _clock() -> ModuleType:
    from . import clock  # needs triton

    return clock


@cache
def wire_of(device: torch.device) -> Wire:
    """One for each device: all transports share the link."""
    return CudaWire(device) if device.type == "cuda" else CpuWire()


def check_link(link: Link | None, device: torch.device) -> None:
    """ValueError where the link cannot be emulated."""
    if link is None or device.type != "cuda":
        return
    if torch.version.hip is not None:
        raise ValueError(f"link {link.name!r}: AMD's GPUs have no clock that can be read here")
    if importlib.util.find_spec("triton") is None:
        raise ValueError(f"link {link.name!r}: emulating it on a GPU needs triton")


class Peers:
    """All other ranks of a group, for one rank that is alone.

    Attributes:
        link: how they are reached; None: messages cost nothing. Then a buffer gets prepared data
            when it is seen for the first time, and is later left as it is. So buffers have to stay
            the same from walk to walk (`Kept`).
        always_copies: even if messages cost nothing. In fp32 and fp64, what kernels read lies where
            gradients were, and would grow from run to run. Numbers of rows, which are few, are
            always copied: as an lse, what a state left behind may be −inf.
        recorder: is told of each post over the link, if there is one.
    """

    def __init__(
        self, device: torch.device, link: Link | None, bank: Bank, always_copies: bool = False
    ) -> None:
        self.link, self._bank, self.always_copies = link, bank, always_copies
        self.recorder: Recorder | None = None
        self._wire = wire_of(device)
        self._filled: set[tuple[int, torch.Size, torch.dtype]] = set()

    def transport(self) -> ReplayTransport:
        """An end for one walk."""
        return ReplayTransport(self._post)

    def _post(self, messages: Sequence[Message], number: int) -> Callable[[], None] | None:
        arriving = [message.tensor for message in messages if message.receive]
        seconds, recorder = 0.0, None
        if self.link is None:
            arriving = [tensor for tensor in arriving if self._wants_data(tensor)]
            if not arriving:
                return None
        else:
            seconds, recorder = self.link.seconds(*sizes(messages)), self.recorder
        copies = [(tensor, self._bank.like(tensor)) for tensor in arriving]
        self._wire.carry(copies, seconds, str(number), recorder)
        return functools.partial(self._wire.join, self._wire.ticket())

    def _wants_data(self, tensor: Tensor) -> bool:
        key = tensor.data_ptr(), tensor.shape, tensor.dtype
        is_new = key not in self._filled
        self._filled.add(key)
        return is_new or self.always_copies or is_row(tensor)


class ReplayTransport:
    """The end of a rank that is alone: posts are queued, in order; `wait` is for all of them.

    Args:
        post: starts messages, the n-th post of the walk; returns what waits for them, if anything.
    """

    def __init__(self, post: Callable[[Sequence[Message], int], Callable[[], None] | None]) -> None:
        self._post, self._posts = post, 0
        self._join: Callable[[], None] | None = None

    def post(self, messages: Sequence[Message]) -> None:
        """Queue a post; nothing happens for one without messages."""
        if messages:
            self._join = self._post(messages, self._posts) or self._join
        self._posts += 1

    def wait(self) -> None:
        """Wait for the last post, and so for those before it."""
        if self._join is not None:
            self._join()
            self._join = None

    def abandon(self, steps: Sequence[bool], drain: bool) -> None:
        """Nobody else is there."""


def sizes(messages: Sequence[Message]) -> tuple[int, int]:
    """Bytes sent and received."""
    sent = sum(m.tensor.nbytes for m in messages if not m.receive)
    return sent, sum(m.tensor.nbytes for m in messages) - sent
