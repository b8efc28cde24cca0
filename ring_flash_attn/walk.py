"""Walking a plan: the buffers and messages of one rank, step by step.

Every buffer that travels is stored rows first, (seqlen, batch, nheads, …), so that the shard of one
rank is a contiguous part of a buffer that holds several; kernels see it as (batch, seqlen, nheads,
…).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from .comm import Message, Transport
from .plan import Heads, Payload, Plan, Side, Transfer, Work
from .tiles import Tile


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a payload.

    Attributes:
        heads: its heads for each KV head: 1, or the group size on the query side.
        headdim: last dimension; None for a number per row, kept as (batch, nheads, seqlen).
        dtype: of its elements.
    """

    heads: int
    headdim: int | None
    dtype: torch.dtype

    def view(self, buffer: Tensor) -> Tensor:
        """Rows-first buffer → what kernels see."""
        return buffer.permute(1, 2, 0) if self.headdim is None else buffer.transpose(0, 1)

    def rows_first(self, tensor: Tensor) -> Tensor:
        """What kernels see → rows-first, contiguous (a copy only if need be)."""
        moved = tensor.permute(2, 0, 1) if self.headdim is None else tensor.transpose(0, 1)
        return moved.contiguous()

    def of_heads(self, tensor: Tensor, heads: Heads) -> Tensor:
        """The part of a kernel-side tensor that belongs to some KV heads."""
        dim = 1 if self.headdim is None else 2
        if tensor.shape[dim] == (heads[1] - heads[0]) * self.heads:
            return tensor
        at = slice(heads[0] * self.heads, heads[1] * self.heads)
        return tensor[:, at] if self.headdim is None else tensor[:, :, at]


Fields = tuple[Field, ...]
Views = tuple[Tensor, ...]
Buffers = tuple[Tensor, ...]
Free = dict[tuple[torch.Size, torch.dtype], list[Tensor]]  # buffers that nobody uses


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where shards lie: the buffer of `owners`, concatenated, for some heads of one side."""

    payload: Payload
    side: Side
    owners: tuple[int, ...]
    heads: Heads


@dataclass(frozen=True, slots=True)
class Only:
    """A launch that is all of a plan, and whether it touches every query and every key."""

    tiles: tuple[Tile, ...]
    covers_queries: bool
    covers_keys: bool


class Path:
    """A plan, and where its shards lie on the way; made once, walked many times.

    Attributes:
        plan: the steps of a rank.
        sizes: number of rows of each side and owner that the plan speaks of.
        last_use: after which step each buffer is free again.
        only: the launch, if there is one for all and nothing to send.
    """

    def __init__(self, plan: Plan, sizes: dict[tuple[Side, int], int]) -> None:
        self.plan, self.sizes = plan, sizes
        self._places = self._find_places()
        self.last_use = self._find_last_use()
        self.only = self._find_only()

    def _find_only(self) -> Only | None:
        launches = [work for step in self.plan.steps for work in step.work]
        if len(launches) != 1 or any(step.transfers for step in self.plan.steps):
            return None
        tiles, rank = launches[0].tiles, self.plan.rank
        assert all(tile.first and tile.last for tile in tiles), "nothing is carried"
        rows = {tile.query.start: tile.query.length for tile in tiles}
        columns = {tile.key.start: tile.key.length for tile in tiles}
        return Only(
            tiles,
            sum(rows.values()) == self.sizes[Side.QUERY, rank],
            sum(columns.values()) == self.sizes[Side.KEY, rank],
        )

    def _find_places(self) -> dict[tuple[Payload, Side, int, Heads], tuple[_Slot, int]]:
        """For shards that a launch takes from a buffer: the buffer, and their first row in it."""
        places = {}
        for step in self.plan.steps:
            for work in step.work:
                for side in Side:
                    owners = work.owners(side)
                    offsets = accumulate((self.sizes[side, o] for o in owners), initial=0)
                    for owner, offset in zip(owners, offsets, strict=False):
                        for payload in Payload:
                            slot = _Slot(payload, side, owners, work.heads)
                            places[payload, side, owner, work.heads] = slot, offset
        return places

    def place(self, transfer: Transfer) -> tuple[_Slot, int]:
        """The buffer that a transfer fills or empties, and the shard's first row in it."""
        side, owner, heads = transfer.side, transfer.owner, transfer.heads
        alone = _Slot(transfer.payload, side, (owner,), heads), 0  # passes through, no launch
        return self._places.get((transfer.payload, side, owner, heads), alone)

    def _find_last_use(self) -> dict[int, list[_Slot]]:
        """After which step each buffer is free again."""
        last: dict[_Slot, int] = {}
        for number, step in enumerate(self.plan.steps):
            for work in step.work:
                for side in Side:
                    last[_Slot(Payload.INPUT, side, work.owners(side), work.heads)] = number
            for transfer in step.transfers:
                if transfer.source == self.plan.rank:
                    last[self.place(transfer)[0]] = number
        slots = defaultdict(list)
        for slot, number in last.items():
            slots[number].append(slot)
        return slots


class Walker:
    """One rank's way through a plan. Subclasses say what travels and what a launch does.

    Args:
        path: the steps of this rank, and where shards lie.
        transport: this rank's end of the group.
        batch: sequences in the batch.
        device: of all tensors.
        free: buffers of earlier walks, which this one takes and leaves for the next; None: it makes
            its own.
    """

    fields: dict[tuple[Payload, Side], Fields]
    home: dict[tuple[Payload, Side], Views]  # this rank's own shards, as kernels see them

    def __init__(
        self,
        path: Path,
        transport: Transport,
        batch: int,
        device: torch.device,
        free: Free | None = None,
    ) -> None:
        self.path, self.plan, self.rank = path, path.plan, path.plan.rank
        self._sizes, self._transport = path.sizes, transport
        self._batch, self._device = batch, device
        self._buffers: dict[_Slot, Buffers] = {}
        self._free: Free = {} if free is None else free
        self._arrivals: list[tuple[Transfer, Buffers]] = []

    # What subclasses fill in.

    def launch(self, work: Work) -> None:
        """Run the kernel."""
        raise NotImplementedError

    def combine(self, side: Side, ours: Views, theirs: Views) -> None:
        """Add what others have accumulated to what is accumulated here."""
        raise NotImplementedError

    def clear(self, side: Side, views: Views) -> None:
        """Make accumulators empty."""
        raise NotImplementedError

    # The walk.

    def post(self, number: int) -> None:
        """Start the transfers of a step."""
        messages: list[Message] = []
        outgoing: dict[tuple[Payload, Side, int, Heads], Buffers] = {}
        for transfer in self.plan.steps[number].transfers:
            if transfer.source == transfer.target:
                self._copy_in_place(transfer)
            elif transfer.source == self.rank:
                key = (transfer.payload, transfer.side, transfer.owner, transfer.heads)
                if key not in outgoing:
                    outgoing[key] = self._outgoing(transfer)
                messages += [Message(b, transfer.target, receive=False) for b in outgoing[key]]
            else:
                buffers = self._incoming(transfer)
                self._arrivals.append((transfer, buffers))
                messages += [Message(b, transfer.source, receive=True) for b in buffers]
        self._transport.post(messages)

    def compute(self, number: int) -> None:
        """Do the work of a step."""
        for work in self.plan.steps[number].work:
            self.launch(work)

    def finish(self, number: int) -> None:
        """Await the transfers of a step; add up results; give buffers back."""
        self._transport.wait()
        for transfer, buffers in self._arrivals:
            if transfer.payload is Payload.RESULT:
                self._add(transfer, buffers)
        self._arrivals.clear()
        for slot in self.path.last_use.get(number, ()):
            self._give_back(self._buffers.pop(slot, ()))

    # Shards, wherever they lie.

    def inputs(self, work: Work, side: Side) -> Views:
        """What a launch reads of one side."""
        return self._views(Payload.INPUT, work, side)

    def results(self, work: Work, side: Side) -> Views:
        """Where a launch accumulates what belongs to one side."""
        return self._views(Payload.RESULT, work, side)

    def _views(self, payload: Payload, work: Work, side: Side) -> Views:
        fields, owners = self.fields[payload, side], work.owners(side)
        if owners == (self.rank,):
            home = self.home[payload, side]
            return tuple(f.of_heads(t, work.heads) for f, t in zip(fields, home, strict=True))
        slot = _Slot(payload, side, owners, work.heads)
        fresh = slot not in self._buffers
        views = tuple(f.view(b) for f, b in zip(fields, self._buffer(slot), strict=True))
        if fresh:
            assert payload is Payload.RESULT, f"{slot} has not arrived"
            self.clear(side, views)
        return views

    def _copy_in_place(self, transfer: Transfer) -> None:
        """Our own shard, into or out of a buffer that holds several."""
        fields = self.fields[transfer.payload, transfer.side]
        home = self.home[transfer.payload, transfer.side]
        ours = tuple(f.of_heads(t, transfer.heads) for f, t in zip(fields, home, strict=True))
        buffers = self._part(transfer)
        views = tuple(f.view(b) for f, b in zip(fields, buffers, strict=True))
        if transfer.payload is Payload.RESULT:
            self.combine(transfer.side, ours, views)
        else:
            for view, tensor in zip(views, ours, strict=True):
                view.copy_(tensor)

    def _outgoing(self, transfer: Transfer) -> Buffers:
        """What we send: our own shard, or one that is passing through."""
        if transfer.payload is Payload.RESULT or transfer.owner != self.rank:
            return self._part(transfer)
        fields = self.fields[transfer.payload, transfer.side]
        home = self.home[transfer.payload, transfer.side]
        return tuple(
            f.rows_first(f.of_heads(t, transfer.heads)) for f, t in zip(fields, home, strict=True)
        )

    def _incoming(self, transfer: Transfer) -> Buffers:
        if transfer.payload is Payload.INPUT:
            return self._part(transfer)
        size = self._sizes[transfer.side, transfer.owner]
        return self._take(self.fields[transfer.payload, transfer.side], size, transfer.heads)

    def _add(self, transfer: Transfer, buffers: Buffers) -> None:
        """Results of others have arrived: add ours, or pass them on if we have none."""
        fields = self.fields[transfer.payload, transfer.side]
        theirs = tuple(f.view(b) for f, b in zip(fields, buffers, strict=True))
        slot, _ = self.path.place(transfer)
        if transfer.owner == self.rank:
            home = self.home[transfer.payload, transfer.side]
            ours = tuple(f.of_heads(t, transfer.heads) for f, t in zip(fields, home, strict=True))
        elif slot not in self._buffers:
            self._buffers[slot] = buffers
            return
        else:
            parts = self._part(transfer)
            ours = tuple(f.view(b) for f, b in zip(fields, parts, strict=True))
        self.combine(transfer.side, ours, theirs)
        self._give_back(buffers)

    # Buffers.

    def _part(self, transfer: Transfer) -> Buffers:
        """The rows of one owner in the buffer where they lie."""
        slot, offset = self.path.place(transfer)
        size = self._sizes[transfer.side, transfer.owner]
        return tuple(buffer[offset : offset + size] for buffer in self._buffer(slot))

    def _buffer(self, slot: _Slot) -> Buffers:
        if slot not in self._buffers:
            size = sum(self._sizes[slot.side, owner] for owner in slot.owners)
            fields = self.fields[slot.payload, slot.side]
            self._buffers[slot] = self._take(fields, size, slot.heads)
        return self._buffers[slot]

    def _take(self, fields: Fields, size: int, heads: Heads) -> Buffers:
        """Buffers for `size` rows, used ones if there are any."""
        buffers = []
        for field in fields:
            last = () if field.headdim is None else (field.headdim,)
            shape = torch.Size((size, self._batch, (heads[1] - heads[0]) * field.heads, *last))
            free = self._free.get((shape, field.dtype))
            buffers.append(
                free.pop() if free else torch.empty(shape, dtype=field.dtype, device=self._device)
            )
        return tuple(buffers)

    def _give_back(self, buffers: Iterable[Tensor]) -> None:
        for buffer in buffers:
            self._free.setdefault((buffer.shape, buffer.dtype), []).append(buffer)


def walk(walkers: Sequence[Walker]) -> None:
    """Take all walkers of this process (one, or all virtual ranks) through their plans in step."""
    for number in range(len(walkers[0].plan.steps)):
        for walker in walkers:
            walker.post(number)
        for walker in walkers:
            walker.compute(number)
        for walker in walkers:
            walker.finish(number)
