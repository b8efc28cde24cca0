"""Step 5. Tiled attention: FlashAttention's forward pass, in PyTorch.

Standard attention writes a matrix of queries × keys, and the softmax reads it back. At 16,384
tokens in fp32 that is 1 GiB for each head. We want the same result while only one tile of it
exists at a time.

Take a block of queries Qᵢ and walk over the blocks of keys Kⱼ and values Vⱼ. For each row keep
three things, as in the online softmax of step 4:

    m      the largest score so far
    total  Σ exp(s − m) over the keys so far
    acc    Σ exp(s − m) v over the keys so far

A new tile S = scale · Qᵢ Kⱼᵀ may raise the maximum. What was summed under the old one is then
multiplied by α, and the tile is added under the new one:

    m' = max(m, rowmax S)      P = exp(S − m')      α = exp(m − m')
    total ← α · total + rowsum P                    acc ← α · acc + P Vⱼ

After the last tile:

    out = acc / total          lse = m + log(total)

The lse (logsumexp) is one number for each row. It is all that the backward pass needs in order to
compute any probability again: p = exp(s − lse). So we save q, k, v, out and lse, and no matrix.

Exercise 5. Write `tiled_forward` and `TiledAttention`. Try one tile first, then two, then lengths
that no tile divides. `rfa lab check 5 DIR` looks at it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..definition import attention

INF = float("inf")


def hidden(i: int, j: int, rows: int, keys: int, offset: int, like: Tensor) -> Tensor:
    """(rows, keys) booleans of a tile that begins at query i and key j: true above the diagonal.

    Queries and keys end together: query i has position i + offset, offset = keys − queries.
    """
    position = i + offset + torch.arange(rows, device=like.device)
    return torch.arange(j, j + keys, device=like.device)[None, :] > position[:, None]


def tiled_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, block_q: int = 64, block_k: int = 64
) -> tuple[Tensor, Tensor]:
    """q (batch, queries, d), k, v (batch, keys, d) → out like q, lse (batch, queries) in fp32."""
    (batch, queries, d), keys = q.shape, k.shape[1]
    out = torch.empty_like(q)
    lse = torch.empty(batch, queries, device=q.device)
    for i in range(0, queries, block_q):
        q_i = q[:, i : i + block_q].float()  # (batch, rows, d); the last block may be shorter
        rows = q_i.shape[1]
        m = torch.full((batch, rows), -INF, device=q.device)
        total = torch.zeros(batch, rows, device=q.device)
        acc = torch.zeros(batch, rows, d, device=q.device)
        for j in range(0, keys, block_k):
            k_j = k[:, j : j + block_k].float()
            v_j = v[:, j : j + block_k].float()
            s = q_i @ k_j.transpose(1, 2) * d**-0.5  # (batch, rows, columns): the only tile
            if causal:
                s = s.masked_fill(hidden(i, j, rows, k_j.shape[1], keys - queries, q), -INF)
            m_new = torch.maximum(m, s.amax(-1))
            # A row that has seen no key yet has m = −inf, and −inf − (−inf) is nan: subtract 0.
            shift = m_new.masked_fill(m_new == -INF, 0.0)
            p = torch.exp(s - shift[..., None])
            alpha = torch.exp(m - shift)
            total = alpha * total + p.sum(-1)
            acc = alpha[..., None] * acc + p @ v_j
            m = m_new
        # A row that sees no key at all: total = 0, out = 0, lse = −inf.
        out[:, i : i + rows] = (acc / total.masked_fill(total == 0.0, 1.0)[..., None]).to(q.dtype)
        lse[:, i : i + rows] = m + torch.log(total)
    return out, lse


class TiledAttention(torch.autograd.Function):
    """`TiledAttention.apply(q, k, v, causal)`: what PyTorch calls, and what it keeps."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        out, lse = tiled_forward(q, k, v, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal = causal
        return out

    # Its backward pass is step 6.


def compare(case: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    """AssertionError with the case and the numbers, if the two differ by more."""
    torch.testing.assert_close(
        found.double(), expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{case}: {m}"
    )


def check() -> None:
    """Against the definition: tiles that do not divide the lengths, a d that is no power of 2."""
    for queries, keys, d, block_q, block_k in (
        (64, 64, 16, 16, 16),
        (37, 53, 24, 16, 32),  # more keys than queries
        (53, 37, 24, 32, 16),  # fewer: causally, the first 16 rows see nothing
        (5, 70, 8, 64, 7),
    ):
        torch.manual_seed(queries)
        q, k, v = (torch.randn(2, n, d) for n in (queries, keys, keys))
        for causal in (False, True):
            expected = attention(q, k, v, causal=causal)
            found = tiled_forward(q, k, v, causal, block_q, block_k)
            for name, a, b in zip(("out", "lse"), found, expected):
                case = f"{name}, {queries} queries, {keys} keys, causal={causal}"
                compare(case, a, b, 1e-5)
    q = torch.randn(2, 40, 16, requires_grad=True)
    out = TiledAttention.apply(q, q, q, True)  # as long as it is there, so is what it saved
    saved = out.grad_fn.saved_tensors
    assert [x.shape for x in saved if x.dim() == 2] == [(2, 40)], "the lse must be saved"


class _Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation returns."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numbers = max(self.numbers, result.numel())
        return result


def one_row() -> tuple[Tensor, Tensor, Tensor]:
    """One query and 320 keys; later keys score higher."""
    torch.manual_seed(5)
    q, k, v = torch.randn(1, 1, 64), torch.randn(1, 320, 64), torch.randn(1, 320, 64)
    return q, k * torch.linspace(0.2, 2.0, 320)[None, :, None], v


def show() -> None:
    """How large the largest tensor is, and how one row's result settles."""
    d = 64
    print(f"The largest tensor that any operation makes (1 head, d = {d}, tiles of 64 × 64, fp32):")
    print("  tokens    standard       tiled    q")
    for n in (256, 512, 1024, 2048):
        q, k, v = (torch.randn(1, n, d) for _ in range(3))
        with _Largest() as standard:
            torch.softmax(q @ k.transpose(1, 2) * d**-0.5, -1) @ v
        with _Largest() as tiled:
            tiled_forward(q, k, v, False)
        sizes = [x * 4 // 1024 for x in (standard.numbers, tiled.numbers, q.numel())]
        print(f"{n:8} {sizes[0]:7} KiB {sizes[1]:7} KiB {sizes[2]:4} KiB")
    print("The tiles do not grow. The largest tensor of tiled attention is its own output.\n")

    q, k, v = one_row()
    exact = attention(q, k, v)[0]
    print("One row, five tiles of 64 keys: the result so far, against the final one")
    for seen in range(64, 321, 64):
        out, lse = tiled_forward(q, k[:, :seen], v[:, :seen], False)
        error = (out - exact).abs().max().item()
        print(f"  {seen:4} keys   lse {lse.item():6.3f}   error {error:.0e}")


def main() -> None:
    check()
    print("Step 5: tiled attention equals its definition.\n")
    show()


if __name__ == "__main__":
    main()
