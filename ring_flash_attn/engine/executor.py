"""The executor of a plan: the buffers, messages and launches of one rank, step by step.

Every buffer that travels is stored rows first, (seqlen, batch, nheads, …), so that rows that follow
each other are a contiguous part of it; kernels see it as (batch, seqlen, nheads, …). Where shards
are cut, k and v (dk and dv) of a row lie side by side in one buffer, and are one message.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..comm import Message, Transport
from ..plan.buffers import BufferPlan, Move, Slot
from ..plan.rows import Packing
from ..plan.steps import Heads, Payload, Side, Step, Work
from ..trace import span
from .packing import row_numbers


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
        return self.moved(tensor).contiguous()

    def moved(self, tensor: Tensor) -> Tensor:
        """What kernels see → rows-first."""
        return tensor.permute(2, 0, 1) if self.headdim is None else tensor.transpose(0, 1)

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

    def home(self, payload: Payload, side: Side) -> Views:
        """Its own shards, as kernels see them.

        Made when they are first asked for: the first post leaves before anything is launched.
        """

    def launch(self, work: Work, executor: Executor) -> None:
        """Run the kernel on the executor's `shards`."""

    def combine(self, ours: Views, theirs: Views, at: Tensor | None = None) -> None:
        """Add what others have accumulated to what is accumulated here, or to rows `at` of it."""

    def clear(self, views: Views) -> None:
        """Make accumulators empty."""


class Executor:
    """Runs the plan of one rank: its buffers, its messages, and the launches of a pass."""

    def __init__(self, work: Pass, transport: Transport) -> None:
        self._pass = work
        self._found: dict[tuple[Payload, Side], Fields] = {}
        self.buffer_plan, self.plan = work.buffer_plan, work.buffer_plan.plan
        self.rank = self.plan.rank
        k = work.home(Payload.INPUT, Side.KEY)[0]
        self._batch, self._nheads_k, self._device = k.shape[0], k.shape[2], k.device
        self._transport = transport
        self._buffers: dict[Slot, Buffers] = {}
        self._begun: set[tuple[Side, Heads]] = set()
        self._pool = work.pool
        self._own: dict[tuple[Side, Heads], Buffers] = {}  # our shards, rows first, while we send
        self._arrivals: list[tuple[Move, Buffers]] = []  # results, in the order of their shards
        self._packed: dict[Packing, Buffers] = {}  # messages of this step whose rows lie apart
        self._unpacked: list[Move] = []  # of each packing that arrives, one

    # Steps.

    def post(self, number: int) -> None:
        messages: list[Message] = []
        stays: list[Move] = []
        for move in self.buffer_plan.moves[number]:
            transfer = move.transfer
            if transfer.source == transfer.target:
                stays.append(move)
            elif transfer.source == self.rank:
                messages += [Message(t, transfer.target, False) for t in self._outgoing(move)]
            else:
                messages += [Message(t, transfer.source, True) for t in self._incoming(move)]
        with span(_post_name, self.rank, number, messages):
            self._transport.post(messages)
        for move in stays:
            self._copy_in_place(move)

    def compute(self, number: int) -> None:
        for work in self.plan.steps[number].work:
            self._pass.launch(work, self)

    def finish(self, number: int) -> None:
        """Await the transfers of a step; add up results; give buffers back."""
        with span(_wait_name, self, number):
            self._transport.wait()
        for move in self._unpacked:
            self._unpack(move)
        for move, buffers in self._arrivals:
            self._add(move, buffers)
        for buffers in self._packed.values():
            self._give_back(buffers)
        for each in (self._unpacked, self._arrivals, self._packed):
            each.clear()
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
        return _views(self._fields(payload, side), self._buffer(slot))

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
        fields = self._fields(transfer.payload, transfer.side)
        shard = self._at_home(transfer.payload, transfer.side, transfer.heads)
        there = _views(fields, self._buffer(move.slot))
        if move.packing is None or move.home is None:
            (of_shard,), (of_slot,) = move.of_shard or (range(0),), move.of_slot or (range(0),)
            ours = _rows(fields, shard, _slice(of_shard))
            there = _rows(fields, there, _slice(of_slot))
            if transfer.payload is Payload.RESULT:
                self._pass.combine(ours, there)
            else:
                for view, tensor in zip(there, ours, strict=True):
                    view.copy_(tensor)
            return
        at, home = (row_numbers(each, self._device) for each in (move.packing, move.home))
        if transfer.payload is Payload.RESULT:
            self._pass.combine(shard, tuple(view.index_select(1, at) for view in there), home)
        else:
            for view, tensor in zip(there, shard, strict=True):
                view.index_copy_(1, at, tensor.index_select(1, home))

    def _at_home(self, payload: Payload, side: Side, heads: Heads) -> Views:
        """Our own shard, as kernels see it."""
        pairs = zip(self._fields(payload, side), self._pass.home(payload, side), strict=True)
        return tuple(field.of_heads(tensor, heads) for field, tensor in pairs)

    def _fields(self, payload: Payload, side: Side) -> Fields:
        """What a payload consists of."""
        if (payload, side) not in self._found:
            home = self._pass.home(payload, side)
            self._found[payload, side] = tuple(Field.of(x, self._nheads_k) for x in home)
        return self._found[payload, side]

    def _outgoing(self, move: Move) -> list[Tensor]:
        """What we send: our own shard, or one that is passing through, or what we have added up."""
        transfer = move.transfer
        at_home = transfer.payload is Payload.INPUT and transfer.owner == self.rank
        if move.packing is not None:
            if move.packing not in self._packed:
                self._packed[move.packing] = self._pack(move, at_home)
            return [buffer[_slice(move.place)] for buffer in self._packed[move.packing]]
        if not at_home:
            return _cut(self._buffer(move.slot), move.of_slot)
        if not move.of_shard:
            return []
        key = transfer.side, transfer.heads
        rows, _ = self.buffer_plan.own[key]
        if key not in self._own:
            self._own[key] = self._rows_first(move, rows)
        (of_shard,), first = move.of_shard, rows.start
        return _cut(self._own[key], (range(of_shard.start - first, of_shard.stop - first),))

    def _rows_first(self, move: Move, rows: slice) -> Buffers:
        """Rows of our own shard, as messages take them; copied only if they lie otherwise."""
        transfer = move.transfer
        fields = self._fields(transfer.payload, transfer.side)
        home = self._at_home(transfer.payload, transfer.side, transfer.heads)
        home = _rows(fields, home, rows)
        if not transfer.cut:
            return tuple(f.rows_first(tensor) for f, tensor in zip(fields, home, strict=True))
        found = _side_by_side(fields, home)
        if found is None:
            shape = _shape(fields, rows.stop - rows.start, self._batch, transfer.heads)
            found = torch.empty(shape, dtype=fields[0].dtype, device=self._device)
            for view, tensor in zip(_views(fields, (found,)), home, strict=True):
                view.copy_(tensor)
        return (found,)

    def _incoming(self, move: Move) -> list[Tensor]:
        """Where what we get belongs: inputs where launches look for them, results in between."""
        transfer = move.transfer
        fields = self._fields(transfer.payload, transfer.side)
        if transfer.payload is Payload.RESULT:
            buffers = self._take(fields, move.rows, transfer.heads, transfer.cut)
            self._arrivals.append((move, buffers))
            return list(buffers)
        if move.packing is None:
            return _cut(self._buffer(move.slot), move.of_slot)
        if move.packing not in self._packed:
            buffers = self._take(fields, move.packing.total, transfer.heads, transfer.cut)
            self._packed[move.packing] = buffers
            self._unpacked.append(move)
        return [buffer[_slice(move.place)] for buffer in self._packed[move.packing]]

    def _pack(self, move: Move, at_home: bool) -> Buffers:
        """Gather the rows of all messages that leave our own shard, or a buffer, in this step."""
        transfer, packing = move.transfer, move.packing
        assert packing is not None
        fields = self._fields(transfer.payload, transfer.side)
        buffers = self._take(fields, packing.total, transfer.heads, transfer.cut)
        numbers = row_numbers(packing, self._device)
        if at_home:
            home = self._at_home(transfer.payload, transfer.side, transfer.heads)
            for view, tensor in zip(_views(fields, buffers), home, strict=True):
                torch.index_select(tensor, 1, numbers, out=view)
        else:
            for buffer, tensor in zip(buffers, self._buffer(move.slot), strict=True):
                torch.index_select(tensor, 0, numbers, out=buffer)
        return buffers

    def _unpack(self, move: Move) -> None:
        """Put the rows of messages that have arrived in their places."""
        assert move.packing is not None
        numbers = row_numbers(move.packing, self._device)
        pairs = zip(self._buffer(move.slot), self._packed[move.packing], strict=True)
        for buffer, arrived in pairs:
            buffer.index_copy_(0, numbers, arrived)

    def _add(self, move: Move, buffers: Buffers) -> None:
        """Results of others have arrived: add ours, or pass them on if we have none."""
        transfer = move.transfer
        fields = self._fields(transfer.payload, transfer.side)
        theirs = _views(fields, buffers)
        if transfer.owner == self.rank:
            home = self._at_home(transfer.payload, transfer.side, transfer.heads)
            if move.packing is not None:
                self._pass.combine(home, theirs, row_numbers(move.packing, self._device))
            else:
                first = 0
                for rows in move.of_shard:
                    there = slice(first, first := first + len(rows))
                    ours = _rows(fields, home, _slice(rows))
                    self._pass.combine(ours, _rows(fields, theirs, there))
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
            fields = self._fields(slot.payload, slot.side)
            rows, cut = self.buffer_plan.rows(slot), self.buffer_plan.is_cut(slot)
            buffers = self._take(fields, rows, slot.heads, cut)
            self._buffers[slot] = buffers
            if clear and slot.payload is Payload.RESULT:  # sent even where no launch adds to it
                self._pass.clear(_views(fields, buffers))
        return self._buffers[slot]

    def _take(self, fields: Fields, size: int, heads: Heads, cut: bool) -> Buffers:
        """Buffers for `size` rows: one for all fields where shards are cut, else one for each."""
        return tuple(
            self._pool.take(_shape(each, size, self._batch, heads), each[0].dtype, self._device)
            for each in ([fields] if cut else [(field,) for field in fields])
        )

    def _give_back(self, buffers: Iterable[Tensor]) -> None:
        for buffer in buffers:
            self._pool.give(buffer)


def _shape(fields: Fields, size: int, batch: int, heads: Heads) -> torch.Size:
    """Of a rows-first buffer in which the fields of a row lie side by side."""
    count, headdims = heads[1] - heads[0], [field.headdim for field in fields]
    if headdims == [None]:
        return torch.Size((size, batch, count * fields[0].heads))
    last = math.gcd(*(headdim or 1 for headdim in headdims))
    width = sum(count * field.heads * (field.headdim or 1) for field in fields)
    return torch.Size((size, batch, width // last, last))


def _views(fields: Fields, buffers: Sequence[Tensor]) -> Views:
    """Rows-first buffers → what kernels see."""
    if len(buffers) == len(fields):
        return tuple(field.view(buffer) for field, buffer in zip(fields, buffers, strict=True))
    (buffer,) = buffers  # side by side: strides at once, as each operation costs the host its time
    size, batch, count, last = buffer.shape
    width, place = count * last, buffer.storage_offset()
    heads = width // sum(field.heads * (field.headdim or 1) for field in fields)
    found = []
    for field in fields:
        assert field.headdim is not None, "a number a row is a message of its own"
        nheads, headdim = heads * field.heads, field.headdim
        shape, strides = (batch, size, nheads, headdim), (width, batch * width, headdim, 1)
        found.append(buffer.as_strided(shape, strides, place))
        place += nheads * headdim
    return tuple(found)


def _side_by_side(fields: Fields, home: Views) -> Tensor | None:
    """Our own rows as one rows-first buffer, if that is how they lie: packed k and v."""
    first = home[0]
    batch, size, nheads, _ = first.shape
    shape = _shape(fields, size, batch, (0, nheads // fields[0].heads))
    width, place = shape[2] * shape[3], first.data_ptr()
    if batch > 1 or not size or len({x.untyped_storage().data_ptr() for x in home}) > 1:
        return None
    for tensor in home:
        _, _, nheads, headdim = tensor.shape
        wanted = zip(tensor.shape[1:], tensor.stride()[1:], (width, headdim, 1), strict=True)
        if tensor.data_ptr() != place or any(n > 1 and a != b for n, a, b in wanted):
            return None
        place += nheads * headdim * tensor.element_size()
    return first.as_strided(shape, (width, width, shape[3], 1))


def _rows(fields: Fields, tensors: Views, rows: slice) -> Views:
    """Some rows of kernel-side tensors."""
    return tuple(f.of_rows(tensor, rows) for f, tensor in zip(fields, tensors, strict=True))


def _slice(rows: range) -> slice:
    return slice(rows.start, rows.stop)


def _cut(buffers: Iterable[Tensor], rows: Sequence[range]) -> list[Tensor]:
    """Some rows of each of some rows-first buffers: contiguous, and both ends list them alike."""
    return [buffer[_slice(each)] for buffer in buffers for each in rows]


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
