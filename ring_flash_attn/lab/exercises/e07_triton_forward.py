"""Exercise 7. Attention's forward pass as a Triton kernel: one program for each block of queries.

The mathematics is that of exercise 5. What is new are the edges: a tile has fixed sizes, powers of
two and at least 16 for tl.dot, and lengths and d are any numbers. Mask what you load and what you
store; and give keys that do not exist the score −inf, since the score of a zero key is 0.

You may change the arguments of the kernel, not those of `triton_forward`: here d is a number like
n_q, in step 7 it is a constant of the compiler; both are right. Use
tl.dot(a, b, input_precision="ieee"), or a GPU rounds fp32 to TF32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ring_flash_attn.lab.device import device

DEVICE = device()  # a GPU, or the CPU with Triton's interpreter: hence before triton is imported

import triton  # noqa: E402
import triton.language as tl  # noqa: E402


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


if (
    __name__ == "__main__"
):  # python e07_triton_forward.py: a case to do by hand; print what you like
    q, k = torch.zeros(1, 2, 4, device=DEVICE), torch.zeros(1, 3, 4, device=DEVICE)
    v = torch.tensor([1.0, 2.0, 6.0], device=DEVICE)[None, :, None].expand(1, 3, 4)
    out, lse = triton_forward(q, k, v, causal=False)  # all scores are 0: out is the mean of v
    print("out", out.tolist(), "should be 3 everywhere")
    print("lse", lse.tolist(), "should be 1.0986 (log 3)")
