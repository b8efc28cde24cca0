"""Exercise 10: grouped-query attention with a sliding window and attention sinks.

Query head h reads KV head h // (heads // heads_k). A query at position p (row i: p = i + rows_k -
rows_q) sees keys p - left … p + right, -1: no limit; causal: right = 0. A sink is a score without a
value: it takes part in the softmax, and adds nothing to the output.
"""

from __future__ import annotations

from torch import Tensor


def grouped_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and natural lse.

    Args:
        q: (batch, rows_q, heads, d).
        k, v: (batch, rows_k, heads_k, d).
        causal: no query sees a later key.
        window: (left, right).
        sinks: (heads,) or None.

    Returns:
        (out, lse): (batch, rows_q, heads, d) and (batch, heads, rows_q), with the sink in lse. A
        query that sees no key: out 0; lse is its sink, or -inf without one.
    """
    raise NotImplementedError("a sink is where the running maximum and sum begin")


def grouped_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, in the shapes of q, k and v, from the forward pass's out and lse.

    The same with and without sinks: lse knows them.
    """
    raise NotImplementedError("recompute p = exp(s - lse); all heads of a group add to dk and dv")
