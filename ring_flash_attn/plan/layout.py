"""Layouts: which rank holds which tokens, as plain data.

A layout says what a rank holds of packed documents, as ranges of tokens (`Layout.held`). Most are
one function, `split(length, rank, world_size)`, over each document or over the whole stream.
Everything else (spans, shards, positions) follows from it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol, runtime_checkable

from .arrays import Array

Split = Callable[[int, int, int], list[range]]
Number = int | Array
Bound = tuple[Number, Number, Number]  # start, stop and step of a range, or of many
Bounds = Callable[[Number, Number, int], list[Bound]]

FLAT_PREFIX = "flat_"


class Span(NamedTuple):
    """Local rows `start … start+length` hold the tokens `position + stride·i` of one document.

    Query i of a document has position i + seqlen_k − seqlen_q, which may be negative. `index` is
    the place of the first token in the whole packed stream, the key of dropout's random draws.
    """

    start: int
    length: int
    position: int
    stride: int
    document: int
    index: int  # type: ignore[assignment]  # not the method of tuples

    @property
    def tokens(self) -> range:
        """Places in the packed stream, row by row."""
        return range(self.index, self.index + self.stride * self.length, self.stride)

    @property
    def positions(self) -> range:
        """Positions in the document, row by row."""
        return range(self.position, self.position + self.stride * self.length, self.stride)

    def moved(self, rows: int) -> Span:
        """The same tokens, `rows` further down in a longer buffer."""
        start, length, position, stride, document, index = self
        return tuple.__new__(Span, (start + rows, length, position, stride, document, index))

    def part(self, start: int, end: int) -> Span:
        skipped = max(start - self.start, 0)
        length = min(end, self.start + self.length) - self.start - skipped
        if length == self.length:
            return self
        tokens = self.stride * skipped
        return self._with(self.start + skipped, length, self.position + tokens, self.index + tokens)

    def _with(self, start: int, length: int, position: int, index: int) -> Span:
        return Span(start, length, position, self.stride, self.document, index)


@runtime_checkable
class Layout(Protocol):
    """A way to spread tokens over ranks. Equal ones have the same name."""

    @property
    def name(self) -> str: ...

    def held(
        self,
        lengths: Sequence[int],
        rank: int,
        world_size: int,
        queries: Sequence[int] | None = None,
    ) -> Iterable[tuple[int, range]]:
        """What `rank` holds of documents of these lengths: (document, tokens of it), row by row.

        `queries` are the documents' numbers of queries where the lengths are those of keys.
        """


@dataclass(frozen=True, slots=True)
class SplitLayout:
    """A layout that is one function.

    Attributes:
        split: the ranges of a rank.
        flat: split the whole packed stream, instead of every document by itself.
        bounds: those of `split` as a formula, for vectors of lengths and ranks too.
    """

    name: str
    split: Split
    flat: bool = False
    bounds: Bounds | None = None

    def held(
        self,
        lengths: Sequence[int],
        rank: int,
        world_size: int,
        queries: Sequence[int] | None = None,
    ) -> Iterable[tuple[int, range]]:
        if not self.flat:
            return (
                (document, tokens)
                for document, length in enumerate(lengths)
                for tokens in self.split(length, rank, world_size)
            )
        found: list[tuple[int, range]] = []
        starts = [0, *accumulate(lengths)]
        for tokens in self.split(starts[-1], rank, world_size):
            begin = max(0, bisect_right(starts, tokens.start) - 1)
            end = bisect_left(starts, tokens.stop, lo=begin)
            # of each document, the first of the rank's tokens at or after its start
            near = starts[begin : end + 1]
            cuts = [max(0, -((tokens.start - start) // tokens.step)) for start in near]
            for document, (first, last) in enumerate(pairwise(cuts), begin):
                part, start = tokens[first:last], starts[document]
                local = range(part.start - start, part.stop - start, part.step)
                found.append((document, local))
        return found


_LAYOUTS: dict[str, Layout] = {}
_UNLISTED: dict[str, Layout] = {}  # found by their names, like all others


def register_layout(name: str) -> Callable[[Split], Split]:
    """Make `split` available as `name` (per document) and `flat_name` (over the whole stream)."""

    def register(split: Split) -> Split:
        _add_split(name, split)
        return split

    return register


def _by_formula(name: str) -> Callable[[Bounds], Split]:
    """Make a layout available that is a formula."""

    def register(bounds: Bounds) -> Split:
        def split(length: int, rank: int, world_size: int) -> list[range]:
            return [range(*each) for each in bounds(length, rank, world_size)]

        split.__doc__ = bounds.__doc__
        _add_split(name, split, bounds)
        return split

    return register


def _add_split(name: str, split: Split, bounds: Bounds | None = None) -> None:
    add_layout(SplitLayout(name, split, bounds=bounds))
    add_layout(SplitLayout(FLAT_PREFIX + name, split, flat=True))


def add_layout(layout: Layout) -> None:
    """Make a layout available by its name."""
    _LAYOUTS[layout.name] = layout


def remember_layout(layout: Layout) -> None:
    """Let its name find it, but do not list it: operators of torch take layouts by name."""
    _UNLISTED[layout.name] = layout


def layout_names() -> tuple[str, ...]:
    """All layouts, in order of registration."""
    return tuple(_LAYOUTS)


def get_layout(layout: str | Layout) -> Layout:
    """The layout of this name, or the layout itself; ValueError that lists the names otherwise."""
    if isinstance(layout, str):
        found = _LAYOUTS.get(layout) or _UNLISTED.get(layout)
        if found is not None:
            return found
    if isinstance(layout, Layout) and not isinstance(layout, type):
        return layout
    raise ValueError(
        f"unknown layout {layout!r}; choose one of {', '.join(_LAYOUTS)}, or a Balanced(...)"
    )


def chunk(length: int, part: int, parts: int) -> range:
    """Part `part` of `parts` nearly equal parts of `length` tokens (sizes differ by at most 1)."""
    return range(part * length // parts, (part + 1) * length // parts)


@_by_formula("contiguous")
def contiguous(length: Number, rank: Number, world_size: int) -> list[Bound]:
    """Rank r holds the r-th part. Simple, but under a causal mask the last rank works most."""
    return [(rank * length // world_size, (rank + 1) * length // world_size, 1)]


@_by_formula("zigzag")
def zigzag(length: Number, rank: Number, world_size: int) -> list[Bound]:
    """Rank r holds parts r and 2W−1−r of 2W: an early and a late one, so causal work is even."""
    parts, early, late = 2 * world_size, rank * length, (2 * world_size - 1 - rank) * length
    return [
        (early // parts, (early + length) // parts, 1),
        (late // parts, (late + length) // parts, 1),
    ]


@_by_formula("stripe")
def stripe(length: Number, rank: Number, world_size: int) -> list[Bound]:
    """Rank r holds every W-th token from r on: causal work is even in every single step."""
    return [(rank, length, world_size)]


def spans(
    layout: Layout,
    lengths: Sequence[int],
    rank: int,
    world_size: int,
    shifts: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
) -> tuple[Span, ...]:
    """What `rank` holds of packed documents of any lengths, in the order of its local rows.

    `shifts` are added to the positions of each document: seqlen_k − seqlen_q for queries.
    `queries` are the documents' numbers of queries where the lengths are those of keys.
    """
    starts = [0, *accumulate(lengths)]
    found: list[Span] = []
    add, new, row = found.append, tuple.__new__, 0  # the quick way: packs are long
    for document, tokens in layout.held(lengths, rank, world_size, queries):
        length = len(tokens)
        if length:
            first = position = tokens.start
            if shifts:
                position += shifts[document]
            index = starts[document] + first
            add(new(Span, (row, length, position, tokens.step, document, index)))
            row += length
    return tuple(found)
