"""Values of small CUDA tensors on the host, without a synchronisation for every read.

As long as the same tensor comes back at the same version, reads return the first copy. A version is
no proof, though (collectives, `.data` and DLPack aliases do not raise it), so reads also queue a
copy to pinned memory, which nobody waits for; a later read raises an error if it differs.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class _Copy:
    """What a tensor held at a version, at an address, and when that is to be checked next."""

    tensor: weakref.ref[Tensor]
    version: int
    address: int
    values: tuple[int, ...]
    due: float = 0.0
    is_checked: bool = False  # a copy is under way

    def is_of(self, tensor: Tensor) -> bool:
        return (
            self.tensor() is tensor
            and self.version == tensor._version
            and self.address == tensor.data_ptr()
        )


@dataclass(frozen=True, slots=True)
class _Check:
    """A copy under way: what has to be in it, and whether it has arrived."""

    name: str
    copy: _Copy
    tensor: Tensor  # alive until it is copied
    host: Tensor
    arrived: Callable[[], bool]


_INTERVAL = 0.005  # seconds between two checks of a tensor: one takes the host 0.1 ms
_copies: dict[int, _Copy] = {}  # by id of the tensor, as long as it lives
_checks: deque[_Check] = deque()  # in the order in which they were queued
_lock = threading.Lock()


def host_values(tensor: Tensor, name: str, fresh: bool = False) -> tuple[int, ...]:
    """The integers in a one-dimensional tensor; never stale for a tensor on the CPU.

    `fresh` reads it now, whatever is known of it. RuntimeError if a tensor was written to without a
    new version, and a call before this one has used what it held earlier.
    """
    if not _is_far(tensor) or tensor.is_inference():  # an inference tensor has no version
        return _read(tensor)
    if _capturing(tensor):  # a graph keeps the plan of its capture; events cannot be asked now
        copy = _copies.get(id(tensor))
        return copy.values if copy and copy.is_of(tensor) else _read(tensor)
    raise_if_stale()
    key = id(tensor)
    copy = _copies.get(key)
    if not fresh and copy is not None and copy.is_of(tensor):
        now = time.perf_counter()
        if now >= copy.due and not copy.is_checked:
            copy.due, copy.is_checked = now + _INTERVAL, True
            check = _Check(name, copy, tensor, *_start_copy(tensor))
            with _lock:
                _checks.append(check)
        return copy.values
    version, address = tensor._version, tensor.data_ptr()
    values = _read(tensor)
    alive = weakref.ref(tensor, lambda gone: _forget(key, gone))
    _copies[key] = _Copy(alive, version, address, values)
    return values


def raise_if_stale() -> None:
    """RuntimeError if one of the copies that have arrived is not what a call took it for."""
    if not _checks:
        return
    with _lock:
        if _checks and _capturing(_checks[0].tensor):  # events cannot be asked now
            return
        while _checks and _checks[0].arrived():
            check = _checks.popleft()
            check.copy.is_checked = False
            now = tuple(check.host.tolist())
            if now == check.copy.values:
                continue
            tensor = check.copy.tensor()
            if tensor is not None:
                _copies.pop(id(tensor), None)
            for other in _checks:
                other.copy.is_checked = False
            _checks.clear()
            raise RuntimeError(
                f"an earlier call took {check.name} for {_short(check.copy.values)}, but it held "
                f"{_short(now)}: the tensor was written to without a new version, as collectives "
                f"(dist.broadcast), .data and DLPack aliases do. The results of that call are "
                f"wrong. Pass {check.name} as a list or a CPU tensor, which is read at every call, "
                f"or as a new tensor whenever it changes"
            )


def _short(values: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, values[:8]))
    return f"[{shown}, … ({len(values)} values)]" if len(values) > 8 else f"[{shown}]"


def _is_far(tensor: Tensor) -> bool:
    """Whether reading it waits for a queue of work, and its copies can be checked later."""
    return tensor.is_cuda


def _read(tensor: Tensor) -> tuple[int, ...]:
    """Its elements; from a GPU, once that is done with all that was queued before."""
    return tuple(tensor.tolist())


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _start_copy(tensor: Tensor) -> tuple[Tensor, Callable[[], bool]]:
    """A copy in pinned memory, and whether it has arrived there."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    stream, event = torch.cuda.current_stream(tensor.device), torch.cuda.Event()
    host.copy_(tensor, non_blocking=True)
    event.record(stream)
    return host, event.query


def _forget(key: int, gone: weakref.ref[Tensor]) -> None:
    copy = _copies.get(key)
    if copy is not None and copy.tensor is gone:
        _copies.pop(key, None)
