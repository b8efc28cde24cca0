"""dK and dV of a KV head in parts, one for some of its query heads each, and their sums."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launches import launch_plain, power_of_2

_SUMMED = 512  # numbers of a program that adds up parts

# fmt: off


@triton.jit
def add_parts_of(
    program, parts_ptr, grad_ptr, count, rows, nheads_k, d, g_batch, g_row, g_head,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, FRESH: tl.constexpr,
):
    """Always in the same order; parts of a vector, of which there are `count`, lie together."""
    vectors = program * BLOCK + tl.arange(0, BLOCK)
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


@triton.jit(do_not_specialize=["programs", "count", "rows", "nheads_k"])
def parts_kernel(
    parts_ptr, grad_ptr, others_ptr, other_ptr, programs, count, rows, nheads_k, d, g_batch, g_row,
    g_head, e, o_batch, o_row, o_head, PARTS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    OTHERS: tl.constexpr, E: tl.constexpr, FRESH: tl.constexpr,
):
    """Of two gradients; the first has so many programs."""
    program = tl.program_id(0)
    if program < programs:
        add_parts_of(
            program, parts_ptr, grad_ptr, count, rows, nheads_k, d, g_batch, g_row, g_head, PARTS,
            BLOCK, D, FRESH,
        )
    else:
        add_parts_of(
            program - programs, others_ptr, other_ptr, count, rows, nheads_k, e, o_batch, o_row,
            o_head, PARTS, OTHERS, E, FRESH,
        )

# fmt: on


def make_parts(grad: Tensor, parts: int, named: int) -> Tensor:
    """Where parts of dK or dV go; zeros if tiles do not name all rows, since all are added up."""
    batch, rows, nheads_k, d = grad.shape
    make = torch.empty if named == rows else torch.zeros
    return make(batch, rows, nheads_k * parts, d, dtype=torch.float32, device=grad.device)


def add_up(parts: Sequence[Tensor], grads: Sequence[Tensor], fresh: bool) -> None:
    """The sums of the parts of one gradient or two, in one launch: written there or added."""
    batch, rows, nheads_k, _ = grads[0].shape
    count = batch * rows * nheads_k
    programs, numbers, constants = [], [], []
    for grad in (grads[0], grads[-1]):
        d = grad.shape[3]
        width = power_of_2(d)
        block = _SUMMED // width
        programs.append(-(-count // block))
        numbers += [d, *grad.stride()[:3]]
        constants += [block, width]
    launch_plain(
        parts_kernel,
        sum(programs[: len(grads)]),
        (parts[0], grads[0], parts[-1], grads[-1]),
        (
            programs[0],
            count,
            rows,
            nheads_k,
            *numbers,
            parts[0].shape[2] // nheads_k,
            *constants,
            fresh,
        ),
    )
