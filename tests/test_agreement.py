"""Ranks that disagree: all get an error, and nobody waits for long."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_flash_attn import (
    ring_attention,
    ring_flash_attn_func,
    ring_flash_attn_varlen_func,
    stripe_flash_attn_func,
    zigzag_ring_flash_attn_func,
)
from ring_flash_attn.comm import agreement


def error_of(call: Callable[[], Any]) -> str:
    """The message of a ValueError; AssertionError otherwise."""
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("no error")


def tensors(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v of one shape."""
    return [torch.randn(shape, dtype=dtype) for _ in range(3)]


def disagree(rank: int, n: int) -> dict[str, str]:
    """Rank 1 does something else, one thing at a time; then everybody does the same."""
    group = dist.new_group(list(range(n)))
    odd = rank == 1
    x = tensors(1, 8, 4, 8)
    cu = torch.tensor([0, 2, 8])
    grads = [t.clone().requires_grad_(odd) for t in x]
    calls: dict[str, Callable[[], Any]] = {
        "seqlen_q": lambda: ring_flash_attn_func(*tensors(1, 6 if odd else 8, 4, 8), group=group),
        "batch": lambda: ring_flash_attn_func(*tensors(2 if odd else 1, 8, 4, 8), group=group),
        "nheads": lambda: ring_flash_attn_func(*tensors(1, 8, 2 if odd else 4, 8), group=group),
        "headdim": lambda: ring_flash_attn_func(*tensors(1, 8, 4, 6 if odd else 8), group=group),
        "dtype": lambda: ring_flash_attn_func(
            *tensors(1, 8, 4, 8, dtype=torch.bfloat16 if odd else torch.float16), group=group
        ),
        "mask": lambda: ring_flash_attn_func(*x, causal=odd, group=group),
        "window": lambda: ring_flash_attn_func(*x, window_size=(3, rank), group=group),
        "softmax_scale": lambda: ring_flash_attn_func(*x, softmax_scale=1.0 + odd, group=group),
        "softcap": lambda: ring_flash_attn_func(*x, softcap=float(odd), group=group),
        "dropout_p": lambda: ring_flash_attn_func(*x, 0.1 + 0.1 * odd, group=group),
        "sink": lambda: ring_flash_attn_func(*x, sink=torch.ones(4) if odd else None, group=group),
        "alibi_slopes": lambda: ring_flash_attn_func(
            *x, alibi_slopes=torch.ones(4) if odd else None, group=group
        ),
        "deterministic": lambda: ring_flash_attn_func(*x, deterministic=odd, group=group),
        "gradients": lambda: ring_flash_attn_func(*grads, group=group),
        "layout": lambda: (stripe_flash_attn_func if odd else zigzag_ring_flash_attn_func)(
            *x, group=group
        ),
        "route": lambda: ring_attention(
            *x, layout="zigzag", route="ring" if odd else "all_gather", group=group
        ),
        "sources": lambda: ring_attention(
            *x, layout="zigzag", route="ring", sources_per_launch=3 if odd else None, group=group
        ),
        "form": lambda: (
            ring_flash_attn_varlen_func(*(t[0] for t in x), cu, 6, group=group)
            if odd
            else ring_flash_attn_func(*x, group=group)
        ),
    }
    said = {what: error_of(call) for what, call in calls.items()}
    ring_flash_attn_func(*x, group=group)
    return said


def test_ranks_that_disagree_all_get_an_error(ranks: Any) -> None:
    """Within seconds, and each says who has what."""
    started = time.perf_counter()
    said = ranks(3).run(disagree)
    assert time.perf_counter() - started < 40, "as long as nobody waits for the other's 60 s"
    assert said[0] == said[1] == said[2], "the same words everywhere"
    ways = {
        "seqlen_q": ["seqlen_q = [24] on ranks 0, 2", "seqlen_q = [18] on rank 1"],
        "batch": ["batch = 1 on ranks 0, 2", "batch = 2 on rank 1"],
        "nheads": ["nheads_k = [4, 4] on ranks 0, 2", "nheads_k = [2, 2] on rank 1"],
        "headdim": ["[8, 8] on ranks 0, 2", "[6, 6] on rank 1"],
        "dtype": ['"torch.float16" on ranks 0, 2', '"torch.bfloat16" on rank 1'],
        "mask": ["[null, null] on ranks 0, 2", "[null, 0] on rank 1"],
        "window": ["[3, 0] on rank 0", "[3, 1] on rank 1", "[3, 2] on rank 2"],
        "softmax_scale": ["softmax_scale = 1.0 on ranks 0, 2", "softmax_scale = 2.0 on rank 1"],
        "softcap": ["softcap = 0.0 on ranks 0, 2", "softcap = 1.0 on rank 1"],
        "dropout_p": ["dropout_p = 0.1 on ranks 0, 2", "dropout_p = 0.2 on rank 1"],
        "sink": ["sink = false on ranks 0, 2", "sink = true on rank 1"],
        "alibi_slopes": ["alibi_slopes = null on ranks 0, 2", "alibi_slopes = [4] on rank 1"],
        "deterministic": ["deterministic = false on ranks 0, 2", "deterministic = true on rank 1"],
        "gradients": ["gradients = false on ranks 0, 2", "gradients = true on rank 1"],
        "layout": ['layout = "zigzag" on ranks 0, 2', 'layout = "stripe" on rank 1'],
        "route": ['route = "all_gather" on ranks 0, 2', 'route = "ring" on rank 1'],
        "sources": [
            "sources_per_launch = 4 on ranks 0, 2",
            "sources_per_launch = 3 on rank 1",
        ],
        "form": ["batch = 1 on ranks 0, 2", "batch = null on rank 1", "documents = 2 on rank 1"],
    }
    assert set(ways) == set(said[0])
    for what, words in ways.items():
        for each in words:
            assert each in said[0][what], said[0][what]
        unrelated = {"softcap", "layout", "dtype"} - {what}
        if what != "form":
            assert not any(f"{field} =" in said[0][what] for field in unrelated), "only differences"


@contextmanager
def store_of(kind: str, port: int, rank: int, n: int) -> Iterator[None]:
    """The group's store is of some kind: the pool's own, in a file, or one over TCP."""
    if kind == "file":
        yield
        return
    store = dist.TCPStore("127.0.0.1", port, n, is_master=rank == 0)
    original = dist.distributed_c10d._get_process_group_store
    dist.distributed_c10d._get_process_group_store = lambda group: store
    try:
        yield
        dist.barrier()  # the master must not go before the others have read
    finally:
        dist.distributed_c10d._get_process_group_store = original


def known_here_new_there(rank: int, n: int, kind: str, port: int) -> tuple[str, float]:
    """Rank 0 makes a new call while the others repeat a known one."""
    group = dist.new_group(list(range(n)), timeout=timedelta(seconds=5))
    x = tensors(1, 4, 2, 8)
    patience = agreement.PATIENCE
    with store_of(kind, port, rank, n):
        ring_flash_attn_func(*x, group=group)
        agreement.PATIENCE = timedelta(seconds=2)
        started = time.perf_counter()
        try:
            ring_flash_attn_func(*x, causal=rank == 0, group=group)
        except (ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}", time.perf_counter() - started
        finally:
            agreement.PATIENCE = patience
    raise AssertionError("no error")


def free_port() -> int:
    """A port that nobody listens to."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_a_call_that_only_one_rank_knows(ranks: Any, kind: str) -> None:
    """The rank that is new to it learns who posted what and who posted nothing, and nobody hangs.

    The others are in the call by then; they get the group's own time-out.
    """
    first, *others = ranks(3).run(known_here_new_there, kind, free_port())
    message, seconds = first
    assert message.startswith("ValueError"), message
    assert "rank 0 posted {" in message
    assert '"mask (left, right)": [null, 0]' in message
    assert "ranks 1, 2 posted nothing within 2 s" in message
    assert seconds < 10
    for message, seconds in others:
        assert message.startswith("RuntimeError")
        assert seconds < 30


def failed_before(rank: int, n: int) -> str:
    """Rank 2's own arguments are wrong, so that it never posts anything."""
    group = dist.new_group(list(range(n)))
    patience = agreement.PATIENCE
    agreement.PATIENCE = timedelta(seconds=1)
    x = tensors(1, 4, 2, 8)
    try:
        return error_of(lambda: ring_flash_attn_func(*x, -1.0 if rank == 2 else 0.0, group=group))
    finally:
        agreement.PATIENCE = patience


def test_a_rank_that_failed_before_is_named(ranks: Any) -> None:
    messages = ranks(3).run(failed_before)
    assert "dropout_p" in messages[2]
    for message in messages[:2]:
        assert "rank 2 posted nothing within 1 s" in message
        assert "ranks 0, 1 posted {" in message


def retried(rank: int, n: int, port: int) -> str:
    """Rank 2 is wrong once; then everybody makes the same call. "" if that works."""
    group = dist.new_group(list(range(n)), timeout=timedelta(seconds=5))
    patience = agreement.PATIENCE
    agreement.PATIENCE = timedelta(seconds=2)
    x = tensors(1, 4, 2, 8)
    try:
        with store_of("tcp", port, rank, n):
            error_of(lambda: ring_flash_attn_func(*x, -1.0 if rank == 2 else 0.0, group=group))
            dist.barrier()
            try:
                ring_flash_attn_func(*x, group=group)
            except (ValueError, RuntimeError) as error:
                return f"{type(error).__name__}: {error}"
            return ""
    finally:
        agreement.PATIENCE = patience


def test_a_call_can_be_made_again_after_a_failure(ranks: Any) -> None:
    """What ranks posted in the round that failed is not taken for an answer in the next."""
    assert ranks(3).run(retried, free_port()) == ["", "", ""]


def cached(rank: int, n: int) -> tuple[int, int, int]:
    """Rounds over the store after a call, after the same call again, and after a new one."""
    group = dist.new_group(list(range(n)))
    rounds = []
    for causal in (False, False, True):
        x = tensors(1, 4, 2, 8)  # new tensors and new values are the same call
        ring_flash_attn_func(*x, causal=causal, group=group)
        rounds.append(agreement._known[group].rounds)
    return rounds[0], rounds[1], rounds[2]


def test_a_known_call_costs_nothing(ranks: Any) -> None:
    assert ranks(2).run(cached) == [(1, 1, 2)] * 2


def with_mode(rank: int, n: int, mode: str, call: str) -> str:
    """What a call says under RFA_CHECK=mode; "" if nothing."""
    group = dist.new_group(list(range(n)))
    x = tensors(8, 2, 4)
    lengths = {  # so many that shards travel whole, whatever they are
        "other documents": torch.tensor([0, 1 + rank, *range(2, 9)]),
        "same documents": torch.tensor([0, 3, 8]),
        "other scale": torch.tensor([0, 3, 8]),
    }[call]
    scale = 1.0 + rank if call == "other scale" else 1.0
    os.environ["RFA_CHECK"] = mode
    try:
        ring_flash_attn_varlen_func(*x, lengths, 8, softmax_scale=scale, group=group)
    except ValueError as error:
        return str(error)
    finally:
        del os.environ["RFA_CHECK"]
    return ""


def test_the_check_can_be_turned_off(ranks: Any) -> None:
    assert ranks(2).run(with_mode, "off", "other scale") == ["", ""]
    assert all("softmax_scale" in said for said in ranks(2).run(with_mode, "on", "other scale"))


def test_the_check_can_compare_documents(ranks: Any) -> None:
    assert ranks(2).run(with_mode, "on", "other documents") == ["", ""]
    for said in ranks(2).run(with_mode, "values", "other documents"):
        assert re.search(r"cu_seqlens = .* on rank 0", said)
        assert re.search(r"cu_seqlens = .* on rank 1", said)
    assert ranks(2).run(with_mode, "values", "same documents") == ["", ""]


def test_an_unknown_mode_is_an_error(ranks: Any) -> None:
    for said in ranks(2).run(with_mode, "maybe", "same documents"):
        assert re.search("RFA_CHECK='maybe'.*off.*on.*values", said)
