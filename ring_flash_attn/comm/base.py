"""What the executor of a plan asks of a transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Message:
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
        """The call has failed, and nothing more will be posted.

        Args:
            steps: whether there are messages, for each post of the whole call.
            drain: wait for what was posted.
        """
        ...
