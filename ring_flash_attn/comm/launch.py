"""Starting ranks: a group of processes on this machine, or the one that torchrun has started."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

# body(rank, world_size, *args) runs on every rank and yields as many items on each.
Body = Callable[..., Iterator[Any]]

GRACE = 5.0  # seconds in which the other ranks may still answer after one has failed

_context = multiprocessing.get_context("forkserver")


class RanksFailed(RuntimeError):
    """A rank raised, died or fell silent: the traceback of the first, the last line of others."""


def default_backend(device: str, world_size: int) -> str:
    """NCCL where every rank can have a GPU of its own, gloo otherwise."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if device == "cuda" and torch.cuda.device_count() >= here:
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def rank_device(device: str, rank: int) -> torch.device:
    """The device of a rank: GPUs in turn."""
    if device != "cuda":
        return torch.device(device)
    local = int(os.environ.get("LOCAL_RANK", rank))
    return torch.device("cuda", local % torch.cuda.device_count())


def torchrun_rank() -> tuple[int, int] | None:
    """(rank, world size) if torchrun, or a launcher like it, has started this process."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return None


def run_joined(body: Body, args: Sequence[Any], device: str, backend: str) -> Iterator[list[Any]]:
    """Run `body` as one of the ranks that torchrun has started; yields as `run_spawned` does."""
    found = torchrun_rank()
    assert found is not None, "torchrun sets RANK and WORLD_SIZE"
    rank, world_size = found
    _use_device(device, rank)
    dist.init_process_group(backend)
    try:
        for item in body(rank, world_size, *args):
            items: list[Any] = [None] * world_size
            dist.all_gather_object(items, item)
            yield items
    finally:
        dist.destroy_process_group()


def run_spawned(
    body: Body,
    args: Sequence[Any],
    world_size: int,
    device: str,
    backend: str,
    timeout: float = 300.0,
) -> Iterator[list[Any]]:
    """Run `body`, at the top level of a module, in new processes of this machine.

    Yields for each item of `body` the list of all ranks' items. A rank may take `timeout` seconds
    for an item; RanksFailed, and every process is ended, if one does not come.
    """
    _context.set_forkserver_preload(["torch", "torch.distributed", "ring_flash_attn"])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], []
    try:
        for rank in range(world_size):
            ours, theirs = _context.Pipe()
            start = (rank, world_size, store.port, device, backend, theirs, body, tuple(args))
            process = _context.Process(target=_serve, args=start, daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        yield from _collect(pipes, timeout)
    finally:
        for process in processes:
            process.kill()


def _collect(pipes: Sequence[Connection], timeout: float) -> Iterator[list[Any]]:
    """One list for each item, as soon as every rank has sent its own."""
    arrived: list[deque[Any]] = [deque() for _ in pipes]
    running = dict(enumerate(pipes))
    sent = [0] * len(pipes)
    errors: list[str] = []
    while running:
        patience = GRACE if errors else timeout
        ready = wait(list(running.values()), patience)
        if not ready:
            fewest = min(sent[rank] for rank in running)
            silent = [str(rank) for rank in running if sent[rank] == fewest]
            who = f"rank{'s' * (len(silent) > 1)} {', '.join(silent)}"
            errors.append(f"no answer {fewest + 1} from {who} within {patience:g} s")
            break
        for rank in [rank for rank, pipe in running.items() if pipe in ready]:
            try:
                kind, value = running[rank].recv()
            except EOFError:
                kind, value = "error", "the process died without a word"
            if kind == "item":
                arrived[rank].append(value)
                sent[rank] += 1
                continue
            del running[rank]
            if kind == "error":
                text = value.strip()
                errors.append(f"rank {rank}: {text.splitlines()[-1] if errors else text}")
        while all(arrived):
            yield [items.popleft() for items in arrived]
    if errors:
        raise RanksFailed("\n".join(errors))


def _serve(
    rank: int,
    world_size: int,
    port: int,
    device: str,
    backend: str,
    pipe: Connection,
    body: Body,
    args: tuple[Any, ...],
) -> None:
    """One rank's process: what `body` yields goes through the pipe."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    try:
        _use_device(device, rank)
        store = TCPStore("127.0.0.1", port, is_master=False)
        patience = timedelta(minutes=10)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=patience
        )
        for item in body(rank, world_size, *args):
            pipe.send(("item", item))
        dist.barrier()  # nobody leaves while another still needs the connection
        dist.destroy_process_group()
        pipe.send(("done", None))
    except Exception:
        pipe.send(("error", traceback.format_exc()))


def _use_device(device: str, rank: int) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank_device(device, rank))
