"""Looking for a case that fails: drawn from a seed, and made as simple as it can be."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Flaky

from .cases import Case, cases


@dataclass(frozen=True)
class Failure:
    """A case that failed, as simple as it could be made, and what it said.

    Attributes:
        case, error: of the last case that failed.
        flaky: it did not fail every time.
    """

    case: Case
    error: str
    flaky: bool


def hunt(
    check: Callable[[Case], object],
    function: str,
    kernel: str,
    device: str,
    key: int,
    count: int,
    until: float = math.inf,
) -> Failure | None:
    """Check `count` cases; the first that fails is minimised.

    Args:
        check: raises where a case fails.
        function, kernel, device: what cases have in common.
        key: what they are drawn from; the same key gives the same cases.
        count: how many.
        until: no new case is checked after this time, of time.monotonic.
    """
    failed: list[tuple[Case, str]] = []

    @seed(key)
    @settings(
        max_examples=count,
        phases=(Phase.generate, Phase.shrink),
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(function, kernel, device))
    def look(case: Case) -> None:
        if not failed and time.monotonic() > until:
            return
        try:
            check(case)
        except Exception as error:
            failed.append((case, f"{type(error).__name__}: {error}"))
            raise

    try:
        look()
    except Exception as error:
        if not failed:
            raise
        return Failure(*failed[-1], flaky=isinstance(error, Flaky))
    return None
