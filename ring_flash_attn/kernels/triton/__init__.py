"""The Triton kernel: every feature, on NVIDIA from Ampere on and on AMD, in plain portable Triton.

Read in this order: `scores.py` (what happens to a block of scores), `forward.py`, `backward.py`,
`tables.py` (how one launch covers many documents), `config.py` (block sizes), `launcher.py`, and
the class here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from ...tiles import Tile
from ..base import Call, Grads, Saved, State
from .backward import delta_kernel, keys_kernel, queries_kernel, stats_kernel
from .config import blocks_for
from .forward import forward_kernel
from .launcher import INTERPRETED, fit, launch, launch_plain
from .tables import table

MAX_HEADDIM = 256
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_DELTA_ROWS, _ROWS = 32, 256  # of a program of the two small kernels


class TritonKernel:
    """One launch for the forward of a step, two for the backward."""

    name = "triton"
    direct = True

    def why_not(self, call: Call) -> list[str]:
        """Device, dtype and head dimension decide."""
        reasons = []
        if call.device.type != "cuda" and not INTERPRETED:
            reasons.append(
                f"needs a GPU, not {call.device}; a process that is started with "
                "TRITON_INTERPRET=1 runs it on the CPU, slowly"
            )
        if call.dtype not in _DTYPES:
            reasons.append(f"dtype {call.dtype} is not fp16, bf16 or fp32")
        if call.softmax_scale <= 0:
            reasons.append(f"softmax_scale {call.softmax_scale} is not positive")
        if max(call.headdim, call.headdim_v) > MAX_HEADDIM:
            reasons.append(
                f"head dimension {max(call.headdim, call.headdim_v)} is over {MAX_HEADDIM}"
            )
        return reasons

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], state: State, call: Call
    ) -> None:
        """Advance `state` by the keys of `tiles`, in one launch."""
        blocks = blocks_for("forward", call)
        work = table(tiles, blocks.rows, blocks.columns, False, q.device)
        launch(
            forward_kernel,
            ((fit(q), blocks.rows), (fit(k), blocks.columns), (fit(v), blocks.columns)),
            (state.out, state.lse, state.out if state.result is None else state.result),
            work,
            call,
            call.nheads,
            blocks,
            GUARD=work.ragged,
            WHOLE=work.full and not work.ragged,
            SINK=call.sink,
            RESULT=state.result is not None,
        )

    def delta(self, dout: Tensor, out: Tensor, call: Call) -> Tensor:
        """(batch, nheads, seqlen_q): the sum of dout · out."""
        batch, length, nheads, dv = out.shape
        delta = torch.empty((batch, nheads, length), dtype=torch.float32, device=out.device)
        count = triton.cdiv(length, _DELTA_ROWS)
        strides = (*out.stride()[:3], *dout.stride())
        launch_plain(
            delta_kernel,
            count * batch * nheads,
            (out, dout, delta),
            (length, nheads, dv, count, *strides, _DELTA_ROWS, triton.next_power_of_2(dv)),
        )
        return delta

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
        """Add the gradients that `tiles` contribute to `grads`, in two launches."""
        q, k, v, dout = (fit(x) for x in (q, k, v, dout))
        stats = _stats(saved, call)
        for name, kernel, heads, into in (
            ("keys", keys_kernel, call.nheads_k, (grads.dk, grads.dv)),
            ("queries", queries_kernel, call.nheads, (grads.dq,)),
        ):
            blocks = blocks_for(name, call)
            own, loop = blocks.rows, blocks.columns
            if name == "keys":
                own, loop = loop, own
            work = table(tiles, own, loop, name == "keys", q.device)
            rows, columns = blocks.rows, blocks.columns
            launch(
                kernel,
                ((q, rows), (k, columns), (v, columns), (dout, rows)),
                (stats, *into),
                work,
                call,
                heads,
                blocks,
                GUARD=work.ragged,
                FRESH=grads.fresh,
            )


def _stats(saved: Saved, call: Call) -> Tensor:
    """(batch, nheads, seqlen_q, 2): what the backward kernels read of each row."""
    batch, nheads, length = saved.lse.shape
    stats = torch.empty((batch, nheads, length, 2), dtype=torch.float32, device=call.device)
    count = triton.cdiv(length, _ROWS)
    tensors = (saved.lse, saved.delta, stats)
    strides = (*saved.lse.stride(), *saved.delta.stride())
    launch_plain(
        stats_kernel, count * batch * nheads, tensors, (length, nheads, count, *strides, _ROWS)
    )
    return stats


KERNEL = TritonKernel()
