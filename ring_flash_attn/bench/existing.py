"""The existing ring-flash-attn library's zigzag design, for comparison by the same method.

As its README and source describe it: keys and values go round; each step is a call of
FlashAttention-2, whose result in half precision is merged into (out, lse) in fp32 by element-wise
operations between the calls. Backward, each step calls FlashAttention-2 with the merged out and
lse, and what it returns in half precision is added to fp32 gradients, of which dk and dv follow the
keys round. With an early and a late half in every shard, a step that meets keys of a lower rank
sees only their first half, and one that meets keys of a higher rank concerns only the second half
of the queries.

A rank is a generator that stops where ranks depend on each other, so that several can be run in
step, and one alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..comm import Message, Transport
from ..engine.attention import QKV
from ..kernels.base import LIBRARIES, Call, load_kernel, why_not
from ..kernels.native.blocks import Block as LibraryBlock
from ..kernels.native.blocks import Library, LibraryKernel
from ..plan.tiles import Mask

Result = TypeVar("Result")
Steps = Generator[None, None, Result]
OutLse = tuple[Tensor, Tensor]  # (batch, seqlen, nheads, headdim), (batch, nheads, seqlen)
Merge = Callable[[Tensor, Tensor, Tensor, Tensor], OutLse]


class Block(Protocol):
    """Attention of one block on one device."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> OutLse:
        """(out, lse)."""
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> QKV:
        """(dq, dk, dv) of the softmax whose result is (out, lse)."""
        ...


class ByLibrary:
    """Kernels of others, by the name that they have here; "fa2" comes with torch.

    Raises:
        ValueError: there is no such library.
    """

    def __init__(self, name: str) -> None:
        if name not in LIBRARIES:
            raise ValueError(f"unknown library {name!r}; choose one of {', '.join(LIBRARIES)}")
        self.name = name

    def why_not(self, q: Tensor, k: Tensor) -> list[str]:
        """Every reason why it cannot do blocks of such tensors."""
        return why_not(self.name, _call(q, k))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> OutLse:
        """(out, lse), out in the dtype of q."""
        return self._library.forward(q, k, v, _block(q, k, causal), _call(q, k))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> QKV:
        """(dq, dk, dv) in the dtype of q."""
        block = _block(q, k, causal)
        return self._library.backward(dout, q, k, v, out, lse, block, _call(q, k))

    @property
    def _library(self) -> Library:
        return cast(LibraryKernel, load_kernel(self.name)).library


def _block(q: Tensor, k: Tensor, causal: bool) -> LibraryBlock:
    return LibraryBlock((-1, 0 if causal else -1), None, None, q.shape[1], k.shape[1])


def _call(q: Tensor, k: Tensor) -> Call:
    headdim = q.shape[3]
    numbers = (q.shape[2], k.shape[2], headdim, headdim, headdim**-0.5)
    return Call(q.device, q.dtype, *numbers, Mask(right=0))


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) over all keys so far and those of a block, in the precision of out.

    Args:
        out, block_out: (batch, seqlen, nheads, headdim).
        lse, block_lse: (batch, seqlen, nheads, 1).
    """
    weight = torch.sigmoid(block_lse - lse)
    out = out - weight * (out - block_out.to(out.dtype))
    return out, lse - logsigmoid(lse - block_lse)


@cache
def scripted_merge() -> Merge:
    """The same, compiled by TorchScript as in the library; on a GPU it fuses what it can."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript
        compiled: Merge = torch.jit.script(merge)
    return compiled


@dataclass(frozen=True, slots=True)
class ZigzagRing:
    """One rank's end.

    Attributes:
        rank, world_size: whose.
        transport: makes an end of the group; keys and gradients have one each.
        block: who computes a block.
        merge: how blocks are put together.
        make: returns memory like a tensor, for what arrives.
    """

    rank: int
    world_size: int
    transport: Callable[[], Transport]
    block: Block
    merge: Merge = merge
    make: Callable[[Tensor], Tensor] = torch.empty_like

    def _pass_on(self, transport: Transport, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Send tensors to the next rank; returns where those of the one before will be."""
        after, before = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        arriving = tuple(self.make(x) for x in tensors)
        messages = [Message(x, before, receive=True) for x in arriving]
        transport.post([*messages, *(Message(x, after, receive=False) for x in tensors)])
        return arriving

    def _parts(self, step: int, half: int) -> tuple[slice, slice]:
        """Rows of the queries and of the keys that a step is about."""
        if step == 0:
            return slice(None), slice(None)
        return (slice(None), slice(half)) if step <= self.rank else (slice(half, None), slice(None))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Steps[OutLse]:
        """(out, lse) of this rank's queries."""
        transport, half = self.transport(), q.shape[1] // 2
        precision = torch.promote_types(q.dtype, torch.float32)
        out = lse = torch.empty(0)
        for step in range(self.world_size):
            last = step + 1 == self.world_size
            arriving = () if last else self._pass_on(transport, k, v)
            yield
            rows, columns = self._parts(step, half)
            block_out, block_lse = self.block.forward(
                q[:, rows], k[:, columns], v[:, columns], causal=step == 0
            )
            block_lse = block_lse.transpose(1, 2)[..., None]
            if step == 0:
                out, lse = block_out.to(precision), block_lse
            elif step <= self.rank:
                out, lse = self.merge(out, lse, block_out, block_lse)
            else:
                merged = self.merge(out[:, rows], lse[:, rows], block_out, block_lse)
                out[:, rows], lse[:, rows] = merged
            yield
            if not last:
                transport.wait()
                k, v = arriving
        return out.to(q.dtype), lse[..., 0].transpose(1, 2).contiguous()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Steps[QKV]:
        """(dq, dk, dv) of this rank's shards."""
        keys, gradients, half = self.transport(), self.transport(), q.shape[1] // 2
        precision = torch.promote_types(q.dtype, torch.float32)
        own: tuple[Tensor, ...] = ()
        dkv: tuple[Tensor, ...] = ()
        for step in range(self.world_size):
            last = step + 1 == self.world_size
            arriving = () if last else self._pass_on(keys, k, v)
            yield
            rows, columns = self._parts(step, half)
            late = lse[:, :, rows].contiguous()
            inputs = dout[:, rows], q[:, rows], k[:, columns], v[:, columns], out[:, rows], late
            block_dq, *block_dkv = self.block.backward(*inputs, causal=step == 0)
            if step == 0:
                own = (block_dq.to(precision),)
                summed = tuple(x.to(precision) for x in block_dkv)
            else:
                own[0][:, rows] += block_dq
                gradients.wait()
                for total, part in zip(dkv, block_dkv, strict=True):
                    total[:, columns] += part
                summed = dkv
            if not last:
                keys.wait()
                k, v = arriving
            dkv = self._pass_on(gradients, *summed)
            yield
        gradients.wait()
        dk, dv = dkv
        return own[0].to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def run_together(ranks: Sequence[Steps[Result]]) -> list[Result]:
    """Take ranks through their steps together; one, or all of a group of virtual ones."""
    found: list[Result] = []
    while not found:
        for rank in ranks:
            try:
                next(rank)
            except StopIteration as end:
                found.append(end.value)
    assert len(found) == len(ranks), "all ranks have as many steps"
    return found
