"""Posts of a transport, on backends that start messages together and on those that do not."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

from ring_flash_attn.comm import DistributedTransport, Message, distributed


class Recorded:
    """A group that notes what is asked of it; `supports_coalescing` as NCCL's backend has it.

    Messages to and from the rank `gone` cannot be started.
    """

    def __init__(self, coalesces: bool, gone: int | None = None) -> None:
        self.supports_coalescing, self.gone = coalesces, gone
        self.seen: list[Any] = []

    def _get_backend(self, device: torch.device) -> Recorded:
        return self

    def _start_coalescing(self, device: torch.device) -> None:
        self.seen.append("begin")

    def _end_coalescing(self, device: torch.device) -> Work:
        self.seen.append("end")
        return Work(self.seen, "all")

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        return self._start("send", tensors, peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        return self._start("recv", tensors, peer, tag)

    def _start(self, what: str, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        if peer == self.gone:
            raise RuntimeError("connection closed by peer")
        self.seen.append((what, len(tensors[0]), peer, tag))
        return Work(self.seen, peer)


class Work:
    def __init__(self, seen: list[Any], what: object) -> None:
        self._seen, self._what = seen, what

    def wait(self) -> None:
        self._seen.append(("wait", self._what))


@pytest.fixture(autouse=True)
def recorded_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of a `Recorded` group is that of torch's."""
    monkeypatch.setattr(distributed, "is_gloo", lambda *_: False)
    monkeypatch.setattr(distributed, "meet_after_failure", lambda group: None)
    monkeypatch.setattr(distributed, "group_timeout", lambda group: timedelta(1))
    monkeypatch.setattr(distributed, "ProcessGroup", Recorded)


@pytest.mark.parametrize("coalesces", [True, False])
def test_receives_come_first_and_nothing_empty_is_sent(coalesces: bool) -> None:
    """In the order in which they were posted, so that messages between two ranks pair up."""
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


@pytest.mark.parametrize("coalesces", [True, False])
def test_messages_that_were_started_before_one_that_failed_are_drained(
    coalesces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If they cannot be, the next call hears that messages are under way."""
    said: list[str] = []
    monkeypatch.setattr(distributed, "call_failed", lambda group, progress: said.append(progress))
    for drains in (True, False):
        group: Any = Recorded(coalesces, gone=2)
        transport = DistributedTransport(group, torch.device("cpu"))
        with pytest.raises(RuntimeError, match="closed"):
            transport.post([Message(torch.empty(3), peer, receive=True) for peer in (1, 2)])
        waits = [("wait", "all" if coalesces else 1)]
        if not drains:
            monkeypatch.setattr(Work, "wait", lost)
        transport.abandon([True, False], drain=True)
        assert group.seen[-1:] == waits or not drains
        assert ("end" in group.seen) is coalesces
    assert said == ["after 0 of 2 steps were posted", distributed.UNDER_WAY]


def lost(self: Work) -> None:
    raise RuntimeError("connection closed by peer")


def test_a_group_that_is_made_in_python_starts_its_messages_one_by_one() -> None:
    """As in torch's batch_isend_irecv: it may have no backend to ask."""

    class Managed(Recorded):
        def _get_backend(self, device: torch.device) -> Recorded:
            raise RuntimeError("there is none")

    group: Any = Managed(coalesces=True)
    DistributedTransport(group, torch.device("cpu")).post([Message(torch.empty(3), 1, False)])
    assert group.seen == [("send", 3, 1, 0)]
