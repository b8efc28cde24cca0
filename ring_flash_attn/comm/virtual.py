"""Virtual ranks: all ranks of a plan in one process, for tests, teaching and one-GPU work."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from .base import Message

_Mail = dict[tuple[int, int], deque[Tensor]]  # (source, target) → what is under way, oldest first


class VirtualTransport:
    """One virtual rank's end. All ranks post a step before any of them waits for it."""

    def __init__(self, rank: int, mail: _Mail) -> None:
        self._rank, self._mail = rank, mail
        self._expected: list[Message] = []

    def post(self, messages: Sequence[Message]) -> None:
        """Leave what is sent in the mail; remember what is to be received."""
        for message in messages:
            if message.receive:
                self._expected.append(message)
            else:
                self._mail.setdefault((self._rank, message.peer), deque()).append(message.tensor)

    def wait(self) -> None:
        """Copy what was sent to us."""
        for message in self._expected:
            sent = self._mail[message.peer, self._rank].popleft()
            assert sent.shape == message.tensor.shape, "both ends name the same rows"
            message.tensor.copy_(sent)
        self._expected.clear()

    def abandon(self, steps: Sequence[bool], drain: bool) -> None:
        """The mail goes with the call."""


def virtual_transports(world_size: int) -> list[VirtualTransport]:
    """The ends of `world_size` ranks that share one mail."""
    mail: _Mail = {}
    return [VirtualTransport(rank, mail) for rank in range(world_size)]
