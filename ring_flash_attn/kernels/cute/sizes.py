"""Blocks for each head dimension; what `Traits` a call has. Nothing here needs CuTe DSL."""

from __future__ import annotations

from bisect import bisect_left
from functools import cache
from typing import NamedTuple

WIDTHS = (64, 80, 96, 128, 192, 256)  # head dimensions that there are kernels for
SHARED = 227 * 1024  # bytes of a program on Hopper


class ForwardSizes(NamedTuple):
    """How a launch is cut up; see `forward.Traits`."""

    consumers: int
    block: int
    stages: int
    items: int
    lazy: bool = True
    late: bool = False


# By the products' columns (d, dv); None: any dv. The first that matches.
_FORWARD: tuple[tuple[int, int | None, ForwardSizes], ...] = (
    (64, 64, ForwardSizes(2, 128, 3, 2, late=True)),
    (80, 80, ForwardSizes(2, 128, 2, 2)),
    (96, 96, ForwardSizes(2, 128, 2, 2)),
    (128, 128, ForwardSizes(2, 128, 2, 2)),
    (192, 128, ForwardSizes(2, 96, 2, 2)),
    (192, 192, ForwardSizes(2, 96, 2, 1)),
    (256, 256, ForwardSizes(2, 80, 2, 1)),
)


def padded(d: int) -> int:
    """The width of a product: the least that there is a kernel for."""
    return WIDTHS[bisect_left(WIDTHS, d)]


def width_of(d: int) -> int:
    """Columns of queries and keys in shared memory: whole lines of 128 bytes."""
    return -(-d // 64) * 64


@cache
def forward_sizes(d: int, dv: int, dropout: bool, alibi: bool) -> ForwardSizes:
    """For a call. Scores that need many registers themselves get smaller blocks and no try."""
    sizes = next(each for limit, limit_v, each in _FORWARD if d <= limit and dv <= (limit_v or 256))
    if dropout or alibi:
        sizes = sizes._replace(
            block=min(sizes.block, 96 if dv <= 128 else 64 if dv <= 192 else 48), lazy=False
        )
    return sizes


class BackwardSizes(NamedTuple):
    """How a backward launch is cut up; see `traits.BackwardTraits`."""

    block: int
    stages: int
    items: int
    late: bool = False
    early_lse: bool = False
    early_delta: bool = False
    swapped: bool = False
    store_last: bool = False
    whole: bool = False


# By the products' columns (d, dv). The first that matches.
_BACKWARD: tuple[tuple[int, int, BackwardSizes], ...] = (
    (64, 64, BackwardSizes(128, 2, 2, late=True, early_delta=True)),
    (96, 96, BackwardSizes(64, 3, 2, late=True, early_lse=True, early_delta=True)),
    (128, 128, BackwardSizes(64, 2, 1, True, True, True, True, True)),
    (192, 128, BackwardSizes(64, 2, 1, early_lse=True, whole=True)),
)


def backward_sizes(d: int, dv: int, many: bool) -> BackwardSizes | None:
    """For a call, if there are any; `many` features leave no registers for large blocks."""
    found = (each for limit, limit_v, each in _BACKWARD if d <= limit and dv <= limit_v)
    sizes = next(found, None)
    if sizes is not None and many:
        if sizes.block > 64:
            return BackwardSizes(64, 3, sizes.items)
        return _plain(sizes)
    return sizes


def _plain(sizes: BackwardSizes) -> BackwardSizes:
    """The same blocks in the order that takes the fewest registers."""
    if sizes.whole:
        return BackwardSizes(64, 4, 1)
    return BackwardSizes(*sizes[:3], late=sizes.block > 64)


class GradientLaunch(NamedTuple):
    """A launch of the backward: how it is cut up, and what it computes; see `BackwardTraits`."""

    sizes: BackwardSizes
    dq: bool = True
    only: str = ""
    exchanged: bool = False


# Blocks of launches that compute one gradient each: of keys for dQ, of queries for dK and for dV.
_ALONE: tuple[tuple[int, int, tuple[BackwardSizes, BackwardSizes, BackwardSizes]], ...] = (
    (64, 64, (BackwardSizes(128, 2, 2),) * 3),
    (128, 128, (BackwardSizes(96, 2, 2),) * 3),
    (192, 192, (BackwardSizes(64, 2, 1),) * 3),
    (256, 256, (BackwardSizes(32, 2, 1), BackwardSizes(32, 2, 1), BackwardSizes(64, 2, 1))),
)


def backward_launches(d: int, dv: int, many: bool, ordered: bool) -> list[GradientLaunch]:
    """For a call; `ordered`: dQ is not to be added up in any order that comes.

    dK and dV of 64 keys fit into a consumer's registers up to head dimension 128, or 192 with
    values of 128; beyond that each gradient is computed by a launch of its own.
    """
    sizes = backward_sizes(d, dv, many)
    if sizes is not None and not ordered:
        return [GradientLaunch(sizes)]
    of_dq, of_dk, of_dv = next(
        each for limit, limit_v, each in _ALONE if d <= limit and dv <= limit_v
    )
    if many:
        of_dq = of_dq._replace(block=min(of_dq.block, 64))
        of_dk, of_dv = (x._replace(block=min(x.block, 64)) for x in (of_dk, of_dv))
    queries = GradientLaunch(of_dq, False, "dk", True)
    if sizes is not None:
        return [GradientLaunch(_plain(sizes), False), queries]
    return [GradientLaunch(of_dk, False, "dk"), GradientLaunch(of_dv, False, "dv"), queries]
