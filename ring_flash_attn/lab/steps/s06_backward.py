"""Step 6. Backward by recomputation: gradients without the matrix of probabilities.

The forward pass was P = softmax(S), S = scale · Q Kᵀ, O = P V. Given dO, the chain rule says:

    dV = Pᵀ dO          dP = dO Vᵀ
    dS = P ∘ (dP − D)   Dᵢ = Σⱼ Pᵢⱼ dPᵢⱼ      (the softmax; D is one number for each row)
    dQ = scale · dS K   dK = scale · dSᵀ Q

Two things look as if they needed whole rows of P. Neither does.

1. P itself. We saved lseᵢ = log Σⱼ exp(Sᵢⱼ), so any tile of P can be computed again from its own
   tile of Q and K, without a maximum and without a sum:  P = exp(S − lse).
2. D, a sum over all keys. Put dPᵢⱼ = dOᵢ · Vⱼ into it, and the sum over j is the output:

    Dᵢ = Σⱼ Pᵢⱼ (dOᵢ · Vⱼ) = dOᵢ · Σⱼ Pᵢⱼ Vⱼ = dOᵢ · Oᵢ        so        D = rowsum(dO ∘ O)

One more product for each tile (S again) buys a backward pass that stores no P. Arithmetic is
cheap; memory is not.

From step 5 we take the forward pass, the mask of a tile, and the autograd function that lacks its
backward pass.

Exercise 6. Write `tiled_backward`, with nothing but the formulas above. `rfa lab check 6 DIR` looks
at it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..definition import attention
from .s05_tiled_forward import TiledAttention, compare, hidden, tiled_forward

Gradients = tuple[Tensor, Tensor, Tensor]


def plain_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, causal: bool
) -> Gradients:
    """The formulas as they stand: one tile that is the whole matrix. We give this to torch.compile.

    Every row must see a key.
    """
    scale = q.shape[-1] ** -0.5
    D = (dout * out).sum(-1, keepdim=True)  # (batch, queries, 1)
    s = q @ k.transpose(1, 2) * scale
    if causal:
        queries, keys = s.shape[1:]
        s = s.masked_fill(hidden(0, 0, queries, keys, keys - queries, q), -torch.inf)
    p = torch.exp(s - lse[..., None])
    ds = p * (dout @ v.transpose(1, 2) - D)
    return ds @ k * scale, ds.transpose(1, 2) @ q * scale, p.transpose(1, 2) @ dout


def tiled_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, causal: bool,
    block: int = 64,
) -> Gradients:  # fmt: skip
    """dq, dk, dv. dout and out are like q; lse is (batch, queries); one tile of P at a time."""
    queries, keys, scale = q.shape[1], k.shape[1], q.shape[-1] ** -0.5
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    D = (dout.float() * out.float()).sum(-1)  # (batch, queries)
    for j in range(0, keys, block):
        at_j = slice(j, j + block)
        k_j, v_j = k[:, at_j].float(), v[:, at_j].float()
        for i in range(0, queries, block):
            at_i = slice(i, i + block)
            q_i, do_i = q[:, at_i].float(), dout[:, at_i].float()
            s = q_i @ k_j.transpose(1, 2) * scale  # (batch, rows, columns)
            p = torch.exp(s - lse[:, at_i, None])
            if causal:  # after exp: a row that sees nothing has lse = −inf, and exp gave inf
                above = hidden(i, j, s.shape[1], s.shape[2], keys - queries, q)
                p = p.masked_fill(above, 0.0)
            dp = do_i @ v_j.transpose(1, 2)
            ds = p * (dp - D[:, at_i, None])
            dv[:, at_j] += p.transpose(1, 2) @ do_i
            dk[:, at_j] += ds.transpose(1, 2) @ q_i * scale
            dq[:, at_i] += ds @ k_j * scale  # each block of keys adds its part
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class RecomputedAttention(TiledAttention):
    """`RecomputedAttention.apply(q, k, v, causal)`: step 5, with its backward pass."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return *tiled_backward(q, k, v, out, lse, grads[0], ctx.causal), None


def definition(causal: bool, *qkv: Tensor) -> Tensor:
    return attention(*qkv, causal=causal)[0]


def recomputed(causal: bool, *qkv: Tensor) -> Tensor:
    return RecomputedAttention.apply(*qkv, causal)


def standard(*qkv: Tensor) -> Tensor:
    q, k, v = qkv
    return torch.softmax(q @ k.transpose(1, 2) * q.shape[-1] ** -0.5, -1) @ v


def check() -> None:
    """Against autograd through the definition."""
    for queries, keys, d in (
        (64, 64, 16),
        (70, 130, 24),
        (130, 70, 24),  # causally, the first 60 rows see nothing: their dq is 0
    ):
        torch.manual_seed(queries)
        q, k, v, dout = (torch.randn(2, n, d) for n in (queries, keys, keys, queries))
        for causal in (False, True):
            out, lse = tiled_forward(q, k, v, causal)
            found = {"tiled": tiled_backward(q, k, v, out, lse, dout, causal)}
            if queries <= keys or not causal:
                found["plain"] = plain_backward(q, k, v, out, lse, dout, causal)
            expected = gradients(partial(definition, causal), q, k, v, dout)
            found["autograd"] = gradients(partial(recomputed, causal), q, k, v, dout)
            for kind, results in found.items():
                for name, a, b in zip(("dq", "dk", "dv"), results, expected):
                    case = f"{kind} {name}, {queries} queries, {keys} keys, causal={causal}"
                    compare(case, a, b.double(), 2e-5)


def gradients(
    function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> Gradients:
    """What autograd makes of a function of q, k and v."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    result = function(q, k, v)
    dq, dk, dv = torch.autograd.grad(result, (q, k, v), dout.to(result.dtype))
    return dq, dk, dv


def kept(function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> int:
    """Bytes that autograd keeps between forward and backward."""
    sizes: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        function(q, k, v).sum()
    return sum(sizes.values())


def milliseconds(function: Callable[[], Any], times: int = 5) -> float:
    """The median of some calls, after a first one that is not counted."""
    taken = []
    for _ in range(times + 1):
        start = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - start))
    return sorted(taken[1:])[times // 2]


def show() -> None:
    """What is kept for the backward pass; then eager against torch.compile."""
    where, d = torch.device("cuda" if torch.cuda.is_available() else "cpu"), 64
    print(f"What autograd keeps for the backward pass (1 head, d = {d}, fp32):")
    for n in (256, 512, 1024):
        q, k, v = (torch.randn(1, n, d, device=where, requires_grad=True) for _ in range(3))
        sizes = [kept(f, q, k, v) // 1024 for f in (standard, partial(recomputed, False))]
        print(f"{n:6} tokens   standard {sizes[0]:5} KiB   ours {sizes[1]:5} KiB")

    q, k, v, dout = (torch.randn(4, 512, d, device=where) for _ in range(4))
    args = (q, k, v, *tiled_forward(q, k, v, True), dout, True)
    print(f"\nThe formulas on 4 × 512 tokens, causal, on {where}:")
    print(f"  eager              {milliseconds(lambda: plain_backward(*args)):8.2f} ms")
    if not any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "clang++", "cl")):
        print("  torch.compile      needs a C++ compiler, and there is none here: left out")
        return
    print("  torch.compile      compiling; the first time takes up to a minute …", flush=True)
    compiled = torch.compile(plain_backward)
    try:
        taken = milliseconds(lambda: compiled(*args))
    except Exception as error:
        print(f"  torch.compile      does not work here: {type(error).__name__}")
        return
    difference = max(
        (a - b).abs().max().item() for a, b in zip(compiled(*args), plain_backward(*args))
    )
    print(f"                     {taken:8.2f} ms, largest difference {difference:.0e}")
    print("It fuses mask, exp and dS into few loops; the matrix P is still made, and still large.")


def main() -> None:
    check()
    print("Step 6: the gradients equal those of the definition.\n")
    show()


if __name__ == "__main__":
    main()
