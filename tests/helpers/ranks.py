"""A pool of worker processes that form a group, kept for the whole test run.

`Ranks(4).run(body, *args)` calls `body(rank, world_size, *args)` in every process and returns the
list of results. Bodies are top-level functions; results are pickled (tensors as they are).
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from torch.distributed import TCPStore, init_process_group

_context = multiprocessing.get_context("forkserver")
_PATIENCE = 600  # seconds: a slow machine is no failure


def one_rank() -> dict[str, str]:
    """What torchrun tells the only rank that it starts."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


class Ranks:
    """`world_size` processes; started at the first run, and again after a run that failed.

    Their store is a file; over_tcp: a server in this process, as torchrun's agent has one.
    """

    def __init__(
        self,
        world_size: int,
        backend: str = "gloo",
        environment: dict[str, str] | None = None,
        over_tcp: bool = False,
    ) -> None:
        self.world_size, self._backend = world_size, backend
        self._environment = environment or {}
        self._over_tcp = over_tcp
        self.server: TCPStore | None = None
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def _start(self) -> None:
        _context.set_forkserver_preload(["torch", "torch.distributed", "ring_flash_attn"])
        if self._over_tcp:
            self.server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            store: str | int = self.server.port
        else:
            store = tempfile.NamedTemporaryFile(delete=False).name + ".init"  # noqa: SIM115
        for rank in range(self.world_size):
            ours, theirs = _context.Pipe()
            args = (
                rank,
                self.world_size,
                self._backend,
                store,
                theirs,
                sys.path,
                self._environment,
            )
            process = _context.Process(target=_serve, args=args, daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(ours)

    def run(self, body: Callable[..., Any], *args: Any, timeout: float = _PATIENCE) -> list[Any]:
        """Results of `body(rank, world_size, *args)`, by rank; RuntimeError with all tracebacks."""
        outcomes = self.outcomes(body, *args, timeout=timeout)
        errors = [f"rank {rank}: {value}" for rank, (ok, value) in outcomes.items() if not ok]
        if errors:
            raise RuntimeError("\n".join(errors))
        return [outcomes[rank][1] for rank in range(self.world_size)]

    def outcomes(
        self, body: Callable[..., Any], *args: Any, timeout: float = _PATIENCE, grace: float = 10
    ) -> dict[int, tuple[bool, Any]]:
        """Of each rank (True, result) or (False, what happened), in the order of their answers.

        Args:
            body: what every rank calls.
            args: for `body`, after rank and world size.
            timeout: seconds without any answer after which the others are given up.
            grace: the same once a rank has failed.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((body, args))
        found: dict[int, tuple[bool, Any]] = {}
        waiting = dict(enumerate(self._pipes))
        failed = False
        while waiting:
            ready = wait(list(waiting.values()), grace if failed else timeout)
            if not ready:
                found |= dict.fromkeys(waiting, (False, "did not answer"))
                failed = True
                break
            for rank in [r for r, pipe in waiting.items() if pipe in ready]:
                try:
                    found[rank] = waiting.pop(rank).recv()
                except EOFError:
                    found[rank] = False, "died"
                failed = failed or not found[rank][0]
        if failed:
            self.stop()
        return found

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        self._processes, self._pipes, self.server = [], [], None


def _serve(
    rank: int,
    world_size: int,
    backend: str,
    store: str | int,
    pipe: Connection,
    path: list[str],
    environment: dict[str, str],
) -> None:
    os.environ.update(environment)
    sys.path[:] = path
    import torch

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    where: dict[str, Any] = {"init_method": f"file://{store}"}
    if isinstance(store, int):
        where = {"store": TCPStore("127.0.0.1", store, is_master=False)}
    init_process_group(backend, **where, rank=rank, world_size=world_size)
    while True:
        body, args = pipe.recv()
        try:
            pipe.send((True, body(rank, world_size, *args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
