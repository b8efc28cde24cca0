"""The reference kernel: the online softmax in plain torch, for any device and dtype.

Blocks of queries meet blocks of keys, so memory is linear in the sequence length. Scores are held
as (batch, nheads_k, group · rows, columns): the query heads that share a KV head are rows of one
product, and K and V are never expanded. Everything is computed in the state's precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan.layout import Span
from ..plan.tiles import Tile
from . import dropout
from .base import Call, Grads, Saved, State

# Entries of one block of scores: small enough for a CPU's cache, large enough to keep a GPU busy.
_SCORES = {"cpu": 1 << 19, "cuda": 1 << 26}
_COLUMNS = {"cpu": 256, "cuda": 4096}


@dataclass(frozen=True, slots=True)
class _Block:
    """Keys j … j+columns of a tile, against some of its queries.

    Attributes:
        j, columns: which keys of the tile.
        at: which rows of the key buffer.
        low, high: the tile's band, in row numbers of the block; None where it hides nothing.
    """

    j: int
    columns: int
    at: slice
    low: int | None
    high: int | None


class _Rows:
    """Queries i … i+rows of a tile, and their scores against blocks of its keys."""

    def __init__(self, q: Tensor, tile: Tile, i: int, rows: int, call: Call) -> None:
        self.tile, self.i, self.rows, self.call = tile, i, rows, call
        self.at = slice(tile.query.start + i, tile.query.start + i + rows)
        self.q = self.of(q)  # (batch, nheads_k, group · rows, headdim)
        self._dropout: Tensor | None = None
        if call.seed is not None:
            tokens = _numbers(tile.query.index, tile.query, i, rows, q.device)
            heads = range(call.head_start, call.head_start + call.nheads)
            self._dropout = dropout.row_keys(call.seed, q.shape[0], heads, tokens)

    def of(self, x: Tensor) -> Tensor:
        """These rows of (batch, seqlen, nheads, d), as (batch, nheads_k, group · rows, d)."""
        x = x[:, self.at].to(self.call.state_dtype)
        x = x.unflatten(2, (self.call.nheads_k, -1)).permute(0, 2, 3, 1, 4)
        return x.reshape(*x.shape[:2], -1, x.shape[-1])

    def of_lse(self, x: Tensor) -> Tensor:
        """These rows of (batch, nheads, seqlen), as (batch, nheads_k, group · rows, 1)."""
        return x[:, :, self.at].reshape(x.shape[0], self.call.nheads_k, -1, 1)

    def back(self, x: Tensor) -> Tensor:
        """(batch, nheads_k, group · rows, d) → (batch, rows, nheads, d)."""
        return x.unflatten(2, (-1, self.rows)).permute(0, 3, 1, 2, 4).flatten(2, 3)

    def key_blocks(self) -> Iterator[_Block]:
        """The keys that these queries see, in order."""
        tile, last = self.tile, self.rows - 1
        first_key = max(0, self.i + tile.low)
        end = min(tile.key.length, self.i + last + tile.high + 1)
        size = _COLUMNS.get(self.q.device.type, _COLUMNS["cuda"])
        for j in range(first_key, end, size):
            columns = min(size, end - j)
            low, high = tile.low + self.i - j, tile.high + self.i - j
            at = slice(tile.key.start + j, tile.key.start + j + columns)
            yield _Block(
                j, columns, at, low if low > -last else None, high if high < columns - 1 else None
            )

    def scores(self, k: Tensor, block: _Block) -> tuple[Tensor, Tensor | None]:
        """Masked scores against the block's keys k, and their tanh where there is a softcap."""
        call = self.call
        scale = call.softmax_scale / (call.softcap or 1.0)
        product = torch.baddbmm(
            k.new_empty(()), self.q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=scale
        )
        scores, capped = product.unflatten(0, k.shape[:2]), None
        if call.softcap:
            capped = scores.tanh_()
            scores = capped * call.softcap
        if call.alibi_slopes is not None:
            scores = scores.add_(self._alibi(block))
        if block.low is not None or block.high is not None:
            scores.unflatten(2, (-1, self.rows)).masked_fill_(self._hidden(block), -torch.inf)
        return scores, capped

    def kept(self, block: _Block) -> Tensor | None:
        """1 / (1 − p) for entries that dropout keeps, 0 for the others; None without dropout."""
        if self._dropout is None:
            return None
        key = self.tile.key
        tokens = _numbers(key.index, key, block.j, block.columns, self.q.device)
        keep = dropout.kept(self._dropout, tokens, self.call.dropout_p)
        return (
            keep.to(self.q.dtype)
            .div_(1 - self.call.dropout_p)
            .view(*self.q.shape[:3], block.columns)
        )

    def _hidden(self, block: _Block) -> Tensor:
        i = torch.arange(self.rows, device=self.q.device)[:, None]
        j = torch.arange(block.columns, device=self.q.device)
        hidden = torch.zeros((), dtype=torch.bool, device=self.q.device)
        if block.low is not None:
            hidden = hidden | (j - i < block.low)
        if block.high is not None:
            hidden = hidden | (j - i > block.high)
        return hidden

    def _alibi(self, block: _Block) -> Tensor:
        assert self.call.alibi_slopes is not None
        query, key, device = self.tile.query, self.tile.key, self.q.device
        rows = _numbers(query.position, query, self.i, self.rows, device)[:, None]
        columns = _numbers(key.position, key, block.j, block.columns, device)
        slopes = self.call.alibi_slopes.to(self.q.dtype)
        if self.call.slopes_by_document and len(slopes) > 1:
            slopes = slopes[query.document]
        slopes = slopes.expand(self.q.shape[0], -1).reshape(*self.q.shape[:2], -1, 1, 1)
        return (slopes * -(rows - columns).abs()).flatten(2, 3)


def _numbers(first: int, span: Span, start: int, length: int, device: torch.device) -> Tensor:
    """first + stride · (start + i) for i in 0 … length."""
    return torch.arange(start, start + length, device=device) * span.stride + first


def _row_blocks(q: Tensor, tiles: Sequence[Tile], call: Call) -> Iterator[_Rows]:
    """All queries of the tiles, in blocks whose scores have the wanted number of entries."""
    kind = q.device.type if q.device.type in _SCORES else "cuda"
    for tile in tiles:
        columns = min(_COLUMNS[kind], tile.key.length)
        size = max(16, _SCORES[kind] // (q.shape[0] * q.shape[2] * columns))
        for i in range(0, tile.query.length, size):
            yield _Rows(q, tile, i, min(size, tile.query.length - i), call)


class ReferenceKernel:
    """See the first lines of this file."""

    name = "reference"

    def why_not(self, call: Call) -> list[str]:
        """It can do everything in floating point."""
        return [] if call.dtype.is_floating_point else [f"{call.dtype} is not floating point"]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], state: State, call: Call
    ) -> None:
        """Advance `state` by the keys of `tiles`."""
        k, v = (x.to(call.state_dtype).transpose(1, 2).contiguous() for x in (k, v))
        for rows in _row_blocks(q, tiles, call):
            _forward(rows, k, v, state)
        if state.result is not None:
            for start, length in {(t.query.start, t.query.length) for t in tiles if t.last}:
                at = slice(start, start + length)
                state.result[:, at] = state.out[:, at].to(state.result.dtype)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: Sequence[Tile],
        saved: Saved,
        grads: Grads,
        call: Call,
    ) -> None:
        """Add the gradients that `tiles` contribute to `grads`."""
        k, v = (x.to(call.state_dtype).transpose(1, 2).contiguous() for x in (k, v))
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for rows in _row_blocks(q, tiles, call):
            _backward(rows, dout, k, v, dk, dv, saved, grads.dq)
        grads.dk.add_(dk.transpose(1, 2))
        grads.dv.add_(dv.transpose(1, 2))


def _forward(rows: _Rows, k: Tensor, v: Tensor, state: State) -> None:
    """One block of queries against the keys it sees: the loop of FlashAttention."""
    # Go on from the state as if it came from one key of score m = lse and value out.
    m = rows.of_lse(state.lse)
    total = (m > -torch.inf).to(m.dtype)
    acc = rows.of(state.out)
    for block in rows.key_blocks():
        scores, _ = rows.scores(k[:, :, block.at], block)
        m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
        finite = torch.where(m_new == -torch.inf, 0.0, m_new)  # exp(−inf − 0) = 0, not NaN
        p = scores.sub_(finite).exp_()
        rescale = (m - finite).exp_()
        total = total.mul_(rescale).add_(p.sum(-1, keepdim=True))
        keep = rows.kept(block)
        if keep is not None:
            p = p.mul_(keep)
        acc = acc.mul_(rescale) + p @ v[:, :, block.at]
        m = m_new
    state.out[:, rows.at] = rows.back(acc / torch.where(total > 0, total, 1.0))
    state.lse[:, :, rows.at] = (m + total.log()).view(*state.lse.shape[:2], rows.rows)


def _backward(
    rows: _Rows,
    dout: Tensor,
    k: Tensor,
    v: Tensor,
    dk: Tensor,
    dv: Tensor,
    saved: Saved,
    dq: Tensor,
) -> None:
    """One block of queries against the keys it sees; adds to dq, dk and dv."""
    dout_rows, delta, lse = rows.of(dout), rows.of_lse(saved.delta), rows.of_lse(saved.lse)
    lse = torch.where(lse == -torch.inf, torch.inf, lse)  # saw no key: p = 0
    dq_rows = torch.zeros_like(rows.q)
    for block in rows.key_blocks():
        scores, capped = rows.scores(k[:, :, block.at], block)
        p = scores.sub_(lse).exp_()
        dp = dout_rows @ v[:, :, block.at].mT
        keep = rows.kept(block)
        dv[:, :, block.at] += (p if keep is None else p * keep).mT @ dout_rows
        if keep is not None:
            dp = dp.mul_(keep)
        ds = dp.sub_(delta).mul_(p).mul_(rows.call.softmax_scale)
        if capped is not None:
            ds = ds.mul_(1 - capped.square_())  # tanh' = 1 − tanh²
        dq_rows += ds @ k[:, :, block.at]
        dk[:, :, block.at] += ds.mT @ rows.q
    dq[:, rows.at] += rows.back(dq_rows)


KERNEL = ReferenceKernel()
