"""The CuTe DSL kernel for Hopper: every feature of a step, in one launch a pass.

Read in this order: `primitives.py` (registers, barriers, the tile scheduler), `scores.py` (what
happens to a block of scores), `forward.py` (the schedule), `producer.py`, `consumer.py`,
`backward.py` and its producer and consumer, `sizes.py` (blocks for each head dimension),
`compiled.py` and `stored.py` (compiled kernels, on disk too), `host.py` and `backward_host.py`
(launching), and the class here. `traits.py` has the names.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import Tensor

from ...plan.tiles import Tile
from ..base import Call, Grads, Saved, State
from . import host

_BACKWARD = f"{__name__}.backward_host"
_NO_TRITON = "its backward pass needs triton, which is not installed: `pip install triton`"


class CuteKernel:
    """One launch for each pass of a step."""

    name = "cute"
    direct = True

    def why_not(self, call: Call) -> list[str]:
        """Device, dtype and head dimension decide; and whether there will be a backward pass."""
        reasons = host.why_not(call)
        if call.needs_grad:
            backward = _backward()
            reasons += [backward] if isinstance(backward, str) else []
        return reasons

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], state: State, call: Call
    ) -> None:
        """Advance `state` by the keys of `tiles`, in one launch."""
        host.forward(q, k, v, tiles, state, call)

    def delta(self, dout: Tensor, out: Tensor, call: Call) -> Tensor:
        """(batch, nheads, seqlen_q): the sum of dout · out."""
        found: Tensor = self._needed().delta(dout, out, call)
        return found

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
        """Add the gradients that `tiles` contribute to `grads`."""
        self._needed().backward(dout, q, k, v, tiles, saved, grads, call)

    def _needed(self) -> Any:
        """What has the backward pass; calls that need it are refused before, by `why_not`."""
        backward = _backward()
        if isinstance(backward, str):
            raise NotImplementedError(f"kernel {self.name!r}: {backward}")
        return backward


@cache
def _backward() -> Any:
    """The module with `delta` and `backward`; or why it cannot be imported."""
    try:
        return importlib.import_module(_BACKWARD)
    except ModuleNotFoundError as missing:  # small kernels of its backward pass are Triton's
        if missing.name != "triton":
            raise
        return _NO_TRITON


KERNEL = CuteKernel()
