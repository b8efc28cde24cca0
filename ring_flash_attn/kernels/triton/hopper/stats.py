"""What the backward pass reads of each row, as bulk copies want it."""

# fmt: off

import triton
import triton.language as tl

from ..scores import ANY_NUMBER, LOG2E


@triton.jit(do_not_specialize=ANY_NUMBER)
def stats_kernel(
    lse_ptr, delta_ptr, lse2_ptr, delta2_ptr, length, wide, nheads, count, l_batch, l_head, l_row,
    e_batch, e_head, e_row, COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """lse in base 2, +inf where no key was seen (so that p = 0), and delta; rows `wide` apart.

    The n-th of the copies begins at row n.
    """
    pair = tl.program_id(0) // count
    batch, head = (pair // nheads).to(tl.int64), (pair % nheads).to(tl.int64)
    rows = (tl.program_id(0) % count * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    mask = rows < length
    lse = tl.load(lse_ptr + batch * l_batch + head * l_head + rows * l_row, mask=mask)
    delta = tl.load(delta_ptr + batch * e_batch + head * e_head + rows * e_row, mask=mask)
    lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
    for copy in tl.static_range(COPIES):
        there = (pair.to(tl.int64) * COPIES + copy) * wide + rows - copy
        tl.store(lse2_ptr + there, lse, mask=mask & (rows >= copy))
        tl.store(delta2_ptr + there, delta, mask=mask & (rows >= copy))
