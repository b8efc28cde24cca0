"""Step 9: causal masks, then skipping blocks.

What we want. A language model predicts the next token, so query i must not see later keys:

    query i sees key j   ⇔   j ≤ i + shift,      shift = keys − queries

Both sequences end together: the last query sees all keys. With a KV cache there are more keys than
queries (shift > 0). With fewer keys (shift < 0) the first queries see nothing: out 0, lse −inf.

A mask alone saves no time: a score that is thrown away has been computed all the same. The gain
comes from whole blocks. Rows r₀ … r₁ − 1 against keys c₀ … c₁ − 1:

    skip the block      c₀ > (r₁ − 1) + shift      even its last row sees not even its first key
    no mask needed      c₁ − 1 ≤ r₀ + shift        even its first row sees even its last key
    mask it             otherwise: the diagonal runs through it

With n × n blocks, n (n + 1) / 2 are left, and only about n of them need the mask. So the inner loop
of a fast kernel has two parts: many blocks without a mask, then the few at the diagonal with one.

The trap. A row of a masked block may see none of its keys. If it has seen none before, its running
maximum is still −inf, and exp(−inf − (−inf)) is NaN. Replace the maximum by 0 where it is −inf: all
powers are then exp(−inf) = 0, which is right. Mask before the maximum, never after it: a hidden
score that sets the maximum makes all powers of the row tiny.

Exercise 9. Write `visible_blocks` and `causal_forward`. Try fewer keys than queries before you say
that it works. `rfa lab check 9 DIR` looks at it.
"""

from __future__ import annotations

import time
from math import ceil, inf

import torch
from torch import Tensor

from ..definition import attention

SHAPES = (  # queries, keys, and the blocks of both
    (512, 512, 64, 64),
    (256, 640, 64, 64),
    (512, 512, 128, 32),
)


def visible_blocks(
    rows_q: int, rows_k: int, block_q: int, block_k: int, causal: bool
) -> list[tuple[int, int, bool]]:
    """(i, j, needs_mask) of each block that some query sees something of, row by row."""
    shift = rows_k - rows_q
    found = []
    for i in range(ceil(rows_q / block_q)):
        first_row, last_row = i * block_q, min((i + 1) * block_q, rows_q) - 1
        for j in range(ceil(rows_k / block_k)):
            first_key, last_key = j * block_k, min((j + 1) * block_k, rows_k) - 1
            if causal and first_key > last_row + shift:
                break  # and so are all blocks to the right of it
            found.append((i, j, causal and last_key > first_row + shift))
    return found


def causal_forward(
    q: Tensor, k: Tensor, v: Tensor, block_q: int = 64, block_k: int = 64, skip: bool = True
) -> tuple[Tensor, Tensor]:
    """Tiled causal attention on (batch, rows, d): output and lse (batch, rows).

    Without `skip` it visits and masks all blocks, for comparison.
    """
    batch, rows_q, d = q.shape
    rows_k, shift = k.shape[1], k.shape[1] - rows_q
    acc = q.new_zeros(batch, rows_q, v.shape[-1])  # not normalised
    m = q.new_full((batch, rows_q), -inf)  # the maximum so far
    total = q.new_zeros(batch, rows_q)  # the sum of powers so far
    for i, j, needs_mask in visible_blocks(rows_q, rows_k, block_q, block_k, causal=skip):
        rows, keys = slice(i * block_q, (i + 1) * block_q), slice(j * block_k, (j + 1) * block_k)
        s = q[:, rows] @ k[:, keys].transpose(1, 2) * d**-0.5
        if needs_mask or not skip:
            row = torch.arange(rows_q, device=q.device)[rows, None]
            key = torch.arange(rows_k, device=q.device)[None, keys]
            s = s.masked_fill(key > row + shift, -inf)
        m_new = torch.maximum(m[:, rows], s.amax(-1))
        m_safe = m_new.masked_fill(m_new == -inf, 0.0)
        p = (s - m_safe[..., None]).exp()
        alpha = (m[:, rows] - m_safe).exp()
        acc[:, rows] = acc[:, rows] * alpha[..., None] + p @ v[:, keys]
        total[:, rows] = total[:, rows] * alpha + p.sum(-1)
        m[:, rows] = m_new
    seen = total > 0
    out = acc / total.masked_fill(~seen, 1.0)[..., None]
    return out, torch.where(seen, m + total.log(), -inf)


def close(what: str, got: Tensor, want: Tensor) -> None:
    """AssertionError with the largest difference, and where it is."""
    torch.testing.assert_close(
        got.double(), want, atol=1e-5, rtol=1e-5, msg=lambda numbers: f"{what}: {numbers}"
    )


def check() -> None:
    """Against the definition: as many keys as queries, more, fewer; blocks of any shape."""
    torch.manual_seed(0)
    for rows_q, rows_k, block_q, block_k in ((70, 70, 16, 16), (33, 90, 32, 8), (90, 33, 8, 32)):
        q, k, v = (torch.randn(2, rows, 24) for rows in (rows_q, rows_k, rows_k))
        found = causal_forward(q, k, v, block_q, block_k)
        for name, got, want in zip(("out", "lse"), found, attention(q, k, v, causal=True)):
            close(f"{name} of {rows_q} queries and {rows_k} keys", got, want)


def picture(rows_q: int, rows_k: int, block_q: int, block_k: int) -> str:
    """The blocks of a causal mask: █ computed, ▒ computed and masked, · never visited."""
    visited = {
        (i, j): mask for i, j, mask in visible_blocks(rows_q, rows_k, block_q, block_k, True)
    }
    signs = {None: "·", False: "█", True: "▒"}
    lines = []
    for i in range(ceil(rows_q / block_q)):
        signs_of_row = (signs[visited.get((i, j))] for j in range(ceil(rows_k / block_k)))
        lines.append("  " + " ".join(signs_of_row))
    return "\n".join(lines)


def show() -> None:
    """The blocks of three shapes; how many are left; what skipping saves."""
    print("█ no mask   ▒ mask   · skipped")
    for rows_q, rows_k, block_q, block_k in SHAPES:
        print(f"\n{rows_q} queries × {rows_k} keys, blocks {block_q} × {block_k}")
        print(picture(rows_q, rows_k, block_q, block_k))

    print("\n rows   blocks   visited  share   masked      (blocks 128 × 128)")
    for rows in (512, 2048, 8192, 65536):
        n, found = rows // 128, visible_blocks(rows, rows, 128, 128, True)
        masks = sum(mask for _, _, mask in found)
        print(f"{rows:5} {n * n:8} {len(found):9} {len(found) / n**2:6.1%} {masks:8}")

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2048, 64) for _ in range(3))
    ms = {}
    for skip in (False, True):
        runs = []
        for _ in range(3):
            start = time.perf_counter()
            causal_forward(q, k, v, 128, 128, skip)
            runs.append(time.perf_counter() - start)
        ms[skip] = min(runs) * 1e3
    print(f"\n2048 rows on this machine: all blocks with a mask {ms[False]:.0f} ms,", end=" ")
    print(f"visible blocks {ms[True]:.0f} ms")


def main() -> None:
    check()
    show()


if __name__ == "__main__":
    main()
