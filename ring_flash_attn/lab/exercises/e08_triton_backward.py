"""Exercise 8. Attention's backward pass as two Triton kernels.

    P = exp(S − lse)    dP = dO Vᵀ    D = rowsum(dO ∘ O)    dS = P ∘ (dP − D)

    dQ = dS K / √d                    a sum over keys: one program for each block of queries
    dV = Pᵀ dO,  dK = dSᵀ Q / √d      sums over queries: one program for each block of keys

D takes one line of PyTorch. `load_tile` is here already. When both kernels pass, make them one: let
the second add its part of dQ with tl.atomic_add, and count the products that you saved.

You may change the arguments of the kernels, not those of `triton_backward`. Use
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
def load_tile(matrix, rows, columns, n_rows, width):
    """The tile rows × columns of a matrix (n_rows, width), as fp32; 0 outside of it."""
    inside = (rows[:, None] < n_rows) & (columns[None, :] < width)
    at = matrix + rows[:, None] * width + columns[None, :]
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, n_q, n_k, d, scale,
    CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_Q rows of dq: block program_id(0) of the batch element program_id(1).

    delta is D, (batch, n_q) like lse. All tensors are contiguous.
    """
    raise NotImplementedError(
        "load q, dout, lse, delta once; for each block of keys: P, dS, and the sum; store dq"
    )


@triton.jit
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, n_q, n_k, d, scale,
    CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_K rows of dk and dv: block program_id(0) of the batch element program_id(1)."""
    raise NotImplementedError(
        "load k and v once; for each block of queries: P, dS, and both sums; store dk and dv"
    )


def triton_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernels.

    Args:
        q, out, dout: (batch, queries, d), fp32; perhaps not contiguous.
        k, v: (batch, keys, d), likewise.
        lse: (batch, queries), natural; −inf where a query sees no key.
        causal: query i, at position i + keys − queries, sees the keys up to its position.

    Returns:
        (dq, dk, dv), like q, k and v. A query that sees no key has dq 0 and adds nothing to dk, dv.
    """
    raise NotImplementedError("compute D, allocate dq, dk, dv, launch both kernels")


if (
    __name__ == "__main__"
):  # python e08_triton_backward.py: a case to do by hand; print what you like
    q = torch.tensor([3.0], device=DEVICE).log()[None, None]  # one query, two keys, d = 1
    k = v = torch.tensor([1.0, 0.0], device=DEVICE)[None, :, None]  # so P is 3/4 and 1/4
    out, lse = torch.full_like(q, 0.75), torch.tensor([[4.0]], device=DEVICE).log()
    dq, dk, dv = triton_backward(q, k, v, out, lse, torch.ones_like(q), causal=False)
    print("dv", dv.flatten().tolist(), "should be [0.75, 0.25]")
    print("dq", dq.flatten().tolist(), "should be 0.1875 (3/16)")
    print("dk", dk.flatten().tolist(), "should be [0.206, -0.206] (3/16 log 3)")
