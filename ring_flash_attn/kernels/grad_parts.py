"""dK and dV of a KV head in parts, one for some of its query heads each, and their sum."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launches import launch_plain, power_of_2

_SUMMED = 512  # numbers of a program that adds up parts

# fmt: off


@triton.jit(do_not_specialize=["count", "rows", "nheads_k"])
def parts_kernel(
    parts_ptr, grad_ptr, count, rows, nheads_k, d, g_batch, g_row, g_head, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, D: tl.constexpr, FRESH: tl.constexpr,
):
    """Always in the same order; parts of a vector, of which there are `count`, lie together."""
    vectors = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    depth = tl.arange(0, D)
    there = (vectors < count)[:, None] & (depth < d)[None, :]
    vectors = vectors.to(tl.int64)
    part_ptrs = parts_ptr + (vectors * PARTS * d)[:, None] + depth[None, :]
    batch, row, head = vectors // nheads_k // rows, vectors // nheads_k % rows, vectors % nheads_k
    grad_ptrs = grad_ptr + (batch * g_batch + row * g_row + head * g_head)[:, None] + depth[None, :]
    if FRESH:
        total = tl.zeros([BLOCK, D], tl.float32)
    else:
        total = tl.load(grad_ptrs, mask=there, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(part_ptrs + part * d, mask=there, other=0.0)
    tl.store(grad_ptrs, total, mask=there)

# fmt: on


def make_parts(grad: Tensor, parts: int, named: int) -> Tensor:
    """Where parts of dK or dV go; zeros if tiles do not name all rows, since all are added up."""
    batch, rows, nheads_k, d = grad.shape
    make = torch.empty if named == rows else torch.zeros
    return make(batch, rows, nheads_k * parts, d, dtype=torch.float32, device=grad.device)


def add_up(parts: Tensor, grad: Tensor, fresh: bool) -> None:
    """Their sum, written to a gradient or added to it."""
    batch, rows, nheads_k, d = grad.shape
    width = power_of_2(d)
    block = _SUMMED // width
    count = batch * rows * nheads_k
    numbers = (count, rows, nheads_k, d, *grad.stride()[:3])
    constants = (parts.shape[2] // nheads_k, block, width, fresh)
    launch_plain(parts_kernel, -(-count // block), (parts, grad), (*numbers, *constants))
