"""Arenas: a pass has its own, and nothing that the user gets lies in one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_flash_attn.engine.attention import PreparedCall, attention
from ring_flash_attn.engine.entry import Options, make_problem
from ring_flash_attn.engine.executor import Pool
from ring_flash_attn.engine.prepare import prepare
from ring_flash_attn.plan.steps import Side

LENGTHS, WORLD = (17, 3, 40, 9, 1, 26), 4
QKV = tuple[Tensor, Tensor, Tensor]


class Shared(Pool):
    """Hands the same arenas out again, as soon as they are back, and full of NaNs."""

    def __init__(self) -> None:
        self.memory: set[int] = set()
        self.free: list[Tensor] = []
        self._lock = Lock()

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        with self._lock:
            for arena in self.free:
                if (len(arena), arena.dtype) == (size, dtype):
                    self.free = [each for each in self.free if each is not arena]
                    return arena
            arena = super().take(size, dtype, device).fill_(torch.nan)
            self.memory.add(arena.untyped_storage().data_ptr())
            return arena

    def give(self, arena: Tensor) -> None:
        with self._lock:
            self.free.append(arena.fill_(torch.nan))


def prepared_call(pool: Pool, **options: Any) -> tuple[PreparedCall, list[QKV]]:
    opts = Options(causal=True, kernel="reference")
    shape = {"layout": "balanced", "route": "ring", **options}
    problem = make_problem(
        shape["layout"],
        shape["route"],
        LENGTHS,
        LENGTHS,
        WORLD,
        opts,
        2,
        None,
        shape.get("sources"),
        shape.get("nodes"),
    )
    torch.manual_seed(0)
    shards = []
    for rank in range(WORLD):
        size = problem.size(Side.QUERY, rank)
        dtype = shape.get("dtype", torch.float32)
        q, k, v = (torch.randn(1, size, n, 8).to(dtype).requires_grad_() for n in (4, 2, 2))
        shards.append((q, k, v))
    return prepare(shape["route"], problem, dict(enumerate(shards)), opts, pool=pool), shards


def both(prepared: PreparedCall, shards: list[QKV], twice: bool = False) -> list[Tensor]:
    """Outputs and gradients."""
    results = attention(prepared, shards)
    loss = sum(out.square().sum() for out, _ in results)
    inputs = [x for shard in shards for x in shard]
    grads = torch.autograd.grad(loss, inputs, retain_graph=twice)
    if twice:
        again = torch.autograd.grad(loss, inputs)
        assert all(map(torch.equal, grads, again))
    return [x for result in results for x in result] + list(grads)


PLACES = [
    {},
    {"sources": 1},
    {"route": "all_gather", "layout": "zigzag"},
    {"route": "query_ring"},
    {"route": "all_to_all"},
    {"route": "all_to_all", "dtype": torch.bfloat16},  # final results are rounded
    {"route": "double_ring", "nodes": 2, "dtype": torch.bfloat16},
    {"route": "mesh", "nodes": 2, "sources": 1, "dtype": torch.bfloat16},
]


@pytest.mark.parametrize("where", PLACES, ids=str)
def test_nothing_that_the_user_gets_lies_in_an_arena(where: dict[str, Any]) -> None:
    expected = both(*prepared_call(Pool(), **where))
    pool = Shared()
    prepared, shards = prepared_call(pool, **where)
    for _ in range(2):  # the second time in the same arenas
        found = both(prepared, shards, twice=True)
        assert all(map(torch.equal, found, expected))
        assert pool.memory.isdisjoint(x.untyped_storage().data_ptr() for x in found)
    assert len(pool.memory) == len(pool.free)


def test_passes_of_one_plan_at_the_same_time_share_no_arena() -> None:
    expected = both(*prepared_call(Pool()))
    prepared, shards = prepared_call(Shared())
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: both(prepared, shards), range(12)))
    for each in found:
        assert all(map(torch.equal, each, expected))


def test_a_plan_keeps_the_programs_of_few_shapes() -> None:
    prepared, shards = prepared_call(Pool())
    lowered = prepared.ranks[0].forward.lowered
    attention(prepared, shards)
    assert len(lowered) == 1
    (program,) = lowered.values()
    attention(prepared, shards)
    assert list(lowered.values()) == [program]
    for batch in range(2, 20):
        attention(prepared, [tuple(x.expand(batch, -1, -1, -1) for x in each) for each in shards])
    assert len(lowered) <= 8
