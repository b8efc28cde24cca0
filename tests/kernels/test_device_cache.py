"""What is made once for each plan and cached on a device."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch

from ring_flash_attn.kernels import device_cache
from ring_flash_attn.kernels.device_cache import DeviceCache, to_device

CPU = torch.device("cpu")


class Plan:
    """Something with an identity."""


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if a CUDA graph were captured; undone by `undo`."""
    monkeypatch.setattr(device_cache, "capturing", lambda device: True)
    return monkeypatch


def test_made_once_for_each_plan_device_and_key() -> None:
    cache: DeviceCache[torch.Tensor] = DeviceCache()
    first, second = Plan(), Plan()
    for plan in (first, second):
        for key in (1, 2):
            one = cache.get(plan, CPU, key, lambda: torch.zeros(1))
            assert cache.get(plan, CPU, key, lambda: torch.ones(1)) is one
    one = cache.get(first, CPU, 1, list)
    assert cache.get(second, CPU, 1, list) is not one
    assert cache.get(first, CPU, 2, list) is not one
    assert cache.get(first, torch.device("meta"), 1, lambda: torch.ones(1)) is not one


class Event:
    """Stands for a point in a stream's work."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


class Stream:
    """Stands for a CUDA stream: notes what it is told."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle
        self.recorded: list[Event] = []
        self.awaited: list[Event] = []

    def record_event(self) -> Event:
        self.recorded.append(Event())
        return self.recorded[-1]

    def wait_event(self, event: Event) -> None:
        self.awaited.append(event)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Stream], None]:
    """Makes a stream the current one, as if the CPU were a GPU."""

    def current(stream: Stream) -> None:
        monkeypatch.setattr(device_cache, "current_stream", lambda device: stream)
        monkeypatch.setattr(device_cache, "stream_handle", lambda device: stream.cuda_stream)

    return current


def test_another_stream_waits_once_for_what_is_copied(use: Callable[[Stream], None]) -> None:
    cache: DeviceCache[int] = DeviceCache()
    plan, maker, other = Plan(), Stream(1), Stream(2)
    for stream in (maker, maker, other, other, maker):
        use(stream)
        cache.get(plan, CPU, 0, int)
    assert maker.awaited == []
    assert other.awaited == maker.recorded
    assert len(maker.recorded) == 1


def test_what_goes_stays_until_all_streams_are_done(use: Callable[[Stream], None]) -> None:
    """Its memory could be somebody else's while kernels still read it."""
    cache: DeviceCache[Plan] = DeviceCache()
    plan, maker, other = Plan(), Stream(1), Stream(2)
    use(maker)
    alive = weakref.ref(cache.get(plan, CPU, 0, Plan))
    use(other)
    cache.get(plan, CPU, 0, Plan)
    others = [Plan() for _ in range(device_cache._MOST + 2)]
    use(Stream(3))
    for each in others[: device_cache._MOST]:
        cache.get(each, CPU, 0, Plan)
    (_, last), (there,) = maker.recorded, other.recorded
    there.done = True
    cache.get(others[-2], CPU, 0, Plan)
    assert alive() is not None, "one stream may still read it"
    last.done = True
    cache.get(others[-1], CPU, 0, Plan)
    assert alive() is None


def test_the_oldest_go_and_their_plans_with_them() -> None:
    cache: DeviceCache[int] = DeviceCache()
    plan = Plan()
    cache.get(plan, CPU, 0, int)
    gone = weakref.ref(plan)
    del plan
    assert gone() is not None, "another object could have its id"
    others = [Plan() for _ in range(device_cache._MOST)]
    for each in others:
        cache.get(each, CPU, 0, int)
    assert gone() is None


def test_what_a_graph_reads_stays(capture: pytest.MonkeyPatch) -> None:
    cache: DeviceCache[list[int]] = DeviceCache()
    plan = Plan()
    made = cache.get(plan, CPU, 0, list)
    capture.undo()
    others = [Plan() for _ in range(2 * device_cache._MOST)]
    for each in others:
        cache.get(each, CPU, 0, list)
    assert cache.get(plan, CPU, 0, list) is made
    assert cache.get(others[0], CPU, 0, lambda: [1]) == [1]


def test_nothing_is_copied_while_a_graph_is_captured(capture: pytest.MonkeyPatch) -> None:
    cache: DeviceCache[torch.Tensor] = DeviceCache()
    plan = Plan()
    with pytest.raises(RuntimeError, match="make the same call once"):
        cache.get(plan, CPU, 0, lambda: to_device(torch.zeros(1), CPU))
    capture.undo()
    before = cache.get(plan, CPU, 0, lambda: to_device(torch.zeros(1), CPU))
    capture.setattr(device_cache, "capturing", lambda device: True)
    assert cache.get(plan, CPU, 0, list) is before
