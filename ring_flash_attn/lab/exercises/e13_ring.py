"""Exercise 13: ring attention, as one rank sees it.

The sequence is split contiguously: rank r has the rows after those of rank r - 1. Ranks run at the
same time, each with its own `send` and `recv`:

    send(to, *tensors)     puts a message into the mailbox of rank `to`; it does not wait
    recv(source) -> tuple  waits for the next message from rank `source`

Messages from one rank to another arrive in the order in which they were sent.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Send = Callable[..., None]
Recv = Callable[[int], tuple[Tensor, ...]]


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
    raise NotImplementedError("in step t the keys of rank (rank - t) % world_size are here")


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
    raise NotImplementedError("dk and dv follow their keys around the ring, and come home at last")
