"""Arrays: vectors of int64 for plans, of numpy where it is installed, otherwise of torch.

Plans of small packs take many short vectors, and numpy starts an operation in a fraction of the
time. Operators, slices and the methods `all`, `any`, `clip`, `max`, `reshape`, `sum` and `tolist`
are the same for both; the rest is here.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

try:
    import numpy as np
except ImportError:
    np = None  # type: ignore[assignment]

Array = Any  # of numpy or of torch
_CPU = "cpu"  # whatever torch's default device is


@functools.cache
def _torch() -> Any:
    return importlib.import_module("torch")  # plans of numpy's arrays come without it


def vector(values: Iterable[int]) -> Array:
    if np is not None:
        return np.array(list(values), dtype=np.int64)
    return _torch().tensor(list(values), dtype=_torch().int64, device=_CPU)


def counted(size: int) -> Array:
    """0 … size − 1."""
    return _torch().arange(size, device=_CPU) if np is None else np.arange(size, dtype=np.int64)


def filled(shape: int | tuple[int, ...], value: int | bool) -> Array:
    """The same value everywhere."""
    if np is not None:
        return np.full(shape, value, bool if isinstance(value, bool) else np.int64)
    return _torch().full((shape,) if isinstance(shape, int) else shape, value, device=_CPU)


def doubles(values: Array) -> Array:
    """As floating-point numbers."""
    return values.double() if np is None else values.astype(np.float64)


def to_tensor(values: Array) -> Tensor:
    found: Tensor = values if np is None else _torch().from_numpy(values)
    return found


def cat(parts: Sequence[Array], axis: int = 0) -> Array:
    return _torch().cat(tuple(parts), axis) if np is None else np.concatenate(parts, axis)


def stack(parts: Sequence[Array]) -> Array:
    return _torch().stack(tuple(parts)) if np is None else np.stack(parts)


def where(condition: Array, one: Array | int, other: Array | int) -> Array:
    return _torch().where(condition, one, other) if np is None else np.where(condition, one, other)


def minimum(a: Array, b: Array) -> Array:
    return _torch().minimum(a, b) if np is None else np.minimum(a, b)


def maximum(a: Array, b: Array) -> Array:
    return _torch().maximum(a, b) if np is None else np.maximum(a, b)


def nonzero(values: Array) -> Array:
    """Where they are not 0."""
    return values.nonzero().reshape(-1) if np is None else np.flatnonzero(values)


def argsort(values: Array) -> Array:
    """The stable order."""
    return values.argsort(stable=True) if np is None else np.argsort(values, kind="stable")


def before(counts: Array) -> Array:
    """The sum of those before each."""
    return counts.cumsum(0) - counts


def sums_before(counts: Array) -> Array:
    """The same, and that of all at the end."""
    return cat([filled(1, 0), counts.cumsum(0)])


def running_max(values: Array) -> Array:
    return values.cummax(0).values if np is None else np.maximum.accumulate(values)


def repeat(values: Array, counts: Array) -> Array:
    """Each so many times."""
    return values.repeat_interleave(counts) if np is None else np.repeat(values, counts)


def unique(values: Array) -> tuple[Array, Array]:
    """Those that there are, in order, and of each which it is."""
    if np is None:
        return values.unique(return_inverse=True)
    return np.unique(values, return_inverse=True)


def insertion_points(values: Array, wanted: Array, right: bool = False) -> Array:
    """Where the wanted ones belong in values that are in order."""
    if np is None:
        return _torch().searchsorted(values.contiguous(), wanted, right=right)
    return np.searchsorted(values, wanted, "right" if right else "left")


def count(groups: Array, size: int) -> Array:
    """How often there is each of 0 … size − 1."""
    return groups.bincount(minlength=size) if np is None else np.bincount(groups, minlength=size)


def sum_of_each(groups: Array, values: Array, size: int) -> Array:
    """The sum of each group's values."""
    found = filled(size, 0)
    if np is None:
        return found.index_add(0, groups, values)
    np.add.at(found, groups, values)
    return found


def least_of_each(groups: Array, values: Array, size: int, most: int) -> Array:
    """The least of each group's values; `most` where there is none."""
    found = filled(size, most)
    if np is None:
        return found.scatter_reduce(0, groups, values, "amin")
    np.minimum.at(found, groups, values)
    return found


def most_of_each(groups: Array, values: Array, size: int, least: int) -> Array:
    """The most of each group's values; `least` where there is none."""
    return -least_of_each(groups, -values, size, -least)
