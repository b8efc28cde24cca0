"""The executor of a plan: the buffers, messages and launches of one rank, step by step.

Every buffer that travels is stored rows first, (seqlen, batch, nheads, …), so that a piece of a
shard is a contiguous part of any buffer that holds it; kernels see it as (batch, seqlen, nheads,
…).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..comm import Message, Transport
from ..plan.buffers import BufferPlan, Move, Slot
from ..plan.steps import Heads, Payload, Side, Step, Work
from ..trace import span


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a payload: heads for each KV head, last dimension (None: a number a row)."""

    heads: int
    headdim: int | None
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor, nheads_k: int) -> Field:
        """Of (batch, seqlen, nheads, headdim) or (batch, nheads, seqlen)."""
        if tensor.dim() == 3:
            return cls(tensor.shape[1] // nheads_k, None, tensor.dtype)
        return cls(tensor.shape[2] // nheads_k, tensor.shape[3], tensor.dtype)

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

    def of_rows(self, tensor: Tensor, rows: slice) -> Tensor:
        return tensor[:, :, rows] if self.headdim is None else tensor[:, rows]


Fields = tuple[Field, ...]
Views = tuple[Tensor, ...]
Buffers = tuple[Tensor, ...]


class Pool:
    """Where buffers come from and go to: here, torch's allocator."""

    def take(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer; what is in it is anybody's guess."""
        return torch.empty(shape, dtype=dtype, device=device)

    def give(self, buffer: Tensor) -> None:
        """It is not used any more."""


class Pass(Protocol):
    """Forward or backward on one rank: its plan, its tensors, and what a launch does."""

    buffer_plan: BufferPlan
    pool: Pool
    home: dict[tuple[Payload, Side], Views]  # its own shards, as kernels see them

    def launch(self, work: Work, executor: Executor) -> None:
        """Run the kernel on the executor's `shards`."""

    def combine(self, ours: Views, theirs: Views) -> None:
        """Add what others have accumulated to what is accumulated here."""

    def clear(self, views: Views) -> None:
        """Make accumulators empty."""


class Executor:
    """Runs the plan of one rank: its buffers, its messages, and the launches of a pass."""

    def __init__(self, work: Pass, transport: Transport) -> None:
        self._pass, self._home = work, work.home
        nheads_k = work.home[Payload.INPUT, Side.KEY][0].shape[2]
        self._fields = {
            key: tuple(Field.of(tensor, nheads_k) for tensor in tensors)
            for key, tensors in work.home.items()
        }
        self.buffer_plan, self.plan = work.buffer_plan, work.buffer_plan.plan
        self.rank = self.plan.rank
        q = self._home[Payload.INPUT, Side.QUERY][0]
        self._transport, self._batch, self._device = transport, q.shape[0], q.device
        self._buffers: dict[Slot, Buffers] = {}
        self._begun: set[tuple[Side, Heads]] = set()
        self._pool = work.pool
        self._own: dict[tuple[Side, Heads], Buffers] = {}  # our shards, rows first, while we send
        self._arrivals: list[tuple[Move, Buffers]] = []  # results, in the order of their shards

    # Steps.

    def post(self, number: int) -> None:
        messages: list[Message] = []
        for move in self.buffer_plan.moves[number]:
            transfer = move.transfer
            if transfer.source == transfer.target:
                self._copy_in_place(move)
            elif transfer.source == self.rank:
                messages += [Message(t, transfer.target, False) for t in self._outgoing(move)]
            else:
                messages += [Message(t, transfer.source, True) for t in self._incoming(move)]
        with span(_post_name, self.rank, number, messages):
            self._transport.post(messages)

    def compute(self, number: int) -> None:
        for work in self.plan.steps[number].work:
            self._pass.launch(work, self)

    def finish(self, number: int) -> None:
        """Await the transfers of a step; add up results; give buffers back."""
        with span(_wait_name, self, number):
            self._transport.wait()
        for move, buffers in self._arrivals:
            self._add(move, buffers)
        self._arrivals.clear()
        for slot in self.buffer_plan.last_use.get(number, ()):
            self._give_back(self._buffers.pop(slot, ()))
        for key in [key for key in self._own if self.buffer_plan.own[key][1] == number]:
            del self._own[key]

    def abandon(self, drain: bool) -> None:
        """The pass has failed: tell the transport which steps have messages."""
        steps = [
            any(move.transfer.source != move.transfer.target for move in moves)
            for moves in self.buffer_plan.moves
        ]
        self._transport.abandon(steps, drain)

    # Shards, wherever they lie.

    def shards(self, payload: Payload, work: Work, side: Side) -> Views:
        """What a launch reads of one side, or where it accumulates what belongs to it."""
        owners = work.owners(side)
        if owners == (self.rank,):
            return self._at_home(payload, side, work.heads)
        slot = Slot(payload, side, owners, work.heads)
        assert payload is Payload.RESULT or slot in self._buffers, f"{slot} has not arrived"
        return _views(self._fields[payload, side], self._buffer(slot))

    def is_fresh(self, work: Work, side: Side) -> bool:
        """Whether a launch is the first to write there, and names every row; asked before it."""
        if work.owners(side) == (self.rank,):
            fresh = self.buffer_plan.begins[side] and (side, work.heads) not in self._begun
            self._begun.add((side, work.heads))
            return fresh
        slot = Slot(Payload.RESULT, side, work.owners(side), work.heads)
        if slot in self._buffers or not self.buffer_plan.covers(work, side):
            return False
        self._buffer(slot, clear=False)
        return True

    def _copy_in_place(self, move: Move) -> None:
        """Our own shard, into or out of a buffer that holds several."""
        transfer = move.transfer
        fields = self._fields[transfer.payload, transfer.side]
        shard = self._at_home(transfer.payload, transfer.side, transfer.heads)
        buffers = self._buffer(move.slot)
        for of_shard, of_slot in zip(move.of_shard, move.of_slot, strict=True):
            ours = _rows(fields, shard, of_shard)
            there = _views(fields, [buffer[of_slot] for buffer in buffers])
            if transfer.payload is Payload.RESULT:
                self._pass.combine(ours, there)
            else:
                for view, tensor in zip(there, ours, strict=True):
                    view.copy_(tensor)

    def _at_home(self, payload: Payload, side: Side, heads: Heads) -> Views:
        """Our own shard, as kernels see it."""
        pairs = zip(self._fields[payload, side], self._home[payload, side], strict=True)
        return tuple(field.of_heads(tensor, heads) for field, tensor in pairs)

    def _outgoing(self, move: Move) -> list[Tensor]:
        """What we send: our own shard, or one that is passing through, or what we have added up."""
        transfer = move.transfer
        if transfer.payload is Payload.RESULT or transfer.owner != self.rank:
            return _cut(self._buffer(move.slot), move.of_slot)
        if not move.of_shard:
            return []
        key = transfer.side, transfer.heads
        rows, _ = self.buffer_plan.own[key]
        if key not in self._own:
            fields = self._fields[transfer.payload, transfer.side]
            home = _rows(fields, self._at_home(transfer.payload, *key), rows)
            self._own[key] = tuple(f.rows_first(t) for f, t in zip(fields, home, strict=True))
        moved = [slice(each.start - rows.start, each.stop - rows.start) for each in move.of_shard]
        return _cut(self._own[key], moved)

    def _incoming(self, move: Move) -> list[Tensor]:
        """Where what we get belongs: inputs where launches look for them, results in between."""
        transfer = move.transfer
        if transfer.payload is Payload.INPUT:
            return _cut(self._buffer(move.slot), move.of_slot)
        sizes = [rows.stop - rows.start for rows in move.of_shard]
        fields = self._fields[transfer.payload, transfer.side]
        buffers = self._take(fields, sum(sizes), transfer.heads)
        self._arrivals.append((move, buffers))
        return [part for buffer in buffers for part in buffer.split(sizes)]

    def _add(self, move: Move, buffers: Buffers) -> None:
        """Results of others have arrived: add ours, or pass them on if we have none."""
        transfer = move.transfer
        fields = self._fields[transfer.payload, transfer.side]
        theirs = _views(fields, buffers)
        if transfer.owner == self.rank:
            home = self._at_home(transfer.payload, transfer.side, transfer.heads)
            row = 0
            for at in _joined(move.of_shard):
                there = slice(row, row + at.stop - at.start)
                ours, part = _rows(fields, home, at), _rows(fields, theirs, there)
                self._pass.combine(ours, part)
                row = there.stop
        else:
            assert not transfer.cut, "sums on their way are whole"
            if move.slot not in self._buffers:
                self._buffers[move.slot] = buffers
                return
            self._pass.combine(_views(fields, self._buffers[move.slot]), theirs)
        self._give_back(buffers)

    # Buffers.

    def _buffer(self, slot: Slot, clear: bool = True) -> Buffers:
        if slot not in self._buffers:
            fields = self._fields[slot.payload, slot.side]
            buffers = self._take(fields, self.buffer_plan.rows(slot), slot.heads)
            self._buffers[slot] = buffers
            if clear and slot.payload is Payload.RESULT:  # sent even where no launch adds to it
                self._pass.clear(_views(fields, buffers))
        return self._buffers[slot]

    def _take(self, fields: Fields, size: int, heads: Heads) -> Buffers:
        """Buffers for `size` rows."""
        buffers = []
        for field in fields:
            last = () if field.headdim is None else (field.headdim,)
            shape = torch.Size((size, self._batch, (heads[1] - heads[0]) * field.heads, *last))
            buffers.append(self._pool.take(shape, field.dtype, self._device))
        return tuple(buffers)

    def _give_back(self, buffers: Iterable[Tensor]) -> None:
        for buffer in buffers:
            self._pool.give(buffer)


def _views(fields: Fields, buffers: Iterable[Tensor]) -> Views:
    """Rows-first buffers → what kernels see."""
    return tuple(field.view(buffer) for field, buffer in zip(fields, buffers, strict=True))


def _rows(fields: Fields, tensors: Views, rows: slice) -> Views:
    """Some rows of kernel-side tensors."""
    return tuple(f.of_rows(tensor, rows) for f, tensor in zip(fields, tensors, strict=True))


def _joined(rows: Iterable[slice]) -> list[slice]:
    """The same rows, with neighbours as one."""
    found: list[slice] = []
    for each in rows:
        if found and found[-1].stop == each.start:
            found[-1] = slice(found[-1].start, each.stop)
        else:
            found.append(each)
    return found


def _cut(buffers: Iterable[Tensor], rows: Sequence[slice]) -> list[Tensor]:
    """Some rows of each of some rows-first buffers: contiguous, and both ends list them alike."""
    return [buffer[each] for buffer in buffers for each in rows]


def run_steps(executors: Sequence[Executor]) -> None:
    """Run all ranks of this process (one, or all virtual ranks), each step on all of them.

    If that fails, what was posted is drained.
    """
    try:
        for number in range(len(executors[0].plan.steps)):
            with span(_step_name, executors, number):
                for executor in executors:
                    executor.post(number)
                for executor in executors:
                    executor.compute(number)
                for executor in executors:
                    executor.finish(number)
    except BaseException as error:
        for executor in executors:
            executor.abandon(drain=isinstance(error, Exception))
        raise


def _step_name(executors: Sequence[Executor], number: int) -> str:
    if len(executors) > 1:
        return f"step {number} of {len(executors)} virtual ranks"
    plan = executors[0].plan
    return f"step {number}: {_whose(plan.steps[number], plan.rank)}"


def _whose(step: Step, rank: int) -> str:
    """Whose keys or queries a step is about, beside our own."""
    for side, name in ((Side.KEY, "keys"), (Side.QUERY, "queries")):
        owners = sorted({owner for work in step.work for owner in work.owners(side)})
        if owners not in ([], [rank]):
            many = "rank" if len(owners) == 1 else "ranks"
            return f"{name} of {many} {', '.join(map(str, owners))}"
    return "own keys" if step.work else "transfers alone"


def _wait_name(executor: Executor, number: int) -> str:
    moves = executor.buffer_plan.moves[number]
    return f"rank {executor.rank} waits for the transfers of step {number}" if moves else ""


def _post_name(rank: int, number: int, messages: Sequence[Message]) -> str:
    if not messages:
        return ""
    received = sum(message.receive for message in messages)
    size = sum(message.tensor.nbytes for message in messages) / 1e6
    return (
        f"rank {rank} posts the transfers of step {number}: "
        f"{len(messages) - received} sends, {received} receives, {size:.3g} MB"
    )
