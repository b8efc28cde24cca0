"""A pool of worker processes that form a group, kept for the whole test run.

`Ranks(4).run(body, *args)` calls `body(rank, world_size, *args)` in every process and returns the
list of results. Bodies are top-level functions; results are pickled (tensors as they are).
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

_context = multiprocessing.get_context("forkserver")


class Ranks:
    """`world_size` processes; started at the first run, and again after a run that failed."""

    def __init__(
        self, world_size: int, backend: str = "gloo", environment: dict[str, str] | None = None
    ) -> None:
        self.world_size, self._backend = world_size, backend
        self._environment = environment or {}
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def _start(self) -> None:
        _context.set_forkserver_preload(["torch", "torch.distributed", "ring_flash_attn"])
        store = tempfile.NamedTemporaryFile(delete=False).name  # noqa: SIM115
        for rank in range(self.world_size):
            ours, theirs = _context.Pipe()
            args = (
                rank,
                self.world_size,
                self._backend,
                f"{store}.init",
                theirs,
                sys.path,
                self._environment,
            )
            process = _context.Process(target=_serve, args=args, daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(ours)

    def run(self, body: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        """Results of `body(rank, world_size, *args)`, by rank; RuntimeError with all tracebacks."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((body, args))
        results: list[Any] = [None] * self.world_size
        waiting = dict(enumerate(self._pipes))
        errors = []
        while waiting:
            ready = wait(list(waiting.values()), 10 if errors else timeout)
            if not ready:
                errors.append(f"ranks {sorted(waiting)} did not answer")
                break
            for rank in [r for r, pipe in waiting.items() if pipe in ready]:
                try:
                    ok, results[rank] = waiting.pop(rank).recv()
                except EOFError:
                    ok, results[rank] = False, "died"
                if not ok:
                    errors.append(f"rank {rank}: {results[rank]}")
        if errors:
            self.stop()
            raise RuntimeError("\n".join(errors))
        return results

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        self._processes, self._pipes = [], []


def _serve(
    rank: int,
    world_size: int,
    backend: str,
    store: str,
    pipe: Connection,
    path: list[str],
    environment: dict[str, str],
) -> None:
    os.environ.update(environment)
    sys.path[:] = path
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world_size
    )
    while True:
        body, args = pipe.recv()
        try:
            pipe.send((True, body(rank, world_size, *args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
