"""Where rows of several shards lie in one buffer, and which rows a message takes, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import cast

from .arrays import (
    Array,
    argsort,
    before,
    cat,
    count,
    filled,
    insertion_points,
    repeat,
    sum_of_each,
    sums_before,
    vector,
)
from .columns import (
    DOCUMENT,
    INDEX,
    LENGTH,
    OWNER,
    POSITION,
    START,
    Columns,
    LazySequence,
    breaks,
    ends_of,
    joined,
    to_spans,
)
from .layout import Span

Rows = Sequence[range]  # of a shard or a buffer

BLOCK = 128  # rows of a kernel's block: a span costs as much as its blocks
COPY = 40  # pairs that are computed in the time that moving the keys and values of a token takes
LAUNCH = 200_000  # and in the time of a small launch
_FEW = 16  # spans of a shard: with more, shards one after the other save little


class Runs(LazySequence[range]):
    """Rows as ranges of step 1.

    Attributes:
        starts, lengths: of the ranges.
        total: number of rows.
    """

    __slots__ = ("lengths", "starts", "total")

    def __init__(self, starts: Array, lengths: Array, total: int) -> None:
        super().__init__()
        self.starts, self.lengths, self.total = starts, lengths, total

    def _make(self) -> tuple[range, ...]:
        ends = (self.starts + self.lengths).tolist()
        return tuple(map(range, self.starts.tolist(), ends))

    def __len__(self) -> int:
        return len(self.starts)


def count_rows(rows: Rows) -> int:
    return rows.total if isinstance(rows, Runs) else sum(map(len, rows))


def chain_rows(parts: Sequence[Rows]) -> Rows:
    """All rows of some parts."""
    if not all(isinstance(part, Runs) for part in parts):
        return tuple(chain.from_iterable(parts))
    runs = cast("Sequence[Runs]", parts)
    starts, lengths = cat([each.starts for each in runs]), cat([each.lengths for each in runs])
    return Runs(starts, lengths, sum(each.total for each in runs))


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Rows of a shard or a buffer as they lie in a message; rows of one peer lie together.

    Compared by identity, so that tables on a GPU can be cached for it.
    """

    rows: Rows  # all of them, in the order of the messages
    counts: tuple[tuple[int, int], ...] = ()  # (peer, rows), in the order of the messages
    total: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", count_rows(self.rows))

    @property
    def slice(self) -> slice | None:
        """The rows, if they follow each other in the shard."""
        if len(self.rows) > 1 or (self.rows and self.rows[0].step != 1):
            return None
        return slice(self.rows[0].start, self.rows[0].stop) if self.rows else slice(0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Arrangement:
    """What of some shards is in one buffer, and where.

    Attributes:
        columns: the spans in the order of rows of the buffer; what goes on with the tokens before
            it is joined.
        places: of each owner, its rows in the buffer, in the order of its shard, as in a message.
        size: rows of the buffer.
        by_document: rows lie by document and position; otherwise owner after owner, so that a
            message is one range of rows.
    """

    columns: Columns
    places: dict[int, Rows]
    size: int
    by_document: bool

    @property
    def spans(self) -> tuple[Span, ...]:
        return to_spans(self.columns)


def arrange(
    owners: Sequence[int], known: Columns, queries: Array, sizes: Sequence[int] | None = None
) -> Arrangement:
    """Some rows of several shards in one buffer.

    They lie owner after owner, by their first tokens, unless kernels save more than the copies cost
    if they lie by document and position: what a query sees of a document is then one range of rows,
    not many with a half-filled block each.

    Args:
        owners: of the shards.
        known: the spans of these rows, in the order of the owners.
        queries: how many there are of each document.
        sizes: those of whole shards, if these are there, and not only the rows of these spans.
    """
    cuts, offsets = cuts_between(owners, known), known[START]
    if sizes is None:
        rows = sums_before(known[LENGTH])
        firsts, lasts = rows[vector(a for a, _ in cuts)], rows[vector(b for _, b in cuts)]
        offsets = rows[:-1] - repeat(firsts, vector(b - a for a, b in cuts))
        sizes = (lasts - firsts).tolist()
    cost = COPY * sum(sizes) + LAUNCH
    if len(owners) < 2 or not _saves_more(known, queries, cost):
        return _by_owner(owners, known, cuts, offsets, sizes)
    if known.shape[1] <= _FEW * len(owners):
        found = _by_owner(owners, known, cuts, offsets, sizes)
        if not _saves_more(found.columns, queries, cost):
            return found
    return _by_document(owners, known, cuts)


def _by_owner(
    owners: Sequence[int],
    known: Columns,
    cuts: Sequence[tuple[int, int]],
    offsets: Array,
    sizes: Sequence[int],
) -> Arrangement:
    firsts = [known[[DOCUMENT, POSITION], a : min(a + 1, b)].flatten().tolist() for a, b in cuts]
    order = sorted(range(len(owners)), key=firsts.__getitem__)
    places: dict[int, Rows] = {}
    shards, begins, size = [known[:, :0]], [offsets[:0]], 0
    for number in order:
        first, last = cuts[number]
        shards.append(known[:, first:last])
        begins.append(offsets[first:last] + size)
        rows = range(size, size + sizes[number])
        places[owners[number]] = (rows,) if rows else ()
        size = rows.stop
    found = joined(cat(shards, 1), cat(begins))
    return Arrangement(found, places, size, by_document=False)


def _by_document(
    owners: Sequence[int], known: Columns, cuts: Sequence[tuple[int, int]]
) -> Arrangement:
    order = argsort(known[INDEX])
    ordered = known[:, order]
    rows = before(ordered[LENGTH])
    begins = filled(len(rows), 0)
    begins[order] = rows
    places = dict(zip(owners, ranges_apart(begins, known[LENGTH], cuts), strict=True))
    return Arrangement(joined(ordered, rows), places, int(known[LENGTH].sum()), by_document=True)


def _saves_more(known: Columns, queries: Array, cost: int) -> bool:
    """Whether more pairs need not be computed if all spans of a document follow each other."""
    _, _, length, _, stride, document, _ = known
    length = length * (stride == 1)
    blocks, rows = (sum_of_each(document, each, len(queries)) for each in (_blocks(length), length))
    return int(((blocks - _blocks(rows)) * queries).sum()) * BLOCK > cost


def _blocks(rows: Array) -> Array:
    return (rows + (BLOCK - 1)) // BLOCK


def ranges_apart(starts: Array, lengths: Array, cuts: Sequence[tuple[int, int]]) -> list[Rows]:
    """Runs of rows, in their order, as ranges; of each part between two cuts by itself."""
    if not len(starts):
        return [()] * len(cuts)
    between = starts[1:] != (starts + lengths)[:-1]
    between[vector(first - 1 for first, last in cuts if 0 < first < last)] = True
    first = breaks(between)
    at = vector([0, *(last for _, last in cuts)])
    total = sums_before(lengths)
    totals = total[at].tolist()
    runs = insertion_points(first, at).tolist()
    starts, lengths = starts[first], total[ends_of(first, len(starts))] - total[first]
    return [
        Runs(starts[a:b], lengths[a:b], end - begin)
        for (a, b), (begin, end) in zip(pairwise(runs), pairwise(totals), strict=True)
    ]


def cuts_between(owners: Sequence[int], known: Columns) -> list[tuple[int, int]]:
    """From where to where the spans of each owner are."""
    counts = count(known[OWNER], 1 + max(owners, default=0)).tolist()
    return list(pairwise(accumulate((counts[owner] for owner in owners), initial=0)))


def ranges_of(known: Columns) -> Rows:
    """The rows of some spans, in their order, as ranges: fewer where one goes on with another."""
    size = known.shape[1]
    return ranges_apart(known[START], known[LENGTH], [(0, size)])[0] if size else ()


def rows_within(rows: Rows, held: Rows) -> Rows:
    """Where some rows of a shard lie in a buffer that holds these of it, one after the other."""
    if not rows:
        return ()
    (starts, lengths), (begins, sizes) = map(_as_columns, (rows, held))
    number = insertion_points(begins, starts, right=True) - 1
    assert (starts + lengths <= (begins + sizes)[number]).all(), f"{rows} are not in {held}"
    found = before(sizes)[number] + starts - begins[number]
    return ranges_apart(found, lengths, [(0, len(found))])[0]


def _as_columns(rows: Rows) -> tuple[Array, Array]:
    """Starts and lengths."""
    if isinstance(rows, Runs):
        return rows.starts, rows.lengths
    return vector(each.start for each in rows), vector(map(len, rows))


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
