"""Moves rows from one layout to another: packs and sends them, and puts them in their places."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import comm
from ..plan.problem import Problem
from ..plan.relayout import Relayout, make_relayout
from ..plan.rows import Packing
from ..trace import span
from . import checks
from .entry import document_values
from .host_copy import raise_if_stale
from .packing import row_numbers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Connect = Callable[[], Sequence[comm.Transport]]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass(frozen=True, slots=True)
class PreparedRelayout:
    """A relayout of the ranks of this process, ready to run.

    Attributes:
        plans: what each rank does.
        dim: the dimension of tokens, not negative.
        connect: makes the ranks' ends of the group, for each pass fresh ones.
        layouts: names of the old and the new one, for profilers.
    """

    plans: tuple[Relayout, ...]
    dim: int
    connect: Connect
    layouts: tuple[str, str]

    def reversed(self) -> PreparedRelayout:
        """The way back."""
        old, new = self.layouts
        return replace(self, plans=tuple(p.reversed() for p in self.plans), layouts=(new, old))


def prepare_relayout(
    before: Problem,
    after: Problem,
    shards: Mapping[int, Tensor],
    dim: int,
    connect: Connect | None = None,
) -> PreparedRelayout:
    """What moves these shards, by rank; `connect` is None if they are those of all ranks."""
    plans = tuple(_planned(before, after, rank) for rank in shards)
    for plan, shard in zip(plans, shards.values(), strict=True):
        who = plan.rank, before.world_size
        checks.check_shard(shard, dim, plan.size_before, before.layout.name, *who)
    ends = connect or functools.partial(comm.virtual_transports, len(plans))
    return PreparedRelayout(plans, dim, ends, (before.layout.name, after.layout.name))


@functools.lru_cache(maxsize=64)  # layers and backward passes share them
def _planned(before: Problem, after: Problem, rank: int) -> Relayout:
    # The cache keeps the problems it is asked with; so plan with some that can go.
    return make_relayout(replace(before), replace(after), rank)


def relayout_on_group(
    before: Problem, after: Problem, x: Tensor, dim: int, group: ProcessGroup, packed: bool
) -> Tensor:
    """This rank's shard in the new layout, once all ranks have agreed on the call."""
    device, lengths = x.device, before.lengths_k
    if device.type == "meta":
        raise ValueError("x is on meta: there is nothing to send to other ranks")
    rank, _ = comm.rank_and_size(group)

    def connect() -> list[comm.Transport]:
        return [comm.DistributedTransport(group, device)]

    prepared = prepare_relayout(before, after, {rank: x}, dim, connect)
    signature = [
        ("call", "relayout"),
        ("from_layout, to_layout", prepared.layouts),
        ("device", device.type),
        ("dtype", str(x.dtype)),
        ("dim", dim),
        ("shape without dim", (*x.shape[:dim], *x.shape[dim + 1 :])),
        ("needs gradients", torch.is_grad_enabled() and x.requires_grad),
        ("tokens" if packed else "seqlen", sum(lengths)),
    ]
    if packed:
        values = document_values(cu_seqlens=lengths, cu_seqlens_q=before.lengths_q)
        signature += ("documents", len(lengths)), *values.items()
    comm.agree(tuple(signature), group)
    comm.connect(group, device)  # whether or not this rank has anything to send
    return run_relayout(prepared, [x])[0]


def run_relayout(prepared: PreparedRelayout, shards: Sequence[Tensor]) -> list[Tensor]:
    """The shards in the new layout, as new tensors; differentiable once."""
    return list(_RelayoutFunction.apply(prepared, *shards))


class _RelayoutFunction(torch.autograd.Function):
    """All ranks of this process at once. Gradients take the way back; nothing is saved for them."""

    @staticmethod
    def forward(ctx: Any, prepared: PreparedRelayout, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.prepared = prepared
        return _exchange(prepared, shards)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise_if_stale()
        return None, *_exchange(ctx.prepared.reversed(), grads)


def _exchange(prepared: PreparedRelayout, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Post all messages, copy what stays meanwhile, then put what has arrived in its places."""
    with span("relayout: {0[0]} to {0[1]}", prepared.layouts):
        plans, ends = prepared.plans, prepared.connect()
        try:
            movers = [_Mover(*each, prepared.dim) for each in zip(plans, shards, strict=True)]
            for mover, end in zip(movers, ends, strict=True):
                end.post(mover.messages())
            for mover in movers:
                mover.copy()
            for mover, end in zip(movers, ends, strict=True):
                end.wait()
                mover.finish()
        except BaseException as error:
            for plan, end in zip(plans, ends, strict=True):
                end.abandon([plan.has_messages], drain=isinstance(error, Exception))
            raise
        return tuple(mover.out for mover in movers)


class _Mover:
    """One rank's shard on its way to the new layout; rows first, as integers, within."""

    def __init__(self, plan: Relayout, shard: Tensor, dim: int) -> None:
        shape = (*shard.shape[:dim], plan.size_after, *shard.shape[dim + 1 :])
        self.out = torch.empty(shape, dtype=shard.dtype, device=shard.device)
        self._plan = plan
        self._old, self._new = (_as_integers(x).movedim(dim, 0) for x in (shard, self.out))
        at = plan.receives.slice
        place = None if at is None else self._new[at]
        self._in_place = place is not None and place.is_contiguous()
        if place is None or not self._in_place:
            place = self._new.new_empty((plan.receives.total, *self._new.shape[1:]))
        self._arriving, self._leaving = place, self._old[:0]  # alive until all has arrived

    def messages(self) -> list[comm.Message]:
        """One for each peer that we share rows with, each way."""
        self._leaving = _take(self._old, self._plan.sends).contiguous()
        return [
            *_messages(self._arriving, self._plan.receives, receive=True),
            *_messages(self._leaving, self._plan.sends, receive=False),
        ]

    def copy(self) -> None:
        """What stays on this rank."""
        _put(self._new, self._plan.stay_at, _take(self._old, self._plan.stays))

    def finish(self) -> None:
        """All messages have arrived."""
        if not self._in_place:
            _put(self._new, self._plan.receives, self._arriving)


def _as_integers(x: Tensor) -> Tensor:
    """The same memory; of integers, because not every dtype can be indexed everywhere."""
    x = x.resolve_conj().resolve_neg()
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.view(_INTEGERS[x.element_size()])


def _messages(buffer: Tensor, packing: Packing, receive: bool) -> list[comm.Message]:
    """A contiguous rows-first buffer in parts; as bytes, because NCCL does not know every dtype."""
    parts = buffer.split([count for _, count in packing.counts])
    return [
        # A single element may have any stride, which a view of bytes does not take.
        comm.Message(part.as_strided((part.numel(),), (1,)).view(torch.uint8), peer, receive)
        for (peer, _), part in zip(packing.counts, parts, strict=True)
    ]


def _take(shard: Tensor, packing: Packing) -> Tensor:
    """Some rows: a view where they follow each other."""
    at = packing.slice
    return shard.index_select(0, row_numbers(packing, shard.device)) if at is None else shard[at]


def _put(shard: Tensor, packing: Packing, rows: Tensor) -> None:
    """Write some rows."""
    at = packing.slice
    if at is None:
        shard.index_copy_(0, row_numbers(packing, shard.device), rows)
    else:
        shard[at].copy_(rows)
