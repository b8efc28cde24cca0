"""Posts of a transport, on backends that start messages together and on those that do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ring_flash_attn.comm import DistributedTransport, Message, distributed


class Recorded:
    """A group that notes what is asked of it; `supports_coalescing` as NCCL's backend has it."""

    def __init__(self, coalesces: bool) -> None:
        self.supports_coalescing = coalesces
        self.seen: list[Any] = []

    def _get_backend(self, device: torch.device) -> Recorded:
        return self

    def _start_coalescing(self, device: torch.device) -> None:
        self.seen.append("begin")

    def _end_coalescing(self, device: torch.device) -> Work:
        self.seen.append("end")
        return Work(self.seen, "all")

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        self.seen.append(("send", len(tensors[0]), peer, tag))
        return Work(self.seen, peer)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        self.seen.append(("recv", len(tensors[0]), peer, tag))
        return Work(self.seen, peer)


class Work:
    def __init__(self, seen: list[Any], what: object) -> None:
        self._seen, self._what = seen, what

    def wait(self) -> None:
        self._seen.append(("wait", self._what))


@pytest.mark.parametrize("coalesces", [True, False])
def test_receives_come_first_and_nothing_empty_is_sent(
    coalesces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order in which they were posted, so that messages between two ranks pair up."""
    monkeypatch.setattr(distributed, "_is_gloo", lambda *_: False)
    monkeypatch.setattr(distributed, "meet_after_failure", lambda group: None)
    group: Any = Recorded(coalesces)
    transport = DistributedTransport(group, torch.device("cpu"))
    sizes = [(3, 1, False), (4, 2, True), (0, 2, True), (5, 1, False), (6, 1, True)]
    transport.post([Message(torch.empty(n), peer, receive) for n, peer, receive in sizes])
    messages = [("recv", 4, 2, 0), ("recv", 6, 1, 0), ("send", 3, 1, 0), ("send", 5, 1, 0)]
    assert group.seen == (["begin", *messages, "end"] if coalesces else messages)
    group.seen.clear()
    transport.wait()
    waits = ["all"] if coalesces else [2, 1, 1, 1]
    assert group.seen == [("wait", each) for each in waits]
    group.seen.clear()
    transport.post([Message(torch.empty(0), 1, receive=False)])
    transport.wait()
    assert group.seen == []
