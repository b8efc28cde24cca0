"""Columns: the spans of many ranks as arrays, for what depends on all of them.

A pack of 1000 documents on 64 ranks has 128,000 spans, one at a time more than a step takes. So who
needs what, and where it lies, is computed on columns; what others ask for is tuples again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TypeVar, overload

from .arrays import (
    Array,
    argsort,
    before,
    cat,
    count,
    counted,
    filled,
    minimum,
    nonzero,
    repeat,
    running_max,
    stack,
    sums_before,
    vector,
)
from .layout import Layout, Span, SplitLayout

Columns = Array  # (7, spans): of each span its owner, and the fields of `Span`
OWNER, START, LENGTH, POSITION, STRIDE, DOCUMENT, INDEX = range(7)

Item = TypeVar("Item")


class LazySequence(Sequence[Item]):
    """Items kept as columns, as packs have very many: made when somebody asks for one."""

    __slots__ = ("_made",)
    _made: tuple[Item, ...] | None

    def __init__(self) -> None:
        self._made = None

    @abstractmethod
    def _make(self) -> tuple[Item, ...]:
        """All of them."""

    def _all(self) -> tuple[Item, ...]:
        if self._made is None:
            self._made = self._make()
        return self._made

    @overload
    def __getitem__(self, number: int) -> Item: ...

    @overload
    def __getitem__(self, number: slice) -> tuple[Item, ...]: ...

    def __getitem__(self, number: int | slice) -> Item | tuple[Item, ...]:
        return self._all()[number]

    def __iter__(self) -> Iterator[Item]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all() == tuple(other)

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        return repr(self._all())


def to_columns(shards: Sequence[tuple[int, Sequence[Span]]]) -> Columns:
    """The spans of some owners, one after the other."""
    owners = vector(owner for owner, _ in shards)
    counts = vector(len(spans) for _, spans in shards)
    fields = vector(chain.from_iterable(chain.from_iterable(spans for _, spans in shards)))
    return cat([repeat(owners, counts)[None], fields.reshape(-1, 6).T])


def to_spans(columns: Columns) -> tuple[Span, ...]:
    return tuple(map(Span._make, zip(*columns[START:].tolist(), strict=True)))


def split_columns(
    layout: Layout, lengths: Sequence[int], world_size: int, shifts: Sequence[int] | None
) -> Columns | None:
    """What `spans` says of all ranks, if the layout splits each document by a formula."""
    if not isinstance(layout, SplitLayout) or layout.bounds is None or layout.flat:
        return None
    length, rank = vector(lengths), counted(world_size)[:, None]
    parts = layout.bounds(length, rank, world_size)
    columns = filled((7, world_size, len(lengths), len(parts)), 0)
    columns[OWNER] = rank[:, :, None]
    columns[DOCUMENT] = counted(len(lengths))[:, None]
    for number, (start, stop, step) in enumerate(parts):
        columns[LENGTH, ..., number] = -((start - stop) // step)
        columns[POSITION, ..., number] = start
        columns[STRIDE, ..., number] = step
    columns[LENGTH] = columns[LENGTH].clip(min=0)
    columns[INDEX] = columns[POSITION] + before(length)[:, None]
    if shifts is not None:
        columns[POSITION] += vector(shifts)[:, None]
    rows = columns[LENGTH].reshape(world_size, -1)
    columns[START] = (rows.cumsum(1) - rows).reshape(columns[START].shape)
    columns = columns.reshape(7, -1)
    return columns[:, columns[LENGTH] > 0]


def part_of(columns: Columns, skipped: Array, lengths: Array) -> Columns:
    """Of each span so many rows, but for the first `skipped`; only those that are not empty."""
    owner, start, _, position, stride, document, index = columns
    ahead = stride * skipped
    parts = (owner, start + skipped, lengths, position + ahead, stride, document, index + ahead)
    return stack(parts)[:, lengths > 0]


def last_positions(columns: Columns) -> Array:
    return columns[POSITION] + columns[STRIDE] * (columns[LENGTH] - 1)


def prefixes(columns: Columns, limits: Array, which: Array | None = None) -> Array:
    """How many rows of spans have positions below a limit; of all of them, or as numbered."""
    length, position, stride = columns[LENGTH : STRIDE + 1]
    if which is not None:
        length, position, stride = length[which], position[which], stride[which]
    return minimum(((limits - position + stride - 1) // stride).clip(min=0), length)


def pairs(groups: Array, others: Array, size: int) -> tuple[Array, Array]:
    """All pairs of the same group, as numbers of both: first by first, in order of the others.

    Args:
        groups: the group of each first.
        others: the group of each other.
        size: number of groups.
    """
    sizes = count(others, size)
    firsts, within = ranges(before(sizes)[groups], sizes[groups])
    return firsts, argsort(others)[within]


def ranges(begins: Array, lengths: Array) -> tuple[Array, Array]:
    """All numbers of ranges, after the number of the range that each is of."""
    which = repeat(counted(len(begins)), lengths)
    return which, (begins - before(lengths))[which] + counted(len(which))


def union(groups: Array, starts: Array, ends: Array) -> tuple[Array, Array, Array]:
    """The same numbers of each group, as ranges in order that do not touch."""
    some = starts < ends
    groups, starts, ends = groups[some], starts[some], ends[some]
    if not len(groups):
        return groups, starts, ends
    apart = int(ends.max()) + 1
    low = groups * apart + starts
    order = argsort(low)
    low, high = low[order], running_max((groups * apart + ends)[order])
    first = breaks(low[1:] > high[:-1])
    found = groups[order][first]
    return found, low[first] - found * apart, high[ends_of(first, len(low)) - 1] - found * apart


def breaks(between: Array) -> Array:
    """Where runs begin, if `between` says where one ends: of all but the last."""
    return cat([filled(1, 0), nonzero(between) + 1])


def ends_of(first: Array, size: int) -> Array:
    """Where runs end that begin there, of so many in all."""
    return cat([first[1:], filled(1, size)])


def sums(values: Array, first: Array) -> Array:
    """Of runs that begin there."""
    total = sums_before(values)
    return total[ends_of(first, len(values))] - total[first]


def joined(columns: Columns, begins: Array) -> Columns:
    """The same tokens, from these rows on, as fewer spans where one goes on with another."""
    if not columns.shape[1]:
        return columns
    _, _, length, _, stride, document, index = columns
    row, token = begins + length, index + stride * length
    between = (index[1:] != token[:-1]) | (begins[1:] != row[:-1])
    between |= (document[1:] != document[:-1]) | (stride[1:] != stride[:-1])
    first = breaks(between)
    found = columns[:, first]
    found[START], found[LENGTH] = begins[first], sums(length, first)
    return found
