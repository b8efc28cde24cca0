"""The reference kernel: the online softmax in plain torch, for any device and dtype.

Blocks of queries meet blocks of keys, so memory is linear in the sequence length. Scores are held as
(batch, nheads_k, group · queries, keys): the query heads that share a KV head are rows of one product,
and K and V are never expanded. Everything is computed in the state's precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import Span
from ..tiles import Tile
from . import dropout
from .base import Call, Grads, Saved, State

# Entries of one block of scores: small enough for a CPU's cache, large enough to keep a GPU busy.
_SCORES = {"cpu": 1 << 19, "cuda": 1 << 26}
_KEYS = 512  # keys of a block


@dataclass(frozen=True, slots=True)
class _Block:
    """Queries i … i+rows and keys j … j+columns of a tile."""

    tile: Tile
    i: int
    rows: int
    j: int
    columns: int

    @property
    def low(self) -> int:
        """The tile's band, in row numbers of the block."""
        return self.tile.low + self.i - self.j

    @property
    def high(self) -> int:
        return self.tile.high + self.i - self.j

    @property
    def empty(self) -> bool:
        return self.low > self.columns - 1 or self.high < 1 - self.rows

    @property
    def full(self) -> bool:
        return self.low <= 1 - self.rows and self.high >= self.columns - 1


def _cut(length: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, size):
        yield start, min(size, length - start)


def _query_rows(q: Tensor, columns: int) -> int:
    """Queries of a block, so that its scores have the wanted number of entries."""
    wanted = _SCORES.get(q.device.type, _SCORES["cuda"])
    return max(16, wanted // (q.shape[0] * q.shape[2] * columns))


def _grouped(x: Tensor, nheads_k: int) -> Tensor:
    """(batch, rows, nheads, d) → (batch, nheads_k, group · rows, d)."""
    batch, rows, nheads, d = x.shape
    x = x.reshape(batch, rows, nheads_k, nheads // nheads_k, d)
    return x.permute(0, 2, 3, 1, 4).reshape(batch, nheads_k, -1, d)


def _ungrouped(x: Tensor, rows: int) -> Tensor:
    """(batch, nheads_k, group · rows, d) → (batch, rows, nheads, d)."""
    batch, nheads_k, _, d = x.shape
    x = x.view(batch, nheads_k, -1, rows, d)
    return x.permute(0, 3, 1, 2, 4).reshape(batch, rows, -1, d)


def _grouped_rows(x: Tensor, nheads_k: int) -> Tensor:
    """(batch, nheads, rows) → (batch, nheads_k, group · rows, 1)."""
    return x.reshape(x.shape[0], nheads_k, -1, 1)


def _numbers(first: int, span: Span, start: int, length: int, device: torch.device) -> Tensor:
    """first + stride · (start + i) for i in 0 … length."""
    return torch.arange(start, start + length, device=device) * span.stride + first


class _Scores:
    """Scores of one block of queries against blocks of keys, and their derivative."""

    def __init__(self, q: Tensor, tile: Tile, i: int, rows: int, call: Call) -> None:
        self.call, self.tile, self.i, self.rows = call, tile, i, rows
        self.batch, self.nheads_k = q.shape[:2]
        self.q = q  # (batch, nheads_k, group · rows, headdim)
        self.dropout_rows: Tensor | None = None
        if call.seed is not None:
            tokens = _numbers(tile.query.index, tile.query, i, rows, q.device)
            heads = range(call.head_start, call.head_start + call.nheads)
            self.dropout_rows = dropout.row_keys(call.seed, self.batch, heads, tokens)

    def __call__(self, k: Tensor, block: _Block) -> tuple[Tensor, Tensor | None]:
        """Masked scores (batch, nheads_k, group · rows, keys), and tanh where there is a softcap."""
        call = self.call
        flat = self.q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)
        scale = call.softmax_scale / (call.softcap or 1.0)
        empty = flat[0].new_empty(())
        scores = torch.baddbmm(empty, *flat, beta=0, alpha=scale).unflatten(0, k.shape[:2])
        capped = None
        if call.softcap:
            capped = scores.tanh_()
            scores = capped * call.softcap
        if call.alibi_slopes is not None:
            scores = scores + self._alibi(block)
        if not block.full:
            self._by_row(scores).masked_fill_(self._forbidden(block), -torch.inf)
        return scores, capped

    def kept(self, block: _Block) -> Tensor | None:
        """1 / (1 − p) for entries that dropout keeps, 0 for the others."""
        if self.dropout_rows is None:
            return None
        key = block.tile.key
        tokens = _numbers(key.index, key, block.j, block.columns, self.q.device)
        keep = dropout.kept(self.dropout_rows, tokens, self.call.dropout_p).to(self.q.dtype)
        keep.div_(1 - self.call.dropout_p)
        return keep.view(self.batch, self.nheads_k, -1, block.columns)

    def _by_row(self, x: Tensor) -> Tensor:
        return x.view(self.batch, self.nheads_k, -1, self.rows, x.shape[-1])

    def _forbidden(self, block: _Block) -> Tensor:
        i = torch.arange(block.rows, device=self.q.device)[:, None]
        j = torch.arange(block.columns, device=self.q.device)
        return (j - i < block.low) | (j - i > block.high)

    def _alibi(self, block: _Block) -> Tensor:
        assert self.call.alibi_slopes is not None
        query, key, device = block.tile.query, block.tile.key, self.q.device
        rows = _numbers(query.position, query, block.i, block.rows, device)[:, None]
        columns = _numbers(key.position, key, block.j, block.columns, device)
        slopes = self.call.alibi_slopes.to(self.q.dtype)
        slopes = slopes.expand(self.batch, -1).reshape(self.batch, self.nheads_k, -1, 1, 1)
        return (slopes * -(rows - columns).abs()).flatten(2, 3)


class ReferenceKernel:
    """See the file's first lines."""

    name = "reference"

    def why_not(self, call: Call) -> list[str]:
        """It can do everything in floating point."""
        return [] if call.dtype.is_floating_point else [f"dtype {call.dtype} is not floating point"]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], state: State, call: Call
    ) -> None:
        """Advance `state` by the keys of `tiles`."""
        k, v = (x.to(call.state_dtype).transpose(1, 2).contiguous() for x in (k, v))
        for tile in tiles:
            columns = min(_KEYS, tile.key.length)
            for i, rows in _cut(tile.query.length, _query_rows(q, columns)):
                self._forward_rows(q, k, v, tile, i, rows, columns, state, call)
        if state.result is not None:
            for start, length in {(t.query.start, t.query.length) for t in tiles if t.last}:
                at = slice(start, start + length)
                state.result[:, at] = state.out[:, at].to(state.result.dtype)

    def _forward_rows(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tile: Tile,
        i: int,
        rows: int,
        columns: int,
        state: State,
        call: Call,
    ) -> None:
        """One block of queries against all keys of its tile: the loop of FlashAttention."""
        at = slice(tile.query.start + i, tile.query.start + i + rows)
        queries = _grouped(q[:, at].to(call.state_dtype), call.nheads_k)
        scores_of = _Scores(queries, tile, i, rows, call)
        # Go on from the state: it is the result over l = 1 key with score m = lse.
        m = _grouped_rows(state.lse[:, :, at], call.nheads_k)
        acc = _grouped(state.out[:, at], call.nheads_k)
        total = (m > -torch.inf).to(m.dtype)
        for j, width in _cut(tile.key.length, columns):
            block = _Block(tile, i, rows, j, width)
            if block.empty:
                continue
            keys = slice(tile.key.start + j, tile.key.start + j + width)
            scores, _ = scores_of(k[:, :, keys], block)
            m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
            finite = torch.where(m_new == -torch.inf, 0.0, m_new)  # exp(−inf − 0) = 0, not NaN
            p = scores.sub_(finite).exp_()
            rescale = (m - finite).exp_()
            total = total.mul_(rescale).add_(p.sum(-1, keepdim=True))
            keep = scores_of.kept(block)
            if keep is not None:
                p = p.mul_(keep)
            acc = torch.baddbmm(
                acc.mul_(rescale).flatten(0, 1), p.flatten(0, 1), v[:, :, keys].flatten(0, 1)
            ).unflatten(0, p.shape[:2])
            m = m_new
        acc = acc / torch.where(total > 0, total, 1.0)
        state.out[:, at] = _ungrouped(acc, rows)
        state.lse[:, :, at] = (m + total.log()).view(*state.lse.shape[:2], rows)

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
        for tile in tiles:
            columns = min(_KEYS, tile.key.length)
            for i, rows in _cut(tile.query.length, _query_rows(q, columns)):
                at = slice(tile.query.start + i, tile.query.start + i + rows)
                side = [_grouped(x[:, at].to(call.state_dtype), call.nheads_k) for x in (q, dout)]
                lse, delta = (
                    _grouped_rows(x[:, :, at], call.nheads_k) for x in (saved.lse, saved.delta)
                )
                lse = torch.where(lse == -torch.inf, torch.inf, lse)  # saw no key: p = 0
                dq = self._backward_rows(
                    *side, k, v, dk, dv, tile, i, rows, columns, lse, delta, call
                )
                grads.dq[:, at] += _ungrouped(dq, rows)
        grads.dk.add_(dk.transpose(1, 2))
        grads.dv.add_(dv.transpose(1, 2))

    def _backward_rows(
        self,
        q: Tensor,
        dout: Tensor,
        k: Tensor,
        v: Tensor,
        dk: Tensor,
        dv: Tensor,
        tile: Tile,
        i: int,
        rows: int,
        columns: int,
        lse: Tensor,
        delta: Tensor,
        call: Call,
    ) -> Tensor:
        """One block of queries against all keys of its tile; adds to dk and dv, returns dq."""
        scores_of = _Scores(q, tile, i, rows, call)
        dq = torch.zeros_like(q)
        for j, width in _cut(tile.key.length, columns):
            block = _Block(tile, i, rows, j, width)
            if block.empty:
                continue
            keys = slice(tile.key.start + j, tile.key.start + j + width)
            scores, capped = scores_of(k[:, :, keys], block)
            p = scores.sub_(lse).exp_()
            dp = dout @ v[:, :, keys].transpose(2, 3)
            keep = scores_of.kept(block)
            dv[:, :, keys] += (p if keep is None else p * keep).transpose(2, 3) @ dout
            if keep is not None:
                dp = dp.mul_(keep)
            ds = dp.sub_(delta).mul_(p).mul_(call.softmax_scale)
            if capped is not None:
                ds = ds.mul_(capped.square_().neg_().add_(1))  # tanh' = 1 − tanh²
            dq += ds @ k[:, :, keys]
            dk[:, :, keys] += ds.transpose(2, 3) @ q
        return dq


KERNEL = ReferenceKernel()
