"""Where the lab runs: in Triton's interpreter, and with `-m gpu` compiled on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(
    scope="module",
    params=["interpreted", pytest.param("compiled", marks=pytest.mark.gpu)],
)
def lab_pool(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """A process for steps and exercises; a module's own, since it may change them."""
    pool = Ranks(1, environment={"TRITON_INTERPRET": str(int(request.param == "interpreted"))})
    yield pool
    pool.stop()
