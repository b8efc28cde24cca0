"""Ranges for profilers: there is one for every pass, step, transfer, launch and merge, or none."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from plain_library import register_plain
from replays import ranks
from torch.profiler import ProfilerActivity, profile

import ring_flash_attn as rfa
from ring_flash_attn import trace
from ring_flash_attn.api.virtual import virtual_ring_attention
from ring_flash_attn.trace import span, tracing


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of NVTX ranges in the order in which they begin; "" where one ends."""
    seen: list[str] = []
    monkeypatch.setattr(trace, "_has_nvtx", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append(""))
    yield seen
    depth = 0
    for name in seen:
        depth += 1 if name else -1
        assert depth >= 0
        assert name.isascii(), "torch.profiler calls anything else unknown"
    assert depth == 0


def begun(pushed: list[str], *words: str) -> list[str]:
    """Ranges whose name begins with one of these words."""
    return [name for name in pushed if name.startswith(words)]


def test_while_they_are_off_nothing_is_made(pushed: list[str]) -> None:
    def name(part: object) -> str:
        raise AssertionError("nobody asked for it")

    with span(name, 1) as nothing:
        assert nothing is None
    assert span("{.missing}", object()) is span("something else")
    ranks().rank(0, None).both()
    assert pushed == []


@pytest.mark.parametrize(("value", "users"), [("1", 1), ("", 0), ("0", 0), (None, 0)])
def test_the_environment_turns_them_on(
    monkeypatch: pytest.MonkeyPatch, value: str | None, users: int
) -> None:
    monkeypatch.delenv("RFA_NVTX", raising=False)
    if value is not None:
        monkeypatch.setenv("RFA_NVTX", value)
    assert runpy.run_path(trace.__file__)["_users"] == users


def test_they_are_off_again_after_an_error(pushed: list[str]) -> None:
    def fails() -> None:
        with tracing(), span("outer {}", 1), span(lambda: "inner"), span(lambda: ""):
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert pushed == ["outer 1", "inner", "", ""]
    assert trace._users == 0


def test_ranges_of_a_rank(pushed: list[str]) -> None:
    """Rank 2 of 3: all keys of others in one launch."""
    rank = ranks(sources_per_launch=2).rank(2, None)
    with tracing():
        rank.both()
    kernel = "zigzag x ring x reference"
    assert begun(pushed, "forward", "backward") == [f"forward: {kernel}", f"backward: {kernel}"]
    paths = rank.prepared.ranks[0].forward, rank.prepared.ranks[0].backward
    steps = [step for path in paths for step in path.plan.steps]
    assert len(begun(pushed, "step")) == len(steps)
    assert begun(pushed, "step 0") == ["step 0: own keys"] * 2
    assert "step 1: keys of ranks 0, 1" in pushed
    assert "step 2: transfers alone" in pushed
    launches = sum(len(step.work) for step in steps)
    assert len(begun(pushed, "reference")) == launches
    assert begun(pushed, "reference f") == ["reference forward on rank 2"] * 2
    moves = [bool(each) for path in paths for each in path.moves]
    assert len(begun(pushed, "rank 2 waits")) == sum(moves)
    assert len(begun(pushed, "rank 2 posts")) == sum(moves)
    assert pushed.count("delta") == 1


def test_a_post_says_what_it_sends(pushed: list[str]) -> None:
    rank = ranks(world_size=2, causal=False).rank(0, None)
    with tracing():
        rank.forward()
    size = 2 * 2 * 20 * 2 * 8 * 2 / 1e6  # k and v, both ways: rows, heads, headdim, bytes
    said = f"rank 0 posts the transfers of step 0: 1 sends, 1 receives, {size:.3g} MB"
    assert begun(pushed, "rank 0 posts") == [said]


@pytest.mark.parametrize(("route", "word"), [("query_ring", "queries"), ("all_gather", "keys")])
def test_steps_say_whose_shards_they_are_about(pushed: list[str], route: str, word: str) -> None:
    with tracing():
        ranks(route=route, causal=False).rank(1, None).forward()
    assert any(re.match(rf"step \d: {word} of ranks? ", name) for name in pushed)


def test_virtual_ranks_merge_and_add(pushed: list[str]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 24, 2, 8, requires_grad=True) for _ in range(3))
    plain = virtual_ring_attention(q, k, v, world_size=3, layout="stripe", route="query_ring")
    with tracing():
        traced = virtual_ring_attention(q, k, v, world_size=3, layout="stripe", route="query_ring")
        traced.sum().backward()
    assert torch.equal(plain, traced)
    assert begun(pushed, "forward") == ["forward: stripe x query_ring x reference"]
    assert "step 1 of 3 virtual ranks" in pushed
    assert pushed.count("merge") >= 3
    assert pushed.count("add gradients") >= 3
    assert {f"reference forward on rank {rank}" for rank in range(3)} <= set(pushed)


def test_one_device(pushed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that does all at once has one range for its launch."""
    name = register_plain(monkeypatch).name
    q, k, v = (torch.randn(1, 12, 2, 8, dtype=torch.bfloat16) for _ in range(3))
    q.requires_grad_()
    with tracing():
        rfa.flash_attn_func(q, k, v, kernel="plain").sum().backward()
    assert [each for each in pushed if each] == [
        f"forward: one device x {name}",
        f"{name} forward",
        f"backward: one device x {name}",
        "delta",
        f"{name} backward",
    ]


def test_torch_profiler_has_them_too() -> None:
    """On threads of autograd as well, and without a GPU."""
    q, k, v = (torch.randn(1, 12, 2, 8, requires_grad=True) for _ in range(3))
    with profile(activities=[ProfilerActivity.CPU]) as recorded, tracing():
        rfa.flash_attn_func(q, k, v, kernel="reference").sum().backward()
    names: list[Any] = [event.name for event in recorded.events()]
    for direction in ("forward", "backward"):
        assert f"{direction}: one device x reference" in names
        assert f"reference {direction} on rank 0" in names
