"""Needs: whose keys each rank's queries see, and about how many, from the columns of all ranks."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from .columns import (
    DOCUMENT,
    OWNER,
    POSITION,
    Columns,
    counted,
    filled,
    last_positions,
    pairs,
    prefixes,
    union,
)
from .tiles import FAR, Mask, seen_rows

_COUNTED = 1 << 17  # spans, for an estimate
_AT_ONCE = 1 << 20  # pairs


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
        self, queries: Columns, keys: Columns, lengths: Tensor, mask: Mask, world_size: int
    ) -> None:
        self._queries, self._keys, self._mask, self._size = queries, keys, mask, world_size
        self._lengths = lengths
        self._windowed = windowed(lengths, mask)

    def bits(self) -> tuple[int, ...]:
        """For each rank, whose keys its queries see: a bit for each."""
        size = self._size
        answered = self._lengths * (self._count(self._queries[DOCUMENT]) > 0)
        longest = answered.argmax()
        found = self._rows(counted(len(answered)) == longest) > 0
        if not found.all():  # mostly one document says it
            found |= self._by_limits()
            self._add_windows(found, answered)
        eights = torch.nn.functional.pad(found, (0, -size % 8)).view(size, -1, 8)
        octets = (eights * (1 << counted(8))).sum(2).tolist()
        return tuple(int.from_bytes(bytes(each), "little") for each in octets)

    def rows(self) -> tuple[dict[int, int], ...]:
        """For each rank, about how many rows it needs of each other.

        The longest of the documents that lie on all ranks stands for them. Of very many others the
        longest are counted.
        """
        owners, held, _ = self._firsts
        users, asked, _ = self._limits
        on, by = self._count(held), self._count(asked)
        owner, user = filled(len(on), -1), filled(len(on), -1)
        owner[held], user[asked] = owners, users
        apart = (on > 1) | (by > 1) | (owner != user)  # not on one rank, with its queries
        order = (-self._lengths).argsort(stable=True)
        everywhere = order[(apart & (on == self._size))[order]]
        found = filled(self._size**2, 0).view(self._size, -1)
        if len(everywhere):
            first = everywhere[0]
            found = self._rows(counted(len(on)) == first)
            found = found * self._lengths[everywhere].sum() // self._lengths[first]
        others = order[(apart & (on < self._size))[order]]
        work = (by * self._count(self._keys[DOCUMENT]))[others]
        chosen = filled(len(on), 0).bool()
        chosen[others[work.cumsum(0) - work < _COUNTED]] = True
        found = (found + self._rows(chosen)).fill_diagonal_(0)
        return tuple(
            {owner: rows for owner, rows in enumerate(each) if rows} for each in found.tolist()
        )

    @cached_property
    def _firsts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Owner, document and the position of the first key, wherever a rank has one."""
        codes, group = self._codes(self._keys)
        found = filled(len(codes), FAR).scatter_reduce(0, group, self._keys[POSITION], "amin")
        return codes // len(self._lengths), codes % len(self._lengths), found

    @cached_property
    def _limits(self) -> tuple[Tensor, Tensor, Tensor]:
        """User, document and the position before which all keys are seen."""
        codes, group = self._codes(self._queries)
        last = last_positions(self._queries)
        found = filled(len(codes), -FAR).scatter_reduce(0, group, last, "amax")
        found += FAR if self._mask.right is None else self._mask.right + 1
        return codes // len(self._lengths), codes % len(self._lengths), found

    def _codes(self, columns: Columns) -> tuple[Tensor, Tensor]:
        """A number for each rank and document that have spans, in order; and of each span which."""
        codes = columns[OWNER] * len(self._lengths) + columns[DOCUMENT]
        if bool((codes[1:] < codes[:-1]).any()):
            return codes.unique(return_inverse=True)
        return codes.unique_consecutive(return_inverse=True)

    def _count(self, documents: Tensor) -> Tensor:
        return documents.bincount(minlength=len(self._lengths))

    def _rows(self, documents: Tensor) -> Tensor:
        """How many rows each rank's queries see of each rank's keys of some documents."""
        size, count = self._size, len(self._lengths)
        found = filled(size * size, 0)
        users, asked, limits = self._limits
        plain = documents & ~self._windowed
        some, keys = plain[asked], self._keys[:, plain[self._keys[DOCUMENT]]]
        user, key = pairs(asked[some], keys[DOCUMENT], count)
        rows = prefixes(keys, limits[some][user], key)
        found.index_add_(0, users[some][user] * size + keys[OWNER][key], rows)
        cut = documents & self._windowed
        if cut.any():
            keys = self._keys[:, cut[self._keys[DOCUMENT]]]
            queries = self._queries[:, cut[self._queries[DOCUMENT]]]
            query, key = pairs(queries[DOCUMENT], keys[DOCUMENT], count)
            ranges = seen_rows(queries[:, query], keys[:, key], self._mask)
            each, first, end = union(queries[OWNER][query] * keys.shape[1] + key, *ranges)
            owner, user = keys[OWNER][each % keys.shape[1]], each // keys.shape[1]
            found.index_add_(0, user * size + owner, end - first)
        return found.view(size, size)

    def _by_limits(self) -> Tensor:
        """Who needs whom for documents without a window."""
        size, count = self._size, len(self._lengths)
        owners, held, firsts = self._firsts
        users, asked, limits = self._limits
        both = 4 * self._count(held) * self._count(asked)
        few = (both <= size * size) & ~self._windowed
        some, others = few[asked], few[held]
        user, owner = pairs(asked[some], held[others], count)
        sees = firsts[others][owner] < limits[some][user]
        found = filled(size * size, 0).bool()
        found[(users[some][user] * size + owners[others][owner])[sees]] = True
        found = found.view(size, size)
        many = (both > size * size) & ~self._windowed
        row = many.cumsum(0) - 1

        def table(ranks: Tensor, documents: Tensor, values: Tensor, nothing: int) -> Tensor:
            some = many[documents]
            found = filled(int(many.sum()) * size, nothing)
            found[row[documents[some]] * size + ranks[some]] = values[some]
            return found.view(-1, size)

        tables = table(owners, held, firsts, 2 * FAR - 1), table(users, asked, limits, -FAR)
        at_once = max(1, _AT_ONCE // size**2)
        for first, limit in zip(*(each.split(at_once) for each in tables), strict=True):
            found |= (first[:, None] < limit[:, :, None]).any(0)
        return found

    def _add_windows(self, found: Tensor, answered: Tensor) -> None:
        """Who needs whom for documents with a window, until everybody needs everybody."""
        queries, keys = self._count(self._queries[DOCUMENT]), self._count(self._keys[DOCUMENT])
        order = (-answered).argsort(stable=True)
        order = order[(self._windowed & (queries > 0) & (keys > 0))[order]]
        chunk = (queries * keys)[order].cumsum(0) // _AT_ONCE
        for number in chunk.unique().tolist():
            if found.all():
                return
            chosen = filled(len(queries), 0).bool()
            chosen[order[chunk == number]] = True
            found |= self._rows(chosen) > 0


def windowed(lengths: Tensor, mask: Mask) -> Tensor:
    """Of documents, whether the left side of the window hides keys from some query."""
    return lengths > (FAR if mask.left is None else mask.left + 1)
