"""The balanced layout: packed documents with tokens and pairs even, and little that travels.

Ranks are filled in turn. Each takes the end of the longest document that is left, and the shortest
ones whole, in the mix that gives it its share of tokens and of pairs. So most short documents are
on one rank. Of a document that is longer than a few ranks' pairs, each takes as much of the start:
otherwise a few ranks would hold what all others need.

Why there is such a mix: by pairs for each token, the sparse end of what is left is at or below the
mean, and the dense end at or above it.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf
from typing import Any, NamedTuple

from .layout import Layout, add_layout, chunk, get_layout, remember_layout
from .tiles import Mask, band_pairs

Slice = tuple[int, int, int]  # document, first token, one past the last
Price = Callable[[int, int, int], float]  # pairs of a slice
Item = tuple[float, int, int, int, float]  # pairs for each token, a slice, its pairs

BLOCK = 128  # rows of a kernel's block: a slice costs as much as its blocks
SHORT = 4 * BLOCK  # tokens; shorter documents cost more than their pairs, so all ranks get some
SMALL = 16  # provided that so many of them fit into a rank
LONG = 3  # times a rank's pairs: a longer document gives from both ends
CLOSE = 0.002  # by how much of its share a rank's pairs may be off, where that saves something
_CAUSAL = ((Mask(right=0), 1),)
_OF_NODES = re.compile(r"Balanced\(ranks_per_node=([1-9]\d*)\)")
TOKEN = 200  # pairs that are computed while the keys and values of a token are on the way


@dataclass(frozen=True, slots=True)
class Balanced:
    """A layout that places documents by their lengths: tokens and pairs even, little that travels.

    All ranks hold as many tokens, to one; they compute as many pairs, where the documents allow it;
    long documents are on few ranks, and most short ones on one. A single sequence is spread as in
    zigzag. Every rank derives the same from cu_seqlens.

    Where a document has more keys than queries, or fewer, the queries decide: its keys are cut at
    the same parts of its length.

    Args:
        masks: ((mask, weight), …), one for each kind of layer; the weight is how many there are.
            Pairs are even over all of them together. By default causal. Attention itself may have
            any other mask, with work that is less even.
        ranks_per_node: ranks that follow each other and share a node, which documents are kept in
            where that can be; None: all ranks are alike.
    """

    masks: tuple[tuple[Mask, float], ...] = _CAUSAL
    ranks_per_node: int | None = None
    name: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "masks", _checked_masks(self.masks))
        ranks = self.ranks_per_node
        if ranks is not None and (type(ranks) is not int or ranks < 1):
            raise ValueError(f"ranks_per_node must be a positive integer or None, not {ranks!r}")
        name = repr(self)
        if self.masks == _CAUSAL:
            name = "balanced" if ranks is None else f"Balanced(ranks_per_node={ranks})"
        object.__setattr__(self, "name", name)
        remember_layout(self)

    def __reduce__(self) -> tuple[object, ...]:
        return Balanced, (self.masks, self.ranks_per_node)  # so that its name finds the copy

    def held(
        self,
        lengths: Sequence[int],
        rank: int,
        world_size: int,
        queries: Sequence[int] | None = None,
    ) -> Iterable[tuple[int, range]]:
        """Slices of documents, in the order of the stream."""
        decides = tuple(lengths if queries is None or len(queries) == 1 else queries)
        slices = _placed(self, decides, world_size)[rank]
        if decides == tuple(lengths):
            return [(document, range(start, stop)) for document, start, stop in slices]
        found = [
            (document, range(start * keys // of, stop * keys // of))
            for document, start, stop in slices
            for keys, of in ((lengths[document], decides[document]),)
        ]
        unseen = [document for document, number in enumerate(decides) if not number]
        found += [(each, chunk(lengths[each], rank, world_size)) for each in unseen]
        return sorted(found, key=lambda each: (each[0], each[1].start))


def _checked_masks(masks: Any) -> tuple[tuple[Mask, float], ...]:
    """The same as tuples; ValueError unless there are masks with positive weights."""
    wrong = f"masks must be pairs ((Mask(...), weight), …) with positive weights, not {masks!r}"

    def is_mask(mask: object) -> bool:
        sides = (mask.left, mask.right) if isinstance(mask, Mask) else (-1,)
        return all(side is None or (type(side) is int and side >= 0) for side in sides)

    try:
        found = tuple((mask, weight) for mask, weight in masks)
    except (TypeError, ValueError):
        raise ValueError(wrong) from None
    for mask, weight in found:
        number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not (is_mask(mask) and number and 0 < weight < inf):
            raise ValueError(wrong)
    if not found:
        raise ValueError(wrong)
    return found


@lru_cache(maxsize=64)  # all ranks, tensors and layers share it
def _placed(layout: Balanced, lengths: tuple[int, ...], world_size: int) -> list[list[Slice]]:
    return place(lengths, world_size, layout.masks, layout.ranks_per_node)


def find_layout(name: str) -> Layout:
    """The layout of this name: a listed one, or `Balanced(ranks_per_node=…)` as that is called.

    ValueError that lists the choices otherwise.
    """
    found = _OF_NODES.fullmatch(name)
    return get_layout(Balanced(ranks_per_node=int(found[1])) if found else name)


def place(
    lengths: Sequence[int],
    world_size: int,
    masks: Sequence[tuple[Mask, float]],
    ranks_per_node: int | None = None,
) -> list[list[Slice]]:
    """What each rank holds of documents of these lengths, in the order of the stream."""
    price = _priced(lengths, masks)
    longest = max(range(len(lengths)), key=lengths.__getitem__, default=0)
    end = lengths[longest] if lengths else 0
    if end and price(longest, 0, end // 2) > price(longest, end - end // 2, end):
        # Late queries see less than early ones: place them as in a mirror.
        swapped = [(Mask(mask.right, mask.left), weight) for mask, weight in masks]
        held = place(lengths, world_size, swapped, ranks_per_node)
        return [sorted((d, lengths[d] - b, lengths[d] - a) for d, a, b in each) for each in held]
    ends = [rank * sum(lengths) // world_size for rank in range(world_size + 1)]
    sizes = [b - a for a, b in pairwise(ends)]
    step = ranks_per_node or world_size
    nodes = [sizes[first : first + step] for first in range(0, world_size, step)]
    held = [[(document, 0, length) for document, length in enumerate(lengths) if length]]
    causal = any(mask.left is None and mask.right is not None for mask, _ in masks)
    if len(nodes) > 1:
        of_nodes = [sum(node) for node in nodes], [len(node) for node in nodes]
        held = _divide(held[0], *of_nodes, price, causal)
    found: list[list[Slice]] = []
    for slices, node in zip(held, nodes):
        found += _divide(slices, node, [1] * len(node), price, causal)
    return [_merged(sorted(slices)) for slices in found]


def _merged(slices: Iterable[Slice]) -> list[Slice]:
    """The same tokens; slices that follow each other become one."""
    found: list[Slice] = []
    for document, start, stop in slices:
        if found and found[-1][0] == document and found[-1][2] == start:
            found[-1] = (document, found[-1][1], stop)
        else:
            found.append((document, start, stop))
    return found


def _priced(lengths: Sequence[int], masks: Sequence[tuple[Mask, float]]) -> Price:
    """Pairs of the queries of a slice, over all masks, by their weights."""
    if [mask for mask, _ in masks] == [Mask(right=0)]:
        return lambda _, start, stop: (stop * (stop + 1) - start * (start + 1)) // 2

    def price(document: int, start: int, stop: int) -> float:
        rows, columns = stop - start, lengths[document]
        work: float = 0
        for mask, weight in masks:
            low = -rows if mask.left is None else start - mask.left
            high = columns if mask.right is None else start + mask.right
            work += weight * band_pairs(rows, columns, low, high)
        return work

    return price


def _divide(
    slices: Sequence[Slice],
    sizes: Sequence[int],
    ranks: Sequence[int],
    price: Price,
    causal: bool,
) -> list[list[Slice]]:
    """Slices for parts of so many tokens; a part's share of the pairs is that of its ranks."""
    found: list[list[Slice]] = [[] for _ in sizes]
    first, slices = _fit(slices, sizes, ranks, price, found)
    works = [0.0] * len(sizes)
    if len(set(ranks)) == 1:
        slices = _deal(slices, sizes, first, price, found, works)
    pool = _Pool(slices, price, causal)
    for part in range(first, len(sizes)):
        share = (pool.work + sum(works[part:])) * ranks[part] / sum(ranks[part:])
        tokens = sizes[part] - sum(stop - start for _, start, stop in found[part])
        if part + 1 < len(sizes):
            found[part] += pool.take(tokens, share - works[part])
        else:
            found[part] += [(document, a, b) for _, document, a, b, _ in pool.items]
    return found


def _fit(
    slices: Sequence[Slice],
    sizes: Sequence[int],
    ranks: Sequence[int],
    price: Price,
    found: list[list[Slice]],
) -> tuple[int, list[Slice]]:
    """Place slices that are just what some parts need; the parts used, and the other slices."""
    share = sum(price(*each) for each in slices) / sum(ranks)
    first, rest = 0, []
    ends = [0, *accumulate(sizes)]
    for each in slices:
        end = bisect_left(ends, ends[first] + each[2] - each[1], lo=first)
        fits = end < len(ends) and ends[end] - ends[first] == each[2] - each[1]
        wanted = share * sum(ranks[first:end])
        if fits and abs(price(*each) - wanted) <= CLOSE * wanted:
            for part, held in enumerate(_spread(each, sizes[first:end], price), first):
                found[part] += held
            first = end
        else:
            rest.append(each)
    return first, rest


def _spread(whole: Slice, sizes: Sequence[int], price: Price) -> list[list[Slice]]:
    """One slice over some parts: one after the other, or as in zigzag if that is more even."""
    document, start, stop = whole
    runs, pairs, at = [], [], start
    for number, size in enumerate(sizes):
        runs.append([(document, at, at + size)] if size else [])
        at += size
        early = (size + number % 2) // 2
        ends = [(document, start, start + early), (document, stop - size + early, stop)]
        pairs.append([each for each in ends if each[1] < each[2]])
        start, stop = start + early, stop - size + early

    def most(parts: list[list[Slice]]) -> float:
        return max(sum(price(*each) for each in held) for held in parts)

    return runs if most(runs) <= most(pairs) * (1 + CLOSE) else pairs


def _deal(
    slices: Sequence[Slice],
    sizes: Sequence[int],
    first: int,
    price: Price,
    found: list[list[Slice]],
    works: list[float],
) -> list[Slice]:
    """Give short slices to the parts from `first` on, one each in a turn; the other slices."""
    parts = range(first, len(sizes))
    most = min(SHORT, min(sizes[first:], default=0) // SMALL)
    short = sorted((b - a, document, a, b) for document, a, b in slices if b - a <= most)
    tokens = [0] * len(sizes)
    mean = sum(price(*each) for each in slices) / max(1, len(parts))
    dealt = set()
    for turn in range(len(short) // max(1, len(parts))):
        order = parts if turn % 2 else parts[::-1]
        cards = short[turn * len(parts) : (turn + 1) * len(parts)]
        new = [(part, card[1:], price(*card[1:])) for part, card in zip(order, cards)]
        if any(tokens[p] + b - a > sizes[p] or works[p] + w > mean for p, (_, a, b), w in new):
            break
        for part, each, work in new:
            found[part].append(each)
            tokens[part] += each[2] - each[1]
            works[part] += work
            dealt.add(each)
    return [each for each in slices if each not in dealt]


class _Mix(NamedTuple):
    """Tokens of a part: from the sparse end, from the dense end, and of one item in between.

    The last item of the dense end may give `front` tokens of its start as well.
    """

    sparse: int
    dense: int
    middle: int = 0  # index
    between: int = 0
    front: int = 0


class _Pool:
    """What nobody holds yet, by pairs for each token."""

    def __init__(self, slices: Iterable[Slice], price: Price, causal: bool) -> None:
        self.price, self._causal = price, causal
        self.items = sorted(self._item(*each) for each in slices)
        self.work = sum(each[4] for each in self.items)

    def _item(self, document: int, start: int, stop: int) -> Item:
        work = self.price(document, start, stop)
        return work / (stop - start), document, start, stop, work

    def take(self, tokens: int, work: float) -> list[Slice]:
        """Remove so many tokens with so many pairs."""
        self._low = _sums(self.items, tokens)
        self._high = _sums(reversed(self.items), tokens)
        mixes = list(self._of_both_ends(tokens, work))
        if not mixes:
            dense = _solve(lambda n: self._dense(n) + self._sparse(tokens - n), tokens, work)
            mixes = [_Mix(tokens - dense, dense), *self._aligned(tokens, dense, work)]
        return self._remove(min(mixes, key=self._cost))

    def _of_both_ends(self, tokens: int, work: float) -> Iterator[_Mix]:
        """Mixes with as much of the start of a long item as of its end; none if it is not long."""
        _, document, start, stop, pairs = self.items[-1] if self.items else (0, 0, 0, 0, 0)
        if not self._causal or pairs <= LONG * work:
            return

        def ends(front: int, back: int) -> float:
            last = self.price(document, stop - back, stop)
            return self.price(document, start, start + front) + last

        most = min(tokens, stop - start) // 2
        size = _solve(lambda n: ends(n, n) + self._sparse(tokens - 2 * n), most, work)
        if bisect_left(self._low[0], tokens - 2 * size) >= len(self.items):
            return  # there is not so much else
        if abs(ends(size, size) + self._sparse(tokens - 2 * size) - work) <= CLOSE * work:
            yield _Mix(tokens - 2 * size, size, front=size)
        odd = size % BLOCK
        size -= odd
        for front, back in ((size + BLOCK, size), (size, size + BLOCK), (size, size)):
            rest, base = tokens - front - back, ends(front, back)
            if odd and size and rest >= 0 and base <= work:
                mixes = list(self._with_middle(rest, base, work, _Mix(0, back, front=front)))
                yield from mixes
                if mixes:
                    return

    def _sparse(self, tokens: int) -> float:
        """Pairs of the first tokens."""
        counts, works = self._low
        number = bisect_left(counts, tokens) - 1
        if number < 0:
            return 0
        _, document, start, _, _ = self.items[number]
        return works[number] + self.price(document, start, start + tokens - counts[number])

    def _dense(self, tokens: int) -> float:
        """Pairs of the last tokens."""
        counts, works = self._high
        number = bisect_left(counts, tokens) - 1
        if number < 0:
            return 0
        _, document, _, stop, _ = self.items[-1 - number]
        return works[number] + self.price(document, stop - tokens + counts[number], stop)

    def _aligned(self, tokens: int, dense: int, work: float) -> Iterator[_Mix]:
        """Mixes in which the slice at the dense end has whole blocks; work is made up elsewhere."""
        last = bisect_left(self._high[0], dense)  # items of the dense end
        if not last:
            return
        _, document, start, stop, _ = self.items[-last]
        before = self._high[0][last - 1]
        odd = (dense - before) % BLOCK
        if not odd or dense - before == stop - start:
            return
        # Fewer tokens there, and an item of the middle instead of some of the sparse end.
        dense -= odd
        rest, base = tokens - dense, self._dense(dense)
        yield from self._with_middle(rest, base, work, _Mix(0, dense), last)

        # More tokens there, and the start of the same item instead of some of the sparse end.
        dense += BLOCK
        most = min(tokens - dense, stop - start - dense + before)
        if most <= 0:
            return
        rest, base = tokens - dense, self._dense(dense)

        def twice(tokens: int) -> float:
            return -base - self.price(document, start, start + tokens) - self._sparse(rest - tokens)

        if bisect_left(self._low[0], rest) <= len(self.items) - last:
            front = _solve(twice, most, -work)
            if abs(twice(front) + work) <= CLOSE * work:
                yield _Mix(rest - front, dense, front=front)

    def _with_middle(
        self, rest: int, base: float, work: float, mix: _Mix, last: int = 1
    ) -> Iterator[_Mix]:
        """A mix whose `last` items have `base` pairs; the rest: one in between, sparse ones."""
        middle = range(bisect_left(self._low[0], rest), len(self.items) - last)

        def instead(index: int) -> float:
            _, _, a, b, pairs = self.items[index]
            return base + pairs + self._sparse(rest - b + a) if b - a <= rest else inf

        def partly(tokens: int) -> float:
            return base + self.price(item, b - tokens, b) + self._sparse(rest - tokens)

        at = middle.start + bisect_left(middle, work, key=instead) if middle else 0
        for index in middle[max(0, at - 1 - middle.start) : at + 1 - middle.start]:
            _, item, a, b, _ = self.items[index]
            size = b - a
            if abs(instead(index) - work) > CLOSE * work:
                size = _solve(partly, min(size, rest), work)
            if abs(partly(size) - work) <= CLOSE * work:
                yield mix._replace(sparse=rest - size, middle=index, between=size)

    def _cost(self, mix: _Mix) -> float:
        """Of what is cut, in pairs: rows that fill up blocks, and what has to be fetched."""
        cost: float = 0
        for index, (front, back) in self._cuts(mix).items():
            _, document, start, stop, _ = self.items[index]
            if front + back == stop - start:
                continue
            for a, b in ((start, start + front), (stop - back, stop)):
                if a < b:
                    cost += (a - b) % BLOCK * self.price(document, b - 1, b)
            cost += TOKEN * (start + front if front and not back else stop - front - back)
        return cost

    def _cuts(self, mix: _Mix) -> dict[int, tuple[int, int]]:
        """Of each item, by index, how many tokens of its start and of its end are taken."""
        cuts: dict[int, tuple[int, int]] = {}
        for index, tokens in enumerate(_split(self._low[0], mix.sparse)):
            cuts[index] = (tokens, 0)
        if mix.between:
            cuts[mix.middle] = (0, mix.between)
        for number, tokens in enumerate(_split(self._high[0], mix.dense), 1):
            index = len(self.items) - number
            cuts[index] = (cuts.get(index, (0, 0))[0], tokens)
        if mix.front:
            cuts[index] = (mix.front, tokens)
        return cuts

    def _remove(self, mix: _Mix) -> list[Slice]:
        taken: list[Slice] = []
        for item, (front, back) in [(self.items[i], cut) for i, cut in self._cuts(mix).items()]:
            _, document, start, stop, work = item
            del self.items[bisect_left(self.items, item)]
            self.work -= work
            if front + back < stop - start:
                rest = self._item(document, start + front, stop - back)
                insort(self.items, rest)
                self.work += rest[4]
            ends = (document, start, start + front), (document, stop - back, stop)
            taken += [each for each in ends if each[1] < each[2]]
        return taken


def _sums(items: Iterable[Item], tokens: int) -> tuple[list[int], list[float]]:
    """Tokens and pairs of the first items, 0, 1, 2, … of them, until there are enough tokens."""
    counts, works = [0], [0.0]
    for _, _, start, stop, work in items:
        if counts[-1] >= tokens:
            break
        counts.append(counts[-1] + stop - start)
        works.append(works[-1] + work)
    return counts, works


def _solve(pairs: Callable[[int], float], most: int, wanted: float) -> int:
    """The number of tokens, 0 … most, at which a function that grows with it comes closest."""
    low, high = 0, most
    below, above = pairs(low) - wanted, pairs(high) - wanted
    middle = True
    while high - low > 1 and below < 0 < above:
        at = (low + high) // 2
        if not middle:  # where a straight line would be 0
            at = min(max(low + round((high - low) * below / (below - above)), low + 1), high - 1)
        value = pairs(at) - wanted
        middle = not middle and (high - low) < 2 * (high - at if value <= 0 else at - low)
        if value <= 0:
            low, below = at, value
        else:
            high, above = at, value
    return low if abs(below) <= abs(above) else high


def _split(counts: Sequence[int], tokens: int) -> list[int]:
    """How many of so many tokens each item gives, where `counts` are those of the first items."""
    number = bisect_left(counts, tokens)
    ends = [*counts[:number], tokens]
    return [b - a for a, b in pairwise(ends)]


add_layout(Balanced())
