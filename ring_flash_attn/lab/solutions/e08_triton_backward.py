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
    batch = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    columns = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + batch * n_q * d, rows, columns, n_q, d)
    dout = load_tile(dout_ptr + batch * n_q * d, rows, columns, n_q, d)
    lse = tl.load(lse_ptr + batch * n_q + rows, mask=rows < n_q, other=0.0)
    delta = tl.load(delta_ptr + batch * n_q + rows, mask=rows < n_q, other=0.0)
    dq = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    for start in range(0, n_k, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        k = load_tile(k_ptr + batch * n_k * d, keys, columns, n_k, d)
        v = load_tile(v_ptr + batch * n_k * d, keys, columns, n_k, d)
        p = tl.exp(tl.dot(q, tl.trans(k), input_precision="ieee") * scale - lse[:, None])
        seen = (rows[:, None] < n_q) & (keys[None, :] < n_k)
        if CAUSAL:
            seen = seen & (keys[None, :] <= rows[:, None] + n_k - n_q)
        p = tl.where(seen, p, 0.0)  # after exp, which makes inf of a row that sees nothing
        ds = p * (tl.dot(dout, tl.trans(v), input_precision="ieee") - delta[:, None])
        dq += tl.dot(ds, k, input_precision="ieee")
    inside = (rows[:, None] < n_q) & (columns[None, :] < d)
    at = batch * n_q * d + rows[:, None] * d + columns[None, :]
    tl.store(dq_ptr + at, dq * scale, mask=inside)


@triton.jit
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, n_q, n_k, d, scale,
    CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_K rows of dk and dv: block program_id(0) of the batch element program_id(1)."""
    batch = tl.program_id(1).to(tl.int64)
    keys = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    columns = tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + batch * n_k * d, keys, columns, n_k, d)
    v = load_tile(v_ptr + batch * n_k * d, keys, columns, n_k, d)
    dk = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    for start in range(0, n_q, BLOCK_Q):
        rows = start + tl.arange(0, BLOCK_Q)
        q = load_tile(q_ptr + batch * n_q * d, rows, columns, n_q, d)
        dout = load_tile(dout_ptr + batch * n_q * d, rows, columns, n_q, d)
        lse = tl.load(lse_ptr + batch * n_q + rows, mask=rows < n_q, other=0.0)
        delta = tl.load(delta_ptr + batch * n_q + rows, mask=rows < n_q, other=0.0)
        p = tl.exp(tl.dot(q, tl.trans(k), input_precision="ieee") * scale - lse[:, None])
        seen = (rows[:, None] < n_q) & (keys[None, :] < n_k)
        if CAUSAL:
            seen = seen & (keys[None, :] <= rows[:, None] + n_k - n_q)
        p = tl.where(seen, p, 0.0)
        ds = p * (tl.dot(dout, tl.trans(v), input_precision="ieee") - delta[:, None])
        dv += tl.dot(tl.trans(p), dout, input_precision="ieee")
        dk += tl.dot(tl.trans(ds), q, input_precision="ieee")
    inside = (keys[:, None] < n_k) & (columns[None, :] < d)
    at = batch * n_k * d + keys[:, None] * d + columns[None, :]
    tl.store(dk_ptr + at, dk * scale, mask=inside)
    tl.store(dv_ptr + at, dv, mask=inside)


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
    q, k, v, lse, dout = (x.contiguous() for x in (q, k, v, lse, dout))
    (batch, n_q, d), n_k = q.shape, k.shape[1]
    delta = (dout.float() * out.float()).sum(-1)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    block_d = max(16, triton.next_power_of_2(d))
    inputs, numbers = (q, k, v, dout, lse, delta), (n_q, n_k, d, d**-0.5)
    sizes = {"CAUSAL": causal, "BLOCK_Q": 32, "BLOCK_K": 32, "BLOCK_D": block_d}
    dq_kernel[(triton.cdiv(n_q, 32), batch)](*inputs, dq, *numbers, **sizes)
    dkdv_kernel[(triton.cdiv(n_k, 32), batch)](*inputs, dk, dv, *numbers, **sizes)
    return dq, dk, dv


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
