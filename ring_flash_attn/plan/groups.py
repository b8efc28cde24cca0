"""Groups: whose keys each launch takes, where it takes those of several ranks, or nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

Groups = list[list[int]]  # of a rank: the owners of the keys of each launch but that on its own

LAUNCHES = 8  # more only to save memory


def by_size(
    sources: list[list[int]],
    rows: Sequence[dict[int, int]],
    limit: int,
    alone: int,
    few: int,
    most: int,
) -> list[Groups]:
    """As few groups as the keys allow that they bring to the rank that gets most.

    Args:
        sources: those of each rank.
        rows: how many keys each of them brings.
        limit: keys of a group.
        alone: keys of the only group.
        few: more groups only to save memory.
        most: keys of a group then, if that is more.
    """
    longest = max(map(len, sources))
    arriving = max(sum(each.values()) for each in rows)
    fewest = max(-(-arriving // limit), 1 + (arriving > alone)) if limit else 0
    for count in range(min(longest, max(1, min(few, fewest))), longest):
        brings = limit if count < few else max(limit, most)
        found = [
            within(brings, of_rank, each, count)
            for each, of_rank in zip(sources, rows, strict=True)
        ]
        if None not in found:
            return [groups for groups in found if groups is not None]
    return [split(each, longest) for each in sources]


def within(most: int, rows: dict[int, int], owners: list[int], count: int) -> Groups | None:
    """At most so many rows in each of `count` groups; None if they do not fit.

    The first group has half as many as the others, as there is least to hide its way behind. If
    that is too much for the others, all have as many owners; or they are filled up from the end.
    Of few rows there are fewer groups: a quarter of `most` is worth a launch.
    """
    total = sum(rows.get(owner, 0) for owner in owners)
    launches = min(count, max(1, -(-4 * total // most))) if most else count
    small_first = _from_the_end(rows, owners, 2 * total / (2 * launches - 1), launches, 0.5)
    for groups in (small_first, split(owners, launches)):
        if all(sum(rows.get(owner, 0) for owner in group) <= most for group in groups):
            return groups + [[]] * (count - len(groups))
    filled = _from_the_end(rows, owners, most, len(owners), 1.0)
    return None if len(filled) > count else filled + [[]] * (count - len(filled))


def _from_the_end(
    rows: dict[int, int], owners: list[int], wanted: float, count: int, part: float
) -> Groups:
    """Groups of about so many rows, the last one first; the first has what is left.

    An owner goes to a group if this `part` of its rows does.
    """
    found: Groups = [[]]
    total = 0
    for owner in reversed(owners):
        size = rows.get(owner, 0)
        if found[0] and total + part * size > wanted and len(found) < count:
            found.insert(0, [])
            total = 0
        found[0].append(owner)
        total += size
    return found


def split(owners: list[int], count: int) -> Groups:
    """Into so many groups, nearly equal, smaller ones first.

    If there are fewer ranks than groups, the first groups have one each.
    """
    size, larger = divmod(len(owners), count) if count else (0, 0)
    sizes = [size] * (count - larger) + [size + 1] * larger
    if not size:
        sizes.reverse()
    return [owners[a:b] for a, b in pairwise(accumulate(sizes, initial=0))]


def most_sent(groups: list[Groups], rows: Sequence[dict[int, int]]) -> int:
    """Rows that a rank sends for one group to all, where that is most."""
    sent: Counter[tuple[int, int]] = Counter()
    for theirs, of_rank in zip(groups, rows, strict=True):
        for number, owners in enumerate(theirs):
            for owner in owners:
                sent[owner, number] += of_rank.get(owner, 0)
    return max(sent.values(), default=0)
