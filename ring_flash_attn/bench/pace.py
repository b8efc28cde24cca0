"""The emulated link: what stands in for all other ranks, and takes as long as they would.

A post goes to a stream of its own, behind the current stream and earlier posts. There, what would
arrive is copied from prepared data, and the rest of the link's time is waited out. So a kernel that
needs a message waits as it would, and one that does not is not held up.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from ..comm import Message
from .link import Link
from .timeline import TRANSFERS, Recorder

Copies = Sequence[tuple[Tensor, Tensor]]  # (target, source)
_ROW = 9.0  # about the log-sum-exp of 8192 scores


class Bank:
    """Prepared data of each kind: normally distributed, numbers of rows around an usual lse."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[tuple[torch.dtype, bool], Tensor] = {}

    def like(self, tensor: Tensor) -> Tensor:
        """Data for a message (seqlen, batch, nheads, …); the same memory for all of its kind."""
        is_row = tensor.dim() == 3
        kept = self._kept.get((tensor.dtype, is_row))
        if kept is None or kept.numel() < tensor.numel():
            kept = torch.randn(tensor.numel(), dtype=tensor.dtype, device=self._device)
            self._kept[tensor.dtype, is_row] = kept.add_(_ROW) if is_row else kept
        return kept[: tensor.numel()].view(tensor.shape)


class Wire(Protocol):
    """A queue of posts that is worked off beside the computation."""

    def carry(self, copies: Copies, seconds: float, label: str, recorder: Recorder | None) -> None:
        """Queue one post: the copies, and as much time as is left of `seconds`."""
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
    """A stream beside the others, of high priority, so that full GPUs let its small kernels in."""

    def __init__(self, device: torch.device) -> None:
        from . import clock  # needs triton

        self._clock, self._device = clock, device
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._start = torch.zeros(1, dtype=torch.int64, device=device)  # used in stream order

    def carry(self, copies: Copies, seconds: float, label: str, recorder: Recorder | None) -> None:
        """Note the time, copy, spin until it is over."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            if recorder is not None:
                recorder.begin(TRANSFERS, label)
            self._clock.note(self._start)
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            self._clock.spin(self._start, seconds)
            if recorder is not None:
                recorder.end(TRANSFERS)

    def ticket(self) -> torch.cuda.Event:
        """An event behind the posts so far."""
        return self._stream.record_event()

    def join(self, ticket: object) -> None:
        """The current stream waits for it, the host does not."""
        assert isinstance(ticket, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(ticket)


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
        link: how they are reached; None: messages cost nothing. Then what a buffer holds when it is
            seen for the first time is replaced by prepared data, and later left as it is. So
            buffers have to stay the same from walk to walk (`Local.free`).
        recorder: is told of each post, if there is one.
    """

    def __init__(self, device: torch.device, link: Link | None, bank: Bank) -> None:
        self.link, self._bank = link, bank
        self.recorder: Recorder | None = None
        self._wire = None if link is None else wire_of(device)
        self._filled: set[tuple[int, torch.Size, torch.dtype]] = set()

    def transport(self) -> ReplayTransport:
        """An end for one walk."""
        return ReplayTransport(self._removed if self.link is None else self._carried)

    def _carried(self, messages: Sequence[Message], number: int) -> Callable[[], None]:
        link, wire = self.link, self._wire
        assert link is not None
        assert wire is not None
        copies = [(m.tensor, self._bank.like(m.tensor)) for m in messages if m.receive]
        seconds = link.seconds(*sizes(messages))
        wire.carry(copies, seconds, str(number), self.recorder)
        ticket = wire.ticket()
        return lambda: wire.join(ticket)

    def _removed(self, messages: Sequence[Message], number: int) -> None:
        for tensor in (m.tensor for m in messages if m.receive):
            key = tensor.data_ptr(), tensor.shape, tensor.dtype
            if key not in self._filled:
                self._filled.add(key)
                tensor.copy_(self._bank.like(tensor))


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
            self._join = self._post(messages, self._posts)
        self._posts += 1

    def wait(self) -> None:
        """Wait for the last post, and so for those before it."""
        if self._join is not None:
            self._join()
            self._join = None


def sizes(messages: Sequence[Message]) -> tuple[int, int]:
    """Bytes sent and received."""
    sent = sum(m.tensor.nbytes for m in messages if not m.receive)
    return sent, sum(m.tensor.nbytes for m in messages) - sent
