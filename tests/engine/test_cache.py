"""The bounded cache: what goes, by number and by weight; and threads that want the same."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ring_flash_attn.cache import Cache
from ring_flash_attn.engine import packing
from ring_flash_attn.plan.rows import Packing


def test_old_entries_go_by_weight_too() -> None:
    gone: list[int] = []
    cache = Cache[str, int](3, gone.append, weigh=lambda value: value, most=10)
    for key, value in {"a": 4, "b": 6}.items():
        assert cache.add(key, value) == value
    assert len(cache) == 2
    cache.add("c", 1)  # 11 in all
    assert gone == [4]
    cache.add("d", 3)
    assert (gone, len(cache)) == ([4], 3)
    cache.add("e", 50)  # the newest stays, whatever it weighs
    assert (gone, cache.get("e"), len(cache)) == ([4, 6, 1, 3], 50, 1)
    cache.add("f", 1)
    assert (gone[4:], cache.get("f")) == ([50], 1)
    cache.clear()
    for number in range(4):
        cache.add(str(number), 0)
    assert len(cache) == 3, "and by number"


def test_row_numbers_weigh_what_they_take() -> None:
    """They are as many as rows, so that few packs of very long documents are kept."""
    device = torch.device("cpu")
    packing._tables._newest.clear()
    first = Packing((range(3, 7), range(9, 10)))
    assert packing.row_numbers(first, device).tolist() == [3, 4, 5, 6, 9]
    assert packing._tables._newest._weight == 5


def test_threads_that_want_the_same_wait_for_the_first() -> None:
    cache, made = Cache[int, object](8), list[int]()
    started, go_on = threading.Event(), threading.Event()

    def make() -> object:
        made.append(1)
        started.set()
        assert go_on.wait(20)
        return object()

    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(cache.get_or_make, 7, make)
        assert started.wait(20)
        others = [pool.submit(cache.get_or_make, 7, make) for _ in range(4)]
        assert cache.get_or_make(8, lambda: 8) == 8, "other keys do not wait"
        go_on.set()
        assert {id(each.result(20)) for each in others} == {id(first.result(20))}
    assert made == [1]


def test_an_error_is_not_kept() -> None:
    cache = Cache[int, int](8)

    def fail() -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cache.get_or_make(1, fail)
    assert cache.get_or_make(1, lambda: 5) == 5
    assert cache.get_or_make(1, fail) == 5
