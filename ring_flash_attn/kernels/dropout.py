"""Dropout's random draws: a hash of (seed, batch, head, query token, key token), written down once.

No generator state, so any rank, any kernel and any block shape drops the same entries. All
arithmetic is on 32-bit integers that wrap around; other kernels repeat these few lines in their own
language:

    row  = mix(mix(mix(mix(low 32 bits of seed) ^ high 32 bits of seed, batch), head), query token)
    bits = mix(row ^ key token · 0x9E3779B1)          # mix(a, b) = mix(a ^ b · 0x9E3779B1)
    kept = bits, read as unsigned, >= round(p · 2³²)

`mix` is the finaliser of MurmurHash3. Tokens are counted over the whole packed stream, so that
packed documents do not share a mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SPREAD = 0x9E3779B1 - (1 << 32)  # 2³² / golden ratio, as a signed 32-bit integer
_FIRST = 0x85EBCA6B - (1 << 32)
_SECOND = 0xC2B2AE35 - (1 << 32)


def _mix(bits: Tensor) -> Tensor:
    """MurmurHash3's finaliser, in place on int32 (torch's >> keeps the sign: mask it away)."""
    bits ^= (bits >> 16) & 0xFFFF
    bits *= _FIRST
    bits ^= (bits >> 13) & 0x7FFFF
    bits *= _SECOND
    bits ^= (bits >> 16) & 0xFFFF
    return bits


def row_keys(seed: Tensor, batch: int, heads: range, query_tokens: Tensor) -> Tensor:
    """The part of the hash that does not depend on the key.

    Args:
        seed: () int64.
        batch: number of sequences in the batch.
        heads: numbers of the query heads.
        query_tokens: (seqlen_q,) places in the stream.

    Returns:
        (batch, nheads, seqlen_q), int32.
    """

    def column(numbers: Tensor, *shape: int) -> Tensor:
        return (numbers.to(torch.int32) * _SPREAD).view(shape)

    device = query_tokens.device
    low = (((seed & 0xFFFFFFFF) + (1 << 31)) % (1 << 32) - (1 << 31)).to(torch.int32).view(1, 1, 1)
    high = (seed >> 32).to(torch.int32).view(1, 1, 1)
    keys = _mix(_mix(low.clone()) ^ high)
    keys = _mix(keys ^ column(torch.arange(batch, device=device), batch, 1, 1))
    head_numbers = torch.arange(heads.start, heads.stop, device=device)
    keys = _mix(keys ^ column(head_numbers, 1, len(heads), 1))
    return _mix(keys ^ column(query_tokens, 1, 1, -1))


def kept(rows: Tensor, key_tokens: Tensor, dropout_p: float) -> Tensor:
    """Which entries stay.

    Args:
        rows: (…, seqlen_q) from `row_keys`.
        key_tokens: (seqlen_k,) places in the stream.
        dropout_p: probability that an entry is dropped.

    Returns:
        (…, seqlen_q, seqlen_k), bool.
    """
    bits = _mix(rows[..., None] ^ (key_tokens.to(torch.int32) * _SPREAD))
    flipped = bits ^ -(1 << 31)  # unsigned order as signed order
    return flipped >= threshold(dropout_p) - (1 << 31)


def threshold(dropout_p: float) -> int:
    """Hashes below it are dropped."""
    return min(round(dropout_p * (1 << 32)), (1 << 32) - 1)
