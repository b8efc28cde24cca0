"""Ranks that disagree: all get an error, and nobody waits for long."""

from __future__ import annotations

import functools
import os
import re
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor

from ring_flash_attn import (
    Balanced,
    flash_attn_func,
    llama3_flash_attn_prepare_cu_seqlens,
    llama3_flash_attn_varlen_func,
    ring_attention,
    ring_flash_attn_func,
    ring_flash_attn_varlen_func,
    stripe_flash_attn_func,
    unshard,
    zigzag_ring_flash_attn_func,
)
from ring_flash_attn.comm import agreement
from ring_flash_attn.engine import entry
from ring_flash_attn.kernels.base import Kernels
from ring_flash_attn.kernels.reference import ReferenceKernel


@pytest.fixture
def doomed() -> Iterator[Callable[[int], Ranks]]:
    """`ranks` of a test's own: where a connection breaks, gloo's threads spin until they end."""
    pools: dict[int, Ranks] = {}
    yield lambda world_size: pools.setdefault(world_size, Ranks(world_size))
    for pool in pools.values():
        pool.stop()


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
        "balanced": lambda: ring_attention(
            *x, layout=Balanced(ranks_per_node=2) if odd else "balanced", route="ring", group=group
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
    assert time.perf_counter() - started < 40, "nobody waits for a timeout"
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
            'sources_per_launch = "by size" on ranks 0, 2',
            "sources_per_launch = 3 on rank 1",
        ],
        "balanced": ['layout = "balanced" on ranks 0, 2', "ranks_per_node=2"],
        "form": ["batch = 1 on ranks 0, 2", "batch = null on rank 1", "documents = 2 on rank 1"],
    }
    assert set(ways) == set(said[0])
    for what, words in ways.items():
        for each in words:
            assert each in said[0][what], said[0][what]
        unrelated = {"softcap", "layout", "dtype"} - {what}
        if what not in ("form", "balanced"):
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
    with store_of(kind, port, rank, n):
        ring_flash_attn_func(*x, group=group)
        started = time.perf_counter()
        try:
            ring_flash_attn_func(*x, causal=rank == 0, group=group)
        except (ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}", time.perf_counter() - started
    raise AssertionError("no error")


def free_port() -> int:
    """A port that nobody listens to."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_a_call_that_only_one_rank_knows(doomed: Any, kind: str) -> None:
    """The rank that is new to it learns who posted what and who posted nothing, and nobody hangs.

    The others are in the call by then; they get the group's own time-out.
    """
    first, *others = doomed(3).run(known_here_new_there, kind, free_port())
    message, seconds = first
    assert message.startswith("ValueError"), message
    assert "rank 0 posted {" in message
    assert '"mask (left, right)": [null, 0]' in message
    assert "ranks 1, 2 posted nothing within 5 s" in message
    assert seconds < 10
    for message, seconds in others:
        assert message.startswith("RuntimeError")
        assert seconds < 30


def failed_before(rank: int, n: int) -> str:
    """Rank 2's own arguments are wrong, so that it never posts anything."""
    group = dist.new_group(list(range(n)), timeout=timedelta(seconds=4))
    x = tensors(1, 4, 2, 8)
    return error_of(lambda: ring_flash_attn_func(*x, -1.0 if rank == 2 else 0.0, group=group))


def test_a_rank_that_failed_before_is_named(ranks: Any) -> None:
    messages = ranks(3).run(failed_before)
    assert "dropout_p" in messages[2]
    for message in messages[:2]:
        assert "rank 2 posted nothing within 4 s" in message
        assert "ranks 0, 1 posted {" in message


def retried(rank: int, n: int, port: int) -> str:
    """Rank 2 is wrong once; then everybody makes the same call. "" if that works."""
    group = dist.new_group(list(range(n)), timeout=timedelta(seconds=4))
    x = tensors(1, 4, 2, 8)
    with store_of("tcp", port, rank, n):
        error_of(lambda: ring_flash_attn_func(*x, -1.0 if rank == 2 else 0.0, group=group))
        dist.barrier()
        if rank < 2:
            time.sleep(0.5)  # rank 2 is first, and must not read what the others posted before
        try:
            ring_flash_attn_func(*x, softcap=3.0, group=group)
        except (ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return ""


def test_a_call_can_be_made_again_after_a_failure(ranks: Any) -> None:
    """What ranks posted in the round that failed is not taken for an answer in the next."""
    assert ranks(3).run(retried, free_port()) == ["", "", ""]


def late(rank: int, n: int, port: int) -> list[str]:
    """Rank 1 comes to a call of its own later than PATIENCE; what rank 0 is warned of."""
    group = dist.new_group(list(range(n)))
    with (
        store_of("tcp", port, rank, n),
        mock.patch.object(agreement, "PATIENCE", timedelta(seconds=0.5)),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        if rank == 1:
            time.sleep(3)
        ring_flash_attn_func(*tensors(1, 4, 2, 8), group=group)
    return [str(warning.message) for warning in caught]


def test_a_late_rank_is_waited_for(ranks: Any) -> None:
    (warning,), none = ranks(2).run(late, free_port())
    assert "rank 1 of the group did not come to this call" in warning
    assert "timeout of 1800 s" in warning, "the group's own"
    assert none == []


def late_and_impatient(rank: int, n: int, port: int) -> list[bool]:
    """Warnings are errors on rank 0, and rank 1 is late; then both make the same call."""
    group = dist.new_group(list(range(n)), timeout=timedelta(seconds=10))
    with (
        store_of("tcp", port, rank, n),
        mock.patch.object(agreement, "PATIENCE", timedelta(seconds=0.3)),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        done = []
        for softcap in (1.0, 2.0):
            try:
                if rank == 0 or softcap == 2.0:
                    ring_flash_attn_func(*tensors(1, 4, 2, 8), softcap=softcap, group=group)
                done.append(True)
            except RuntimeWarning:
                done.append(False)
            dist.barrier()
    return done


def test_who_stops_waiting_takes_its_word_back(ranks: Any) -> None:
    assert ranks(2).run(late_and_impatient, free_port()) == [[False, True], [True, True]]


def in_two_threads(rank: int, n: int, port: int) -> list[str]:
    """Two groups, each in a thread of its own; the two ranks begin with different ones."""
    store = dist.TCPStore("127.0.0.1", port, n, is_master=rank == 0)
    groups = [dist.new_group(list(range(n)), timeout=timedelta(seconds=20)) for _ in range(2)]
    names = {id(group): str(i) for i, group in enumerate(groups)}
    said = ["", ""]

    def use(i: int) -> None:
        time.sleep(0.5 * (i != rank))
        try:
            ring_flash_attn_func(*tensors(1, 4, 2, 8), group=groups[i])
        except Exception as error:
            said[i] = f"{type(error).__name__}: {error}"

    def store_of_group(group: dist.ProcessGroup) -> dist.Store:
        return dist.PrefixStore(names[id(group)], store)

    with mock.patch.object(dist.distributed_c10d, "_get_process_group_store", store_of_group):
        threads = [threading.Thread(target=use, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        dist.barrier()
    return said


def test_a_thread_that_waits_does_not_block_another_group(ranks: Any) -> None:
    assert ranks(2).run(in_two_threads, free_port()) == [["", ""], ["", ""]]


def many_calls(rank: int, n: int) -> tuple[int, int]:
    """Signatures remembered, and rounds, after 3 calls, a forgotten one and a known one."""
    group = dist.new_group(list(range(n)))
    with mock.patch.object(agreement, "_SIGNATURES", 2):
        for softcap in (1.0, 2.0, 3.0, 1.0, 3.0):
            ring_flash_attn_func(*tensors(1, 4, 2, 8), softcap=softcap, group=group)
    known = agreement._known[group]
    return len(known.signatures), known.rounds


def test_old_calls_are_forgotten(ranks: Any) -> None:
    assert ranks(2).run(many_calls) == [(2, 4)] * 2


class Failing:
    """The reference kernel, until its n-th launch."""

    def __init__(self, launches: int, error: type[BaseException] = MemoryError) -> None:
        self._left, self._error = launches, error
        self._forward = functools.partial(ReferenceKernel.forward, ReferenceKernel())
        self.name = "failing"

    def why_not(self, call: Any) -> list[str]:
        return []

    def forward(self, *args: Any) -> None:
        if self._left == 0:
            raise self._error("no room for this launch")
        self._left -= 1
        self._forward(*args)


def after_a_failure(
    rank: int,
    n: int,
    launches: list[int],
    mode: str,
    error: type[BaseException] = MemoryError,
) -> list[str]:
    """Errors of a call that fails on rank r at launch launches[r], and of two more calls."""
    group = dist.new_group(list(range(n)), timeout=timedelta(seconds=5))
    whole = [torch.randn(1, 6 * n, 2, 8, generator=seeded(i)) for i in range(3)]
    x = [t.chunk(n, 1)[rank].contiguous() for t in whole]
    said = []
    options: dict[str, Any] = {"layout": "contiguous", "route": "ring", "sources_per_launch": 1}
    ring_attention(*x, **options, group=group)
    for fails in (True, False, False):
        if rank:  # others know the call
            entry._ready_on_group.clear()
        kernel = Failing(launches[rank], error)
        forward = mock.patch.object(ReferenceKernel, "forward", staticmethod(kernel.forward))
        environment = mock.patch.dict(os.environ, {"RFA_CHECK": mode})
        with environment, forward if fails else nullcontext():
            try:
                out = ring_attention(*x, **options, group=group)
            except (ValueError, RuntimeError, error) as raised:
                said.append(f"{type(raised).__name__}: {raised}")
            else:
                want = flash_attn_func(*whole).chunk(n, 1)[rank]
                said.append("" if torch.allclose(out, want, atol=1e-5) else "wrong")
    return said


def seeded(seed: int) -> torch.Generator:
    """The same numbers on all ranks."""
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("launch", [0, 1, 2])
def test_a_call_that_fails_on_all_ranks_leaves_nothing_behind(ranks: Any, launch: int) -> None:
    """Messages under way are drained, so the next call gets its own."""
    for said in ranks(3).run(after_a_failure, [launch] * 3, "on"):
        assert "no room" in said[0]
        assert said[1:] == ["", ""]


def test_calls_after_one_that_failed_in_different_places_are_refused(doomed: Any) -> None:
    """Rank 0 has posted one step less than the others: what they sent is still under way."""
    for said in doomed(3).run(after_a_failure, [0, 1, 1], "on"):
        for message in said[1:]:
            assert "the call before failed" in message
            assert "make a new process group" in message


def test_a_call_that_was_interrupted_is_not_drained(doomed: Any) -> None:
    """Whoever stops a program does not want to wait: its messages are still under way."""
    for said in doomed(3).run(after_a_failure, [1, 1, 1], "on", KeyboardInterrupt):
        assert said[0].startswith("KeyboardInterrupt")
        assert all("make a new process group" in message for message in said[1:])
    alone = doomed(1).run(after_a_failure, [0], "on", KeyboardInterrupt)
    assert alone[0][1:] == ["", ""], "no messages, nothing under way"


def test_without_the_check_a_group_with_messages_under_way_is_refused(doomed: Any) -> None:
    for said in doomed(3).run(after_a_failure, [0, 0, 0], "off"):
        assert all("make a new process group" in message for message in said[1:])


def backward_after_a_failure(rank: int, n: int) -> tuple[bool, bool]:
    """Whether a backward pass is right after a call that failed, and what is gathered after it."""
    group = dist.new_group(list(range(n)), timeout=timedelta(seconds=5))
    x = [t.requires_grad_() for t in tensors(1, 6, 2, 8)]
    out = ring_flash_attn_func(*x, group=group)
    with (
        mock.patch(
            "ring_flash_attn.engine.prepare.choose_kernels", return_value=Kernels(*[Failing(0)] * 2)
        ),
        pytest.raises(MemoryError),
    ):
        ring_attention(*x, layout="contiguous", route="ring", sources_per_launch=1, group=group)
    (dv,) = torch.autograd.grad(out.sum(), x[2], retain_graph=True)
    total = dv.sum()
    dist.all_reduce(total, group=group)
    whole = unshard(torch.full((1, 2), rank), "contiguous", group=group)
    gathered = whole.tolist() == [[r for r in range(n) for _ in range(2)]]
    return abs(float(total) - n * out.numel()) < 1e-2, gathered


def test_a_backward_pass_after_a_failure_asks_the_others_too(ranks: Any) -> None:
    assert ranks(3).run(backward_after_a_failure) == [(True, True)] * 3


def own_message(rank: int, n: int) -> tuple[bool, bool]:
    """A user's own message is under way while attention runs: does each get its own?"""
    group = dist.new_group(list(range(n)))
    whole = [torch.randn(1, 8 * n, 2, 8, generator=seeded(i)) for i in range(3)]
    x = [t.chunk(n, 1)[rank].contiguous() for t in whole]
    received = torch.zeros(8, 1, 2, 8)
    request = dist.irecv(received, 1, group=group) if rank == 0 else None
    out = ring_flash_attn_func(*x, group=group)
    if request is None:
        dist.send(torch.full_like(received, 7.0), 0, group=group)
    else:
        request.wait()
    want = flash_attn_func(*whole).chunk(n, 1)[rank]
    return torch.allclose(out, want, atol=1e-5), rank > 0 or bool((received == 7).all())


def test_messages_of_users_are_not_taken_for_ours(ranks: Any) -> None:
    assert ranks(2).run(own_message) == [(True, True)] * 2


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


def parts_of_llama3(rank: int, n: int, mode: str, streams: list[list[int]]) -> str:
    """What llama3's function says of ranks that have been told of these streams; "" if nothing."""
    group = dist.new_group(list(range(n)))
    documents = llama3_flash_attn_prepare_cu_seqlens(
        torch.tensor(streams[rank]), causal=True, rank=rank, world_size=n
    )
    *lengths, local_k_slice = documents
    with mock.patch.dict(os.environ, {"RFA_CHECK": mode}):
        try:
            for _ in range(2):
                llama3_flash_attn_varlen_func(
                    *tensors(4, 2, 8), *lengths, 2, local_k_slice, causal=True, group=group
                )
        except ValueError as error:
            return str(error)
    return ""


def test_the_check_can_compare_parts_of_documents(ranks: Any) -> None:
    pool = ranks(3)
    same = [[0, 2, 9, 9, 12]] * 3
    assert pool.run(parts_of_llama3, "values", same) == [""] * 3
    others = [[0, 2, 12], [0, 2, 12], [0, 2, 3, 12]]
    assert pool.run(parts_of_llama3, "on", others) == [""] * 3
    first, *rest = pool.run(parts_of_llama3, "values", others)
    assert re.search("for rank 2 one begins at token 3 .*, for rank 0 none does", first)
    assert rest == [first, first]
    for streams in ([[0, 3, 12], [0, 12], [0, 12]], [[0, 12], [0, 12], [0, 8, 12]]):
        said = pool.run(parts_of_llama3, "values", streams)
        assert said[0] == said[1] == said[2]
        assert ("different documents" in said[0]) == (streams[2] == [0, 12]), said


def test_an_unknown_mode_is_an_error(ranks: Any) -> None:
    for said in ranks(2).run(with_mode, "maybe", "same documents"):
        assert re.search("RFA_CHECK='maybe'.*off.*on.*values", said)
