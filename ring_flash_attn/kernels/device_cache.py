"""Small tensors that launches read, copied to a device once for each plan and cached there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from threading import Lock
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ..cache import Cache

Made = TypeVar("Made")
_MOST = 512  # of a kind; a plan of many ranks has as many launches


@dataclass(slots=True)
class _Entry(Generic[Made]):
    """What was made, and who may read it.

    Attributes:
        plan: held, since the cache goes by its id.
        made: the value.
        ready: done when the copies to the GPU are; None on other devices.
        streams: those that have launched kernels which read it, by handle.
    """

    plan: object
    made: Made
    ready: torch.cuda.Event | None = None
    streams: dict[int, torch.cuda.Stream] = field(default_factory=dict)


class DeviceCache(Generic[Made]):
    """What was made for plans, which hand out the same objects each time: it goes by identity.

    It holds the newest (by number and weight, as `Cache` does), and what a CUDA graph reads, since
    that may be replayed at any time.
    Any stream may use an entry: it waits for the copies that another stream has queued, and memory
    is released when all streams that use it are done.
    """

    def __init__(
        self, most: int = _MOST, weigh: Callable[[Made], int] | None = None, heaviest: int = 0
    ) -> None:
        weight = None if weigh is None else lambda entry: weigh(entry.made)
        self._newest: Cache[tuple[object, ...], _Entry[Made]] = Cache(
            most, self._retire, weight, heaviest
        )
        self._of_graphs: dict[tuple[object, ...], _Entry[Made]] = {}
        self._retired: list[tuple[list[torch.cuda.Event], _Entry[Made]]] = []
        self._lock = Lock()

    def get(
        self, plan: object, device: torch.device, key: object, make: Callable[[], Made]
    ) -> Made:
        """What was made for a part of a plan, on a device, for a key; made now if it is not there.

        Raises:
            RuntimeError: a CUDA graph is being captured, and what is made is copied to the device.
        """
        whole = id(plan), device, key
        captured = capturing(device)
        found = self._newest.get(whole) or self._of_graphs.get(whole)
        if found is None:
            found = _Entry(plan, make())
            stream = None if captured else current_stream(device)
            if stream is not None:
                found.ready = stream.record_event()
                found.streams[stream.cuda_stream] = stream
            if not captured:
                found = self._newest.add(whole, found)
        if captured:
            # torch.cuda.graph waits for the device before it captures: all copies are there.
            self._of_graphs[whole] = found
        elif found.ready is not None and stream_handle(device) not in found.streams:
            stream = current_stream(device)
            assert stream is not None  # of a CUDA device
            stream.wait_event(found.ready)
            found.streams[stream.cuda_stream] = stream
        return found.made

    def _retire(self, entry: _Entry[Made]) -> None:
        """Keep its memory until the kernels that read it are done, whatever their stream."""
        if entry.ready is None:
            return
        events = [stream.record_event() for stream in list(entry.streams.values())]
        with self._lock:
            self._retired = [
                (pending, old)
                for pending, old in self._retired
                if not all(event.query() for event in pending)
            ]
            self._retired.append((events, entry))


def capturing(device: torch.device) -> bool:
    """Whether what is launched now becomes part of a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream that kernels are launched on; None on the CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def stream_handle(device: torch.device) -> int:
    """Of the current stream of a CUDA device; much cheaper than the stream itself."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


_HERE: AbstractContextManager[None] = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes it the current device, on which kernels are launched; free if it is."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return _HERE
    return torch.cuda.device(device)


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """A copy of a CPU tensor, without waiting for what a GPU has to do before it."""
    if capturing(device):
        raise RuntimeError(
            "before this can be captured in a CUDA graph, make the same call once, with its "
            "backward pass if that is captured: it copies tables to the GPU, and a graph would "
            "copy them again whenever it is replayed, from memory that is not theirs any more"
        )
    if device.type != "cuda":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)
