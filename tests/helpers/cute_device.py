"""Launches of the kernel "cute" on the CPU: what they would compute, from their arguments alone.

Like a compiled kernel it gets addresses and numbers, and reads memory and the launch's tables; it
computes in fp64. So the host's part of a call runs as it is: strides, tables, parts of groups,
copies of what TMA cannot read. CuTe DSL is not needed.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ring_flash_attn.cache import Cache
from ring_flash_attn.kernels import cute, dropout, scheduler
from ring_flash_attn.kernels.base import Call
from ring_flash_attn.kernels.cute import backward_host, host
from ring_flash_attn.kernels.tables import (
    BLOCK_COLUMNS,
    FIRST,
    LAST,
    TILE_COLUMNS,
    BlockEntry,
    TileEntry,
)

LOG2E = 1.4426950408889634
PROCESSORS = 132  # of an H200: they decide into how many parts a group of query heads goes
_FP32 = torch.float32


def names_of(file: str) -> list[str]:
    """A compiled kernel's arguments, read from its source."""
    source = (Path(host.__file__).parent / file).read_text()
    head = source.split("def __call__(")[1].split(") ->")[0]
    return re.findall(r"(\w+): (?:Int64|Int32|Float32|Any)", head)


def memory(
    address: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]
) -> Tensor:
    """What lies there."""
    count = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    size = torch.empty((), dtype=dtype).element_size()
    bytes_there = (ctypes.c_char * (count * size)).from_address(address)
    return torch.frombuffer(bytes_there, dtype=dtype, count=count).as_strided(shape, strides)


class Arguments(SimpleNamespace):
    """A launch's, by name."""

    def tensor(self, name: str, heads: int, width: int, dtype: torch.dtype, rows: int) -> Tensor:
        """(batch, row, head, column), of what TMA or 16 bytes of a thread reach."""
        strides = [getattr(self, f"{name}_{each}") for each in ("batch", "row", "head")]
        shape = self.batch, rows, heads
        size = torch.empty((), dtype=dtype).element_size()
        address = self.address_of(name)
        assert address % 16 == 0
        assert all(n == 1 or each * size % 16 == 0 for n, each in zip(shape, strides, strict=True))
        assert all(n == 1 or each > 0 for n, each in zip(shape, strides, strict=True))
        return memory(address, dtype, (*shape, width), (*strides, 1))

    def address_of(self, name: str) -> int:
        longer = {"o": "dout" if hasattr(self, "dout") else "out", "r": "result", "l": "lse"}
        address: int = getattr(self, longer.get(name, name))
        return address

    def items(self) -> Iterator[tuple[BlockEntry, list[TileEntry]]]:
        """Blocks of the table, and their tiles."""
        columns = BLOCK_COLUMNS, 1
        blocks = memory(self.blocks, torch.int32, (self.count, BLOCK_COLUMNS), columns)
        for row in blocks.tolist():
            own = BlockEntry(*row[: len(BlockEntry._fields)])
            address = self.tiles + 4 * TILE_COLUMNS * own.tile
            shape = own.last_tile - own.tile, TILE_COLUMNS
            tiles = memory(address, torch.int32, shape, (TILE_COLUMNS, 1)).tolist()
            assert row[len(own) : len(own) + 6] == tiles[0][:6], "the first tile is there twice"
            yield own, [TileEntry(*tile[:6]) for tile in tiles]

    def scores(
        self, call: Call, own: BlockEntry, tile: TileEntry, products: Tensor, batch: int, head: int
    ) -> tuple[Tensor, Tensor]:
        """(own row, other row): scores, −inf outside of the band, and their derivatives."""
        scores, slope = products * self.scale, torch.ones_like(products)
        if call.softcap > 0:
            tanh = torch.tanh(scores / self.softcap)
            scores, slope = self.softcap * tanh, 1 - tanh.square()
        i, j = torch.arange(own.rows)[:, None], torch.arange(tile.length)
        if call.alibi_slopes is not None:
            place = self.slopes + 4 * (batch * self.slopes_batch + head)
            away = own.position + i * own.stride - tile.position - j * own.stride
            scores = scores - memory(place, _FP32, (1,), (1,)).double() * away.abs()
        distance = j - i - own.first
        seen = (tile.low <= distance) & (distance <= tile.high)
        return scores.masked_fill(~seen, -torch.inf), slope * self.scale

    def kept(
        self, call: Call, queries: Tensor, keys: Tensor, batch: int, head: int
    ) -> Tensor | float:
        """(query, key): 0 or `keep_scale`, of tokens."""
        if call.dropout_p == 0:
            return 1.0
        seed = memory(self.seed, torch.int64, (1,), (1,))[0]
        heads = range(head + self.head_start, head + self.head_start + 1)
        rows = dropout.row_keys(seed, batch + 1, heads, queries)[batch, 0]
        return dropout.kept(rows, keys, call.dropout_p).double() * self.keep_scale


def _tokens(first: int, count: int, stride: int) -> Tensor:
    return first + torch.arange(count) * stride


def forward(a: Arguments, call: Call, single: bool, in_state: bool) -> None:
    """Advance the state, or write the result."""
    dtype = call.dtype
    q = a.tensor("q", a.nheads, a.d, dtype, a.rows_q)
    k = a.tensor("k", a.nheads_k, a.d, dtype, a.rows_k)
    v = a.tensor("v", a.nheads_k, a.dv, dtype, a.rows_k)
    lse = memory(a.lse, _FP32, (a.batch, a.rows_q, a.nheads), (a.l_batch, a.l_row, a.l_head))
    out = None if single else a.tensor("o", a.nheads, a.dv, _FP32, a.rows_q)
    result = None if in_state else a.tensor("r", a.nheads, a.dv, dtype, a.rows_q)
    for own, tiles in a.items():
        rows = slice(own.row, own.row + own.rows)
        first, last = single or own.flags & FIRST, single or own.flags & LAST
        for batch in range(a.batch):
            for head in range(a.nheads):
                head_k = head // (a.nheads // a.nheads_k)
                known = lse[batch, rows, head].double()
                known = known if call.sink or not first else torch.full_like(known, -torch.inf)
                total = torch.zeros(own.rows, a.dv, dtype=torch.float64)
                if not first:
                    total = out[batch, rows, head].double()  # type: ignore[index]
                scores, values = [known[:, None]], []
                for tile in tiles:
                    others = slice(tile.row, tile.row + tile.length)
                    products = q[batch, rows, head].double() @ k[batch, others, head_k].double().T
                    scores.append(a.scores(call, own, tile, products, batch, head)[0])
                    queries = _tokens(own.token, own.rows, own.stride)
                    keys = _tokens(tile.token, tile.length, own.stride)
                    values.append((a.kept(call, queries, keys, batch, head), batch, others, head_k))
                new = torch.cat(scores, 1).logsumexp(1)
                safe = new.nan_to_num(neginf=0.0)
                total = total * (known - safe).exp()[:, None]
                for each, (kept, *place) in zip(scores[1:], values, strict=True):
                    total += ((each - safe[:, None]).exp() * kept) @ v[tuple(place)].double()
                lse[batch, rows, head] = new.float()
                to = result if last and not in_state else out
                to[batch, rows, head] = total.to(to.dtype)  # type: ignore[index,union-attr]


def _stats(a: Arguments, address: int, batch: int, head: int, heads: int, rows: range) -> Tensor:
    """lse or delta of some queries, which every copy says."""
    shape = a.batch, heads, 4, a.wide
    copies = memory(address, _FP32, shape, (heads * 4 * a.wide, 4 * a.wide, a.wide, 1))
    found = [copies[batch, head, row & 3, row - (row & 3)] for row in rows]
    return torch.stack(found).double()


def backward(a: Arguments, call: Call, launch: Any, fresh: bool, dtype: torch.dtype) -> None:
    """Write dK and dV or add to them, and add dQ; or, with queries and keys exchanged, dQ alone."""
    q = a.tensor("q", a.nheads, a.d, call.dtype, a.rows_q).double()
    k = a.tensor("k", a.nheads_k, a.d, call.dtype, a.rows_k).double()
    v = a.tensor("v", a.nheads_k, a.dv_width, call.dtype, a.rows_k).double()
    dout = a.tensor("o", a.nheads, a.dv_width, call.dtype, a.rows_q).double()
    heads, exchanged = a.nheads_k * a.parts, launch.exchanged
    group = 1 if exchanged else a.nheads // heads
    to_k = a.tensor("dk", heads, a.d, dtype, a.rows_k) if launch.only != "dv" else None
    to_v = a.tensor("dv", heads, a.dv_width, dtype, a.rows_k) if launch.only != "dk" else None
    dq = a.tensor("dq", a.nheads, a.d, _FP32, a.rows_q) if launch.dq else None
    for own, tiles in a.items():
        mine = slice(own.row, own.row + own.rows)
        for batch in range(a.batch):
            for part in range(heads):
                dk = torch.zeros(own.rows, a.d, dtype=torch.float64)
                dv = torch.zeros(own.rows, a.dv_width, dtype=torch.float64)
                at_k = batch, mine, part // a.parts
                for head in range(part * group, (part + 1) * group):
                    other = head // (heads // a.nheads) if exchanged else head
                    for tile in tiles:
                        at_q = batch, slice(tile.row, tile.row + tile.length), other
                        scores, slope = a.scores(call, own, tile, k[at_k] @ q[at_q].T, batch, head)
                        ours = _tokens(own.token, own.rows, own.stride)
                        theirs = _tokens(tile.token, tile.length, own.stride)
                        queries, keys = (ours, theirs) if exchanged else (theirs, ours)
                        kept = a.kept(call, queries, keys, batch, head)
                        if not exchanged and isinstance(kept, Tensor):
                            kept = kept.T
                        rows = range(mine.start, mine.stop) if exchanged else range(a.rows_q)
                        rows = rows if exchanged else rows[at_q[1]]
                        of = batch, head, heads if exchanged else a.nheads, rows
                        lse, delta = (_stats(a, each, *of) for each in (a.lse, a.delta))
                        if exchanged:
                            lse, delta = lse[:, None], delta[:, None]
                        p = torch.exp2(scores * LOG2E - lse)
                        if launch.sizes.folded:  # the softmax scale is in it
                            p = p / a.scale
                        ds = p * (v[at_k] @ dout[at_q].T * kept - delta) * slope
                        dk += ds @ q[at_q]
                        dv += (p * kept) @ dout[at_q]
                        if dq is not None:
                            dq[at_q] += (ds.T @ k[at_k]).float()
                for to, found in ((to_k, dk), (to_v, dv)):
                    if to is not None:
                        place = batch, mine, part
                        to[place] = (found if fresh else to[place] + found).to(to.dtype)


def _compiled() -> ModuleType:
    """In the place of `compiled.py`."""
    module = ModuleType(f"{cute.__name__}.compiled")

    def forward_kernel(traits: tuple[Any, ...]) -> Any:
        _, call, _, single, in_state = traits
        names = names_of("forward.py")
        return lambda *numbers: forward(
            Arguments(**dict(zip(names, numbers, strict=True))), call, single, in_state
        )

    def backward_kernel(traits: tuple[Any, ...]) -> Any:
        _, call, launch, fresh, dtype = traits
        names = names_of("backward.py")
        return lambda *numbers: backward(
            Arguments(**dict(zip(names, numbers, strict=True))), call, launch, fresh, dtype
        )

    module.forward_kernel = forward_kernel  # type: ignore[attr-defined]
    module.backward_kernel = backward_kernel  # type: ignore[attr-defined]
    return module


@contextmanager
def installed() -> Iterator[list[tuple[Any, ...]]]:
    """The kernel "cute" runs on the CPU; what its kernels would have been compiled for."""
    kinds: list[tuple[Any, ...]] = []

    def traits_of(*arguments: Any) -> tuple[Any, ...]:
        kinds.append(arguments)
        return arguments

    module = _compiled()
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.dict(sys.modules, {module.__name__: module}))
        enter(mock.patch.object(host, "_unavailable", return_value=()))
        enter(mock.patch.object(scheduler, "processors", return_value=PROCESSORS))
        enter(mock.patch("ring_flash_attn.engine.entry._ready", Cache(64)))
        for each in (host, backward_host):
            enter(mock.patch.object(each, "traits_of", traits_of))
            enter(mock.patch.object(each, "_launches", Cache(512)))
        yield kinds
