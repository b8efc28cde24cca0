"""Kernels that compute nothing: they tell the meter what launches of the real ones take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..bench.workload import BACKWARD, FORWARD
from ..kernels.base import LIBRARIES, Call, Grads, Kernel, Saved, State
from ..kernels.native.blocks import LibraryKernel
from ..kernels.native.lowering import LibraryCall, Rect
from ..plan.tiles import Tile
from .fit import row_bytes
from .meter import Meter
from .rates import Band, Rate, band_of, seconds, turned

_FP32 = 4
_SQUARE = ("cudnn",)  # libraries that take one block at a time, of as many keys as queries


def stand_in(name: str, headdim: int, meter: Meter, sustained: bool) -> Kernel:
    """For the kernel of this name; ValueError if the GPU has no rate for it.

    `sustained`: at the clock that the GPU's power limit allows in long work.
    """
    forward, backward = (meter.gpu.rate(name, way, headdim) for way in (FORWARD, BACKWARD))
    rates = forward.at_clock(sustained), backward.at_clock(sustained)
    if name in LIBRARIES:
        return _PricedLibraryKernel(_PricedLibrary(name, meter, *rates))
    return _PricedKernel(name, meter, *rates)


class _PricedKernel:
    """For kernels that go on from a state, in one launch."""

    direct = True

    def __init__(self, name: str, meter: Meter, forward: Rate, backward: Rate) -> None:
        self.name, self._meter = name, meter
        self._forward, self._backward = forward, backward

    def why_not(self, call: Call) -> list[str]:
        """Nothing: who asks has chosen it."""
        return []

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], state: State, call: Call
    ) -> None:
        """A launch, and the state of rows that other launches have."""
        gpu, heads = self._meter.gpu, len(q) * call.nheads
        self._meter.launches += 1
        self._meter.add(seconds(self._forward, _by_queries(tiles), heads, gpu.sms))
        if state.out.dtype is torch.float32:
            rows = {t.query.start: t.query.length * (2 - t.first - t.last) for t in tiles}
            size = sum(rows.values()) * heads * (call.headdim_v + 1) * _FP32
            self._meter.add(size / gpu.bandwidth)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: Sequence[Tile],
        saved: Saved,
        grads: Grads,
        call: Call,
    ) -> None:
        """A launch, and what passes over rows before and after it."""
        gpu, heads, rows = self._meter.gpu, len(q) * call.nheads, q.shape[:3].numel()
        self._meter.launches += 1
        self._meter.add(seconds(self._backward, _by_keys(tiles), heads, gpu.sms))
        if grads.dq.dtype is not torch.float32:  # the only launch
            self._meter.add(gpu.moving(rows * row_bytes(call.headdim, call.headdim_v)))
        else:
            saved.remember("statistics", lambda: self._meter.add(gpu.moving(rows * 4 * _FP32)))
            if grads.fresh_q:
                self._meter.add(gpu.moving(rows * call.headdim * _FP32))

    def delta(self, dout: Tensor, out: Tensor, call: Call) -> Tensor:
        """(batch, nheads, seqlen_q): a launch that reads both."""
        batch, length, nheads, _ = out.shape
        found = out.new_empty((batch, nheads, length), dtype=call.state_dtype)
        self._meter.add(self._meter.gpu.moving(dout.nbytes + out.nbytes + found.nbytes))
        return found


class _PricedLibrary:
    """For libraries of kernels, that return blocks."""

    def __init__(self, name: str, meter: Meter, forward: Rate, backward: Rate) -> None:
        self.name, self.meter = name, meter
        self.packs, self.square = name not in _SQUARE, name in _SQUARE
        self._forward, self._backward = forward, backward

    def why_not(self, call: Call) -> list[str]:
        """Nothing: who asks has chosen it."""
        return []

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Any, call: Call
    ) -> tuple[Tensor, Tensor]:
        """out and lse."""
        batch, rows, nheads, _ = q.shape
        bands = [[_band_of(rect)] for rect in block.rects]
        self.meter.launches += 1
        self.meter.add(seconds(self._forward, bands, batch * nheads, self.meter.gpu.sms))
        out = q.new_empty((batch, rows, nheads, call.headdim_v))
        return out, q.new_empty((batch, nheads, rows), dtype=torch.float32)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        block: Any,
        call: Call,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv."""
        gpu, batch, nheads = self.meter.gpu, len(q), q.shape[2]
        bands = [[turned(_band_of(rect))] for rect in block.rects]
        self.meter.launches += 1
        self.meter.add(seconds(self._backward, bands, batch * nheads, gpu.sms))
        rows = q.shape[:3].numel()
        self.meter.add(gpu.moving(rows * row_bytes(call.headdim, call.headdim_v)))
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _PricedLibraryKernel(LibraryKernel):
    """Such a library: which blocks there are, and what is merged, is what the real one does."""

    def block_of(self, call: LibraryCall, device: torch.device) -> Any:
        """The call itself: on a device, nobody could look into its table."""
        return call


def _by_queries(tiles: Sequence[Tile]) -> list[list[Band]]:
    """The bands of each query span."""
    found: dict[int, list[Band]] = {}
    for tile in tiles:
        found.setdefault(tile.query.start, []).append(band_of(tile))
    return list(found.values())


def _by_keys(tiles: Sequence[Tile]) -> list[list[Band]]:
    """The bands of each key span, with keys as rows."""
    found: dict[int, list[Band]] = {}
    for tile in tiles:
        found.setdefault(tile.key.start, []).append(turned(band_of(tile)))
    return list(found.values())


def _band_of(rect: Rect) -> Band:
    """A rectangle's band in rows of its own."""
    shift = rect.q - rect.k
    return rect.q_end - rect.q, rect.k_end - rect.k, rect.low + shift, rect.high + shift
