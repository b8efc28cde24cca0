"""Virtual ranks for the ring exercise: one thread each, messages through a mailbox."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from torch import Tensor


class Stuck(RuntimeError):
    """Every rank waits for a message that nobody has sent."""


class Mailbox:
    """Messages between threads; notices when all of them wait."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.waiting: dict[int, int] = {}
        self._running = world_size
        self._stuck = ""
        self._queues: dict[tuple[int, int], deque[tuple[Tensor, ...]]] = defaultdict(deque)
        self._changed = threading.Condition()

    def send(self, rank: int, to: int, *tensors: Tensor) -> None:
        """Does not wait."""
        to = self._check(to, "send")
        with self._changed:
            self._queues[rank, to].append(tuple(x.detach().clone() for x in tensors))
            self._changed.notify_all()

    def recv(self, rank: int, source: int) -> tuple[Tensor, ...]:
        """The next message of a rank; Stuck if there will be none."""
        source = self._check(source, "recv")
        with self._changed:
            self.waiting[rank] = source
            while not self._queues[source, rank]:
                self._look()
                if self._stuck:
                    raise Stuck(self._stuck)
                self._changed.wait()
            del self.waiting[rank]
            return self._queues[source, rank].popleft()

    def leave(self) -> None:
        """A rank has finished, or failed."""
        with self._changed:
            self._running -= 1
            self._look()
            self._changed.notify_all()

    def _check(self, rank: int, what: str) -> int:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"{what}: there are ranks 0 … {self.world_size - 1}, not {rank}")
        return int(rank)

    def _look(self) -> None:
        empty = all(not self._queues[source, rank] for rank, source in self.waiting.items())
        if self.waiting and len(self.waiting) >= self._running and empty and not self._stuck:
            pairs = (f"rank {rank} for rank {source}" for rank, source in self.waiting.items())
            self._stuck = f"everybody waits, nobody sends: {', '.join(pairs)}"
            self._changed.notify_all()


def run_ranks(world_size: int, body: Callable[[int, Any, Any], Any]) -> list[Any]:
    """`body(rank, send, recv)` on each rank; the first failure that is not a mere consequence."""
    mailbox = Mailbox(world_size)
    results: list[Any] = [None] * world_size
    failures: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        def send(to: int, *tensors: Tensor) -> None:
            mailbox.send(rank, to, *tensors)

        def recv(source: int) -> tuple[Tensor, ...]:
            return mailbox.recv(rank, source)

        try:
            results[rank] = body(rank, send, recv)
        except Exception as error:
            failures.append((rank, error))
        finally:
            mailbox.waiting.pop(rank, None)
            mailbox.leave()

    threads = [
        threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        rank, error = min(failures, key=lambda each: (isinstance(each[1], Stuck), each[0]))
        if not isinstance(error, (Stuck, NotImplementedError)):
            error.args = (f"rank {rank}: {error}",)
        raise error
    return results
