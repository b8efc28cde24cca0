"""Step 11: packed documents: many sequences in one stream, without padding.

What we want. Documents have different lengths. A batch pads all of them to the longest; a packed
stream puts them one after the other, (tokens, heads, d), and says where each begins:

    lengths      5  3  4
    cu_seqlens   0  5  8  12          document n has the rows cu_seqlens[n] … cu_seqlens[n + 1] − 1

Attention stays inside a document: the mask is a row of squares (or triangles) on the diagonal.

                     padding                packing
    rows             documents · longest    Σ length
    pairs, full      documents · longest²   Σ length²

How a kernel does it. There is no mask of tokens × tokens, and no launch for each document. There is
a list of work items: one for each block of queries, with the first and the last row of its
document. Each program looks up its item and then does what it always did, from the document's first
key on. Two things go wrong easily:

    leaks        a block at a document's end holds rows of the next one: cut keys and queries there
    positions    causal compares a row and a key: count both from the document's start, or, where
                 they share cu_seqlens as here, both from the stream's, but never one of each

A document may be shorter than a block, one token long, or empty.

Exercise 11. Write `packed_forward`. Then put NaN into one document and see whether another one
notices. `rfa lab check 11 DIR` looks at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

import torch
from torch import Tensor

from ..definition import attention

EXAMPLE = (0, 5, 8, 12)  # cu_seqlens of documents of 5, 3, 4 tokens
BATCHES = {  # lengths of documents
    "4 × 2048": (2048,) * 4,
    "1000, 37, 4000, 3155": (1000, 37, 4000, 3155),
    "one of 8192, 31 of 512": (8192, *[512] * 31),
}


@dataclass(frozen=True)
class WorkItem:
    """What one program of a kernel does: rows first … last − 1, against their document's keys."""

    first: int
    last: int
    begin: int  # of the document, in the stream
    end: int


def work_items(cu_seqlens: Sequence[int] | Tensor, block_q: int) -> list[WorkItem]:
    """All blocks of queries of all documents; longest documents first, so that nobody waits."""
    documents = sorted(pairwise(map(int, cu_seqlens)), key=lambda ends: ends[0] - ends[1])
    return [
        WorkItem(first, min(first + block_q, end), begin, end)
        for begin, end in documents
        for first in range(begin, end, block_q)
    ]


def packed_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Sequence[int] | Tensor,
    causal: bool = False,
    block_q: int = 32,
    block_k: int = 32,
) -> tuple[Tensor, Tensor]:
    """(tokens, heads, d) → output, and lse (heads, tokens)."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # (heads, tokens, d)
    out, lse = q.new_zeros(*q.shape[:2], v.shape[-1]), q.new_full(q.shape[:2], -inf)
    for item in work_items(cu_seqlens, block_q):  # on a GPU: one program each, all at once
        rows = torch.arange(item.first, item.last, device=q.device)[:, None]
        mine = q[:, item.first : item.last] * q.shape[-1] ** -0.5
        acc = torch.zeros_like(out[:, item.first : item.last])
        m, total = acc[..., 0] - inf, acc[..., 0].clone()
        stop = item.last if causal else item.end  # skip what is beyond the diagonal
        for j in range(item.begin, stop, block_k):
            keys = slice(j, min(j + block_k, stop))  # not one key of the next document
            s = mine @ k[:, keys].transpose(1, 2)
            if causal and keys.stop > item.first + 1:  # both are counted in the same stream
                at = torch.arange(keys.start, keys.stop, device=q.device)
                s = s.masked_fill(at[None, :] > rows, -inf)
            m_new = torch.maximum(m, s.amax(-1))  # never −inf: every row sees its first key
            p, alpha = (s - m_new[..., None]).exp(), (m - m_new).exp()
            acc = acc * alpha[..., None] + p @ v[:, keys]
            m, total = m_new, total * alpha + p.sum(-1)
        out[:, item.first : item.last] = acc / total[..., None]
        lse[:, item.first : item.last] = m + total.log()
    return out.transpose(0, 1), lse


def close(what: str, got: Tensor, want: Tensor) -> None:
    """AssertionError with the largest difference, and where it is."""
    torch.testing.assert_close(
        got.double(), want, atol=1e-5, rtol=1e-5, msg=lambda numbers: f"{what}: {numbers}"
    )


def check() -> None:
    """Against the definition; then change a document, and see that the others do not notice."""
    torch.manual_seed(0)
    for lengths in ((40, 1, 0, 77, 32), (9,), (3, 3, 3, 3), (0, 65)):
        cu_seqlens = [0, *accumulate(lengths)]
        q, k, v = torch.randn(3, cu_seqlens[-1], 2, 24)
        for causal in (False, True):
            found = packed_forward(q, k, v, cu_seqlens, causal)
            want = attention(q, k, v, causal=causal, cu_seqlens_q=cu_seqlens)
            for name, a, b in zip(("out", "lse"), found, want):
                close(f"{name}, documents {lengths}, causal {causal}", a, b)
    q, k, v = torch.randn(3, 60, 2, 24)
    before, _ = packed_forward(q, k, v, [0, 25, 60])
    k[25:], v[25:] = 1e4, float("nan")
    after, _ = packed_forward(q, k, v, [0, 25, 60])
    assert torch.equal(before[:25], after[:25]), "document 0 has seen document 1"


def show() -> None:
    """The mask, the work items, and what padding would cost."""
    print("documents of 5, 3, 4 tokens, causal: the digit is the document")
    for row in range(12):
        number = sum(row >= end for end in EXAMPLE[1:])
        line = [str(number) if EXAMPLE[number] <= key <= row else "·" for key in range(12)]
        print("  " + " ".join(line))
    print("\nits work items with blocks of 4 queries")
    for item in work_items(EXAMPLE, 4):
        print(f"  queries {item.first:2} … {item.last - 1:2}   keys {item.begin} … {item.end - 1}")

    print("\n                                     rows                 causal pairs")
    print("documents                    padded    packed         padded        packed")
    for name, lengths in BATCHES.items():
        longest, count = max(lengths), len(lengths)
        pairs = [n * (n + 1) // 2 for n in lengths]
        print(
            f"{name:24} {longest * count:10,} {sum(lengths):9,} "
            f"{max(pairs) * count:14,} {sum(pairs):13,}  ({sum(pairs) / max(pairs) / count:.0%})"
        )


def main() -> None:
    check()
    show()


if __name__ == "__main__":
    main()
