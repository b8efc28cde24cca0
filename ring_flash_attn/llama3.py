"""The llama3 functions' own view of packed documents: each rank knows the part that concerns it.

The stream is split evenly, without regard to documents; all ranks gather all keys, and a rank is
told by (cu_seqlens_q, cu_seqlens_k, local_k_slice) which documents its queries belong to and where
their keys lie in the gathered stream.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from .checks import CuSeqlens, check_flag, check_integer, document_lengths
from .layout import Span
from .pieces import Piece
from .plan import Heads, Side
from .tiles import Mask


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: CuSeqlens, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """What a rank needs to know of the packed documents.

    Args:
        cu_seqlens: (documents + 1,) of the whole stream, or a sequence of ints; its end divides by
            world_size.
        causal: whether keys after the rank's last query can be left out.
        rank: whose part.
        world_size: number of ranks.

    Returns:
        cu_seqlens_q, cu_seqlens_k (for the keys in local_k_slice), max_seqlen_q, max_seqlen_k, and
        local_k_slice, the part of the gathered keys that the rank's queries need. The tensors are
        like cu_seqlens; of a sequence of ints, int32 and on the CPU.
    """
    lengths = document_lengths(cu_seqlens)
    causal = check_flag("causal", causal)
    world_size = check_integer("world_size", world_size, 1)
    rank = check_integer("rank", rank)
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    total = offsets[-1]
    if total == 0 or total % world_size:
        raise ValueError(
            f"cu_seqlens ends at {total}, which must be a positive multiple of {world_size} ranks"
        )
    if not 0 <= rank < world_size:
        raise ValueError(f"rank = {rank} is not a rank of {world_size}")
    size = total // world_size
    start, end = rank * size, (rank + 1) * size
    left = bisect_left(offsets, start)
    if offsets[left] != start:
        left -= 1
    right = bisect_left(offsets, end)
    k_end = end if causal else offsets[right]
    inner = offsets[left + 1 : right]
    cu_q = [0, *(offset - start for offset in inner), size]
    cu_k = [0, *(offset - offsets[left] for offset in inner), k_end - offsets[left]]

    like = (
        cu_seqlens
        if isinstance(cu_seqlens, Tensor)
        else torch.empty(0, dtype=torch.int32, device="cpu")
    )

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=like.dtype, device=like.device)

    longest_q, longest_k = (max(b - a for a, b in pairwise(cu)) for cu in (cu_q, cu_k))
    return tensor(cu_q), tensor(cu_k), longest_q, longest_k, slice(offsets[left], k_end)


def check_parts(parts: Sequence[Sequence[int]], size: int) -> None:
    """ValueError unless all ranks' `Llama3Problem.documents` are of one packed stream.

    Args:
        parts: of each rank.
        size: keys of every rank.
    """
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
        if side is Side.QUERY:
            assert rank == self.rank, "the queries of other ranks are not known here"
            return self._queries()
        return self._keys(rank * self.size_k, (rank + 1) * self.size_k)

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
