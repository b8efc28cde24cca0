"""The baseline: ring-flash-attn 0.1.8's zigzag design, for comparison by the same method.

As its README and source describe it: keys and values go round; each step is a call of
FlashAttention-2, whose result in half precision is merged into (out, lse) in fp32 by element-wise
operations between the calls. Backward, each step calls FlashAttention-2 with the merged out and
lse, and what it returns in half precision is added to fp32 gradients, of which dk and dv follow the
keys round. With an early and a late half in every shard, a step that meets keys of a lower rank
sees only their first half, and one that meets keys of a higher rank concerns only the second half
of the queries.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ...comm import Message, Transport
from ...engine.attention import QKV
from ...kernels.base import LIBRARIES, Call, load_kernel, why_not
from ...kernels.native.blocks import Block, LibraryKernel
from ...plan.tiles import Mask
from ..links import Link, Topology
from ..workload import call_of
from .emulated import EmulatedRanks
from .rank import LibraryRanks, OutLse

Merge = Callable[[Tensor, Tensor, Tensor, Tensor], OutLse]


class BlockAttention(Protocol):
    """Attention of one block on one device, backward of the softmax whose result is (out, lse).

    out is (batch, seqlen, nheads, headdim), lse (batch, nheads, seqlen).
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> OutLse: ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> QKV: ...


class NativeAttention:
    """Kernels of another library, by the name that they have here; "fa2" comes with torch."""

    def __init__(self, name: str) -> None:
        if name not in LIBRARIES:
            raise ValueError(f"unknown library {name!r}; choose one of {', '.join(LIBRARIES)}")
        self.name = name

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> OutLse:
        library = cast(LibraryKernel, load_kernel(self.name)).library
        return library.forward(q, k, v, *_block_call(q, k, causal))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> QKV:
        library = cast(LibraryKernel, load_kernel(self.name)).library
        return library.backward(dout, q, k, v, out, lse, *_block_call(q, k, causal))


def _block_call(q: Tensor, k: Tensor, causal: bool) -> tuple[Block, Call]:
    (_, length, nheads, headdim), (_, length_k, nheads_k, _) = q.shape, k.shape
    numbers = (nheads, nheads_k, headdim, headdim, headdim**-0.5)
    block = Block((-1, 0 if causal else -1), None, None, length, length_k)
    return block, Call(q.device, q.dtype, *numbers, Mask(right=0))


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> OutLse:
    """(out, lse) over all keys so far and those of a block, in the precision of out.

    Out is (batch, seqlen, nheads, headdim), lse (batch, seqlen, nheads, 1).
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
    """One rank's end."""

    rank: int
    world_size: int
    transport: Callable[[], Transport]  # makes an end of the group, for keys and for gradients
    block: BlockAttention
    merge: Merge = merge
    make: Callable[[Tensor], Tensor] = torch.empty_like  # memory like a tensor, for what arrives

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

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> OutLse:
        transport, half = self.transport(), q.shape[1] // 2
        out = lse = torch.empty(0)
        for step in range(self.world_size):
            last = step + 1 == self.world_size
            arriving = () if last else self._pass_on(transport, k, v)
            rows, columns = self._parts(step, half)
            block_out, block_lse = self.block.forward(
                q[:, rows], k[:, columns], v[:, columns], causal=step == 0
            )
            block_lse = block_lse.transpose(1, 2)[..., None]
            if step == 0:
                out, lse = block_out.to(_wide(q)), block_lse
            elif step <= self.rank:
                out, lse = self.merge(out, lse, block_out, block_lse)
            else:
                merged = self.merge(out[:, rows], lse[:, rows], block_out, block_lse)
                out[:, rows], lse[:, rows] = merged
            if not last:
                transport.wait()
                k, v = arriving
        return out.to(q.dtype), lse[..., 0].transpose(1, 2).contiguous()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> QKV:
        keys, gradients, half = self.transport(), self.transport(), q.shape[1] // 2
        dq = torch.empty(0)
        dkv: tuple[Tensor, ...] = ()
        for step in range(self.world_size):
            last = step + 1 == self.world_size
            arriving = () if last else self._pass_on(keys, k, v)
            rows, columns = self._parts(step, half)
            late = lse[:, :, rows].contiguous()
            inputs = dout[:, rows], q[:, rows], k[:, columns], v[:, columns], out[:, rows], late
            block_dq, *block_dkv = self.block.backward(*inputs, causal=step == 0)
            if step == 0:
                dq, dkv = block_dq.to(_wide(q)), tuple(x.to(_wide(q)) for x in block_dkv)
            else:
                dq[:, rows] += block_dq
                gradients.wait()
                for total, part in zip(dkv, block_dkv, strict=True):
                    total[:, columns] += part
            if not last:
                keys.wait()
                k, v = arriving
            dkv = self._pass_on(gradients, *dkv)
        gradients.wait()
        dk, dv = dkv
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class BaselinePasses(NamedTuple):
    """A forward pass, and a forward and a backward pass, to be run again and again."""

    forward: Callable[[], OutLse]
    both: Callable[[], tuple[OutLse, QKV]]


class BaselineRanks:
    """The baseline's ranks on blocks of attention, with the data of this library's ranks.

    Raises:
        ValueError: the baseline cannot do this workload.
    """

    def __init__(self, ours: LibraryRanks, block: BlockAttention) -> None:
        self._ours, self._block, self._tokens = ours, block, ours.share.seqlen
        self._check()
        block_name = getattr(block, "name", type(block).__name__)
        self.name = f"baseline on {block_name}"
        self._buffers: list[Tensor] = []

    def _check(self) -> None:
        workload, reasons = self._ours.workload, []
        if workload.packed or not workload.causal:
            reasons.append("only the causal one of equal sequences is replayed")
        for name in ("headdim_v", "softmax_scale", "softcap"):
            if getattr(workload, name):
                reasons.append(f"it is replayed without {name}")
        if self._tokens % 2:
            reasons.append(f"it halves shards, and {self._tokens} tokens are odd")
        if isinstance(self._block, NativeAttention):
            name, call = self._block.name, call_of(workload, self._ours.device)
            reasons += [f"{name}: {why}" for why in why_not(name, call)]
        if reasons:
            raise ValueError(f"the baseline: {'; '.join(reasons)}")

    def rank(
        self, rank: int, link: Link | Topology | None, keep_buffers: bool = True
    ) -> BaselinePasses:
        """A rank of many; see `LibraryRanks.rank`. The n-th request gets the n-th buffer."""
        ours = self._ours
        shard, dout = ours.shard(self._tokens)
        for each in (shard[1].dtype, _wide(shard[1])):
            ours.data.like(torch.empty_like(shard[1], dtype=each, device="meta"))
        free: Iterator[Tensor] = iter(())

        def make(tensor: Tensor) -> Tensor:
            if not keep_buffers or link is not None:
                return torch.empty_like(tensor)
            buffer = next(free, None)
            if buffer is None:
                buffer = torch.empty_like(tensor)
                self._buffers.append(buffer)
            return buffer

        ring = ZigzagRing(
            rank,
            ours.placement.world_size,
            EmulatedRanks(ours.device, link, ours.data, rank).transport,
            self._block,
            scripted_merge() if ours.device.type == "cuda" else merge,
            make,
        )

        def forward() -> OutLse:
            nonlocal free
            free = iter(self._buffers)
            return ring.forward(*shard)

        def both() -> tuple[OutLse, QKV]:
            result = forward()
            return result, ring.backward(dout, *shard, *result)

        return BaselinePasses(forward, both)

    def single_device(self, masked: bool) -> BaselinePasses:
        """The block on a rank's own tokens, on one device."""
        shard, dout = self._ours.shard(self._tokens)
        block = self._block

        def both() -> tuple[OutLse, QKV]:
            result = block.forward(*shard, masked)
            return result, block.backward(dout, *shard, *result, masked)

        return BaselinePasses(lambda: block.forward(*shard, masked), both)

    def describe(self, rank: int) -> tuple[int, int, tuple[()]]:
        """A causal block of a rank's own tokens, half a block with every other rank; no costs."""
        tokens, others = self._tokens, self._ours.placement.world_size - 1
        pairs = tokens * (tokens + 1) // 2 + others * tokens**2 // 2
        return tokens, self._ours.workload.nheads * pairs, ()
