"""Groups: whose keys each launch takes, where it takes those of several ranks, or nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

Groups = list[list[int]]  # of a rank: the owners of the keys of each launch but that on its own

LAUNCHES = 8  # more only to save memory


def by_size(
    sources: list[list[int]],
    rows: Sequence[dict[int, int]],
    limit: int,
    few: int,
    most: int,
    last: bool,
) -> list[Groups]:
    """As few groups as the keys allow that they bring to the rank that gets most.

    Args:
        sources: those of each rank.
        rows: how many keys each of them brings.
        limit: keys of a group.
        few: more groups only to save memory.
        most: keys of a group then, if that is more.
        last: whether the last group is a single source, the one with the fewest keys.
    """
    if last:
        sources = [sorted(each, key=last_is(each, rows[u])) for u, each in enumerate(sources)]
    few, longest = few - last, max(map(len, sources)) - last
    fewest = max(-(-sum(each.values()) // limit) for each in rows) if limit else 0
    for count in range(min(longest, max(1, min(few, fewest - last))), longest):
        brings = limit if count < few else max(limit, most)
        pairs = zip(sources, rows, strict=True)
        found = [within(brings, of_rank, each, count, last) for each, of_rank in pairs]
        if None not in found:
            return [groups for groups in found if groups is not None]
    return [split(each, longest, last) for each in sources]


def within(
    most: int, rows: dict[int, int], owners: list[int], count: int, last: bool
) -> Groups | None:
    """At most so many rows in each of `count` groups; None if they do not fit."""
    even = split(owners, count, last)
    if all(sum(rows.get(owner, 0) for owner in group) <= most for group in even):
        return even
    rest = owners[: len(owners) - last]
    filled: Groups = []
    total = 0
    for owner in rest if last else reversed(rest):
        total += rows.get(owner, 0)
        if not filled or total > most:
            filled.append([])
            total = rows.get(owner, 0)
        filled[-1].append(owner)
    if len(filled) > count:
        return None
    if not last:  # the first one is the smallest
        filled.reverse()
    return filled + [[]] * (count - len(filled)) + [owners[len(rest) :]] * last


def last_is(owners: list[int], rows: dict[int, int]) -> Callable[[int], bool]:
    last = min(reversed(owners), key=lambda owner: rows.get(owner, 0), default=None)
    return lambda owner: owner == last


def split(owners: list[int], count: int, last: bool) -> Groups:
    """Into so many groups, nearly equal, smaller ones first; with `last` one more, of one rank.

    If there are fewer ranks than groups, the first groups have one each.
    """
    alone = owners[-1:] if last else []
    rest = owners[: len(owners) - len(alone)]
    size, larger = divmod(len(rest), count) if count else (0, 0)
    sizes = [size] * (count - larger) + [size + 1] * larger
    if last or not size:
        sizes.reverse()
    groups = [rest[a:b] for a, b in pairwise(accumulate(sizes, initial=0))]
    return [*groups, alone] if last else groups
