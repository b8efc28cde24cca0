"""Step 1. A weighted sum: the first Triton kernel, forward and backward.

What we want, for every row i of a matrix x (rows, d) and one weight for each column:

    y_i = Σ_j x_ij w_j

A Triton kernel is one small program that is launched many times at once. Each launched program asks
for its number, works out which rows are its own, and then does four things: it makes pointers to a
tile, loads the tile, computes, and stores. What it loaded stays on the chip, so that nothing
between load and store costs memory traffic.

Tiles have sizes that are powers of two; matrices do not. At the edges a tile sticks out, and a mask
says which of its elements exist. Whatever is masked is loaded as 0, which adds nothing to a sum.

Backward, with g_i = ∂L/∂y_i:

    ∂L/∂x_ij = g_i w_j          each element on its own
    ∂L/∂w_j  = Σ_i g_i x_ij     a sum over rows, and the rows belong to different programs

Programs cannot see each other's registers. So each one writes the sum over its own rows, and one
more sum adds up what they wrote. (The other way is an atomic add; step 8 has one.)

Look at how the two directions differ: y needs a sum inside of a program, ∂L/∂w one across programs.
Attention's backward pass has the same two kinds of sums: dQ and dK, dV.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..device import device

DEVICE = device()  # before triton is imported: without a GPU, this turns the interpreter on

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

BLOCK_ROWS, BLOCK_D = 16, 32


@triton.jit
def forward_kernel(
    x_ptr, w_ptr, y_ptr, rows, d, x_row, x_column, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):
    """One program: BLOCK_ROWS rows, from the first column to the last, BLOCK_D at a time."""
    i = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    y = tl.zeros((BLOCK_ROWS,), tl.float32)
    for start in range(0, d, BLOCK_D):
        j = start + tl.arange(0, BLOCK_D)
        exists = (i < rows)[:, None] & (j < d)[None, :]
        at = x_ptr + i[:, None] * x_row + j[None, :] * x_column  # strides: x may be a transpose
        x = tl.load(at, mask=exists, other=0.0)
        w = tl.load(w_ptr + j, mask=j < d, other=0.0)
        y += tl.sum(x * w[None, :], axis=1)
    tl.store(y_ptr + i, y, mask=i < rows)


@triton.jit
def backward_kernel(
    x_ptr, w_ptr, g_ptr, dx_ptr, part_ptr, rows, d, x_row, x_column,
    BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The same rows again: their ∂L/∂x, and their part of ∂L/∂w."""
    program = tl.program_id(0)
    i = program * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    g = tl.load(g_ptr + i, mask=i < rows, other=0.0)
    for start in range(0, d, BLOCK_D):
        j = start + tl.arange(0, BLOCK_D)
        exists = (i < rows)[:, None] & (j < d)[None, :]
        w = tl.load(w_ptr + j, mask=j < d, other=0.0)
        tl.store(dx_ptr + i[:, None] * d + j[None, :], g[:, None] * w[None, :], mask=exists)
        at = x_ptr + i[:, None] * x_row + j[None, :] * x_column
        x = tl.load(at, mask=exists, other=0.0)
        tl.store(part_ptr + program * d + j, tl.sum(g[:, None] * x, axis=0), mask=j < d)


class WeightedSum(torch.autograd.Function):
    """`apply(x, weight)`: x (rows, d), weight (d,) → (rows,)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Launch one program for each block of rows; keep what backward will need."""
        ctx.save_for_backward(x, weight)
        rows, d = x.shape
        y = torch.empty(rows, device=x.device)
        grid = (triton.cdiv(rows, BLOCK_ROWS),)
        forward_kernel[grid](
            x, weight.contiguous(), y, rows, d, *x.stride(), BLOCK_ROWS=BLOCK_ROWS, BLOCK_D=BLOCK_D
        )
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """∂L/∂x, and ∂L/∂w as the sum of the programs' parts."""
        x, weight = ctx.saved_tensors
        rows, d = x.shape
        programs = triton.cdiv(rows, BLOCK_ROWS)
        dx = torch.empty(rows, d, device=x.device)
        parts = torch.empty(programs, d, device=x.device)
        backward_kernel[(programs,)](
            x, weight.contiguous(), grad.contiguous(), dx, parts, rows, d, *x.stride(),
            BLOCK_ROWS=BLOCK_ROWS, BLOCK_D=BLOCK_D,
        )  # fmt: skip
        return dx, parts.sum(0)


def check() -> None:
    """Against fp64: sizes that fill their tiles, sizes that do not, one column, a transpose."""
    torch.manual_seed(0)
    for rows, d in ((32, 64), (37, 50), (1, 1), (5, 100), (40, 3)):
        for transposed in (False, True):
            x = torch.randn(d, rows).T if transposed else torch.randn(rows, d)
            x, weight, grad = (t.to(DEVICE) for t in (x, torch.randn(d), torch.randn(rows)))
            leaves = [t.detach().requires_grad_() for t in (x, weight)]
            y = WeightedSum.apply(*leaves)
            found = (y, *torch.autograd.grad(y, leaves, grad))
            x, weight, grad = x.double(), weight.double(), grad.double()
            true = (x @ weight, torch.outer(grad, weight), grad @ x)
            for name, ours, theirs in zip(("y", "dx", "dweight"), found, true):
                error = (ours - theirs).abs().max().item()
                assert error < 1e-4, f"({rows}, {d}): {name} is wrong by {error:.2e}"


SMALL = (6, 20, 4, 8)  # rows and columns of a matrix, and of its tiles


def show() -> None:
    """The tiles of a small matrix; then what limits the kernel."""
    rows, d, block_rows, block_d = SMALL
    print(f"x is ({rows}, {d}), a tile ({block_rows}, {block_d}). Digits: the program that has the")
    print("element. Dots: elements of a tile that do not exist, and must be masked.\n")
    for i in range(-(-rows // block_rows) * block_rows):
        columns = range(-(-d // block_d) * block_d)
        row = "".join(str(i // block_rows) if i < rows and j < d else "·" for j in columns)
        print("  " + " ".join(row[at : at + block_d] for at in range(0, len(row), block_d)))
        if i % block_rows == block_rows - 1:
            print()
    print("Forward: 2 FLOPs for each element of x, which is 4 bytes: 0.5 FLOP/byte. A GPU computes")
    print("ten or more in the time of one byte. So memory decides, and reading x once is the best")
    print("one can do. (x * w).sum(-1), op by op, reads x, writes the product, reads it again: 3×.")
    if DEVICE.type == "cuda":
        x, w = torch.randn(16384, 4096, device=DEVICE), torch.randn(4096, device=DEVICE)
        for name, call in (
            ("Triton", lambda: WeightedSum.apply(x, w)),
            ("op by op", lambda: (x * w).sum(-1)),
        ):
            ms = triton.testing.do_bench(call)
            print(f"  {name:9} {ms:.3f} ms: x at {x.numel() * 4 / ms / 1e9:.2f} TB/s")


def main() -> None:
    """Check, then show."""
    check()
    show()


if __name__ == "__main__":
    main()
