"""Where rows of several shards lie in one buffer, and which rows a message takes, as plain data."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from .layout import Span

Rows = tuple[range, ...]  # of a shard or a buffer

BLOCK = 128  # rows of a kernel's block: a span costs as much as its blocks
COPY = 40  # pairs that are computed in the time that moving the keys and values of a token takes
LAUNCH = 200_000  # and in the time of a small launch
_FEW = 16  # spans of a shard: with more, shards one after the other save little


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Rows of a shard or a buffer as they lie in a message; rows of one peer lie together.

    Compared by identity, so that tables on a GPU can be cached for it.
    """

    rows: Rows  # all of them, in the order of the messages
    counts: tuple[tuple[int, int], ...] = ()  # (peer, rows), in the order of the messages
    total: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", sum(map(len, self.rows)))

    @property
    def slice(self) -> slice | None:
        """The rows, if they follow each other in the shard."""
        if len(self.rows) > 1 or (self.rows and self.rows[0].step != 1):
            return None
        return slice(self.rows[0].start, self.rows[0].stop) if self.rows else slice(0, 0)


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What of some shards is in one buffer, and where.

    Attributes:
        spans: in the order of rows of the buffer; what goes on with the tokens before it is joined.
        places: of each owner, its rows in the buffer, in the order of its shard, as in a message.
        size: rows of the buffer.
        by_document: rows lie by document and position; otherwise owner after owner, so that a
            message is one range of rows.
    """

    spans: tuple[Span, ...]
    places: dict[int, Rows]
    size: int
    by_document: bool


Shard = tuple[int, Rows, Sequence[Span]]  # owner, rows that are there, what is known of them


def arrange(shards: Sequence[Shard], queries: dict[int, int]) -> Arrangement:
    """Some rows of several shards in one buffer.

    They lie owner after owner, by their first tokens, unless kernels save more than the copies cost
    if they lie by document and position: what a query sees of a document is then one range of rows,
    not many with a half-filled block each. `queries` are the numbers of queries of each document.
    """
    size = sum(len(rows) for _, parts, _ in shards for rows in parts)
    cost = COPY * size + LAUNCH
    if len(shards) == 1 or not _saves_more((known for _, _, known in shards), queries, cost):
        return _by_owner(shards)
    if sum(len(known) for _, _, known in shards) <= _FEW * len(shards):
        found = _by_owner(shards)
        if not _saves_more([found.spans], queries, cost):
            return found
    return _by_document(shards)


def _by_owner(shards: Iterable[Shard]) -> Arrangement:
    spans: list[Span] = []
    begins: list[int] = []
    places: dict[int, Rows] = {}
    size = 0
    in_order = sorted(shards, key=lambda each: [(s.document, s.position) for s in each[2][:1]])
    for owner, rows, known in in_order:
        first, runs = size, iter(rows)
        run = range(0)
        for span in known:
            while span.start >= run.stop:
                size += len(run)
                run = next(runs)
            begins.append(size - run.start + span.start)
        spans += known
        size = first + sum(map(len, rows))
        places[owner] = (range(first, size),) if size > first else ()
    return Arrangement(_joined(spans, begins), places, size, by_document=False)


def _by_document(shards: Sequence[Shard]) -> Arrangement:
    spans = [span for _, _, known in shards for span in known]
    order = sorted(range(len(spans)), key=[span[5] for span in spans].__getitem__)  # index
    lengths = [span[1] for span in spans]
    rows = list(accumulate(map(lengths.__getitem__, order), initial=0))
    size, begins = rows.pop(), [0] * len(spans)
    for number, row in zip(order, rows, strict=True):
        begins[number] = row
    places, first = {}, 0
    for owner, _, known in shards:
        last = first + len(known)
        places[owner] = join_runs(begins[first:last], lengths[first:last])
        first = last
    joined = _joined(map(spans.__getitem__, order), rows)
    return Arrangement(joined, places, size, by_document=True)


def _saves_more(shards: Iterable[Sequence[Span]], queries: dict[int, int], cost: int) -> bool:
    """Whether more pairs need not be computed if all spans of a document follow each other.

    More shards save more, so the first ones may do.
    """
    blocks: dict[int, int] = {}
    rows: dict[int, int] = {}
    look = 2  # after so many shards
    for number, spans in enumerate(shards, 1):
        for _, length, _, stride, document, _ in spans:
            if stride == 1:
                blocks[document] = blocks.get(document, 0) - (-length // BLOCK)
                rows[document] = rows.get(document, 0) + length
        if number == look:
            if _saved(blocks, rows, queries) > cost:
                return True
            look += look
    return _saved(blocks, rows, queries) > cost


def _saved(blocks: dict[int, int], rows: dict[int, int], queries: dict[int, int]) -> int:
    """Pairs: blocks of spans that lie apart, less those of the same rows in one place."""
    return sum(
        (count + (-rows[document] // BLOCK)) * BLOCK * queries.get(document, 0)
        for document, count in blocks.items()
    )


def _joined(spans: Iterable[Span], begins: Iterable[int]) -> tuple[Span, ...]:
    """The same tokens, from these rows on, as fewer spans where one goes on with another."""
    found: list[Span] = []
    add, new = found.append, tuple.__new__  # the quick way: packs are long
    first = total = step = after = beyond = row = at = 0  # of the span that grows
    of = -1
    for span, begin in zip(spans, begins, strict=True):
        _, length, position, stride, document, index = span
        if index == beyond and begin == after and document == of and stride == step:
            total += length
        else:
            if total:
                add(new(Span, (row, total, at, step, of, first)))
            row, total, at, step, of, first = begin, length, position, stride, document, index
        after, beyond = begin + length, index + stride * length
    if total:
        add(new(Span, (row, total, at, step, of, first)))
    return tuple(found)


def join_runs(starts: Iterable[int], lengths: Iterable[int]) -> Rows:
    """Runs of rows, in their order, as ranges: fewer where one goes on with another."""
    found: list[range] = []
    add, first, end = found.append, -1, -1
    for start, length in zip(starts, lengths, strict=True):
        if start != end:
            if end > first:
                add(range(first, end))
            first = start
        end = start + length
    if end > first:
        add(range(first, end))
    return tuple(found)


def rows_within(rows: Rows, held: Rows) -> Rows:
    """Where some rows of a shard lie in a buffer that holds these of it, one after the other."""
    starts = [run.start for run in held]
    firsts = [0, *accumulate(map(len, held))]
    found = []
    for run in rows:
        number = bisect_right(starts, run.start) - 1
        first = firsts[number] + run.start - starts[number]
        assert first + len(run) <= firsts[number + 1], f"{run} is not in {held[number]}"
        found.append(range(first, first + len(run)))
    return join(found)


def join(parts: Iterable[range]) -> Rows:
    """The same rows in the same order, as fewer ranges where one goes on with another."""
    found: list[range] = []
    for rows in parts:
        if found and rows.step == 1 == found[-1].step:  # mostly
            if found[-1].stop == rows.start:
                found[-1] = range(found[-1].start, rows.stop)
            else:
                found.append(rows)
            continue
        if len(rows) == 1:
            rows = range(rows.start, rows.start + 1)
        if found:
            last = found[-1]
            step = rows.step if len(last) == 1 else last.step
            if rows.start == last[-1] + step and (len(rows) == 1 or rows.step == step):
                found[-1] = range(last.start, rows[-1] + 1, step)
                continue
        found.append(rows)
    return tuple(found)
