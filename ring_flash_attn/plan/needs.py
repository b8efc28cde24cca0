"""Needs: whose keys each rank's queries see, and about how many, from the columns of all ranks."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

from .arrays import (
    Array,
    argsort,
    cat,
    count,
    counted,
    filled,
    least_of_each,
    most_of_each,
    nonzero,
    sum_of_each,
    vector,
)
from .columns import (
    DOCUMENT,
    OWNER,
    POSITION,
    Columns,
    last_positions,
    pairs,
    prefixes,
    union,
)
from .tiles import FAR, Mask, seen_rows

_COUNTED = 1 << 18  # spans, for an estimate
_AT_ONCE = 1 << 20  # pairs
_NOWHERE = 2 * FAR - 1  # beyond all limits


class Needs:
    """What the queries of each rank see of the keys of each other.

    Of a document without a window, a rank's queries see all keys before a limit. So the last query
    of each rank and document, and the first key, say who needs whom.

    Args:
        queries, keys: the spans of all ranks.
        lengths: keys of each document.
        mask: between them.
        world_size: number of ranks.
    """

    def __init__(
        self, queries: Columns, keys: Columns, lengths: Array, mask: Mask, world_size: int
    ) -> None:
        self._queries, self._keys, self._mask, self._size = queries, keys, mask, world_size
        self._lengths = lengths
        self._windowed = windowed(lengths, mask)

    def bits(self) -> tuple[int, ...]:
        """For each rank, whose keys its queries see: a bit for each."""
        size = self._size
        answered = self._lengths * (self._count(self._queries[DOCUMENT]) > 0)
        found = filled((size, size), False)
        if len(answered) * size**2 > _AT_ONCE:  # mostly one document says it
            found |= self._rows(counted(len(answered)) == answered.argmax()) > 0
        if not found.all():
            found |= self._by_limits()
            self._add_windows(found, answered)
        found = cat([found, filled((size, -size % 8), False)], 1).reshape(size, -1, 8)
        octets = (found * vector(1 << bit for bit in range(8))).sum(2).tolist()
        return tuple(int.from_bytes(bytes(each), "little") for each in octets)

    def rows(self) -> tuple[dict[int, int], ...]:
        """For each rank, about how many rows it needs of each other.

        The longest of the documents that lie on all ranks stands for them. Of very many others the
        longest are counted.
        """
        size = self._size
        held, asked = self._firsts < _NOWHERE, self._limits > -FAR
        on, by = held.sum(1), asked.sum(1)
        alone = (on == 1) & (by == 1) & (held & asked).any(1)  # on one rank, with its queries
        order = argsort(-self._lengths)
        everywhere = order[(~alone & (on == size))[order]]
        found = filled((size, size), 0)
        if len(everywhere):
            first = everywhere[0]
            found = self._rows(counted(len(on)) == first)
            found = found * self._lengths[everywhere].sum() // self._lengths[first]
        others = order[(~alone & (on < size))[order]]
        work = (by * self._count(self._keys[DOCUMENT]))[others]
        chosen = filled(len(on), False)
        chosen[others[work.cumsum(0) - work < _COUNTED]] = True
        found = found + self._rows(chosen)
        users = counted(size)
        found[users, users] = 0
        some = found > 0
        ends = [0, *some.sum(1).cumsum(0).tolist()]
        owners, rows = nonzero(some.reshape(-1)) % size, found[some]
        each = list(zip(owners.tolist(), rows.tolist(), strict=True))
        return tuple(dict(each[a:b]) for a, b in pairwise(ends))

    @cached_property
    def _firsts(self) -> Array:
        """Of each document and rank, the position of the first key."""
        size, documents = self._size, len(self._lengths)
        groups = self._keys[DOCUMENT] * size + self._keys[OWNER]
        found = least_of_each(groups, self._keys[POSITION], documents * size, _NOWHERE)
        return found.reshape(documents, size)

    @cached_property
    def _limits(self) -> Array:
        """Of each document and rank, the position before which its queries see all keys."""
        size, documents = self._size, len(self._lengths)
        groups = self._queries[DOCUMENT] * size + self._queries[OWNER]
        right = FAR if self._mask.right is None else self._mask.right + 1
        limits = last_positions(self._queries) + right
        return most_of_each(groups, limits, documents * size, -FAR).reshape(documents, size)

    def _count(self, documents: Array) -> Array:
        return count(documents, len(self._lengths))

    def _rows(self, documents: Array) -> Array:
        """How many rows each rank's queries see of each rank's keys of some documents."""
        size, found = self._size, filled(self._size**2, 0)
        plain, cut = documents & ~self._windowed, documents & self._windowed
        if plain.any():
            some = nonzero(plain)
            limits = self._limits[some].reshape(-1)
            asked = nonzero(limits > -FAR)
            keys = self._keys[:, plain[self._keys[DOCUMENT]]]
            asking, key = pairs(some[asked // size], keys[DOCUMENT], len(documents))
            asking = asked[asking]
            rows = prefixes(keys, limits[asking], key)
            groups = asking % size * size + keys[OWNER][key]
            found += sum_of_each(groups, rows, size**2)
        if cut.any():
            keys = self._keys[:, cut[self._keys[DOCUMENT]]]
            queries = self._queries[:, cut[self._queries[DOCUMENT]]]
            query, key = pairs(queries[DOCUMENT], keys[DOCUMENT], len(documents))
            ranges = seen_rows(queries[:, query], keys[:, key], self._mask)
            each, first, end = union(queries[OWNER][query] * keys.shape[1] + key, *ranges)
            owner, user = keys[OWNER][each % keys.shape[1]], each // keys.shape[1]
            found += sum_of_each(user * size + owner, end - first, size**2)
        return found.reshape(size, size)

    def _by_limits(self) -> Array:
        """Who needs whom for documents without a window."""
        size, plain = self._size, ~self._windowed
        firsts, limits = self._firsts[plain], self._limits[plain]
        found = filled((size, size), False)
        if not len(firsts):
            return found
        held, asked = firsts < _NOWHERE, limits > -FAR
        at_once = max(1, _AT_ONCE // size**2)
        many = counted(len(firsts)) < at_once
        if len(firsts) > at_once:  # of documents on few ranks, only those
            many = 4 * held.sum(1) * asked.sum(1) > size * size
            users, owners = (
                nonzero((asked & ~many[:, None]).reshape(-1)),
                nonzero((held & ~many[:, None]).reshape(-1)),
            )
            asking, holding = pairs(users // size, owners // size, len(firsts))
            user, owner = users[asking], owners[holding]
            sees = firsts.reshape(-1)[owner] < limits.reshape(-1)[user]
            found[(user % size)[sees], (owner % size)[sees]] = True
        firsts, limits = firsts[many], limits[many]
        for n in range(0, len(firsts), at_once):
            first, limit = firsts[n : n + at_once], limits[n : n + at_once]
            found |= (first[:, None] < limit[:, :, None]).any(0)
        return found

    def _add_windows(self, found: Array, answered: Array) -> None:
        """Who needs whom for documents with a window, until everybody needs everybody."""
        queries, keys = self._count(self._queries[DOCUMENT]), self._count(self._keys[DOCUMENT])
        order = argsort(-answered)
        order = order[(self._windowed & (queries > 0) & (keys > 0))[order]]
        chunks = ((queries * keys)[order].cumsum(0) // _AT_ONCE).tolist()
        for number in sorted(set(chunks)):
            if found.all():
                return
            chosen = filled(len(queries), False)
            chosen[order[vector(chunks) == number]] = True
            found |= self._rows(chosen) > 0


def windowed(lengths: Array, mask: Mask) -> Array:
    """Of documents, whether the left side of the window hides keys from some query."""
    return lengths > (FAR if mask.left is None else mask.left + 1)
