"""Exercise 1. A weighted sum, forward and backward, as Triton kernels.

    y_i = Σ_j x_ij w_j        ∂L/∂x_ij = g_i w_j        ∂L/∂w_j = Σ_i g_i x_ij

Fill in the two kernels, then the autograd function that launches them. Rows and d are any numbers,
not only multiples of your tile. You may change the arguments of the kernels, not of `WeightedSum`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ring_flash_attn.lab.device import device

DEVICE = device()  # a GPU, or the CPU with Triton's interpreter: hence before triton is imported

import triton  # noqa: E402
import triton.language as tl  # noqa: E402


@triton.jit
def forward_kernel(
    x_ptr, w_ptr, y_ptr, rows, d, x_row, x_column, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Sum BLOCK_ROWS rows of x, from the first column to the last, BLOCK_D columns at a time.

    x_row and x_column are the strides of x: element (i, j) is at x_ptr + i * x_row + j * x_column.
    """
    raise NotImplementedError("which rows are mine? loop over columns: load, multiply, sum; store")


@triton.jit
def backward_kernel(
    x_ptr, w_ptr, g_ptr, dx_ptr, part_ptr, rows, d, x_row, x_column,
    BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write ∂L/∂x of my rows to dx (rows, d), and their sum for ∂L/∂w to row program_id of part."""
    raise NotImplementedError("load g once; for each block of columns store dx and the sum of g x")


class WeightedSum(torch.autograd.Function):
    """`apply(x, weight)`: x (rows, d), perhaps not contiguous, weight (d,) → (rows,)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Launch `forward_kernel`; keep what backward will need."""
        raise NotImplementedError("save x and weight, allocate y, launch one program per row block")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Launch `backward_kernel`; return ∂L/∂x (rows, d) and ∂L/∂weight (d,).

        `grad` (rows,) may be one number, expanded, as after y.sum().
        """
        raise NotImplementedError("allocate dx and (programs, d) parts, launch, sum the parts")


if __name__ == "__main__":  # python e01_weighted_sum.py: a case to do by hand; print what you like
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], device=DEVICE, requires_grad=True)
    weight = torch.tensor([1.0, 10.0, 100.0], device=DEVICE, requires_grad=True)
    y = WeightedSum.apply(x, weight)
    print("y", y.tolist(), "should be [321, 654]")
    (dweight,) = torch.autograd.grad(y.sum(), weight)
    print("dweight", dweight.tolist(), "should be [5, 7, 9]")
