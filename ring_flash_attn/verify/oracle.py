"""The oracle: softmax attention the naive way, S×S in fp64, and shards cut by slicing lists.

It shares no code with layouts, tiles, plans or kernels, so that a mistake there cannot hide here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Rules:
    """What attention is asked for, with flash-attn's meanings."""

    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softmax_scale: float | None = None
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    dropout_p: float = 0.0
    seed: int = 0


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rules: Rules,
    cu_seqlens_q: Sequence[int] | None = None,
    cu_seqlens_k: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over whole tensors, batch or packed, in the precision of q (use fp64).

    Returns:
        out, like q with v's head dimension; lse, (batch, nheads, seqlen_q) or (nheads, total_q).
    """
    if cu_seqlens_q is None or cu_seqlens_k is None:
        parts = [_document(q[b], k[b], v[b], rules, b, (0, 0), b) for b in range(q.shape[0])]
        return torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])
    parts = []
    for d in range(len(cu_seqlens_q) - 1):
        (q0, q1), (k0, k1) = cu_seqlens_q[d : d + 2], cu_seqlens_k[d : d + 2]
        parts.append(_document(q[q0:q1], k[k0:k1], v[k0:k1], rules, 0, (q0, k0), d))
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], dim=1)


def _document(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rules: Rules,
    batch: int,
    starts: tuple[int, int],
    number: int,
) -> tuple[Tensor, Tensor]:
    """One sequence: q (seqlen_q, nheads, headdim), k and v (seqlen_k, nheads_k, …).

    `number` is its row in the slopes of a batch or of documents, if they have several.
    """
    seqlen_q, nheads, headdim = q.shape
    seqlen_k, nheads_k, _ = k.shape
    k, v = (x.repeat_interleave(nheads // nheads_k, dim=1) for x in (k, v))
    scale = headdim**-0.5 if rules.softmax_scale is None else rules.softmax_scale
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if rules.softcap:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    # distance = key position − query position, aligned at the ends of both
    i = torch.arange(seqlen_q, device=q.device)[:, None] + seqlen_k - seqlen_q
    distance = torch.arange(seqlen_k, device=q.device) - i
    if rules.alibi_slopes is not None:
        slopes = rules.alibi_slopes.to(scores.dtype).view(-1, nheads)
        slopes = slopes[number if len(slopes) > 1 else 0]
        scores = scores - slopes[:, None, None] * distance.abs()
    scores = scores.masked_fill(_hidden(distance, rules), -torch.inf)
    extra = scores.new_full((nheads, seqlen_q, 1), -torch.inf)
    if rules.sink is not None:
        extra = rules.sink.to(scores.dtype)[:, None, None].expand(nheads, seqlen_q, 1)
    lse = torch.logsumexp(torch.cat([scores, extra], dim=-1), dim=-1)
    seen = (lse > -torch.inf)[..., None]
    p = torch.where(seen, (scores - torch.where(seen, lse[..., None], 0.0)).exp(), 0.0)
    if rules.dropout_p:
        p = p * _kept(rules, batch, starts, p)
    return torch.einsum("hqk,khd->qhd", p, v), lse


def _hidden(distance: Tensor, rules: Rules) -> Tensor:
    left, right = rules.window_size
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if rules.causal:
        hidden |= distance > 0
    elif right >= 0:
        hidden |= distance > right
    return hidden


def _mix(x: Tensor) -> Tensor:
    """MurmurHash3's finaliser on unsigned 32-bit words in int64."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _WORD
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _WORD
    return x ^ (x >> 16)


def _kept(rules: Rules, batch: int, starts: tuple[int, int], p: Tensor) -> Tensor:
    """1 / (1 − p) where dropout keeps an entry, else 0; as `kernels/dropout.py` describes it."""

    def spread(first: int, count: int) -> Tensor:
        return (torch.arange(first, first + count, device=p.device) * 0x9E3779B1) & _WORD

    word = _mix(torch.tensor(rules.seed & _WORD, device=p.device)) ^ (rules.seed >> 32 & _WORD)
    word = _mix(_mix(word) ^ spread(batch, 1))
    rows = _mix(_mix(word ^ spread(0, p.shape[0]))[:, None] ^ spread(starts[0], p.shape[1]))
    bits = _mix(rows[..., None] ^ spread(starts[1], p.shape[2]))
    return (bits >= round(rules.dropout_p * 2**32)).to(p.dtype) / (1 - rules.dropout_p)


# Shards.


def _part(tokens: list[int], part: int, parts: int) -> list[int]:
    """One of `parts` pieces, whose ends are the whole numbers below part / parts of the length."""
    ends = [len(tokens) * i // parts for i in range(parts + 1)]
    return tokens[ends[part] : ends[part + 1]]


def _zigzag(tokens: list[int], rank: int, world_size: int) -> list[int]:
    early = _part(tokens, rank, 2 * world_size)
    late = _part(tokens, 2 * world_size - 1 - rank, 2 * world_size)
    return early + late


_CUTS: dict[str, Callable[[list[int], int, int], list[int]]] = {
    "contiguous": _part,
    "zigzag": _zigzag,
    "stripe": lambda tokens, rank, world_size: tokens[rank::world_size],
}


def cut_names() -> tuple[str, ...]:
    """The layouts that can be cut here."""
    return (*_CUTS, *(f"flat_{name}" for name in _CUTS))


def cut(layout: str, lengths: Sequence[int], rank: int, world_size: int) -> list[int]:
    """Places in the whole stream of a rank's tokens, in local order; lengths are documents'."""
    stream = list(range(sum(lengths)))
    if layout.startswith("flat_"):
        return _CUTS[layout.removeprefix("flat_")](stream, rank, world_size)
    tokens: list[int] = []
    for length in lengths:
        document, stream = stream[:length], stream[length:]
        tokens += _CUTS[layout](document, rank, world_size)
    return tokens
