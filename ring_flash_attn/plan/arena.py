"""Where the buffers of a plan lie in one piece of memory, as plain data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple


class Extent(NamedTuple):
    """A buffer: its size, and the first and the last step in which it is in use."""

    size: int
    first: int
    last: int


def place(extents: Sequence[Extent]) -> tuple[list[int], int]:
    """An offset for each buffer, and the size of all; what is in use at once lies apart.

    Each goes as far to the front as those before it let it; of a few orders the best is taken.
    """
    least, found = _most_at_once(extents), None
    for order in _ORDERS:
        offsets, size = _place(
            extents, sorted(range(len(extents)), key=lambda n: order(extents[n]))
        )
        if found is None or size < found[1]:
            found = offsets, size
        if size == least:
            break
    assert found is not None
    return found


_ORDERS: tuple[Callable[[Extent], tuple[int, ...]], ...] = (
    lambda extent: (extent.first,),  # equal buffers, one after the other
    lambda extent: (-extent.last,),  # buffers that grow
    lambda extent: (-extent.size, extent.first),
)


def _most_at_once(extents: Sequence[Extent]) -> int:
    """The most that is in use in a step."""
    changes: dict[int, int] = {}
    for size, first, last in extents:
        changes[first] = changes.get(first, 0) + size
        changes[last + 1] = changes.get(last + 1, 0) - size
    return max(accumulate(changes[step] for step in sorted(changes)), default=0)


def _place(extents: Sequence[Extent], order: Sequence[int]) -> tuple[list[int], int]:
    offsets, end = [0] * len(extents), 0
    in_use: defaultdict[int, list[int]] = defaultdict(list)  # by step: what has its place
    for number in order:
        size, first, last = extents[number]
        steps = range(first, last + 1)
        others = {other for step in steps for other in in_use[step]}
        taken = sorted((offsets[n], offsets[n] + extents[n].size) for n in others)
        offset = 0
        for start, stop in taken:
            if start - offset >= size:
                break
            offset = max(offset, stop)
        offsets[number] = offset
        end = max(end, offset + size)
        for step in steps:
            in_use[step].append(number)
    return offsets, end
