"""The llama3 functions' own view of packed documents: each rank knows the part that concerns it.

(cu_seqlens_q, cu_seqlens_k, local_k_slice) tell a rank which documents its queries belong to, and
where their keys lie in the stream of all ranks' keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from .arrays import filled
from .columns import Columns, to_columns
from .layout import Span
from .problem import Problem
from .rows import Arrangement, Rows, arrange
from .steps import Side, Users


def check_parts(parts: Sequence[Sequence[int]], size: int) -> None:
    """ValueError unless all ranks' `Llama3Problem.documents` are of one stream of `size` a rank."""
    for owner, theirs in enumerate(parts):
        low, high = owner * size, (owner + 1) * size
        for rank, ours in enumerate(parts):
            known = range(max(ours[0], low), min(ours[-1], high))  # both know what begins here
            found = {x for x in ours[:-1] if x in known}
            wanted = {x for x in theirs[:-1] if x in known}
            if found != wanted:
                token = min(found ^ wanted)
                has, lacks = (rank, owner) if token in found else (owner, rank)
                raise ValueError(
                    f"the ranks have different documents: for rank {has} one begins at token "
                    f"{token} of the stream, for rank {lacks} none does (cu_seqlens_q, "
                    f"cu_seqlens_k, local_k_slice)"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Problem(Problem):
    """A problem of which only one rank's part is known: all keys go to all ranks.

    Attributes:
        lengths_q, lengths_k: queries here, and keys in the gathered stream, of each document here.
        k_start: where the keys of the first document start in the gathered stream.
        rank: whose part.
        size_q, size_k: queries and keys of every rank.
        bottom_right: the last query of a document sees as far as its last key (flash-attn's rule);
            otherwise queries have the positions that the stream gives them.
    """

    k_start: int
    rank: int
    size_q: int
    size_k: int
    bottom_right: bool

    def size(self, side: Side, rank: int) -> int:
        """All shards are equal."""
        return self.size_q if side is Side.QUERY else self.size_k

    def sizes(self, side: Side) -> list[int]:
        """All shards are equal."""
        return [self.size(side, 0)] * self.world_size

    def needed(self, query_rank: int, key_rank: int) -> bool:
        """Nobody can tell what the others need."""
        return True

    @property
    def documents(self) -> list[int]:
        """Where in the gathered stream the documents here begin, and where the last one ends."""
        return list(accumulate(self.lengths_k, initial=self.k_start))

    def spans(self, side: Side, rank: int) -> tuple[Span, ...]:
        """What is known of a rank's shard: all of our queries, and the keys that we need."""
        found, row, begins = [], 0, self.documents
        if side is Side.KEY:
            first = rank * self.size_k
            for document, (begin, end) in enumerate(pairwise(begins)):
                start, stop = max(first, begin), min(first + self.size_k, end)
                if start < stop:
                    position = start - begin
                    found.append(Span(start - first, stop - start, position, 1, document, start))
            return tuple(found)
        assert rank == self.rank, "the queries of other ranks are not known here"
        for document, (q, k) in enumerate(zip(self.lengths_q, self.lengths_k, strict=True)):
            index = rank * self.size_q + row
            position = k - q if self.bottom_right else index - begins[document]
            if q:
                found.append(Span(row, q, position, 1, document, index))
            row += q
        return tuple(found)

    def columns(self, side: Side, ranks: Users) -> Columns:
        """The same of a rank, or of several."""
        owners = (ranks,) if isinstance(ranks, int) else ranks
        return to_columns([(owner, self.spans(side, owner)) for owner in owners])

    def sent(self, owner: int, user: Users) -> Rows:
        """Shards stay whole, as nobody can tell what is needed."""
        return (range(self.size_k),) if self.size_k else ()

    def arrangement(self, owners: tuple[int, ...], user: Users) -> Arrangement:
        """They follow each other in the stream, whatever the documents are."""
        known = self.columns(Side.KEY, owners)
        counts = filled(len(self.lengths_k), 0)  # of queries: shards stay as they are
        return arrange(owners, known, counts, [self.size_k] * len(owners))
