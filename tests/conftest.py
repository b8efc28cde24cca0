"""Fixtures: pools of ranks that live as long as the test run; memory that is NaN."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from ranks import Ranks

os.environ["RFA_COSTS"] = ""  # what `auto` takes is not what somebody measured here
torch.set_num_threads(1)  # small tensors: threads only get in each other's way


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test with the mark `product(n)`, all but one case in n are slow."""
    seen: Counter[str] = Counter()
    for item in items:
        product = item.get_closest_marker("product")
        if product is not None and item.get_closest_marker("gpu") is None:
            test = item.nodeid.partition("[")[0]
            if seen[test] % product.args[0]:
                item.add_marker("slow")
            seen[test] += 1


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., Ranks]]:
    """`ranks(world_size).run(body, *args)`; see `ranks.py`."""
    pools: dict[tuple[int, str], Ranks] = {}

    def of(world_size: int, backend: str = "gloo") -> Ranks:
        return pools.setdefault((world_size, backend), Ranks(world_size, backend))

    yield of
    for pool in pools.values():
        pool.stop()


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """A process that interprets Triton's kernels; a module's own, since it may change them."""
    pool = Ranks(1, environment={"TRITON_INTERPRET": "1"})
    yield pool
    pool.stop()


@pytest.fixture
def nan_memory() -> Iterator[None]:
    """What nobody has written yet is NaN, so that using it shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
