"""The Triton kernel: every feature, on NVIDIA from Ampere on and on AMD, in plain portable Triton.

Read in this order: `scores.py` (what happens to a block of scores), `forward.py`, `backward.py`,
`tables.py` (how one launch covers many documents), `config.py` (block sizes), and the class here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...tiles import Tile
from ..base import Call, Grads, Saved, State
from ..dropout import threshold
from .backward import keys_kernel, queries_kernel
from .config import Blocks, blocks_for
from .forward import forward_kernel
from .tables import Table, table

MAX_HEADDIM = 256
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


INTERPRETED = not isinstance(forward_kernel, triton.JITFunction)  # decided when triton is imported


class TritonKernel:
    """One launch for the forward of a step, two for the backward."""

    name = "triton"

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
        work = table(tiles, blocks.rows, False, q.device)
        result = state.out if state.result is None else state.result
        _launch(
            forward_kernel,
            q.shape[0],
            (
                Matrix(q, blocks.rows),
                Matrix(k, blocks.columns),
                Matrix(v, blocks.columns),
                state.out,
                state.lse,
                result,
            ),
            work,
            call,
            call.nheads,
            blocks,
            SINK=call.sink,
            WHOLE=work.full and not work.ragged(blocks.columns),
            RESULT=state.result is not None,
        )

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
        saved_rows = (saved.lse, saved.delta)
        for name, heads, kernel, into in (
            ("keys", call.nheads_k, keys_kernel, (grads.dk, grads.dv)),
            ("queries", call.nheads, queries_kernel, (grads.dq,)),
        ):
            blocks = blocks_for(name, call)
            by_key = name == "keys"
            work = table(tiles, blocks.columns if by_key else blocks.rows, by_key, q.device)
            read = [Matrix(q, blocks.rows), *(Matrix(x, blocks.columns) for x in (k, v))]
            tensors = (*read, Matrix(dout, blocks.rows), *saved_rows, *into)
            _launch(kernel, q.shape[0], tensors, work, call, heads, blocks)


class Matrix:
    """A (batch, row, head, d) tensor as a matrix: at which row and column a batch and head starts.

    Whatever the strides are, a step in a dimension is a number of whole rows or of columns.
    """

    def __init__(self, x: Tensor, rows: int) -> None:
        self.rows = rows  # that a program loads at a time
        batch, row, head, _ = x.stride()
        if not self._fits(x):
            x = x.contiguous()
            batch, row, head, _ = x.stride()
        self.tensor, self.stride = x, row
        self.brow, self.bcol = self._steps(batch, row)
        self.hrow, self.hcol = self._steps(head, row)

    @staticmethod
    def _fits(x: Tensor) -> bool:
        batch, row, head, last = x.stride()
        return last == 1 and all(s % row == 0 or s < row for s in (batch, head) if row)

    @staticmethod
    def _steps(stride: int, row: int) -> tuple[int, int]:
        return (stride // row, 0) if row and stride % row == 0 else (0, stride)

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.stride, self.brow, self.bcol, self.hrow, self.hcol

    @property
    def aligned(self) -> bool:
        """Whether the hardware's bulk copies can read it."""
        size = self.tensor.element_size()
        return self.tensor.data_ptr() % 16 == 0 and self.stride * size % 16 == 0 and self.stride > 0

    def descriptor(self) -> TensorDescriptor:
        batch, length, heads, d = self.tensor.shape
        height = (batch - 1) * self.brow + (heads - 1) * self.hrow + length
        width = (batch - 1) * self.bcol + (heads - 1) * self.hcol + d
        return TensorDescriptor(self.tensor, [height, width], [self.stride, 1], [self.rows, d])


def _launch(
    kernel: Any,
    batch: int,
    tensors: tuple[Tensor | Matrix, ...],
    work: Table,
    call: Call,
    nheads: int,
    blocks: Blocks,
    **flags: bool,
) -> None:
    slopes = call.alibi_slopes
    depth, depth_v = (max(16, triton.next_power_of_2(x)) for x in (call.headdim, call.headdim_v))
    even = depth == call.headdim and depth_v == call.headdim_v
    matrices = [x for x in tensors if isinstance(x, Matrix)]
    tma = even and all(x.aligned for x in matrices)
    arguments: list[Any] = []
    strides: list[int] = []
    for x in tensors:
        if isinstance(x, Matrix):
            arguments.append(x.descriptor() if tma else x.tensor)
            strides += x.numbers
        else:
            arguments.append(x)
            strides += x.stride()[:3]
    some = work.blocks  # stands in for what is not there; never read
    launch = functools.partial(
        kernel[(len(work.blocks) * batch * nheads,)],  # one axis: the others end at 65535
        *arguments,
        some if slopes is None else slopes.float().contiguous(),
        some if call.seed is None else call.seed,
        work.blocks,
        work.tiles,
        call.softmax_scale,
        call.softcap or 1.0,
        threshold(call.dropout_p),
        1 / (1 - call.dropout_p),
        call.head_start,
        call.headdim,
        call.headdim_v,
        nheads,
        call.nheads // call.nheads_k,
        len(work.blocks),
        *strides,
        0 if slopes is None or slopes.dim() == 1 else call.nheads,
        D=depth,
        DV=depth_v,
        EVEN=even,
        TMA=tma,
        GUARD=work.ragged(blocks.rows if kernel is keys_kernel else blocks.columns),
        BLOCK_M=blocks.rows,
        BLOCK_N=blocks.columns,
        WINDOW=work.windowed,
        SOFTCAP=call.softcap > 0,
        ALIBI=slopes is not None,
        DROPOUT=call.seed is not None,
        PRECISION="ieee" if call.dtype is torch.float32 else "tf32",
        UPCAST=INTERPRETED and call.dtype is torch.bfloat16,
        STAGES=blocks.stages,
        num_warps=blocks.warps,
        **flags,
    )
    if call.device.type == "cuda":
        with torch.cuda.device(call.device):  # Triton launches on the current one
            launch()
    else:
        launch()


KERNEL = TritonKernel()
