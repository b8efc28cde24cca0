"""Exercise 11: attention of packed documents, which must not see each other."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def packed_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Sequence[int] | Tensor, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Output and natural lse of a packed stream.

    Args:
        q, k, v: (tokens, heads, d): documents one after the other.
        cu_seqlens: (documents + 1,): document n has rows cu_seqlens[n] … cu_seqlens[n + 1] - 1. It
            may have none.
        causal: a query sees its own key and those before, of its document.

    Returns:
        (out, lse): (tokens, heads, d) and (heads, tokens).
    """
    raise NotImplementedError("go through blocks of each document; cut them where it ends")
