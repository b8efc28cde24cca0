"""dK or dV of a KV head, added up from the parts of its query heads."""

# fmt: off

import triton
import triton.language as tl

from ..scores import ANY_NUMBER


@triton.jit(do_not_specialize=[*ANY_NUMBER, "rows"])
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
