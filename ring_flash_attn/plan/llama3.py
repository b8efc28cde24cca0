"""The llama3 functions' own view of packed documents: each rank knows the part that concerns it.

The stream is split evenly, without regard to documents; all ranks gather all keys, and a rank is
told by (cu_seqlens_q, cu_seqlens_k, local_k_slice) which documents its queries belong to and where
their keys lie in the gathered stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from .layout import Span
from .pieces import Piece
from .steps import Heads, Side
from .tiles import Mask


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


@dataclass(frozen=True, slots=True)
class Llama3Problem:
    """A `Problem` of which only one rank's part is known: all keys go to all ranks.

    Attributes:
        lengths_q, lengths_k: queries here, and keys in the gathered stream, of each document here.
        k_start: where the keys of the first document start in the gathered stream.
        rank, world_size: this rank, of how many.
        size_q, size_k: queries and keys of every rank.
        mask: which keys a query sees.
        bottom_right: the last query of a document sees as far as its last key (flash-attn's rule);
            otherwise queries have the positions that the stream gives them.
        nheads_k, heads_k_stride: KV heads, and how many travel together.
    """

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    k_start: int
    rank: int
    world_size: int
    size_q: int
    size_k: int
    mask: Mask
    bottom_right: bool
    nheads_k: int
    heads_k_stride: int

    def size(self, side: Side, rank: int) -> int:
        """Number of tokens that any rank holds of one side."""
        return self.size_q if side is Side.QUERY else self.size_k

    def needed(self, query_rank: int, key_rank: int) -> bool:
        """Nobody can tell what the others need."""
        return True

    @property
    def documents(self) -> list[int]:
        """Where in the gathered stream the documents here begin, and where the last one ends."""
        return list(accumulate(self.lengths_k, initial=self.k_start))

    @property
    def all_heads(self) -> Heads:
        """Every KV head."""
        return (0, self.nheads_k)

    def spans(self, side: Side, rank: int) -> tuple[Span, ...]:
        """What is known of a rank's shard: all of our queries, and the keys that we need."""
        if side is Side.KEY:
            return self._keys(rank * self.size_k, (rank + 1) * self.size_k)
        assert rank == self.rank, "the queries of other ranks are not known here"
        return self._queries()

    def pieces(self, owner: int, user: int) -> tuple[Piece, ...]:
        """Shards stay whole: they follow each other in the stream, whatever the documents are."""
        size = self.size_k
        return (Piece(0, owner * size, owner, 0, size),) if size else ()

    def _queries(self) -> tuple[Span, ...]:
        found, row, k_offset = [], 0, self.k_start
        for document, (q, k) in enumerate(zip(self.lengths_q, self.lengths_k, strict=True)):
            index = self.rank * self.size_q + row
            position = k - q if self.bottom_right else index - k_offset
            if q:
                found.append(Span(row, q, position, 1, document, index))
            row, k_offset = row + q, k_offset + k
        return tuple(found)

    def _keys(self, low: int, high: int) -> tuple[Span, ...]:
        found, offset = [], self.k_start
        for document, length in enumerate(self.lengths_k):
            start, end = max(low, offset), min(high, offset + length)
            if start < end:
                found.append(Span(start - low, end - start, start - offset, 1, document, start))
            offset += length
        return tuple(found)
