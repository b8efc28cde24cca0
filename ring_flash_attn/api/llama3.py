"""What the llama3 functions tell a rank of packed documents."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ..engine.checks import CuSeqlens, check_flag, check_rank, document_lengths


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
    lengths = document_lengths(cu_seqlens, fresh=True)
    causal = check_flag("causal", causal)
    rank, world_size = check_rank(rank, world_size)
    offsets = [0, *accumulate(lengths)]
    total = offsets[-1]
    if total == 0 or total % world_size:
        raise ValueError(
            f"cu_seqlens ends at {total}, which must be a positive multiple of {world_size} ranks"
        )
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
    dtype, device = torch.int32, torch.device("cpu")
    if isinstance(cu_seqlens, Tensor):
        dtype, device = cu_seqlens.dtype, cu_seqlens.device
    tensor_q, tensor_k = (torch.tensor(cu, dtype=dtype, device=device) for cu in (cu_q, cu_k))
    longest_q, longest_k = (max(b - a for a, b in pairwise(cu)) for cu in (cu_q, cu_k))
    return tensor_q, tensor_k, longest_q, longest_k, slice(offsets[left], k_end)
