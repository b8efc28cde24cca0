"""What the backward pass reads of each row, as bulk copies want it."""

# fmt: off

import triton
import triton.language as tl

from ..backward import stats_of_rows
from ..scores import ANY_NUMBER


@triton.jit(do_not_specialize=ANY_NUMBER)
def stats_kernel(
    lse_ptr, delta_ptr, lse2_ptr, delta2_ptr, length, wide, nheads, count, l_batch, l_head, l_row,
    e_batch, e_head, e_row, COPIES: tl.constexpr, BLOCK: tl.constexpr,
):
    """lse and delta, rows `wide` apart; the n-th of the copies begins at row n."""
    pair, rows, mask, lse, delta = stats_of_rows(
        lse_ptr, delta_ptr, length, nheads, count, l_batch, l_head, l_row, e_batch, e_head, e_row,
        BLOCK,
    )
    for copy in tl.static_range(COPIES):
        there = (pair * COPIES + copy) * wide + rows - copy
        tl.store(lse2_ptr + there, lse, mask=mask & (rows >= copy))
        tl.store(delta2_ptr + there, delta, mask=mask & (rows >= copy))
