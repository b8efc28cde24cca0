"""Step 12. Merging by lse: two halves of the keys, one result.

What we want: attention over all keys, from two calls that saw half of the keys each. Each call has
normalised its output by its own sum; with L = lse = log Σ_j exp(s_j) that sum is exp(L). Undo the
two divisions, add, and divide by the sum over all keys:

    L   = log(exp(L₁) + exp(L₂))
    out = exp(L₁ − L) out₁ + exp(L₂ − L) out₂

The two weights add up to 1: out is an average of the halves, and each counts by its share of the
whole sum. Nothing is approximated. It is online softmax (step 4) once more: there a block joined
the rows so far, here any two sets of keys join, in any order and any number. So keys may be split
over the programs of a GPU (long contexts, few queries) or over GPUs. The ring (step 13) is this
function and a network.

With w = exp(L₂ − L) = sigmoid(L₂ − L₁) it is also

    out = out₁ + w (out₂ − out₁),        L = L₁ + softplus(L₂ − L₁)

which reads and writes one running output. Two traps. A half of which a row sees no key has L = −inf
and weight 0; if it sees none in both, L₁ − L is −inf − (−inf), which is NaN. And the lse must be
natural in both halves, or base 2 in both.

Backward needs no merge. A half computes its P from its scores and the L of *all* keys, and
D = rowsum(dO ∘ out) from the merged output:

    P = exp(S − L)        dS = P ∘ (dO vᵀ − D)

dQ is the sum of what the halves find; dK and dV belong to one half each.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from .. import definition

INF = float("inf")
Result = tuple[Tensor, Tensor]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
COUNTS = (2, 8, 32, 128)  # parts of the keys


def merge(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> Result:
    """(out, lse) over the keys of both: out (..., rows, d), lse (..., rows)."""
    lse = torch.logaddexp(lse1, lse2)
    safe = lse.masked_fill(lse == -INF, 0.0)  # a row that sees no key: both weights become 0
    weight1, weight2 = (lse1 - safe).exp(), (lse2 - safe).exp()
    return weight1[..., None] * out1 + weight2[..., None] * out2, lse


def scores_of(q: Tensor, k: Tensor, hidden: Tensor) -> Tensor:
    """Scores of some of the keys; hidden ones are −inf."""
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(hidden, -INF)


def attention_part(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Result:
    """Output and lse over some of the keys; `hidden` is their part of the mask."""
    scores = scores_of(q, k, hidden)
    lse = scores.logsumexp(-1)
    return (scores - lse.masked_fill(lse == -INF, 0.0)[..., None]).exp() @ v, lse


def backward_part(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, out: Tensor, lse: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A part's (dq, dk, dv); out and lse are those of all keys."""
    p = (scores_of(q, k, hidden) - lse.masked_fill(lse == -INF, 0.0)[..., None]).exp()
    ds = p * (dout @ v.transpose(-1, -2) - (dout * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dout


def parts_of(
    q: Tensor, k: Tensor, v: Tensor, count: int, causal: bool
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """k, v and the mask, cut into `count` parts along the keys."""
    hidden = ~definition.visible(q.shape[1], k.shape[1], causal)
    return list(zip(k.chunk(count, 1), v.chunk(count, 1), hidden.chunk(count, 1)))


def check() -> None:
    """Out, lse and gradients against the definition: halves, many parts, rows that see nothing."""
    torch.manual_seed(0)
    for causal in (False, True):
        for queries, keys in ((24, 24), (9, 30), (30, 9)):  # the last, causal: rows without a key
            q, k, v, dout = (torch.randn(2, n, 8) for n in (queries, keys, keys, queries))
            leaves = [x.double().requires_grad_() for x in (q, k, v)]
            true, true_lse = definition.attention(*leaves, causal=causal)
            true_grads = torch.autograd.grad(true, leaves, dout.double())
            for count in (2, 3, 9):
                parts = parts_of(q, k, v, count, causal)
                results = [attention_part(q, *part) for part in parts]
                for order in (results, results[::-1]):
                    out, lse = reduce(lambda a, b: merge(*a, *b), order)
                    case = f"{queries} × {keys}, {count} parts, causal {causal}"
                    seen = true_lse > -INF
                    assert torch.equal(lse > -INF, seen), f"{case}: rows that see nothing"
                    pairs = [("out", out, true), ("lse", lse[seen], true_lse[seen])]
                    if seen.all():  # else autograd's gradients are NaN
                        grads = [backward_part(q, *part, out, lse, dout) for part in parts]
                        dq = torch.stack([dq for dq, _, _ in grads]).sum(0)
                        dk, dv = (torch.cat([grad[i] for grad in grads], 1) for i in (1, 2))
                        pairs += zip(("dq", "dk", "dv"), (dq, dk, dv), true_grads)
                    for name, ours, theirs in pairs:
                        error = (ours - theirs).abs().max().item()
                        assert error < 1e-5, f"{case}: {name} is wrong by {error:.2e}"


def lse_of_halves() -> tuple[Tensor, Tensor, Tensor]:
    """Causal, 8 rows: the lse over keys 0–3, over keys 4–7, and over all."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 8, 16)
    first, second = (attention_part(q, *part) for part in parts_of(q, k, v, 2, True))
    return first[1][0], second[1][0], merge(*first, *second)[1][0]


def errors(count: int) -> list[float]:
    """4096 keys in `count` parts: the error of out, by the dtype that it has between merges."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 64) for n in (64, 4096, 4096))
    true, _ = definition.attention(q, k, v)
    results, found = [attention_part(q, *part) for part in parts_of(q, k, v, count, False)], []
    for dtype in DTYPES:
        out, lse = results[0][0].to(dtype), results[0][1]
        for other, other_lse in results[1:]:
            merged, lse = merge(out.float(), lse, other, other_lse)
            out = merged.to(dtype)
        found.append(((out.double() - true).abs().max() / true.abs().max()).item())
    return found


def show() -> None:
    """The weights of two halves; then what many merges cost in each dtype."""
    print("Causal, 8 rows, keys 0–3 (░) and 4–7 (█): how much each half counts in each row.")
    print(f"  {'row':>3} {'lse 0–3':>8} {'lse 4–7':>8} {'merged':>8}   weights")
    for i, row in enumerate(torch.stack(lse_of_halves(), 1)):
        share = round(20 * (row[1] - row[2]).exp().item())
        numbers = " ".join(f"{x:8.3f}" for x in row.tolist())
        print(f"  {i:3} {numbers}   {'░' * (20 - share)}{'█' * share}")
    print("\n4096 keys in parts, one merged after the other. Largest error of out, relative:")
    print(f"  {'parts':>5} {'fp32':>9} {'fp16':>9} {'bf16':>9}   (dtype of the running output)")
    for count in COUNTS:
        print(f"  {count:5} " + " ".join(f"{x:9.1e}" for x in errors(count)))
    print("Each merge rounds the running output once more. So it is fp32 until the last step, and")
    print("so is the lse: an error ε of the lse is a factor exp(ε) of the output.")


def main() -> None:
    """Check, then show."""
    check()
    show()


if __name__ == "__main__":
    main()
