"""Ever new packs of documents: memory must stay flat, on one device, on ranks and in threads."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from ranks import Ranks
from samples import check
from torch import Tensor

from ring_flash_attn import (
    flash_attn_varlen_func,
    relayout,
    ring_attention,
    shard,
    unshard,
    virtual_ring_attention,
)
from ring_flash_attn.verify.oracle import Rules, oracle

Pack = tuple[int, ...]  # cu_seqlens

DOCUMENTS = 3
CHECKED = 50  # one pack in so many is checked with the oracle, forward and backward
WARM_UP = 200  # packs before the first measurement: caches hold 64
THREADS = 8
LIMITS = {"mib": 8.0, "blocks": 8000, "tensors": 50}  # of growth; see Memory
MOST_KEYS = 64  # of growth, in the group's store
SLACK = 60.0  # seconds beyond its own time after which a worker hangs


@dataclass
class Memory:
    """What a process holds, measured from time to time.

    Attributes:
        packs: how many it had seen by then.
        mib: its resident set.
        blocks: of memory that the interpreter has given out; any Python object is at least one.
        tensors: alive.
    """

    packs: list[int] = field(default_factory=list)
    mib: list[float] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    tensors: list[int] = field(default_factory=list)

    def measure(self, packs: int) -> None:
        """Once more, without garbage."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.packs.append(packs)
        self.mib.append(round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1))
        self.blocks.append(sys.getallocatedblocks())
        self.tensors.append(sum(issubclass(type(x), Tensor) for x in gc.get_objects()))

    def follow(self, packs: int) -> bool:
        """Measure after the warm-up, and whenever packs have doubled; whether it can be checked."""
        if packs >= (2 * self.packs[-1] if self.packs else WARM_UP):
            self.measure(packs)
        return len(self.packs) > 1

    def check(self) -> None:
        """Flat from the first measurement to the last."""
        assert len(self.packs) > 1, f"too few packs to tell whether memory grows: {self.packs}"
        for name, most in LIMITS.items():
            values = getattr(self, name)
            grown = values[-1] - values[0]
            assert grown <= most, f"{name} grew by {grown} over packs {self.packs}: {values}"


def packs(start: int = 0, step: int = 1) -> Iterator[Pack]:
    """All borders of documents in 8 tokens, then in 9, …, so that no pack comes twice."""
    all_packs = (
        (0, *borders, total)
        for total in itertools.count(8)
        for borders in itertools.combinations(range(1, total), DOCUMENTS - 1)
    )
    return itertools.islice(all_packs, start, None, step)


def watched(
    step: Callable[[Pack, bool], object],
    all_packs: Iterator[Pack],
    count: int,
    seconds: float,
) -> Memory:
    """Take `count` packs, fewer if time is up; `step(pack, whether to check its results)`."""
    memory, until, number = Memory(), time.monotonic() + seconds, 0
    for number, pack in enumerate(itertools.islice(all_packs, count), start=1):
        step(pack, number % CHECKED == 0)
        if memory.follow(number) and time.monotonic() > until:
            break
    memory.measure(number)
    return memory


def _attend(attend: Callable[[Tensor, Tensor, Tensor], Tensor], pack: Pack, checked: bool) -> None:
    """One call under a causal mask; forward alone unless it is checked."""
    generator = torch.Generator().manual_seed(pack[-1])
    q, k, v = torch.randn(3, pack[-1], 1, 2, dtype=torch.float64, generator=generator)
    if not checked:
        attend(q, k, v)
        return
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    found = []
    for out in (attend(*leaves), oracle(*leaves, Rules(causal=True), pack, pack)[0]):
        grads = torch.autograd.grad(out.sum(), leaves)
        found.append(dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads))))
    check(found[0], found[1], 1e-12, floor=1.0)


def _single(pack: Pack, checked: bool) -> None:
    cu_seqlens, total = torch.tensor(pack), pack[-1]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        both = (cu_seqlens, cu_seqlens, total, total)
        return flash_attn_varlen_func(q, k, v, *both, causal=True)

    _attend(attend, pack, checked)


_buffer = torch.zeros(DOCUMENTS + 1, dtype=torch.int32)  # one for all packs, as loaders have it
_loader = _buffer.numpy()


def _virtual(pack: Pack, checked: bool) -> None:
    _loader[:] = pack
    routes = ("ring", "all_gather", "all_to_all", "query_ring")
    layouts = ("zigzag", "stripe", "flat_contiguous", "contiguous")
    options = {"route": routes[pack[1] % 3], "layout": layouts[pack[2] % 4], "causal": True}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return virtual_ring_attention(q, k, v, world_size=2, cu_seqlens=_buffer, **options)

    _attend(attend, pack, checked)


def _grouped(pack: Pack, checked: bool) -> None:
    """On one rank of a group, with a relayout; its results are put together on every rank."""
    generator = torch.Generator().manual_seed(pack[-1])
    qkv = torch.randn(3, pack[-1], 1, 2, dtype=torch.float64, generator=generator)
    parts = [shard(x, "flat_contiguous", cu_seqlens=pack) for x in qkv]
    parts = [relayout(x, "flat_contiguous", "zigzag", cu_seqlens=pack) for x in parts]
    out = ring_attention(*parts, layout="zigzag", route="ring", cu_seqlens=pack, causal=True)
    if checked:
        expected, _ = oracle(*qkv, Rules(causal=True), pack, pack)
        check({"out": unshard(out, "zigzag", cu_seqlens=pack)}, {"out": expected}, 1e-12)


def _run_apart(rank: int, n: int, door: str, count: int, seconds: float) -> Memory:
    """Every process by itself takes its part of the packs."""
    step = {"single": _single, "virtual": _virtual}[door]
    return watched(step, packs(rank, n), count // n, seconds)


def _run_together(rank: int, n: int, start: int) -> Memory:
    """Some packs; how many is not a matter of time, which differs between ranks."""
    memory = Memory()
    for number, pack in enumerate(itertools.islice(packs(start), WARM_UP), start=start + 1):
        _grouped(pack, number % CHECKED == 0)
    memory.measure(start + WARM_UP)
    return memory


def _run_threads(rank: int, n: int, count: int, seconds: float) -> Memory:
    """Threads that change places all the time, in rounds; memory is measured after each."""
    sys.setswitchinterval(1e-5)
    memory, done, until = Memory(), 0, time.monotonic() + seconds
    streams = [packs(thread, THREADS) for thread in range(THREADS)]

    def take(stream: Iterator[Pack]) -> None:
        for number, pack in enumerate(itertools.islice(stream, WARM_UP // THREADS)):
            _single(pack, number % CHECKED == 0)

    while done < count and (len(memory.packs) < 2 or time.monotonic() < until):
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(take, streams))
        done += WARM_UP
        memory.follow(done)
    memory.measure(done)
    return memory


def apart(door: str, count: int, seconds: float, processes: int) -> int:
    """Packs on one device or on virtual ranks, in processes of their own; how many."""
    return _checked(Ranks(processes, over_tcp=True), _run_apart, door, count, seconds)


def in_threads(count: int, seconds: float) -> int:
    """Packs on one device, by threads of one process at once; how many."""
    return _checked(Ranks(1, over_tcp=True), _run_threads, count, seconds)


def _checked(pool: Ranks, body: Callable[..., Memory], *args: Any) -> int:
    try:
        found = pool.run(body, *args, timeout=args[-1] + SLACK)
    finally:
        pool.stop()
    for memory in found:
        memory.check()
    return sum(memory.packs[-1] for memory in found)


def together(count: int, seconds: float, world_size: int = 2) -> int:
    """Packs on a group whose ranks compare them all; neither ranks nor their store grow."""
    pool = Ranks(world_size, environment={"RFA_CHECK": "values"}, over_tcp=True)
    until, keys = time.monotonic() + seconds, []
    found = [Memory() for _ in range(world_size)]
    try:
        for start in range(0, count, WARM_UP):
            for memory, new in zip(found, pool.run(_run_together, start, timeout=SLACK)):
                for name in ("packs", *LIMITS):
                    getattr(memory, name).extend(getattr(new, name))
            assert pool.server is not None
            keys.append(pool.server.num_keys())
            if len(keys) > 1 and time.monotonic() > until:
                break
    finally:
        pool.stop()
    for memory in found:
        memory.check()
    assert keys[-1] - keys[0] <= MOST_KEYS, f"keys in the store of the group: {keys}"
    return found[0].packs[-1]
