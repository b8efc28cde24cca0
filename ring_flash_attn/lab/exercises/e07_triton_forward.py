"""Exercise 7. Attention's forward pass as a Triton kernel: one program for each block of queries.

The mathematics is that of exercise 5. What is new are the edges: a tile has fixed sizes, powers of
two and at least 16 for tl.dot, and lengths and d are any numbers. Mask what you load and what you
store; and give keys that do not exist the score −inf, since the score of a zero key is 0.

You may change the arguments of the kernel, not those of `triton_forward`. Use
tl.dot(a, b, input_precision="ieee"), or a GPU rounds fp32 to TF32.
"""

from __future__ import annotations

import torch  # noqa: F401
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, n_q, n_k, d, scale,
    CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows BLOCK_Q · program_id(0) … of out and lse, of the batch element program_id(1).

    q and out are (batch, n_q, d), k and v (batch, n_k, d), lse (batch, n_q); all are contiguous.
    """
    raise NotImplementedError(
        "load q; for each block of keys: load k and v, scores, mask, m, α, p, sums; store"
    )


def triton_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Launch the kernel.

    Args:
        q: (batch, queries, d), fp32; perhaps not contiguous.
        k, v: (batch, keys, d), likewise.
        causal: query i, at position i + keys − queries, sees the keys up to its position.

    Returns:
        (out, lse): out (batch, queries, d); lse (batch, queries), natural. A query that sees no key
        has out 0 and lse −inf.
    """
    raise NotImplementedError(
        "allocate out and lse; the grid is (blocks of queries, batch); BLOCK_D is d rounded up"
    )
