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
    (80, 80, ForwardSizes(2, 160, 2, 2)),
    (96, 96, ForwardSizes(2, 144, 2, 2)),
    (128, 128, ForwardSizes(2, 128, 2, 2)),
    (192, 128, ForwardSizes(2, 128, 2, 1)),
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
    overlap: bool = False


# By the products' columns (d, dv). The first that matches.
_BACKWARD: tuple[tuple[int, int, BackwardSizes], ...] = (
    (64, 64, BackwardSizes(128, 2, 2, late=True)),
    (96, 96, BackwardSizes(64, 3, 2)),
    (128, 128, BackwardSizes(64, 2, 1)),
    (192, 128, BackwardSizes(64, 4, 1)),
)


def backward_sizes(d: int, dv: int, many: bool) -> BackwardSizes | None:
    """For a call, if there are any; `many` features leave no registers for large blocks."""
    found = (each for limit, limit_v, each in _BACKWARD if d <= limit and dv <= limit_v)
    sizes = next(found, None)
    if sizes is not None and many and sizes.block > 64:
        return BackwardSizes(64, 3, sizes.items)
    return sizes
