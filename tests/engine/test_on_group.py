"""A group: calls that are alike are checked and planned once, and share nothing else."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

import ring_flash_attn as rfa
from ring_flash_attn.engine import entry, prepare
from ring_flash_attn.plan.layout import SplitLayout, add_layout


def halves(length: int, rank: int, world_size: int) -> list[range]:
    return [range(rank * length // world_size, (rank + 1) * length // world_size)]


def odd_first(length: int, rank: int, world_size: int) -> list[range]:
    return [range(world_size - 1 - rank, length, world_size)]


def calls() -> dict[str, Callable[[], Tensor]]:
    """Ranks of two with 8 of 16 tokens; each differs from another in what could be overlooked."""
    torch.manual_seed(dist.get_rank())
    q, k, v = (torch.randn(8, 2, 8) for _ in range(3))
    scale, slopes = torch.tensor(0.1), torch.tensor([0.1, 0.5])
    offsets, window = torch.tensor([0, 5, 16]), [3, 0]
    leaf = q.clone().requires_grad_()
    part = rfa.llama3_flash_attn_prepare_cu_seqlens(offsets, True, dist.get_rank(), 2)

    def ring(*shard: Tensor, layout: str = "zigzag", **options: object) -> Tensor:
        options = {"cu_seqlens": [0, 16], **options}
        return rfa.ring_attention(*(shard or (q, k, v)), layout=layout, route="ring", **options)

    def llama3(**options: object) -> Tensor:
        cu_q, cu_k, max_q, max_k, keys = part
        where = {"heads_k_stride": 1, "local_k_slice": keys}
        found: Tensor = rfa.llama3_flash_attn_varlen_func(
            *(q, k, v), cu_q, cu_k, max_q, max_k, **where, causal=True, **options
        )
        return found

    def dropped(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return ring(dropout_p=0.5)

    def in_half() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return ring()

    def registered(split: Any) -> Tensor:
        add_layout(SplitLayout("registered twice", split))
        return ring(layout="registered twice", causal=True)

    def changed(tensor: Tensor, value: float, call: Callable[[], Tensor]) -> Tensor:
        before = tensor.clone()
        tensor[...] = value
        found = call()
        tensor.copy_(before)
        return found

    return {
        "plain": ring,
        "layout": lambda: ring(layout="stripe", causal=True),
        "causal": lambda: ring(causal=True),
        "window": lambda: ring(window_size=(3, 0)),
        "window in a list": lambda: ring(window_size=window),
        "documents": lambda: ring(cu_seqlens=offsets, layout="flat_zigzag"),
        "offsets changed in place": lambda: changed(
            offsets[1:2], 6, lambda: ring(cu_seqlens=offsets, layout="flat_zigzag")
        ),
        "scale": lambda: ring(softmax_scale=scale),
        "scale changed in place": lambda: changed(scale, 2, lambda: ring(softmax_scale=scale)),
        "slopes": lambda: ring(alibi_slopes=slopes),
        "other slopes": lambda: ring(alibi_slopes=3 * slopes),
        "sink": lambda: ring(sink=slopes),
        "another sink": lambda: ring(sink=3 * slopes),
        "fp64": lambda: ring(q.double(), k.double(), v.double()),
        "a gradient": lambda: torch.autograd.grad(ring(leaf, k, v).sum(), leaf)[0],
        "lse": lambda: ring(return_attn_probs=True)[1],
        "dropout": lambda: dropped(1),
        "another seed": lambda: dropped(2),
        "autocast": in_half,
        "llama3": llama3,
        "llama3's window": lambda: llama3(window_size=(2, 0)),
        "a layout": lambda: registered(halves),
        "another of its name": lambda: registered(odd_first),
        "a batch": lambda: ring(q[None], k[None], v[None], cu_seqlens=None),
    }


def again(rank: int, world_size: int) -> tuple[list[str], int]:
    """What differs when all calls are made once more; how many of these were prepared again."""
    fresh = {}
    for name, call in calls().items():
        entry._ready_on_group.clear()
        fresh[name] = call()
    different = {tuple(x.double().flatten().tolist()) for x in fresh.values()}
    assert len(different) == len(fresh) - len(["window in a list", "a batch"])
    entry._ready_on_group.clear()
    with mock.patch.object(entry, "_KINDS", len(fresh)):
        first = {name: call() for name, call in calls().items()}
    with mock.patch.object(entry, "prepare_on_group", wraps=prepare.prepare_on_group) as prepared:
        second = {name: call() for name, call in calls().items()}
    wrong = [
        name
        for name, x in fresh.items()
        if not (torch.equal(x, first[name]) and torch.equal(x, second[name]))
    ]
    return wrong, prepared.call_count


def test_calls_that_are_alike_share_nothing_they_should_not(ranks: Any) -> None:
    """Only values in tensors and lists, of which nobody knows whether they changed, take a look."""
    for wrong, prepared in ranks(2).run(again):
        assert wrong == []
        assert prepared == len(["window in a list", "scale", "scale changed in place"])


def gone(rank: int, world_size: int) -> tuple[int, int]:
    """How many groups there are whose calls are known, before and after one is destroyed."""
    with mock.patch.object(entry, "_ready_on_group", WeakKeyDictionary()) as ready:
        group = dist.new_group(list(range(world_size)))
        x = torch.randn(1, 8, 2, 8)
        rfa.ring_flash_attn_func(x, x, x, group=group)
        before = len(ready)
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        gc.collect()
        return before, len(ready)


def test_a_group_can_go(ranks: Any) -> None:
    assert ranks(2).run(gone) == [(1, 0)] * 2
