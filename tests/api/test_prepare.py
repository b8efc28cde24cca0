"""prepare: plans ahead of the call, from any thread, and none that stay for ever."""

from __future__ import annotations

import gc
import random
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from ring_flash_attn import position_ids, prepare, virtual_ring_attention
from ring_flash_attn.engine import prepare as engine
from ring_flash_attn.plan.build import route_names
from ring_flash_attn.plan.layout import layout_names
from ring_flash_attn.plan.steps import Plan

CU_SEQLENS = [0, 7, 7, 31, 40]


@pytest.fixture(autouse=True)
def fresh_plans() -> Iterator[None]:
    engine._plans.clear()
    yield
    engine._plans.clear()


def refuse(*args: object) -> Plan:
    raise AssertionError(f"planned again: {args}")


@pytest.mark.parametrize("route", route_names())
@pytest.mark.parametrize("layout", layout_names())
def test_a_prepared_call_makes_no_plan(
    layout: str, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward; the result is that of a call that was not prepared."""
    q = torch.randn(40, 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = torch.randn(2, 40, 2, 8, dtype=torch.float64)
    options: dict[str, Any] = {"causal": True, "window_size": (9, 0), "layout": layout}
    if route == "all_gather":
        options["heads_k_stride"] = 1
    if route == "ring":
        options["sources_per_launch"] = 2
    options |= {"route": route, "cu_seqlens": CU_SEQLENS}
    expected = virtual_ring_attention(q, k, v, world_size=3, softcap=3.0, **options)
    (dq,) = torch.autograd.grad(expected.sum(), [q])
    engine._plans.clear()
    for rank in range(3):
        prepare(**options, nheads_k=2, rank=rank, world_size=3)
    monkeypatch.setattr(engine, "make_plan", refuse)
    out = virtual_ring_attention(q, k, v, world_size=3, softcap=3.0, **options)
    assert_close(out, expected, rtol=0, atol=0)
    assert_close(torch.autograd.grad(out.sum(), [q])[0], dq, rtol=0, atol=0)
    with pytest.raises(AssertionError, match="planned again"):
        virtual_ring_attention(q, k, v, world_size=3, **options | {"window_size": (8, 0)})


@pytest.mark.slow
def test_long_packs_are_prepared_some_steps_ahead() -> None:
    """Their plans are large, but do not drive out those of the step that is under way."""
    options: dict[str, Any] = {"layout": "zigzag", "route": "ring", "rank": 32, "world_size": 64}
    for number in range(4):
        lengths = [300 + 7 * (n + number) % 400 for n in range(1000)]
        prepare([0, *accumulate(lengths)], causal=True, nheads_k=8, **options)
    assert len(engine._plans) == 4


def test_threads_prepare_each_pack_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Counter[object] = Counter()
    make_plan = engine.make_plan

    def count(route: str, problem: Any, rank: int, backward: bool) -> Plan:
        made[problem.lengths_q, rank, backward] += 1
        return make_plan(route, problem, rank, backward)

    monkeypatch.setattr(engine, "make_plan", count)
    packs = [[0, *accumulate(range(1, 3 + n))] for n in range(30)]
    asked = [pack for pack in packs for _ in range(6)]
    random.Random(0).shuffle(asked)

    def ask(pack: list[int]) -> None:
        prepare(pack, layout="zigzag", route="ring", nheads_k=1, rank=1, world_size=4)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, asked))
    assert len(made) == 2 * len(packs)
    assert set(made.values()) == {1}


def traced() -> int:
    """Bytes that Python has allocated since tracing began."""
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.parametrize(
    ("count", "size", "most"),
    [
        (300, traced, 1 << 20),  # bytes; 64 plans have less
        pytest.param(10_000, sys.getallocatedblocks, 10_000, marks=pytest.mark.slow),
    ],
)
def test_memory_stays_flat_over_many_packs(
    count: int, size: Callable[[], int], most: int, request: pytest.FixtureRequest
) -> None:
    """Measured when all caches are full, and at the end."""
    draw = random.Random(1)

    def prepare_some(number: int) -> int:
        for _ in range(number):
            pack = [0, *accumulate(draw.randint(1, 60) for _ in range(3))]
            prepare(pack, layout="zigzag", route="ring", nheads_k=2, rank=1, world_size=2)
            position_ids("zigzag", cu_seqlens=pack, rank=1, world_size=2)
        gc.collect()
        return size()

    if size is traced:
        request.addfinalizer(tracemalloc.stop)
        tracemalloc.start()
    before = prepare_some(300)
    assert prepare_some(count) - before < most
    assert len(engine._plans) == 64


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cu_seqlens": [1, 2]}, "cu_seqlens"),
        ({"cu_seqlens_k": [0, 5]}, "documents"),
        ({"nheads_k": 0}, "nheads_k"),
        ({"layout": "spiral"}, "unknown layout"),
        ({"route": "carrier_pigeon"}, "unknown route"),
        ({"heads_k_stride": 1}, "heads_k_stride"),
        ({"route": "all_gather", "heads_k_stride": 3}, "heads_k_stride"),
        ({"sources_per_launch": 0}, "sources_per_launch"),
        ({"window_size": (1,)}, "window_size"),
        ({"causal": "yes"}, "causal"),
        ({"world_size": None}, "give both or neither"),
        ({"rank": 4}, "rank"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Any], words: str) -> None:
    right: dict[str, Any] = {"cu_seqlens": CU_SEQLENS, "layout": "zigzag", "route": "ring"}
    right |= {"nheads_k": 2, "rank": 1, "world_size": 4}
    with pytest.raises((ValueError, TypeError), match=words):
        prepare(**right | changes)
    assert not len(engine._plans)
