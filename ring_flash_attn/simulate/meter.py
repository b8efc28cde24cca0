"""The meter: what a pass that runs on tensors without data would cost on a GPU, and its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..comm import Message
from ..kernels.base import FIRST, LAST, Rows
from ..kernels.merge import merging
from ..kernels.rows import adding
from .machine import Gpu
from .timeline import Stage

ADDED = 4.0  # times as long as a sum: rows that are added by number (fitted; see `gpus`)
_FP32, _HALF = 4, 2  # bytes
_aten = torch.ops.aten
_FREE = {_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default}
_ROWS = {  # operations on some rows of a tensor: which argument has as many, and how often it moves
    _aten.index_select.default: (None, 2),
    _aten.index_select.out: (None, 2),
    _aten.index_copy_.default: (3, 2),
    _aten.index_add_.default: (3, 3 * ADDED),
}
_WRITES = {_aten.zero_.default, _aten.fill_.Scalar, _aten.zeros.default, _aten.zeros_like.default}


class Meter(TorchDispatchMode):
    """Adds up the seconds of operations; as a transport, cuts them into stages."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu
        self.stages: list[Stage] = []
        self.launches = 0  # of the kernel
        self._seconds = 0.0  # since the last post or wait

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in _FREE and not func.is_view:
            self.add(self.gpu.moving(_moved(func, args, kwargs or {}, found)))
        return found

    def __enter__(self) -> Any:
        self._tokens = merging.set(self._merge), adding.set(self._add_parts)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        merging.reset(self._tokens[0])
        adding.reset(self._tokens[1])
        super().__exit__(*error)

    def _merge(self, block: Tensor, rows: Sequence[Rows]) -> None:
        """One launch; the block, just written, is in the L2 cache."""
        size = sum((each.end - each.start) * _merged(each.bits) for each in rows)
        batch, _, nheads, headdim = block.shape
        self.add(self.gpu.moving(size * batch * nheads * headdim))

    def _add_parts(self, size: int) -> None:
        """One launch for each tensor; the table is copied once for a plan."""
        self.add(self.gpu.moving(size))

    def add(self, seconds: float) -> None:
        """Something else on the compute stream."""
        self._seconds += seconds

    def post(self, messages: Sequence[Message]) -> None:
        """The next stage begins; what was done since the last one's wait comes before it."""
        before = self._taken() + (self.gpu.post if messages else 0.0)
        sent = tuple((m.peer, m.tensor.nbytes) for m in messages if not m.receive)
        received = tuple((m.peer, m.tensor.nbytes) for m in messages if m.receive)
        self.stages.append(Stage(0.0, sent, received, before=before))

    def wait(self) -> None:
        """What was done since the post is the work of its stage."""
        self.stages[-1] = replace(self.stages[-1], compute=self._taken())

    def abandon(self, steps: Sequence[bool], drain: bool) -> None:
        """Nobody else is there."""

    def finished(self) -> tuple[Stage, ...]:
        """All stages; a launch without an executor is one."""
        rest = self._taken()
        if not self.stages:
            return (Stage(rest),)
        last = self.stages.pop()
        return (*self.stages, replace(last, after=last.after + rest))

    def _taken(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def _merged(bits: int) -> int:
    """Bytes that a merge reads and writes of each number of a row: the state's, or the result's."""
    return (0 if bits & FIRST else _FP32) + (_HALF if bits & LAST else _FP32)


def _moved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> float:
    """Bytes that an operation reads and writes; none where it runs on the host."""
    if not isinstance(found, Tensor) or not found.is_meta:
        return 0
    if func in _ROWS:
        place, times = _ROWS[func]
        return times * (found if place is None else args[place]).nbytes
    if func in _WRITES:
        return found.nbytes
    read = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    if any(not each.is_meta for each in read):
        return 0  # a table, copied once for a plan
    return sum(each.nbytes for each in read[func is _aten.copy_.default :]) + found.nbytes
