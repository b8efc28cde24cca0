"""Fixtures: pools of ranks that live as long as the test run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(world_size).run(body, *args)`; see `ranks.py`."""
    pools: dict[int, Ranks] = {}

    def of(world_size: int) -> Ranks:
        return pools.setdefault(world_size, Ranks(world_size))

    yield of
    for pool in pools.values():
        pool.stop()
