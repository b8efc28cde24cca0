"""What the executor of a plan asks of a transport; and one of virtual ranks in one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class Message(NamedTuple):
    """A contiguous tensor to send to, or to fill from, the rank `peer` of the group.

    Between two ranks, messages pair up in the order in which they are posted.
    """

    tensor: Tensor
    peer: int
    receive: bool


class Transport(Protocol):
    """Moves tensors between the ranks of a group, one batch of messages at a time."""

    def post(self, messages: Sequence[Message]) -> None:
        """Start all messages. Their tensors belong to the transport until `wait` returns."""
        ...

    def wait(self) -> None:
        """Later work (of the current stream, on a GPU) sees what was posted as done."""
        ...

    def abandon(self, steps: Sequence[bool], drain: bool) -> None:
        """The call has failed; `steps` says for each of its posts whether there are messages.

        Nothing more will be posted; `drain` waits for what was.
        """
        ...


_Mail = dict[tuple[int, int], deque[Tensor]]  # (source, target) → what is under way, oldest first


class VirtualTransport:
    """One virtual rank's end. All ranks post a step before any of them waits for it."""

    def __init__(self, rank: int, mail: _Mail) -> None:
        self._rank, self._mail = rank, mail
        self._expected: list[Message] = []

    def post(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if message.receive:
                self._expected.append(message)
            else:
                self._mail.setdefault((self._rank, message.peer), deque()).append(message.tensor)

    def wait(self) -> None:
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
