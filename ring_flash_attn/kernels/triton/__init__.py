"""The Triton kernel: every feature, on NVIDIA from Ampere on and on AMD, in plain portable Triton.

Read in this order: `scores.py` (what happens to a block of scores), `forward.py`, `backward.py`,
`../tables.py` (how one launch covers many documents), `config.py` (block sizes),
`launcher.py`, and the class here. `tuning.py` is for `rfa tune` alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ...plan.tiles import Tile
from .. import row_stats
from ..base import Call, Grads, Saved, State
from ..launches import INTERPRETED, launch_plain
from ..scheduler import programs
from ..tables import table
from .backward import keys_kernel, queries_kernel, stats_kernel
from .config import DTYPES, blocks_for, own_and_loop
from .forward import forward_kernel
from .hopper import host as hopper
from .launcher import fit, launch

MAX_HEADDIM = 256
_ROWS = 256  # of a program of the small kernel


class TritonKernel:
    """One launch for the forward of a step; one or two, and a small one, for the backward."""

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
        if call.dtype not in DTYPES:
            reasons.append(f"dtype {call.dtype} is not fp16, bf16 or fp32")
        if call.softmax_scale <= 0:
            reasons.append(f"softmax_scale {call.softmax_scale} is not positive")
        if max(call.headdim, call.headdim_v) > MAX_HEADDIM:
            reasons.append(
                f"head dimension {max(call.headdim, call.headdim_v)} is over {MAX_HEADDIM}"
            )
        return reasons

    def has_hopper_kernels(self, call: Call) -> bool:
        """Whether a call does not go through the portable kernels."""
        return hopper.can(call)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], state: State, call: Call
    ) -> None:
        """Advance `state` by the keys of `tiles`, in one launch."""
        if hopper.can(call):
            return hopper.forward(q, k, v, tiles, state, call)
        return launch_forward(q, k, v, tiles, state, call)

    def delta(self, dout: Tensor, out: Tensor, call: Call) -> Tensor:
        """(batch, nheads, seqlen_q): the sum of dout · out."""
        return row_stats.delta(dout, out)

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
        if hopper.can(call):
            run = hopper.ordered_backward if hopper.in_order(call) else hopper.backward
            return run(dout, q, k, v, tiles, saved, grads, call)
        if saved.out is not None:
            saved = Saved(saved.lse, self.delta(dout, saved.out, call))
        inputs = fit(q), fit(k), fit(v), fit(dout)
        make = functools.partial(stats_side_by_side, saved, call)
        stats = saved.remember("side by side", make)
        launch_backward("keys", inputs, (stats, grads.dk, grads.dv), tiles, call, grads.fresh_k)
        launch_backward("queries", inputs, (stats, grads.dq), tiles, call, grads.fresh_q)


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], state: State, call: Call
) -> None:
    """The launch of the forward."""
    out, result = state.out, state.out if state.result is None else state.result
    if out.dtype is not torch.float32:
        # Nothing is carried, so that the kernel does not touch `out`. It has to be fp32 all the
        # same: for another type the loop is compiled badly (tests/kernels/test_triton_compiled.py).
        out = state.lse.as_strided((1, 1, 1, 1), (0, 0, 0, 0))
    blocks = blocks_for("forward", call)
    work = table(tiles, blocks.rows, blocks.columns, False, q.device)
    launch(
        forward_kernel,
        ((fit(q), blocks.rows), (fit(k), blocks.columns), (fit(v), blocks.columns)),
        (out, state.lse, result),
        work,
        call,
        call.nheads,
        blocks,
        SHORT_DOCS=work.short,
        WINDOW=work.windowed,
        SINK=call.sink,
        RESULT=result is not out,
    )


def launch_backward(
    name: str,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    others: tuple[Tensor, ...],
    tiles: Sequence[Tile],
    call: Call,
    fresh: bool,
) -> None:
    """One of the two launches of the backward.

    Args:
        name: "keys" or "queries".
        inputs: q, k, v, dout.
        others: what `stats_side_by_side` returns, and the gradients: dk and dv, or dq.
        tiles: what to compute.
        call: the call.
        fresh: write gradients rather than add to them.
    """
    by_key = name == "keys"
    blocks = blocks_for(name, call)
    together = programs(inputs[0].shape[0] * call.nheads_k, call.device) if by_key else 0.0
    work = table(tiles, *own_and_loop(name, blocks), by_key, call.device, together)
    heights = blocks.rows, blocks.columns, blocks.columns, blocks.rows
    launch(
        keys_kernel if by_key else queries_kernel,
        tuple(zip(inputs, heights, strict=True)),
        others,
        work,
        call,
        call.nheads_k if by_key else call.nheads,
        blocks,
        SHORT_DOCS=work.short,
        FRESH=fresh,
        **({} if by_key else {"WINDOW": work.windowed}),
    )


def stats_side_by_side(saved: Saved, call: Call) -> Tensor:
    """(batch, nheads, seqlen_q, 2): what the backward kernels read of each row."""
    batch, nheads, length = saved.lse.shape
    stats = torch.empty((batch, nheads, length, 2), dtype=torch.float32, device=call.device)
    count = -(-length // _ROWS)
    tensors = (saved.lse, saved.delta, stats)
    strides = (*saved.lse.stride(), *saved.delta.stride())
    launch_plain(
        stats_kernel, count * batch * nheads, tensors, (length, nheads, count, *strides, _ROWS)
    )
    return stats


KERNEL = TritonKernel()
