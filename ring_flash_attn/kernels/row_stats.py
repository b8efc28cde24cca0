"""What backward kernels know of each row: lse in base 2, and delta = sum of dout · out.

Small kernels in Triton, for all kernels that read (lse, delta) instead of computing them.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .base import Saved
from .launches import launch_plain, power_of_2

LOG2E = tl.constexpr(1.4426950408889634)
ANY_NUMBER = ["length", "nheads", "count", "l_batch", "l_head", "e_batch", "e_head"]
_COPIES = 4  # of what is known of rows
_ROWS, _DELTA_ROWS = 256, 32  # of a program that copies, and of one that computes delta
_NUMBERS = 8192  # of out, of a program of the one that prepares the backward pass

# fmt: off


@triton.jit
def rows_of_pair(length, nheads, count, BLOCK: tl.constexpr):
    """A program's pair of batch and head, these, rows, and which of them there are."""
    pair = tl.program_id(0) // count
    batch, head = (pair // nheads).to(tl.int64), (pair % nheads).to(tl.int64)
    rows = (tl.program_id(0) % count * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    return pair.to(tl.int64), batch, head, rows, rows < length


@triton.jit
def delta_of_rows(
    out_ptr, dout_ptr, length, nheads, dv, count, o_batch, o_row, o_head, g_batch, g_row, g_head,
    g_last, BLOCK: tl.constexpr, DV: tl.constexpr,
):
    """What `rows_of_pair` has, and delta = sum of dout · out."""
    pair, batch, head, rows, mask = rows_of_pair(length, nheads, count, BLOCK)
    depth = tl.arange(0, DV)
    there = mask[:, None] & (depth < dv)[None, :]
    out_ptr += batch * o_batch + head * o_head + rows[:, None] * o_row
    dout_ptr += batch * g_batch + head * g_head + rows[:, None] * g_row
    out = tl.load(out_ptr + depth[None, :], mask=there, other=0.0)
    dout = tl.load(dout_ptr + depth[None, :] * g_last, mask=there, other=0.0)
    return pair, batch, head, rows, mask, tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)


@triton.jit(do_not_specialize=ANY_NUMBER)
def delta_kernel(
    out_ptr, dout_ptr, delta_ptr, length, nheads, dv, count, o_batch, o_row, o_head, g_batch,
    g_row, g_head, g_last, BLOCK: tl.constexpr, DV: tl.constexpr,
):
    """delta of BLOCK rows of one head; (batch, nheads, length)."""
    pair, _, _, rows, mask, delta = delta_of_rows(
        out_ptr, dout_ptr, length, nheads, dv, count, o_batch, o_row, o_head, g_batch, g_row,
        g_head, g_last, BLOCK, DV,
    )
    tl.store(delta_ptr + pair * length + rows, delta, mask=mask)


@triton.jit
def lse_in_base_2(lse, shift):
    """And `shift` more; +inf where no key was seen, so that p = 0."""
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E + shift)


@triton.jit
def stats_of_rows(
    lse_ptr, delta_ptr, length, nheads, count, l_batch, l_head, l_row, e_batch, e_head, e_row,
    shift, BLOCK: tl.constexpr,
):
    """A program's pair of batch and head, rows, which there are, lse in base 2, and delta."""
    pair, batch, head, rows, mask = rows_of_pair(length, nheads, count, BLOCK)
    lse = tl.load(lse_ptr + batch * l_batch + head * l_head + rows * l_row, mask=mask)
    delta = tl.load(delta_ptr + batch * e_batch + head * e_head + rows * e_row, mask=mask)
    return pair, rows, mask, lse_in_base_2(lse, shift), delta


@triton.jit
def store_copies(ptr, x, pair, rows, wide, mask, COPIES: tl.constexpr):
    """Numbers of rows, `wide` apart; the n-th of the copies begins at row n."""
    for copy in tl.static_range(COPIES):
        there = (pair * COPIES + copy) * wide + rows - copy
        tl.store(ptr + there, x, mask=mask & (rows >= copy))


@triton.jit(do_not_specialize=ANY_NUMBER)
def copies_kernel(
    lse_ptr, delta_ptr, lse2_ptr, delta2_ptr, length, wide, nheads, count, l_batch, l_head, l_row,
    e_batch, e_head, e_row, shift, COPIES: tl.constexpr, BLOCK: tl.constexpr,
):
    """Copies of lse and delta."""
    pair, rows, mask, lse, delta = stats_of_rows(
        lse_ptr, delta_ptr, length, nheads, count, l_batch, l_head, l_row, e_batch, e_head, e_row,
        shift, BLOCK,
    )
    store_copies(lse2_ptr, lse, pair, rows, wide, mask, COPIES)
    store_copies(delta2_ptr, delta, pair, rows, wide, mask, COPIES)


@triton.jit(do_not_specialize=ANY_NUMBER)
def prepare_kernel(
    out_ptr, dout_ptr, lse_ptr, lse2_ptr, delta2_ptr, dq_ptr, length, wide, nheads, d, dv, count,
    o_batch, o_row, o_head, g_batch, g_row, g_head, g_last, l_batch, l_head, l_row, q_batch, q_row,
    q_head, shift, COPIES: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    ZERO: tl.constexpr,
):
    """The same with delta computed here, and zeros for dQ to be added to, in one launch."""
    pair, batch, head, rows, mask, delta = delta_of_rows(
        out_ptr, dout_ptr, length, nheads, dv, count, o_batch, o_row, o_head, g_batch, g_row,
        g_head, g_last, BLOCK, DV,
    )
    lse = tl.load(lse_ptr + batch * l_batch + head * l_head + rows * l_row, mask=mask)
    store_copies(lse2_ptr, lse_in_base_2(lse, shift), pair, rows, wide, mask, COPIES)
    store_copies(delta2_ptr, delta, pair, rows, wide, mask, COPIES)
    if ZERO:
        depth = tl.arange(0, D)
        dq_ptrs = dq_ptr + batch * q_batch + head * q_head + rows[:, None] * q_row + depth[None, :]
        there = mask[:, None] & (depth < d)[None, :]
        tl.store(dq_ptrs, tl.zeros([BLOCK, D], tl.float32), mask=there)

# fmt: on


def delta(dout: Tensor, out: Tensor) -> Tensor:
    """(batch, nheads, seqlen_q): the sum of dout · out."""
    batch, length, nheads, dv = out.shape
    found = torch.empty((batch, nheads, length), dtype=torch.float32, device=out.device)
    count = -(-length // _DELTA_ROWS)
    strides = (*out.stride()[:3], *dout.stride())
    numbers = (length, nheads, dv, count, *strides, _DELTA_ROWS, power_of_2(dv))
    launch_plain(delta_kernel, count * batch * nheads, (out, dout, found), numbers)
    return found


def row_stats(
    saved: Saved, dout: Tensor, dq: Tensor | None, shift: float = 0.0
) -> tuple[Tensor, Tensor]:
    """lse in base 2 and `shift` more, +inf where no key was seen, and delta.

    Both are (batch, head, copy, row).

    TMA begins at multiples of 16 bytes, blocks at any row: so there are four, and the n-th
    begins at row n. Sets dq to zero if there is one.
    """
    if saved.out is not None:
        stats = _empty_stats(saved.lse)
        prepare(saved.out, dout, saved.lse, stats, dq, shift)
        return stats[0], stats[1]
    if dq is not None:
        dq.zero_()
    return saved.remember(("copies", shift), functools.partial(_copies, saved, shift))


def _empty_stats(lse: Tensor) -> Tensor:
    batch, nheads, length = lse.shape
    wide = -(-length // _COPIES) * _COPIES
    shape = (2, batch, nheads, _COPIES, wide)
    return torch.empty(shape, dtype=torch.float32, device=lse.device)


def _copies(saved: Saved, shift: float) -> tuple[Tensor, Tensor]:
    """Of what is known already."""
    batch, nheads, length = saved.lse.shape
    stats = _empty_stats(saved.lse)
    count = -(-length // _ROWS)
    strides = (*saved.lse.stride(), *saved.delta.stride(), shift)
    numbers = (length, stats.shape[-1], nheads, count, *strides, _COPIES, _ROWS)
    tensors = (saved.lse, saved.delta, stats[0], stats[1])
    launch_plain(copies_kernel, count * batch * nheads, tensors, numbers)
    return stats[0], stats[1]


def prepare(
    out: Tensor, dout: Tensor, lse: Tensor, stats: Tensor, dq: Tensor | None, shift: float
) -> None:
    """What `row_stats` does, delta included, in one launch."""
    zeros = out if dq is None else dq
    batch, length, nheads, d = zeros.shape
    dv = out.shape[-1]
    widths = power_of_2(d), power_of_2(dv)
    rows = _NUMBERS // max(widths)
    count = -(-length // rows)
    strides = (*out.stride()[:3], *dout.stride(), *lse.stride(), *zeros.stride()[:3], shift)
    numbers = (length, stats.shape[-1], nheads, d, dv, count, *strides, _COPIES, rows, *widths)
    tensors = (out, dout, lse, stats[0], stats[1], zeros)
    launch_plain(prepare_kernel, count * batch * nheads, tensors, (*numbers, dq is not None))
