"""Step 4. Online softmax: a softmax over blocks, with a maximum that moves.

What we want: softmax(s) v for a row s that we never see as a whole. Its scores come in blocks, and
a block is gone once we have used it.

A softmax needs two numbers of a row: the maximum m (without it exp overflows: e⁸⁹ is inf in fp32)
and the sum of exp(s_j − m). The trouble is that m is known only at the end. The way out: use the
maximum so far, and correct the sum whenever it moves. For a new block s:

    m'     = max(m, max(s)),       α = exp(m − m')
    total' = α · total + Σ_j exp(s_j − m')

Why is it right? Suppose total = Σ exp(s_j − m) over the scores so far. Times α this is
Σ exp(s_j − m'): as if m' had been the maximum all along. The new block adds its own terms.

The same factor corrects the sum of weighted values, so that the softmax and its product with v
need one pass over the scores:

    acc' = α · acc + exp(s − m') v,        out = acc / total at the end

α is at most 1, so nothing can overflow. And m + log(total) is the lse, log Σ exp(s_j): the
one number of a row that backward (step 6) and the merge (step 12) will ask for.

A trap: where all scores so far are hidden, m = m' = −inf, and exp(−inf − (−inf)) is NaN. Such a row
has total 0 and output 0: subtract 0 in place of −inf, and exp(−inf) is 0 by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .. import definition

INF = float("inf")


def safe(m: Tensor) -> Tensor:
    """The maximum as something to subtract: 0 where nothing has been seen."""
    return m.masked_fill(m == -INF, 0.0)


def online_softmax(blocks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Running maximum (rows,) and sum of exp(score − maximum) (rows,) over blocks (rows, n)."""
    m = torch.full_like(blocks[0][:, 0], -INF)
    total = torch.zeros_like(m)
    for s in blocks:
        new = torch.maximum(m, s.amax(-1))
        alpha = (m - safe(new)).exp()
        total = alpha * total + (s - safe(new)[:, None]).exp().sum(-1)
        m = new
    return m, total


def softmax_dot(scores: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """softmax(all scores) @ all values, (rows, d), from blocks (rows, n) and (n, d); one pass."""
    rows, d = scores[0].shape[0], values[0].shape[1]
    m = torch.full_like(scores[0][:, 0], -INF)
    total = torch.zeros_like(m)
    acc = scores[0].new_zeros(rows, d)
    for s, v in zip(scores, values):
        new = torch.maximum(m, s.amax(-1))
        alpha = (m - safe(new)).exp()
        p = (s - safe(new)[:, None]).exp()
        total = alpha * total + p.sum(-1)
        acc = alpha[:, None] * acc + p @ v
        m = new
    return acc / total.masked_fill(total == 0, 1.0)[:, None]


def check() -> None:
    """Against the definition: blocks of all sizes, large scores, rows that see nothing."""
    torch.manual_seed(0)
    for size, causal in ((1.0, False), (1.0, True), (200.0, False), (200.0, True)):
        rows, keys, d = 24, 20, 8  # causal: the first 4 rows see nothing
        q, k, v = torch.randn(1, rows, d) * size, torch.randn(1, keys, d), torch.randn(1, keys, d)
        scores = (q @ k.transpose(-1, -2))[0] * d**-0.5
        scores = scores.masked_fill(~definition.visible(rows, keys, causal), -INF)
        true, true_lse = definition.attention(q, k, v, causal=causal)
        for n in (1, 3, 7, 20):
            blocks = scores.split(n, dim=1)
            m, total = online_softmax(blocks)
            out = softmax_dot(blocks, v[0].split(n))
            assert torch.equal(m, scores.amax(-1)), f"blocks of {n}: not the maximum"
            seen = true_lse[0] > -INF
            assert torch.equal(total == 0, ~seen), f"blocks of {n}: rows that see nothing: {total}"
            lse = (m + total.log())[seen]
            for name, ours, theirs in (("lse", lse, true_lse[0, seen]), ("out", out, true[0])):
                # Errors of a score become errors of exp(score): they grow with the scores.
                error, limit = (ours - theirs).abs().max().item(), 2e-6 * max(size, 5.0)
                assert error < limit, f"blocks of {n}, size {size}: {name} wrong by {error:.2e}"


ROW = (0.5, 1.0, -1.0, 0.0, 3.0, 2.0, 1.5, -2.0, 2.5, 4.0, 0.0, 1.0)


def history(row: Tensor, n: int) -> Iterator[tuple[Tensor, float, float, float]]:
    """Block, maximum, alpha and sum after each block of one row."""
    blocks, old = row[None].split(n, dim=1), torch.tensor([-INF])
    for seen, block in enumerate(blocks, 1):
        m, total = online_softmax(blocks[:seen])
        yield block[0], m.item(), (old - m).exp().item(), total.item()
        old = m


def show() -> None:
    """The maximum moves, the sum is corrected; then how often each way reads the scores."""
    row = torch.tensor(ROW)
    print(f"{'block':>26} {'maximum':>9} {'alpha':>11} {'sum':>8}")
    for block, m, alpha, total in history(row, 3):
        scores = "  ".join(f"{x:4.1f}" for x in block.tolist())
        print(f"{scores:>26} {m:9.1f} {alpha:11.4f} {total:8.4f}")
    print(f"{'all at once':>26} {row.max():9.1f} {'':11} {(row - row.max()).exp().sum():8.4f}\n")
    large = torch.tensor([90.0, 89.0])
    without, with_it = large.exp() / large.exp().sum(), large.softmax(0)
    print(
        f"Without a maximum: exp(90) is {large.exp()[0].item()} in fp32. The softmax of (90, 89) is"
    )
    print(f"{without.tolist()}; with it, ({with_it[0]:.4f}, {with_it[1]:.4f}).\n")
    print("How often are the scores read?")
    print("  maximum, then sum, then exp / sum · v      3 times")
    print("  online maximum and sum, then exp / sum · v 2 times")
    print("  softmax_dot                                once, so they need not be stored: step 5\n")
    torch.manual_seed(0)
    steps = torch.randn(10_000, 256).cummax(-1).values.diff(dim=-1).gt(0).sum(-1).float().mean()
    print(f"How often does the maximum move? {steps + 1:.1f} times in 256 random scores, about")
    print("ln 256 + 0.6: records are rare. Some kernels keep an old maximum until a score lies far")
    print("above it, and correct even less.")


def main() -> None:
    """Check, then show."""
    check()
    show()


if __name__ == "__main__":
    main()
