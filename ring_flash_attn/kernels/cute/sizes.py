"""Blocks for each head dimension; what `Traits` a call has. Nothing here needs CuTe DSL."""

from __future__ import annotations

from bisect import bisect_left
from functools import cache
from typing import NamedTuple, TypeVar

WIDTHS = (64, 80, 96, 128, 192, 256)  # head dimensions that there are kernels for
SHARED = 227 * 1024  # bytes of a program on Hopper

Found = TypeVar("Found")


class ForwardSizes(NamedTuple):
    """How a launch is cut up; see `forward.Traits`."""

    consumers: int
    block: int
    stages: int
    items: int
    lazy: bool = True
    late: bool = False


# By the products' columns (d, dv). The first that matches.
_FORWARD: tuple[tuple[int, int, ForwardSizes], ...] = (
    (64, 64, ForwardSizes(2, 128, 3, 2, late=True)),
    (80, 80, ForwardSizes(2, 128, 2, 2)),
    (96, 96, ForwardSizes(2, 128, 2, 2)),
    (128, 128, ForwardSizes(2, 128, 2, 2)),
    (192, 128, ForwardSizes(2, 96, 2, 2)),
    (192, 192, ForwardSizes(2, 96, 2, 1)),
    (256, 256, ForwardSizes(2, 80, 2, 1)),
)

# Three consumers, where their registers suffice, and what a query and a key cost with them, as a
# part of what they cost with two.
_THREE: dict[int, tuple[ForwardSizes, float]] = {
    64: (ForwardSizes(3, 96, 3, 2), 0.91),
    80: (ForwardSizes(3, 96, 2, 2), 0.92),
    96: (ForwardSizes(3, 64, 2, 2), 0.97),
}


def padded(d: int) -> int:
    """The width of a product: the least that there is a kernel for."""
    return WIDTHS[bisect_left(WIDTHS, d)]


def width_of(d: int) -> int:
    """Columns of queries and keys in shared memory: whole lines of 128 bytes."""
    return -(-d // 64) * 64


def _find(table: tuple[tuple[int, int, Found], ...], d: int, dv: int) -> Found | None:
    return next((each for limit, limit_v, each in table if d <= limit and dv <= limit_v), None)


@cache
def forward_sizes(
    d: int, dv: int, dropout: bool, alibi: bool
) -> tuple[tuple[ForwardSizes, float], ...]:
    """For a call: what there is to choose from, and what a query and a key cost with each.

    Scores that need many registers themselves get smaller blocks and no try.
    """
    sizes = _find(_FORWARD, d, dv)
    assert sizes is not None
    if dropout or alibi:
        block = 96 if dv <= 128 else 64 if dv <= 192 else 48
        return ((sizes._replace(block=min(sizes.block, block), lazy=False), 1.0),)
    three = _THREE.get(padded(max(d, dv)))
    return ((sizes, 1.0),) if three is None else ((sizes, 1.0), three)


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
    folded: bool = False
    kept: int = 0


# By the products' columns (d, dv). The first that matches.
_BACKWARD: tuple[tuple[int, int, BackwardSizes], ...] = (
    (64, 64, BackwardSizes(128, 2, 2, late=True, store_last=True, folded=True)),
    (80, 80, BackwardSizes(128, 2, 1, late=True, folded=True)),
    (96, 96, BackwardSizes(64, 3, 2, late=True, early_lse=True, store_last=True, folded=True)),
    (128, 128, BackwardSizes(64, 2, 1, True, True, True, True, True)),
    (192, 128, BackwardSizes(64, 2, 1, early_lse=True, whole=True)),
)

# The order that takes the fewest registers.
_PLAIN: tuple[tuple[int, int, BackwardSizes], ...] = (
    (64, 64, BackwardSizes(128, 2, 2, late=True)),
    (96, 96, BackwardSizes(64, 3, 2)),
    (128, 128, BackwardSizes(64, 2, 1)),
    (192, 128, BackwardSizes(64, 4, 1)),
)

# Where keys are seen by fewer queries than this: items are short.
_FEW: dict[int, tuple[int, BackwardSizes]] = {
    64: (1024, BackwardSizes(128, 2, 2, late=True, folded=True)),
    80: (
        512,
        BackwardSizes(64, 3, 2, late=True, early_lse=True, store_last=True, folded=True),
    ),
}

# dK and dQ where dV is computed by a launch of its own.
_PAIRED = BackwardSizes(64, 1, 1, folded=True, kept=2)


def backward_sizes(d: int, dv: int, many: bool, fp16: bool) -> BackwardSizes | None:
    """For a call, if there are any.

    `many` features leave no registers for large blocks. In fp16 small p times the softmax scale
    would lose digits: they are not folded.
    """
    sizes, plain = _find(_BACKWARD, d, dv), _find(_PLAIN, d, dv)
    if sizes is None or plain is None:
        return None
    if many:
        return plain if plain.block == 64 else BackwardSizes(64, 3, 2)
    return _folded(sizes, fp16)


def _folded(sizes: BackwardSizes, fp16: bool) -> BackwardSizes:
    return sizes._replace(folded=sizes.folded and not fp16)


class GradientLaunch(NamedTuple):
    """A launch of the backward: how it is cut up, and what it computes; see `BackwardTraits`.

    Attributes:
        for_few: how it is cut up where keys are seen by fewer than `few` queries.
    """

    sizes: BackwardSizes
    dq: bool = True
    only: str = ""
    exchanged: bool = False
    few: int = 0
    for_few: BackwardSizes | None = None


# Blocks of launches that compute one gradient each: of keys for dQ, of queries for dK and for dV.
_ALONE: tuple[tuple[int, int, tuple[BackwardSizes, BackwardSizes, BackwardSizes]], ...] = (
    (64, 64, (BackwardSizes(128, 2, 2),) * 3),
    (128, 128, (BackwardSizes(96, 2, 2),) * 3),
    (192, 192, (BackwardSizes(64, 2, 1),) * 3),
    (256, 256, (BackwardSizes(32, 2, 1), BackwardSizes(32, 2, 1), BackwardSizes(64, 2, 1))),
)


@cache
def backward_launches(
    d: int, dv: int, many: bool, fp16: bool, ordered: bool
) -> tuple[GradientLaunch, ...]:
    """For a call; `ordered`: dQ is not to be added up in any order that comes.

    dK and dV of 64 keys fit into a consumer's registers up to head dimension 128, or 192 with
    values of 128; beyond that dV is computed by a launch of its own, and so is dK if ordered.
    """
    sizes = backward_sizes(d, dv, many, fp16)
    if sizes is not None and not ordered:
        few, other = (0, None) if many else _FEW.get(padded(max(d, dv)), (0, None))
        return (GradientLaunch(sizes, few=few, for_few=other and _folded(other, fp16)),)
    alone = _find(_ALONE, d, dv)
    assert alone is not None
    of_dq, of_dk, of_dv = alone
    if many:
        of_dq, of_dk, of_dv = (each._replace(block=min(each.block, 64)) for each in alone)
    if not ordered:
        pair = GradientLaunch(_folded(_PAIRED, fp16), True, "dk")
        return pair, GradientLaunch(_folded(of_dv._replace(folded=True), fp16), False, "dv")
    queries = GradientLaunch(of_dq, False, "dk", True)
    plain = sizes if many else _find(_PLAIN, d, dv)
    if plain is not None:
        return GradientLaunch(plain, False), queries
    return GradientLaunch(of_dk, False, "dk"), GradientLaunch(of_dv, False, "dv"), queries
