"""What the backward pass reads of each row, as TMA wants it."""

# fmt: off

import triton
import triton.language as tl

from ..backward import delta_of_rows, lse_in_base_2, stats_of_rows
from ..scores import ANY_NUMBER


@triton.jit
def store_copies(ptr, x, pair, rows, wide, mask, COPIES: tl.constexpr):
    """Numbers of rows, `wide` apart; the n-th of the copies begins at row n."""
    for copy in tl.static_range(COPIES):
        there = (pair * COPIES + copy) * wide + rows - copy
        tl.store(ptr + there, x, mask=mask & (rows >= copy))


@triton.jit(do_not_specialize=ANY_NUMBER)
def stats_kernel(
    lse_ptr, delta_ptr, lse2_ptr, delta2_ptr, length, wide, nheads, count, l_batch, l_head, l_row,
    e_batch, e_head, e_row, COPIES: tl.constexpr, BLOCK: tl.constexpr,
):
    """Copies of lse and delta."""
    pair, rows, mask, lse, delta = stats_of_rows(
        lse_ptr, delta_ptr, length, nheads, count, l_batch, l_head, l_row, e_batch, e_head, e_row,
        BLOCK,
    )
    store_copies(lse2_ptr, lse, pair, rows, wide, mask, COPIES)
    store_copies(delta2_ptr, delta, pair, rows, wide, mask, COPIES)


@triton.jit(do_not_specialize=ANY_NUMBER)
def prepare_kernel(
    out_ptr, dout_ptr, lse_ptr, lse2_ptr, delta2_ptr, dq_ptr, length, wide, nheads, d, dv, count,
    o_batch, o_row, o_head, g_batch, g_row, g_head, g_last, l_batch, l_head, l_row, q_batch, q_row,
    q_head, COPIES: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    ZERO: tl.constexpr,
):
    """The same with delta computed here, and zeros for dQ to be added to, in one launch."""
    pair, batch, head, rows, mask, delta = delta_of_rows(
        out_ptr, dout_ptr, length, nheads, dv, count, o_batch, o_row, o_head, g_batch, g_row,
        g_head, g_last, BLOCK, DV,
    )
    lse = tl.load(lse_ptr + batch * l_batch + head * l_head + rows * l_row, mask=mask)
    store_copies(lse2_ptr, lse_in_base_2(lse), pair, rows, wide, mask, COPIES)
    store_copies(delta2_ptr, delta, pair, rows, wide, mask, COPIES)
    if ZERO:
        depth = tl.arange(0, D)
        dq_ptrs = dq_ptr + batch * q_batch + head * q_head + rows[:, None] * q_row + depth[None, :]
        there = mask[:, None] & (depth < d)[None, :]
        tl.store(dq_ptrs, tl.zeros([BLOCK, D], tl.float32), mask=there)
