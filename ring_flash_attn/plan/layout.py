"""Layouts: which rank holds which tokens, as plain data.

A layout is one function, `split(length, rank, world_size)`, that returns the tokens of a rank as a
list of ranges. Everything else (documents, spans, shards, positions) follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

Split = Callable[[int, int, int], list[range]]

FLAT_PREFIX = "flat_"


@dataclass(frozen=True, slots=True)
class Span:
    """Local rows `start … start+length` hold the tokens `position + stride·i` of one document.

    Query i of a document has position i + seqlen_k − seqlen_q, which may be negative. `index` is
    the place of the first token in the whole packed stream, the key of dropout's random draws.
    """

    start: int
    length: int
    position: int
    stride: int
    document: int
    index: int

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
        return self._with(self.start + rows, self.length, self.position, self.index)

    def part(self, start: int, end: int) -> Span:
        skipped = max(start - self.start, 0)
        length = min(end, self.start + self.length) - self.start - skipped
        if length == self.length:
            return self
        tokens = self.stride * skipped
        return self._with(self.start + skipped, length, self.position + tokens, self.index + tokens)

    def _with(self, start: int, length: int, position: int, index: int) -> Span:
        # not `replace`, which is slow: packs are long
        return Span(start, length, position, self.stride, self.document, index)


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to spread tokens over ranks."""

    name: str
    split: Split
    flat: bool = False  # split the whole packed stream, instead of every document by itself


_LAYOUTS: dict[str, Layout] = {}


def register_layout(name: str) -> Callable[[Split], Split]:
    """Make `split` available as `name` (per document) and `flat_name` (over the whole stream)."""

    def register(split: Split) -> Split:
        _LAYOUTS[name] = Layout(name, split)
        _LAYOUTS[FLAT_PREFIX + name] = Layout(FLAT_PREFIX + name, split, flat=True)
        return split

    return register


def layout_names() -> tuple[str, ...]:
    """All layouts, in order of registration."""
    return tuple(_LAYOUTS)


def get_layout(name: str) -> Layout:
    """The layout called `name`; ValueError that lists the choices otherwise."""
    if not isinstance(name, str) or name not in _LAYOUTS:
        raise ValueError(f"unknown layout {name!r}; choose one of {', '.join(_LAYOUTS)}")
    return _LAYOUTS[name]


def _chunk(length: int, part: int, parts: int) -> range:
    """Part `part` of `parts` nearly equal parts of `length` tokens (sizes differ by at most 1)."""
    return range(part * length // parts, (part + 1) * length // parts)


@register_layout("contiguous")
def contiguous(length: int, rank: int, world_size: int) -> list[range]:
    """Rank r holds the r-th part. Simple, but under a causal mask the last rank works most."""
    return [_chunk(length, rank, world_size)]


@register_layout("zigzag")
def zigzag(length: int, rank: int, world_size: int) -> list[range]:
    """Rank r holds parts r and 2W−1−r of 2W: an early and a late one, so causal work is even."""
    return [_chunk(length, part, 2 * world_size) for part in (rank, 2 * world_size - 1 - rank)]


@register_layout("stripe")
def stripe(length: int, rank: int, world_size: int) -> list[range]:
    """Rank r holds every W-th token from r on: causal work is even in every single step."""
    return [range(rank, length, world_size)]


def spans(
    layout: Layout,
    lengths: Sequence[int],
    rank: int,
    world_size: int,
    shifts: Sequence[int] | None = None,
) -> tuple[Span, ...]:
    """What `rank` holds of packed documents of any lengths, in the order of its local rows.

    `shifts` are added to the positions of each document: seqlen_k − seqlen_q for queries.
    """
    starts = [0, *accumulate(lengths)]
    found: list[Span] = []
    row = 0

    def take(tokens: range, document: int) -> None:
        nonlocal row
        if not tokens:
            return
        position = tokens.start - starts[document] + (shifts[document] if shifts else 0)
        found.append(Span(row, len(tokens), position, tokens.step, document, tokens.start))
        row += len(tokens)

    if layout.flat:
        for tokens in layout.split(starts[-1], rank, world_size):
            # of each document, the first of the rank's tokens at or after its start
            cuts = [max(0, -((tokens.start - start) // tokens.step)) for start in starts]
            for document, (first, last) in enumerate(pairwise(cuts)):
                take(tokens[first:last], document)
    else:
        for document, length in enumerate(lengths):
            for piece in layout.split(length, rank, world_size):
                offset = starts[document]
                take(range(piece.start + offset, piece.stop + offset, piece.step), document)
    return tuple(found)
