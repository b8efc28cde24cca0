"""Launching the portable kernels: tensors as matrices, and a kernel's arguments in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..base import Call
from ..dropout import threshold
from ..launches import INTERPRETED, again, first, power_of_2
from ..scheduler import section
from ..tables import Table
from .config import Blocks, has_tma


class Matrix:
    """A (batch, row, head, d) tensor as a matrix: at which row and column a batch and head starts.

    Whatever the strides are, a step in a dimension is a number of whole rows or of columns.

    Args:
        x: the tensor; must `fit`.
        rows: that a program loads at a time.
    """

    __slots__ = ("numbers", "rows", "stride", "tensor")

    def __init__(self, x: Tensor, rows: int) -> None:
        self.tensor, self.rows = x, rows
        batch, self.stride, head, _ = x.stride()
        self.numbers = self.stride, *self._steps(batch), *self._steps(head)

    def _steps(self, stride: int) -> tuple[int, int]:
        """Rows and columns."""
        row = self.stride
        return (stride // row, 0) if row and stride % row == 0 else (0, stride)

    @property
    def aligned(self) -> bool:
        """Whether TMA can read it."""
        size = self.tensor.element_size()
        return self.tensor.data_ptr() % 16 == 0 and self.stride * size % 16 == 0 and self.stride > 0

    def descriptor(self) -> TensorDescriptor:
        """For TMA of `rows` rows of one head."""
        batch, length, heads, d = self.tensor.shape
        _, brow, bcol, hrow, hcol = self.numbers
        height = (batch - 1) * brow + (heads - 1) * hrow + length
        width = (batch - 1) * bcol + (heads - 1) * hcol + d
        return TensorDescriptor(self.tensor, [height, width], [self.stride, 1], [self.rows, d])


def fit(x: Tensor) -> Tensor:
    """The tensor, or a copy if its strides are not those of a matrix."""
    batch, row, head, last = x.stride()
    fits = row == 0 or ((batch % row == 0 or batch < row) and (head % row == 0 or head < row))
    return x if fits and last == 1 else x.contiguous()


def launch(
    kernel: Any,
    loaded: Sequence[tuple[Tensor, int]],
    others: Sequence[Tensor],
    work: Table,
    call: Call,
    nheads: int,
    blocks: Blocks,
    **flags: bool,
) -> None:
    """Launch one of the three kernels.

    Args:
        kernel: which.
        loaded: tensors that it reads in blocks, and the number of rows of a block.
        others: tensors that it reads and writes through pointers.
        work: what each program does.
        call: the call.
        nheads: heads that have programs of their own.
        blocks: sizes.
        flags: the kernel's own compile-time flags.
    """
    slopes, seed = call.alibi_slopes, call.seed
    tensors = [
        *(tensor for tensor, _ in loaded),
        *others,
        work.blocks if slopes is None else slopes.float().contiguous(),  # never read where it
        work.blocks if seed is None else seed,  # stands in for what is not there
    ]
    key = (
        id(kernel),
        id(work),
        blocks,
        call.key,
        loaded[0][0].shape[0],
        *flags.values(),
        *[(x.stride(), x.dtype, x.data_ptr() % 16) for x in tensors],
    )
    if again(key, tensors):
        return
    matrices = [Matrix(tensor, rows) for tensor, rows in loaded]
    arguments, options = _arguments(kernel, matrices, tensors, work, call, nheads, blocks, flags)
    pairs = tensors[0].shape[0] * nheads
    grid = (len(work.blocks) * pairs, 1, 1)  # one axis: the others end at 65535
    first(key, kernel, grid, arguments, len(tensors), options, work)


def _arguments(
    kernel: Any,
    matrices: Sequence[Matrix],
    tensors: Sequence[Tensor],
    work: Table,
    call: Call,
    nheads: int,
    blocks: Blocks,
    flags: dict[str, bool],
) -> tuple[list[Any], dict[str, Any]]:
    """All arguments of a kernel in order, and Triton's own options."""
    depth, depth_v = (max(16, power_of_2(x)) for x in (call.headdim, call.headdim_v))
    even = depth == call.headdim and depth_v == call.headdim_v
    tma = even and has_tma(call) and all(x.aligned for x in matrices)
    others = tensors[len(matrices) : -2]
    slopes = call.alibi_slopes
    pairs = tensors[0].shape[0] * nheads
    given = {
        "scale": call.softmax_scale,
        "softcap": call.softcap or 1.0,
        "threshold": threshold(call.dropout_p),
        "keep_scale": 1 / (1 - call.dropout_p),
        "head_start": call.head_start,
        "d": call.headdim,
        "dv": call.headdim_v,
        "nheads": nheads,
        "group": call.nheads // call.nheads_k,
        "count": len(work.blocks),
        "section": section(pairs, nheads, work, call),
    }
    strides = [number for x in matrices for number in x.numbers]
    strides += [number for x in others for number in x.stride()[:3]]
    constants: dict[str, Any] = {
        "D": depth,
        "DV": depth_v,
        "EVEN": even,
        "TMA": tma,
        "BLOCK_M": blocks.rows,
        "BLOCK_N": blocks.columns,
        "SOFTCAP": call.softcap > 0,
        "ALIBI": slopes is not None,
        "DROPOUT": call.seed is not None,
        "UPCAST": INTERPRETED and call.dtype is torch.bfloat16,
        "STAGES": blocks.stages,
        **flags,
    }
    arguments = [
        *(x.descriptor() if tma else x.tensor for x in matrices),
        *tensors[len(matrices) :],
        work.blocks,
        work.tiles,
        *given.values(),
        *strides,
        call.slopes_stride,
    ]
    names = kernel.arg_names[len(arguments) :]
    assert set(names) == set(constants), set(names) ^ set(constants)
    options: dict[str, Any] = {"num_warps": blocks.warps}
    if blocks.registers and not INTERPRETED:
        options["maxnreg"] = blocks.registers
    return arguments + [constants[name] for name in names], options
