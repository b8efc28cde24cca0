"""Groups: whose keys each launch takes, where it takes those of several ranks, or nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

Groups = list[list[int]]  # of a rank: the owners of the keys of each launch but that on its own

LAUNCHES = 8  # more only to save memory


def by_size(
    sources: list[list[int]], rows: Sequence[dict[int, int]], limit: int, few: int, most: int
) -> list[Groups]:
    """As few groups as the keys allow that they bring to the rank that gets most.

    Args:
        sources: those of each rank.
        rows: how many keys each of them brings.
        limit: keys of a group.
        few: more groups only to save memory.
        most: keys of a group then, if that is more.
    """
    longest = max(map(len, sources))
    fewest = max(-(-sum(each.values()) // limit) for each in rows) if limit else 0
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
    """At most so many rows in each of `count` groups; None if they do not fit."""
    even = split(owners, count)
    if all(sum(rows.get(owner, 0) for owner in group) <= most for group in even):
        return even
    filled: Groups = []
    total = 0
    for owner in reversed(owners):
        total += rows.get(owner, 0)
        if not filled or total > most:
            filled.append([])
            total = rows.get(owner, 0)
        filled[-1].append(owner)
    if len(filled) > count:
        return None
    return filled[::-1] + [[]] * (count - len(filled))  # the first one is the smallest


def split(owners: list[int], count: int) -> Groups:
    """Into so many groups, nearly equal, smaller ones first.

    If there are fewer ranks than groups, the first groups have one each.
    """
    size, larger = divmod(len(owners), count) if count else (0, 0)
    sizes = [size] * (count - larger) + [size + 1] * larger
    if not size:
        sizes.reverse()
    return [owners[a:b] for a, b in pairwise(accumulate(sizes, initial=0))]


def in_turn(groups: list[Groups], rows: Sequence[dict[int, int]]) -> list[Groups]:
    """Each rank begins with another group, where a rank would send too much of its keys at a time.

    Many ranks in a row need the start of a long document, which a few hold: in the order of ranks
    they would all ask for it first. All groups are taken in turn if the most that a rank sends at a
    time is then at most three quarters.
    """
    turned = [
        [*each[turn:], *each[:turn]]
        for each, turn in ((each, user % max(1, len(each))) for user, each in enumerate(groups))
    ]
    return turned if 4 * _most_sent(turned, rows) <= 3 * _most_sent(groups, rows) else groups


def _most_sent(groups: list[Groups], rows: Sequence[dict[int, int]]) -> int:
    sent: Counter[tuple[int, int]] = Counter()
    for theirs, of_rank in zip(groups, rows, strict=True):
        for number, owners in enumerate(theirs):
            for owner in owners:
                sent[owner, number] += of_rank.get(owner, 0)
    return max(sent.values(), default=0)
