"""Exercise 13: ring attention, as one rank sees it.

The sequence is split contiguously: rank r has the rows after those of rank r - 1. Ranks run at the
same time, each with its own `send` and `recv`:

    send(to, *tensors)     puts a message into the mailbox of rank `to`; it does not wait
    recv(source) -> tuple  waits for the next message from rank `source`

Messages from one rank to another arrive in the order in which they were sent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Send = Callable[..., None]
Recv = Callable[[int], tuple[Tensor, ...]]


def _scores(q: Tensor, k: Tensor, diagonal: bool) -> Tensor:
    scores = q @ k.T / q.shape[-1] ** 0.5
    if diagonal:
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def ring_forward(
    rank: int,
    world_size: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    send: Send,
    recv: Recv,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output and natural lse of this rank's queries, over the keys of all ranks.

    Args:
        rank, world_size: who we are, and how many there are.
        q, k, v: (rows, d): this rank's part; all parts have as many rows.
        send, recv: see above.
        causal: no query sees a later key.

    Returns:
        (out, lse): (rows, d) and (rows,).
    """
    out = q.new_zeros(q.shape[0], v.shape[1])
    lse = q.new_full((q.shape[0],), float("-inf"))
    for step in range(world_size):
        source = (rank - step) % world_size
        if step + 1 < world_size:
            send((rank + 1) % world_size, k, v)
        if not causal or source <= rank:
            scores = _scores(q, k, causal and source == rank)
            new = torch.logaddexp(lse, scores.logsumexp(-1))
            p = (scores - new[:, None]).exp()  # normalised by all keys so far
            out, lse = out * (lse - new).exp()[:, None] + p @ v, new
        if step + 1 < world_size:
            k, v = recv((rank - 1) % world_size)
    return out, lse


def ring_backward(
    rank: int,
    world_size: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    send: Send,
    recv: Recv,
    causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of this rank's own part, each with what all ranks contribute.

    Args:
        out, lse: what `ring_forward` returned.
        dout: (rows, d), the gradient of this rank's output.
    """
    delta = (dout * out).sum(-1, keepdim=True)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for step in range(world_size):
        source = (rank - step) % world_size
        if not causal or source <= rank:
            p = (_scores(q, k, causal and source == rank) - lse[:, None]).exp()
            ds = p * (dout @ v.T - delta) / q.shape[-1] ** 0.5
            dq, dk, dv = dq + ds @ k, dk + ds.T @ q, dv + p.T @ dout
        send((rank + 1) % world_size, k, v, dk, dv)
        k, v, dk, dv = recv((rank - 1) % world_size)
    return dq, dk, dv  # after world_size hops they are those of our own keys
