"""Step 3. Standard attention: what it computes, and what it stores.

What we want, for each query i, over the keys j that it sees:

    S = q kᵀ / √d        scores   (queries, keys)
    P = softmax(S)       each row of P sums to 1
    out = P v            a weighted sum of values: step 1, with weights of its own for each row

Why 1/√d? The sum of d products of numbers with variance 1 has variance d. Divided by √d it is 1
again, and the softmax neither saturates nor becomes flat as d grows.

Causal: a query sees the keys up to its own position. Both sequences end together, so query i has
position i + keys − queries. Hidden scores are −inf: exp makes them 0.

Backward, with dO = ∂L/∂out. Each product gives two, the softmax one:

    dV = Pᵀ dO        dP = dO vᵀ
    dS = P ∘ (dP − rowsum(P ∘ dP))
    dQ = dS k / √d    dK = dSᵀ q / √d

Read the right-hand sides: backward needs q, k, v and P. The first three grow with the length of the
sequence; P grows with its square. That is the whole problem which FlashAttention solves, and not
the FLOPs: it even does more of them. We measure what autograd stores, and predict it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import definition


def standard_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Output (batch, queries, d), and the tensors that backward needs, by name."""
    queries, keys = q.shape[1], k.shape[1]
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
        hidden = hidden.triu(1 + keys - queries)
        scores = scores.masked_fill(hidden, float("-inf"))
    p = scores.softmax(-1)
    if causal and queries > keys:
        p = p.masked_fill(hidden, 0.0)  # rows that see no key: a softmax over nothing is NaN
    return p @ v, {"q": q, "k": k, "v": v, "p": p}


def standard_backward(saved: dict[str, Tensor], dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) from what forward saved, and from nothing else."""
    q, k, v, p = (saved[name] for name in ("q", "k", "v", "p"))
    dv = p.transpose(-1, -2) @ dout
    dp = dout @ v.transpose(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    return ds @ k, ds.transpose(-1, -2) @ q, dv


def measured_bytes(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> int:
    """What autograd keeps for backward; a tensor that is saved twice counts once."""
    kept: dict[int, Tensor] = {}  # by storage, which views share

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x
        return x

    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        standard_attention(leaves[0], leaves[1], leaves[2], causal)
    return sum(x.untyped_storage().nbytes() for x in kept.values())


def predicted_bytes(
    batch: int, queries: int, keys: int, d: int, causal: bool, element: int = 4
) -> int:
    """q, k, v and P; and the mask, one byte for each score, shared by the batch."""
    p = queries * keys
    return element * batch * (queries * d + 2 * keys * d + p) + (p if causal else 0)


def flash_bytes(batch: int, queries: int, keys: int, d: int, element: int = 4) -> int:
    """What FlashAttention stores: q, k, v, out, and one fp32 number for each row, the lse."""
    return element * batch * (2 * queries * d + 2 * keys * d) + 4 * batch * queries


def check() -> None:
    """Output and gradients against the definition; measured bytes against predicted ones."""
    torch.manual_seed(0)
    for causal in (False, True):
        for queries, keys, d in ((32, 32, 16), (37, 37, 5), (7, 20, 8), (20, 7, 8)):
            q, k, v, dout = (torch.randn(2, n, d) for n in (queries, keys, keys, queries))
            out, saved = standard_attention(q, k, v, causal)
            leaves = [x.double().requires_grad_() for x in (q, k, v)]
            true, _ = definition.attention(*leaves, causal=causal)
            pairs = [("out", out, true)]
            if not (causal and queries > keys):  # for empty rows autograd finds NaN
                gradients = torch.autograd.grad(true, leaves, dout.double())
                found = standard_backward(saved, dout)
                pairs += zip(("dq", "dk", "dv"), found, gradients)
                measured = measured_bytes(q, k, v, causal)
                predicted = predicted_bytes(2, queries, keys, d, causal)
                assert measured == predicted, f"{measured} bytes, predicted {predicted}"
            for name, ours, theirs in pairs:
                error = (ours - theirs).abs().max().item()
                case = f"{queries} × {keys}, d {d}, causal {causal}"
                assert error < 1e-5, f"{case}: {name} is wrong by {error:.2e}"


def show() -> None:
    """Bytes that wait for backward: measured, predicted, and those of FlashAttention."""
    d = 64
    print(f"Stored for backward, one head, d {d}, fp32, causal, in KiB:")
    print(f"  {'length':>6} {'measured':>9} {'predicted':>10} {'FlashAttention':>15}")
    for n in (128, 256, 512, 1024):
        q, k, v = torch.randn(3, 1, n, d)
        numbers = (
            measured_bytes(q, k, v, True),
            predicted_bytes(1, n, n, d, True),
            flash_bytes(1, n, n, d),
        )
        kib = [f"{x / 1024:.0f}" for x in numbers]
        print(f"  {n:6} {kib[0]:>9} {kib[1]:>10} {kib[2]:>15}   {'█' * (numbers[0] // 2**17)}")
    print("Twice the length: four times P, twice everything else. In bf16 with 32 heads, in GiB:")
    for n in (4096, 16384, 65536, 131072):
        standard = predicted_bytes(32, n, n, d, True, 2) / 2**30
        flash = flash_bytes(32, n, n, d, 2) / 2**30
        print(f"  {n:6} tokens: standard {standard:8.1f}   FlashAttention {flash:5.2f}")
    print("This is one layer. The next steps compute P in tiles and never store it.")


def main() -> None:
    """Check, then show."""
    check()
    show()


if __name__ == "__main__":
    main()
