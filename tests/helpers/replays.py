"""Small workloads to replay, and a block of plain torch for the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import torch
from torch import Tensor

from ring_flash_attn.api.sharding import shard, unshard
from ring_flash_attn.bench.machine import find_device
from ring_flash_attn.bench.replays.baseline import ZigzagRing
from ring_flash_attn.bench.replays.rank import LibraryRanks, ReplayedRank
from ring_flash_attn.bench.workload import Placement, Workload
from ring_flash_attn.comm import Message

SMALL: dict[str, Any] = {
    "world_size": 3,
    "layout": "zigzag",
    "route": "ring",
    "kernel": "reference",
    "seqlen": 20,
    "batch": 1,
    "nheads": 4,
    "nheads_k": 2,
    "headdim": 8,
    "dtype": torch.bfloat16,
    "causal": True,
    "device": "cpu",
}


def small(**changes: Any) -> dict[str, Any]:
    """Arguments of `replay`; those without a rank's tokens where there are documents."""
    given = {**SMALL, "repeats": 1, **changes}
    if "cu_seqlens" in changes and "seqlen" not in changes:
        del given["seqlen"]
    return given


def ranks(**changes: Any) -> LibraryRanks:
    """Where replayed ranks come from; arguments as of `replay`."""
    given = small(**changes)
    place = {name: given[name] for name in Placement.__dataclass_fields__ if name in given}
    call = {name: given[name] for name in Workload.__dataclass_fields__ if name in given}
    if "seqlen" in given:
        call["seqlen"] *= given["world_size"]
    return LibraryRanks(Workload(**call), Placement(**place), find_device(given["device"]))


def tensors(rank: ReplayedRank) -> list[Tensor]:
    """What both passes return."""
    (out, lse), grads = rank.both()
    return [out, lse, *grads]


class TorchBlock:
    """Attention of a block in plain torch, in the precision of q."""

    def _scores(self, q: Tensor, k: Tensor, causal: bool) -> Tensor:
        k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -torch.inf) if causal else scores

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        scores = self._scores(q, k, causal)
        v = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
        return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v), scores.logsumexp(-1)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        group, scale = q.shape[2] // k.shape[2], q.shape[-1] ** -0.5
        p = (self._scores(q, k, causal) - lse[..., None].to(q.dtype)).exp()
        wide_k, wide_v = (x.repeat_interleave(group, dim=2) for x in (k, v))
        delta = (dout * out).sum(-1).transpose(1, 2)[..., None]
        ds = p * (torch.einsum("bihd,bjhd->bhij", dout, wide_v) - delta) * scale
        dk, dv = torch.einsum("bhij,bihd->bjhd", ds, q), torch.einsum("bhij,bihd->bjhd", p, dout)
        dk, dv = (x.unflatten(2, (-1, group)).sum(3) for x in (dk, dv))
        return torch.einsum("bhij,bjhd->bihd", ds, wide_k), dk, dv


class Queued:
    """A rank's end of a group of threads."""

    def __init__(self, rank: int, mail: dict[tuple[int, int], Queue[Tensor]]) -> None:
        self._rank, self._mail = rank, mail
        self._expected: list[Message] = []

    def post(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if message.receive:
                self._expected.append(message)
            else:
                self._mail[self._rank, message.peer].put(message.tensor.clone())

    def wait(self) -> None:
        for message in self._expected:
            message.tensor.copy_(self._mail[message.peer, self._rank].get(timeout=60))
        self._expected.clear()

    def abandon(self, steps: Sequence[bool], drain: bool) -> None:
        """Nothing fails here."""


def baseline_in_threads(
    qkv: list[Tensor], dout: Tensor, world_size: int, block: Any, merged: Any
) -> list[Tensor]:
    """(out, dq, dk, dv) of all ranks of the baseline, put together."""
    ranks = range(world_size)
    ends = [
        {(rank, (rank + 1) % world_size): Queue[Tensor]() for rank in ranks}
        for _ in range(3)  # keys forward; keys and gradients backward
    ]

    def run(rank: int) -> list[Tensor]:
        mails = iter(ends)
        ring = ZigzagRing(rank, world_size, lambda: Queued(rank, next(mails)), block, merged)
        own = [shard(x, "zigzag", rank=rank, world_size=world_size) for x in (*qkv, dout)]
        out, lse = ring.forward(*own[:3])
        return [out, *ring.backward(own[3], *own[:3], out, lse)]

    with ThreadPoolExecutor(world_size) as threads:
        found = list(threads.map(run, ranks))
    return [unshard(list(parts), "zigzag") for parts in zip(*found, strict=True)]
