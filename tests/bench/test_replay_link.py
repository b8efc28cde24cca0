"""The emulated link: a post takes as long as it should, and no longer where work hides it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch

from ring_flash_attn.bench import Link, Topology
from ring_flash_attn.bench.replays import emulated
from ring_flash_attn.bench.replays.emulated import CudaLink, EmulatedRanks, RandomData, Recorder
from ring_flash_attn.comm import Message

CPU = torch.device("cpu")


def received(*shape: int, dtype: torch.dtype = torch.float32, peer: int = 1) -> Message:
    return Message(torch.full(shape, torch.nan, dtype=dtype), peer, receive=True)


def sent(*shape: int, peer: int = 1) -> Message:
    return Message(torch.zeros(shape), peer, receive=False)


def test_a_post_takes_its_time_and_posts_queue_up() -> None:
    link = Link("slow", 1e6, 5e-3)
    transport = EmulatedRanks(CPU, link, RandomData(CPU)).transport()
    start = time.perf_counter()
    first = received(1000, 1, 5, 1)  # 20 kB: 20 ms, and 5
    transport.post([first, sent(100)])
    transport.post([received(100, 1, 1, 1), sent(7500)])  # 30 kB: 30 ms, and 5
    transport.post([])
    transport.wait()
    passed = time.perf_counter() - start
    assert passed >= 0.060
    assert first.tensor.isfinite().all()
    assert first.tensor.std() > 0.5
    start = time.perf_counter()
    transport.wait()  # nothing is under way
    assert time.perf_counter() - start < 0.03


def test_a_transfer_is_hidden_behind_work() -> None:
    link = Link("slow", 1e6, 0.2)
    transport = EmulatedRanks(CPU, link, RandomData(CPU)).transport()
    start = time.perf_counter()
    transport.post([received(1, 1, 1, 1)])
    time.sleep(0.2)
    transport.wait()
    assert 0.2 <= time.perf_counter() - start < 0.35


def test_two_ends_share_a_link_and_wait_for_their_own() -> None:
    others = EmulatedRanks(CPU, Link("slow", 1e6, 0.2), RandomData(CPU))
    one, other = others.transport(), others.transport()
    start = time.perf_counter()
    one.post([received(1, 1, 1, 1)])
    other.post([received(1, 1, 1, 1)])
    one.wait()
    assert 0.2 <= time.perf_counter() - start < 0.38
    other.wait()
    assert time.perf_counter() - start >= 0.4


NODES = Topology("nodes", Link("in", 1e6, 0.05), Link("out", 1e5, 0.1), 2)


def test_both_levels_work_at_once() -> None:
    """Rank 3's node is {2, 3}: 100 ms inside, 300 ms outside."""
    others = EmulatedRanks(CPU, NODES, RandomData(CPU), rank=3)
    others.recorder = recorder = Recorder(CPU)
    transport = others.transport()
    arriving = [received(12_500, 1, 1, 1, peer=2), received(5000, 1, 1, 1, peer=0)]
    start = time.perf_counter()
    transport.post([*arriving, sent(100, peer=2), sent(10, peer=5)])
    transport.wait()
    assert 0.3 <= time.perf_counter() - start < 0.39
    assert all(each.tensor.isfinite().all() for each in arriving)
    assert recorder.costs["forward"] == {
        "launches": 0,
        "posts": 1,
        "sent": 440,
        "received": 70_000,
    }
    lengths = {bar.lane: bar.end - bar.start for bar in recorder.bars()}
    assert lengths == pytest.approx({"transfers": 100, "network": 300}, abs=5)


def test_a_long_transfer_between_nodes_does_not_hold_up_those_inside() -> None:
    others = EmulatedRanks(CPU, NODES, RandomData(CPU), rank=3)
    far, near = others.transport(), others.transport()
    start = time.perf_counter()
    far.post([received(5000, 1, 1, 1, peer=0)])  # 300 ms
    near.post([received(12_500, 1, 1, 1, peer=2)])  # 100 ms
    near.wait()
    assert 0.1 <= time.perf_counter() - start < 0.28
    near.post([received(1, 1, 1, 1, peer=0)])  # behind the first
    near.wait()
    assert time.perf_counter() - start >= 0.4


def test_removed_messages_fill_a_buffer_once() -> None:
    transport = EmulatedRanks(CPU, None, RandomData(CPU)).transport()
    message, rows = received(4, 1, 2, 3), received(4, 1, 2)
    transport.post([message, rows])
    transport.wait()
    assert message.tensor.isfinite().all()
    assert 3 < rows.tensor.min() < rows.tensor.max() < 15  # as a log-sum-exp
    message.tensor.fill_(7)
    rows.tensor.fill_(-torch.inf)
    transport.post([message, rows])
    transport.wait()
    assert (message.tensor == 7).all()
    assert rows.tensor.isfinite().all()  # a state may have been there


class FakeStream:
    """Notes what is asked of it, and what is queued while it is the current one."""

    def __init__(self, name: str, log: list[tuple[object, ...]]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self._log.append((self.name, "waits for", other.name))

    def wait_event(self, event: FakeEvent) -> None:
        self._log.append((self.name, "waits for", event.after))

    def record_event(self) -> FakeEvent:
        return FakeEvent(len(self._log))


@dataclass(frozen=True)
class FakeEvent:
    """Stands behind so many entries of the log."""

    after: int


def test_what_a_gpu_is_asked_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of events, on streams that are none."""
    log: list[tuple[object, ...]] = []
    main, side, copies = (FakeStream(name, log) for name in ("main", "side", "copies"))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append(("main", "pauses")))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    link = CudaLink.__new__(CudaLink)
    link._device, link._timing, link._copying = CPU, side, copies  # type: ignore[assignment]
    link._lane = "transfers"
    link._posted = link._awaited = 0
    monkeypatch.setattr(emulated, "_spin", lambda s: log.append(("side", "spins", s)))
    monkeypatch.setattr(emulated, "link_of", lambda device, level: link)
    others = EmulatedRanks(CPU, Link("own", 1e3, 1.0), RandomData(CPU))
    one, other = others.transport(), others.transport()
    message = received(2, 1, 1, 1)
    one.post([message])  # 8 bytes
    one.post([sent(500)])  # 2000 bytes
    other.post([received(1, 1, 1, 1)])  # 4 bytes
    one.wait()
    other.wait()
    mixed = [received(1, 1, 1, 1), received(1, 1, 1, 2, dtype=torch.bfloat16)]
    mixed.append(received(1, 1, 1, 1))
    other.post(mixed)  # 12 bytes

    def of_post(begin: int, seconds: float) -> list[tuple[object, ...]]:
        return [
            ("side", "waits for", "main"),
            ("side", "spins", seconds),
            ("copies", "waits for", begin + 1),
            ("side", "waits for", "copies"),
        ]

    assert log == [
        *of_post(0, 1.008),
        ("main", "waits for", 1),
        ("main", "pauses"),
        *of_post(6, 3.0),  # while the first is under way
        *of_post(10, 1.004),
        ("main", "waits for", 10),
        ("main", "waits for", 14),
        *of_post(16, 1.012),
        ("main", "waits for", 17),
        ("main", "pauses"),
    ]
    assert all(each.tensor.isfinite().all() for each in (message, *mixed))


def in_a_fresh_process(code: str) -> str:
    variables = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_it_loads_nothing_heavy() -> None:
    code = "import sys, ring_flash_attn.bench; print(*(n.split('.')[0] for n in sys.modules))"
    assert not {"triton", "typer", "rich"} & set(in_a_fresh_process(code).split())


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_waiting_kernel_reads_the_clock_again_and_again() -> None:
    """Compiled for a GPU that need not be there."""
    code = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ring_flash_attn.bench.replays.spin import spin_kernel

for kind in ("i32", "i64"):
    source = ASTSource(spin_kernel, {"duration": kind})
    target = GPUTarget("cuda", 90, 32)
    print(triton.compile(source, target=target, options={"num_warps": 1}).asm["ptx"], "=" * 9)
"""
    spin, _, _ = in_a_fresh_process(code).split("=" * 9)
    head, loop = spin.split("Loop Header")
    assert head.count("%globaltimer") == 2
    assert loop.count("%globaltimer") == 1
    assert loop.index("%globaltimer") < loop.index("bra")
