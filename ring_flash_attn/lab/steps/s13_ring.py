"""Step 13: the ring: keys and values travel, gradients come home.

What we want. The sequence is too long for one GPU. Rank r of W holds rows r·n … (r + 1)·n − 1 of q,
k and v. Every query needs every key, but never all at once: step 12 has shown that results of two
sets of keys merge by their lse. So queries stay, and keys and values go around:

    step t     rank r holds the keys of rank  source = (r − t) mod W
               it sends them to r + 1, and receives those of source − 1 from r − 1
               meanwhile it computes its queries against them, and merges

After W steps everybody has seen everything; each shard made W − 1 hops. A rank needs room for two
shards of (k, v): the one at work and the one on its way.

Causal. source > rank: all these keys are later, nothing to do. source = rank: a causal tile. source
< rank: no mask. (Step 14 does something about the ranks that have nothing to do.)

Backward. Rank r can compute what its queries contribute to dK and dV of the shard it holds at the
moment: with the final lse and D of its own rows, p = exp(s − lse) is right without any merging. dQ
is ours and stays. dK and dV belong to the source. They travel with their keys, everybody adds to
them, and one hop more than the keys make brings them home:

    step t     dK, dV of the shard arrive; add our part; send them to r + 1
    at the end, after W hops, those of our own keys arrive

The code below runs W ranks as W threads. They share nothing but mailboxes.

Exercise 13. Write `ring_forward` and `ring_backward`, as one rank sees them. `rfa lab check 13 DIR`
looks at it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import inf
from queue import Queue
from typing import Any

import torch
from torch import Tensor

from ..definition import attention

Send = Callable[..., None]  # send(to, *tensors); does not block
Recv = Callable[[int], tuple[Tensor, ...]]  # recv(source) waits for the next message from there


def block_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """One tile, (rows, d): what a flash-attention kernel would return."""
    s = q @ k.T * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -inf)
    lse = s.logsumexp(-1)
    return (s - lse[:, None]).exp() @ v, lse


def merge(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Step 12: two sets of keys, one result."""
    lse = torch.logaddexp(lse1, lse2)
    return out1 * (lse1 - lse).exp()[:, None] + out2 * (lse2 - lse).exp()[:, None], lse


def ring_forward(
    rank: int, world_size: int, q: Tensor, k: Tensor, v: Tensor, send: Send, recv: Recv,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What one rank does: output and lse of its own rows."""
    following, previous = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(world_size):
        source = (rank - step) % world_size
        if step < world_size - 1:
            send(following, k, v)  # before the work, so that it is on its way meanwhile
        if step == 0:
            out, lse = block_forward(q, k, v, causal)  # our own keys: no row is without a key now
        elif not causal or source < rank:
            out, lse = merge(out, lse, *block_forward(q, k, v, False))
        if step < world_size - 1:
            k, v = recv(previous)
    return out, lse


def ring_backward(
    rank: int, world_size: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    dout: Tensor, send: Send, recv: Recv, causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv of a rank's own rows; `out` and `lse` are final, over all keys."""
    following, previous = (rank + 1) % world_size, (rank - 1) % world_size
    scale, delta = q.shape[-1] ** -0.5, (dout * out).sum(-1, keepdim=True)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for step in range(world_size):
        source = (rank - step) % world_size
        if step < world_size - 1:
            send(following, k, v)
        part_k, part_v = torch.zeros_like(k), torch.zeros_like(v)
        if not causal or source <= rank:
            s = q @ k.T * scale
            if causal and source == rank:
                s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -inf)
            p = (s - lse[:, None]).exp()
            ds = p * (dout @ v.T - delta) * scale
            dq = dq + ds @ k
            part_k, part_v = ds.T @ q, p.T @ dout
        if step > 0:
            dk, dv = recv(previous)  # what the ranks before us have added up for this source
        send(following, dk + part_k, dv + part_v)
        if step < world_size - 1:
            k, v = recv(previous)
    dk, dv = recv(previous)  # ours, from all ranks
    return dq, dk, dv


def run_ranks(world_size: int, rank_main: Callable[[int, Send, Recv], Any]) -> list[Any]:
    """Run rank_main(rank, send, recv) for all ranks, each in a thread; their results."""
    ranks = range(world_size)
    boxes: dict[tuple[int, int], Queue[tuple[Tensor, ...]]]
    boxes = {(source, target): Queue() for source in ranks for target in ranks}

    def run(rank: int) -> Any:
        def send(to: int, *tensors: Tensor) -> None:
            boxes[rank, to].put(tensors)

        def recv(source: int) -> tuple[Tensor, ...]:
            return boxes[source, rank].get(timeout=20)  # a message that never comes: queue.Empty

        return rank_main(rank, send, recv)

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, ranks))


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, world_size: int, causal: bool
) -> tuple[Tensor, ...]:
    """Out, lse, dq, dk, dv of a whole sequence (rows, d), over `world_size` ranks."""
    shards = list(zip(*(x.chunk(world_size) for x in (q, k, v, dout))))

    def rank_main(rank: int, send: Send, recv: Recv) -> tuple[Tensor, ...]:
        q, k, v, dout = shards[rank]
        out, lse = ring_forward(rank, world_size, q, k, v, send, recv, causal)
        grads = ring_backward(rank, world_size, q, k, v, out, lse, dout, send, recv, causal)
        return out, lse, *grads

    return tuple(torch.cat(parts) for parts in zip(*run_ranks(world_size, rank_main)))


NAMES = ("out", "lse", "dq", "dk", "dv")


def exact(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, causal: bool) -> tuple[Tensor, ...]:
    """The same by the definition and autograd."""
    leaves = [x.double()[None].requires_grad_() for x in (q, k, v)]
    out, lse = attention(leaves[0], leaves[1], leaves[2], causal=causal)
    grads = torch.autograd.grad(out, leaves, dout.double()[None])
    return tuple(x[0].detach() for x in (out, lse, *grads))


def check() -> None:
    """Against the definition, for one rank and for several."""
    torch.manual_seed(0)
    for world_size, causal in ((1, True), (2, False), (4, True), (5, True), (5, False)):
        tensors = torch.randn(4, 15 * world_size, 24).unbind()
        found = ring_attention(*tensors, world_size=world_size, causal=causal)
        want = exact(*tensors, causal=causal)
        for name, a, b in zip(NAMES, found, want):
            error = (a.double() - b).abs().max().item()
            assert error < 2e-5, f"{name}, {world_size} ranks, causal {causal}: off by {error:.1e}"


def show() -> None:
    """Who holds which keys when; errors; the library on the same numbers."""
    from ...api.virtual import virtual_ring_attention  # ring_flash_attn.virtual_ring_attention

    print("keys at work, causal, 4 ranks (· nothing to see, \\ a causal tile, █ a full one)")
    print("         " + "  ".join(f"rank {rank}" for rank in range(4)))
    for step in range(4):
        line = []
        for rank in range(4):
            source = (rank - step) % 4
            line.append(f"K{source} " + ("\\" if source == rank else "█" if source < rank else "·"))
        print(f"  step {step} " + "    ".join(line))

    torch.manual_seed(0)
    tensors = torch.randn(4, 128, 32).unbind()
    mine = ring_attention(*tensors, world_size=4, causal=True)
    want = exact(*tensors, causal=True)
    leaves = [x[None, :, None].requires_grad_() for x in tensors[:3]]  # a batch and a head of one
    result = virtual_ring_attention(
        leaves[0], leaves[1], leaves[2], causal=True, world_size=4, layout="contiguous",
        route="ring", return_attn_probs=True,
    )  # fmt: skip
    grads = torch.autograd.grad(result[0], leaves, tensors[3][None, :, None])
    library = [result[0][0, :, 0], result[1][0, 0], *(x[0, :, 0] for x in grads)]
    print("\nlargest error in fp32, 128 rows, 4 ranks")
    print("         these lines   virtual_ring_attention")
    for name, a, b, c in zip(NAMES, mine, library, want):
        errors = [(x.double() - c).abs().max().item() for x in (a, b)]
        print(f"  {name:4} {errors[0]:12.1e} {errors[1]:16.1e}")


def main() -> None:
    check()
    show()


if __name__ == "__main__":
    main()
