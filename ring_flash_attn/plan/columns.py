"""Columns: the spans of many ranks as vectors, for what depends on all of them.

A pack of 1000 documents on 64 ranks has 128,000 spans, one at a time more than a step takes. So who
needs what, and where it lies, is computed on columns; a launch's own spans are tuples again. All
tensors are on the CPU, whatever torch's default device is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from .layout import Layout, Span, SplitLayout

Columns = Tensor  # (7, spans) int64: of each span its owner, and the fields of `Span`
OWNER, START, LENGTH, POSITION, STRIDE, DOCUMENT, INDEX = range(7)

_CPU = torch.device("cpu")


def vector(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device=_CPU)


def counted(size: int) -> Tensor:
    """0 … size − 1."""
    return torch.arange(size, device=_CPU)


def filled(size: int, value: int) -> Tensor:
    return torch.full((size,), value, dtype=torch.int64, device=_CPU)


def to_columns(shards: Sequence[tuple[int, Sequence[Span]]]) -> Columns:
    """The spans of some owners, one after the other."""
    owners = vector(owner for owner, _ in shards)
    counts = vector(len(spans) for _, spans in shards)
    fields = vector(chain.from_iterable(chain.from_iterable(spans for _, spans in shards)))
    return torch.cat([owners.repeat_interleave(counts)[None], fields.view(-1, 6).T])


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
    columns = torch.zeros(7, world_size, len(lengths), len(parts), dtype=torch.int64, device=_CPU)
    columns[OWNER] = rank[:, :, None]
    columns[DOCUMENT] = counted(len(lengths))[:, None]
    for number, (start, stop, step) in enumerate(parts):
        columns[LENGTH, ..., number] = -((start - stop) // step)
        columns[POSITION, ..., number] = start
        columns[STRIDE, ..., number] = step
    columns[LENGTH].clamp_(min=0)
    begins = length.cumsum(0) - length
    columns[INDEX] = columns[POSITION] + begins[:, None]
    if shifts is not None:
        columns[POSITION] += vector(shifts)[:, None]
    rows = columns[LENGTH].view(world_size, -1)
    columns[START] = (rows.cumsum(1) - rows).view_as(columns[START])
    columns = columns.view(7, -1)
    return columns[:, columns[LENGTH] > 0]


def part_of(columns: Columns, skipped: Tensor, lengths: Tensor) -> Columns:
    """Of each span so many rows, but for the first `skipped`; only those that are not empty."""
    owner, start, _, position, stride, document, index = columns
    ahead = stride * skipped
    parts = (owner, start + skipped, lengths, position + ahead, stride, document, index + ahead)
    return torch.stack(parts)[:, lengths > 0]


def last_positions(columns: Columns) -> Tensor:
    _, _, length, position, stride, _, _ = columns
    return position + stride * (length - 1)


def prefixes(columns: Columns, limits: Tensor, which: Tensor | None = None) -> Tensor:
    """How many rows of spans have positions below a limit; of all of them, or as numbered."""
    _, _, length, position, stride, _, _ = columns
    if which is not None:
        length, position, stride = length[which], position[which], stride[which]
    return ((limits - position + stride - 1) // stride).clamp(min=0).minimum(length)


def pairs(groups: Tensor, others: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """All pairs of the same group, as numbers of both: first by first, in order of the others.

    Args:
        groups: the group of each first.
        others: the group of each other.
        count: of groups.
    """
    order = others.argsort(stable=True)
    sizes = others.bincount(minlength=count)
    begins = sizes.cumsum(0) - sizes
    each = sizes[groups]
    firsts = counted(len(groups)).repeat_interleave(each)
    within = counted(len(firsts)) - (each.cumsum(0) - each)[firsts]
    return firsts, order[begins[groups][firsts] + within]


def union(groups: Tensor, starts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same numbers of each group, as ranges in order that do not touch."""
    some = starts < ends
    groups, starts, ends = groups[some], starts[some], ends[some]
    if not len(groups):
        return groups, starts, ends
    apart = int(ends.max()) + 1
    low, order = (groups * apart + starts).sort()
    high = (groups * apart + ends)[order].cummax(0).values
    first = breaks(low[1:] > high[:-1])
    last = torch.cat([first[1:] - 1, filled(1, len(low) - 1)])
    found = groups[order][first]
    return found, low[first] - found * apart, high[last] - found * apart


def breaks(between: Tensor) -> Tensor:
    """Where runs begin, if `between` says where one ends: of all but the last."""
    return torch.cat([filled(1, 1).bool(), between]).nonzero().view(-1)


def joined(columns: Columns, begins: Tensor) -> Columns:
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


def sums(values: Tensor, first: Tensor) -> Tensor:
    """Of runs that begin there."""
    before = torch.cat([filled(1, 0), values.cumsum(0)])
    return before[torch.cat([first[1:], filled(1, len(values))])] - before[first]
