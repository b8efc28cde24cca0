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
    batch = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    columns = tl.arange(0, BLOCK_D)
    at_q = batch * n_q * d + rows[:, None] * d + columns[None, :]
    in_q = (rows[:, None] < n_q) & (columns[None, :] < d)
    q = tl.load(q_ptr + at_q, mask=in_q, other=0.0).to(tl.float32)  # fp16 and bf16, too

    m = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    for start in range(0, n_k, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        at_k = batch * n_k * d + keys[:, None] * d + columns[None, :]
        in_k = (keys[:, None] < n_k) & (columns[None, :] < d)
        k = tl.load(k_ptr + at_k, mask=in_k, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + at_k, mask=in_k, other=0.0).to(tl.float32)

        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where(keys[None, :] < n_k, s, float("-inf"))
        if CAUSAL:
            s = tl.where(keys[None, :] <= rows[:, None] + n_k - n_q, s, float("-inf"))

        m_new = tl.maximum(m, tl.max(s, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # −inf − (−inf) is nan
        p = tl.exp(s - shift[:, None])
        alpha = tl.exp(m - shift)
        total = alpha * total + tl.sum(p, 1)
        acc = alpha[:, None] * acc + tl.dot(p, v, input_precision="ieee")
        m = m_new

    total = tl.where(total == 0.0, 1.0, total)  # a row that sees no key: out 0, lse −inf
    tl.store(out_ptr + at_q, acc / total[:, None], mask=in_q)
    tl.store(lse_ptr + batch * n_q + rows, m + tl.log(total), mask=rows < n_q)


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
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    (batch, n_q, d), n_k = q.shape, k.shape[1]
    out = torch.empty_like(q)
    lse = torch.empty(batch, n_q, device=q.device)
    block_d = max(16, triton.next_power_of_2(d))
    forward_kernel[(triton.cdiv(n_q, 32), batch)](
        q, k, v, out, lse, n_q, n_k, d, d**-0.5,
        CAUSAL=causal, BLOCK_Q=32, BLOCK_K=32, BLOCK_D=block_d,
    )  # fmt: skip
    return out, lse


if (
    __name__ == "__main__"
):  # python e07_triton_forward.py: a case to do by hand; print what you like
    q, k = torch.zeros(1, 2, 4, device=DEVICE), torch.zeros(1, 3, 4, device=DEVICE)
    v = torch.tensor([1.0, 2.0, 6.0], device=DEVICE)[None, :, None].expand(1, 3, 4)
    out, lse = triton_forward(q, k, v, causal=False)  # all scores are 0: out is the mean of v
    print("out", out.tolist(), "should be 3 everywhere")
    print("lse", lse.tolist(), "should be 1.0986 (log 3)")
