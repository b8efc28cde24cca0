"""Step 8. Backward in Triton: two kernels, then one with atomics.

For one tile, step 6 computes

    S = scale · Q Kᵀ    P = exp(S − lse)    dP = dO Vᵀ    dS = P ∘ (dP − D)

and then adds to three results. Look at the direction in which each of them sums:

    dQᵢ = scale · Σⱼ dSᵢⱼ Kⱼ          over blocks of keys
    dKⱼ = scale · Σᵢ dSᵢⱼᵀ Qᵢ         over blocks of queries
    dVⱼ =         Σᵢ Pᵢⱼᵀ dOᵢ         over blocks of queries

A program should own what it sums: then the sum stays in registers, and is written once. So dQ wants
a program for each block of queries, dK and dV want one for each block of keys.

Two kernels give each its own. Both compute S and dP, so a tile costs 3 + 4 = 7 products.

One kernel computes the tile once, 5 products: a program owns dKⱼ and dVⱼ, and adds its part of dQᵢ
to memory with an atomic add, since programs of other keys add to the same rows. The price: dQ is
in fp32 and begins as zeros, the additions travel to memory, and they come in any order. fp32
addition is not associative, so two runs may differ in the last bits.

From step 7 we take the helpers: load_tile, store_tile, visible, dot, block_sizes.

Exercise 8. Write `triton_backward` with two kernels, then try one with atomics. `rfa lab check 8
DIR` looks at it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..definition import attention
from ..device import device

DEVICE = device()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from .s07_triton_forward import (  # noqa: E402
    INTERPRETED,
    block_sizes,
    dot,
    load_tile,
    store_tile,
    triton_forward,
    visible,
)

Gradients = tuple[Tensor, Tensor, Tensor]
PRODUCTS = {  # of one tile
    "dq_kernel": ("S", "dP", "dQ"),
    "dkdv_kernel": ("S", "dP", "dV", "dK"),
    "dkdv_kernel with dq": ("S", "dP", "dV", "dK", "dQ"),
}


@triton.jit
def probabilities_and_ds(
    q, k, v, dout, lse, delta, rows, keys, n_q, n_k, scale, CAUSAL: tl.constexpr
):
    """P and dS of one tile, both (rows, keys); q, dout (rows, d), k, v (keys, d)."""
    s = dot(q, tl.trans(k)) * scale
    p = tl.where(visible(rows, keys, n_q, n_k, CAUSAL), tl.exp(s - lse[:, None]), 0.0)
    dp = dot(dout, tl.trans(v))
    return p, p * (dp - delta[:, None])


@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, n_q, n_k, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """BLOCK_Q rows of dq: a loop over keys, like the forward pass."""
    batch = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    columns = tl.arange(0, BLOCK_D)

    q = load_tile(q_ptr + batch * n_q * D, rows, columns, n_q, D)
    dout = load_tile(dout_ptr + batch * n_q * D, rows, columns, n_q, D)
    lse = tl.load(lse_ptr + batch * n_q + rows, mask=rows < n_q, other=0.0)
    delta = tl.load(delta_ptr + batch * n_q + rows, mask=rows < n_q, other=0.0)
    dq = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)

    for start in range(0, n_k, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        k = load_tile(k_ptr + batch * n_k * D, keys, columns, n_k, D)
        v = load_tile(v_ptr + batch * n_k * D, keys, columns, n_k, D)
        _, ds = probabilities_and_ds(q, k, v, dout, lse, delta, rows, keys, n_q, n_k, scale, CAUSAL)
        dq += dot(ds.to(k.dtype), k)

    store_tile(dq_ptr + batch * n_q * D, dq * scale, rows, columns, n_q, D)


@triton.jit
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, n_q, n_k, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr, WITH_DQ: tl.constexpr,
):  # fmt: skip
    """BLOCK_K rows of dk and dv: a loop over queries. WITH_DQ: adds to dq on the way."""
    batch = tl.program_id(1).to(tl.int64)
    keys = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    columns = tl.arange(0, BLOCK_D)

    k = load_tile(k_ptr + batch * n_k * D, keys, columns, n_k, D)
    v = load_tile(v_ptr + batch * n_k * D, keys, columns, n_k, D)
    dk = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)

    for start in range(0, n_q, BLOCK_Q):
        rows = start + tl.arange(0, BLOCK_Q)
        q = load_tile(q_ptr + batch * n_q * D, rows, columns, n_q, D)
        dout = load_tile(dout_ptr + batch * n_q * D, rows, columns, n_q, D)
        lse = tl.load(lse_ptr + batch * n_q + rows, mask=rows < n_q, other=0.0)
        delta = tl.load(delta_ptr + batch * n_q + rows, mask=rows < n_q, other=0.0)
        p, ds = probabilities_and_ds(q, k, v, dout, lse, delta, rows, keys, n_q, n_k, scale, CAUSAL)
        dv += dot(tl.trans(p.to(dout.dtype)), dout)
        dk += dot(tl.trans(ds.to(q.dtype)), q)
        if WITH_DQ:
            inside = (rows[:, None] < n_q) & (columns[None, :] < D)
            at = dq_ptr + batch * n_q * D + rows[:, None] * D + columns[None, :]
            tl.atomic_add(at, dot(ds.to(k.dtype), k) * scale, mask=inside)

    store_tile(dk_ptr + batch * n_k * D, dk * scale, keys, columns, n_k, D)
    store_tile(dv_ptr + batch * n_k * D, dv, keys, columns, n_k, D)


def launch(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, causal: bool,
    atomics: bool,
) -> Gradients:  # fmt: skip
    """dq, dk, dv, in the types of q, k, v; from one kernel (atomics) or from two."""
    q, k, v, dout = (x.contiguous() for x in (q, k, v, dout))
    (batch, n_q, d), n_k = q.shape, k.shape[1]
    delta = (dout.float() * out.float()).sum(-1)  # D of step 6, (batch, queries)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    dq = torch.zeros_like(q, dtype=torch.float32) if atomics else torch.empty_like(q)
    block_d, block = block_sizes(q)
    sizes: dict[str, Any] = {
        "D": d, "BLOCK_D": block_d, "BLOCK_Q": block, "BLOCK_K": block,
        "CAUSAL": causal, "num_stages": 2,
    }  # fmt: skip
    inputs, numbers = (q, k, v, dout, lse, delta), (n_q, n_k, d**-0.5)
    if not atomics:
        dq_kernel[(triton.cdiv(n_q, block), batch)](*inputs, dq, *numbers, **sizes)
    dkdv_kernel[(triton.cdiv(n_k, block), batch)](
        *inputs, dq, dk, dv, *numbers, WITH_DQ=atomics, **sizes
    )
    return dq.to(q.dtype), dk, dv


def triton_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, causal: bool
) -> Gradients:
    """Two kernels: the same bits in every run."""
    return launch(q, k, v, out, lse, dout, causal, atomics=False)


def atomic_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, causal: bool
) -> Gradients:
    """One kernel, fewer products; dq is summed in any order."""
    return launch(q, k, v, out, lse, dout, causal, atomics=True)


class TritonAttention(torch.autograd.Function):
    """`TritonAttention.apply(q, k, v, causal)`: steps 7 and 8 together."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        out, lse = triton_forward(q, k, v, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return *triton_backward(q, k, v, out, lse, grads[0], ctx.causal), None


def errors(
    backward: Callable[..., Gradients], n_q: int, n_k: int, d: int, causal: bool, dtype: torch.dtype
) -> dict[str, float]:
    """The largest error of dq, dk and dv, each relative to the largest number in it."""
    torch.manual_seed(n_q)
    q, k, v, dout = (torch.randn(2, n, d, device=DEVICE).to(dtype) for n in (n_q, n_k, n_k, n_q))
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(attention(*wide, causal=causal)[0], wide, dout.double())
    out, lse = triton_forward(q, k, v, causal)
    found = backward(q, k, v, out, lse, dout, causal)
    return {
        name: ((a - b).abs().max() / b.abs().max()).item()
        for name, a, b in zip(("dq", "dk", "dv"), found, expected)
    }


def check() -> None:
    """Against autograd through the definition: two kernels and one; edges; fp32 and bf16."""
    for n_q, n_k, causal, dtype, tolerance in (
        (70, 90, False, torch.float32, 1e-5),
        (70, 90, True, torch.float32, 1e-5),
        (90, 70, True, torch.float32, 1e-5),  # the first 20 rows see nothing
        (70, 90, True, torch.bfloat16, 2e-2),
    ):
        for backward in (triton_backward, atomic_backward):
            found = errors(backward, n_q, n_k, 24, causal, dtype)
            case = f"{backward.__name__}, {n_q} queries, {n_k} keys, {causal=}, {dtype}"
            assert all(error < tolerance for error in found.values()), f"{case}: {found}"


def show() -> None:
    """What the two ways cost, and how exact they are; on a GPU, their time."""
    ways = {"two kernels": triton_backward, "one, atomics": atomic_backward}
    print("                products   dq in   writes of dq             order of sums")
    one, other, both = map(len, PRODUCTS.values())
    print(f"  two kernels          {one + other}    bf16   one                      fixed")
    print(f"  one, atomics         {both}    fp32   one for each key block   any\n")
    for name, backward in ways.items():
        found = errors(backward, 100, 100, 32, True, torch.float32)
        print(f"  {name:12}   errors in fp32:", *(f"{x} {e:.0e}" for x, e in found.items()))
    if INTERPRETED:
        print("\nThe interpreter runs one program after another, so here the order is fixed, too.")
        return
    q, k, v, dout = (torch.randn(16, 4096, 64, device=DEVICE).bfloat16() for _ in range(4))
    args = (q, k, v, *triton_forward(q, k, v, False), dout, False)
    for name, backward in ways.items():
        taken = triton.testing.do_bench(partial(backward, *args))
        same = "same" if torch.equal(backward(*args)[0], backward(*args)[0]) else "different"
        print(f"  {name:12} {taken:7.3f} ms for 16 heads; two runs: {same} dq")


def main() -> None:
    check()
    print(f"Step 8: both backward passes equal the definition's gradients (on {DEVICE}).\n")
    show()


if __name__ == "__main__":
    main()
