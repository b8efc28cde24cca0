"""Walking a plan: the buffers and messages of one rank, step by step.

Every buffer that travels is stored rows first, (seqlen, batch, nheads, …), so that a piece of a
shard is a contiguous part of any buffer that holds it; kernels see it as (batch, seqlen, nheads,
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
from .pieces import Piece, arrange
from .plan import Heads, Payload, Plan, Problem, Side, Transfer, Work
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

    def of_rows(self, tensor: Tensor, rows: slice) -> Tensor:
        """Some rows of a kernel-side tensor."""
        return tensor[:, :, rows] if self.headdim is None else tensor[:, rows]


Fields = tuple[Field, ...]
Views = tuple[Tensor, ...]
Buffers = tuple[Tensor, ...]


class Pool:
    """Where buffers come from and go to. Here torch makes each anew, and gets it back."""

    def take(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer; what is in it is anybody's guess."""
        return torch.empty(shape, dtype=dtype, device=device)

    def give(self, buffer: Tensor) -> None:
        """It is not used any more."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where shards lie: the buffer of `owners`, for some heads of one side."""

    payload: Payload
    side: Side
    owners: tuple[int, ...]
    heads: Heads


@dataclass(frozen=True, slots=True)
class Move:
    """A transfer, and where this rank has its shard.

    Attributes:
        transfer: what goes from whom to whom.
        slot: the buffer that it fills or empties.
        of_shard: rows of the shard, one slice for each message.
        of_slot: the same rows, as they lie in the buffer (not used at home).
        of_parcel: the same rows, without what lies between them.
    """

    transfer: Transfer
    slot: _Slot
    of_shard: tuple[slice, ...]
    of_slot: tuple[slice, ...]
    of_parcel: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Only:
    """A launch that is all of a plan, and whether it touches every query and every key."""

    tiles: tuple[Tile, ...]
    covers_queries: bool
    covers_keys: bool


class Path:
    """A plan, and where its shards lie on the way; made once, walked many times.

    Args:
        plan: the steps of a rank.
        problem: what they are the steps of.

    Attributes:
        plan: the same.
        sizes: number of rows of each side and owner.
        places: for launches on keys that are cut, by owners, where each piece begins in the buffer.
        moves: those of each step.
        last_use: after which step each buffer is free again.
        own: of our own shards, the rows that we send, from first to last, and the last step in
            which we do.
        begins: for each side, whether the first launches on this rank's own results name every row
            of every head, before anything else is added.
        only: the launch, if there is one for all and nothing to send.
    """

    def __init__(self, plan: Plan, problem: Problem) -> None:
        self.plan = plan
        ranks = range(problem.world_size)
        self.sizes = {(side, rank): problem.size(side, rank) for side in Side for rank in ranks}
        self._covers: dict[tuple[int, Side], bool] = {}
        self._slots = self._find_slots()
        self.places = self._find_places(problem)
        self.moves = self._find_moves(problem)
        self.last_use = self._find_last_use()
        self.own = self._find_own()
        self.begins = {side: self._begins(side, problem.nheads_k) for side in Side}
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

    def _find_slots(self) -> dict[tuple[Payload, Side, int, Heads], _Slot]:
        """For shards that a launch takes from a buffer: the buffer."""
        return {
            (payload, side, owner, work.heads): _Slot(payload, side, work.owners(side), work.heads)
            for step in self.plan.steps
            for work in step.work
            for side in Side
            for owner in work.owners(side)
            for payload in Payload
        }

    def _find_places(self, problem: Problem) -> dict[tuple[int, ...], dict[Piece, int]]:
        rank = self.plan.rank
        cut = {work.keys for step in self.plan.steps for work in step.work if work.cut}
        return {owners: arrange(problem.pieces(o, rank) for o in owners) for owners in cut}

    def _find_moves(self, problem: Problem) -> list[list[Move]]:
        def move(transfer: Transfer) -> Move:
            slot, size = self._slot(transfer), self.sizes[transfer.side, transfer.owner]
            places = self._places(slot)
            if not transfer.cut:
                assert places is None, f"{transfer} goes whole, but {slot} holds pieces"
                return Move(transfer, slot, *[(slice(0, size),)] * 3)
            pieces = problem.pieces(transfer.owner, transfer.user)
            lengths = [piece.length for piece in pieces]
            of_shard = _slices([piece.start for piece in pieces], lengths)
            of_parcel = _slices(accumulate(lengths, initial=0), lengths)
            if places is None or transfer.user != self.plan.rank:  # at home, or for no launch
                used = transfer.owner != self.plan.rank and slot in self._slots.values()
                assert not used, f"{transfer} is cut, but {slot} is whole"
                return Move(transfer, slot, of_shard, of_shard, of_parcel)
            of_slot = _slices([places[piece] for piece in pieces], lengths)
            return Move(transfer, slot, of_shard, of_slot, of_parcel)

        return [[move(transfer) for transfer in step.transfers] for step in self.plan.steps]

    def rows(self, slot: _Slot) -> int:
        """Number of rows of a buffer."""
        places = self._places(slot)
        if places is None:
            return self.sizes[slot.side, slot.owners[0]]
        return sum(piece.length for piece in places)

    def _places(self, slot: _Slot) -> dict[Piece, int] | None:
        """Where pieces lie in a buffer; None if it holds a shard as it is."""
        return self.places.get(slot.owners) if slot.side is Side.KEY else None

    def _slot(self, transfer: Transfer) -> _Slot:
        """The buffer that a transfer fills or empties."""
        key = (transfer.payload, transfer.side, transfer.owner, transfer.heads)
        alone = _Slot(transfer.payload, transfer.side, (transfer.owner,), transfer.heads)
        return self._slots.get(key, alone)  # alone: passes through, no launch

    def covers(self, work: Work, side: Side) -> bool:
        """Whether a launch of the plan names every row of one side's buffer."""
        key = id(work), side
        if key not in self._covers:
            spans = (tile.query if side is Side.QUERY else tile.key for tile in work.tiles)
            rows = {span.start: span.length for span in spans}
            slot = _Slot(Payload.RESULT, side, work.owners(side), work.heads)
            self._covers[key] = sum(rows.values()) == self.rows(slot)
        return self._covers[key]

    def _begins(self, side: Side, nheads_k: int) -> bool:
        rank, begun = self.plan.rank, set()
        for step in self.plan.steps:
            results = [
                t
                for t in step.transfers
                if t.payload is Payload.RESULT and (t.side, t.owner) == (side, rank)
            ]
            if any(t.heads not in begun for t in results if t.source == t.target):
                return False  # copied before the step's work
            for work in step.work:
                if work.owners(side) == (rank,) and work.heads not in begun:
                    if not self.covers(work, side):
                        return False
                    begun.add(work.heads)
            if any(t.heads not in begun for t in results):
                return False
        return sum(end - start for start, end in begun) == nheads_k

    def _find_own(self) -> dict[tuple[Side, Heads], tuple[slice, int]]:
        rank, found = self.plan.rank, dict[tuple[Side, Heads], tuple[slice, int]]()
        for number, moves in enumerate(self.moves):
            for move in moves:
                t, rows = move.transfer, move.of_shard
                if t.payload is Payload.INPUT and rank == t.owner == t.source != t.target and rows:
                    start, end = min(r.start for r in rows), max(r.stop for r in rows)
                    before, _ = found.get((t.side, t.heads), (slice(start, end), 0))
                    hull = slice(min(before.start, start), max(before.stop, end))
                    found[t.side, t.heads] = hull, number
        return found

    def _find_last_use(self) -> dict[int, list[_Slot]]:
        """After which step each buffer is free again."""
        last: dict[_Slot, int] = {}
        for number, step in enumerate(self.plan.steps):
            for work in step.work:
                for side in Side:
                    last[_Slot(Payload.INPUT, side, work.owners(side), work.heads)] = number
            for move in self.moves[number]:
                if move.transfer.source == self.plan.rank:
                    last[move.slot] = number
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
        pool: where buffers come from.
    """

    fields: dict[tuple[Payload, Side], Fields]
    home: dict[tuple[Payload, Side], Views]  # this rank's own shards, as kernels see them

    def __init__(
        self,
        path: Path,
        transport: Transport,
        batch: int,
        device: torch.device,
        pool: Pool,
    ) -> None:
        self.path, self.plan, self.rank = path, path.plan, path.plan.rank
        self._transport, self._batch, self._device = transport, batch, device
        self._buffers: dict[_Slot, Buffers] = {}
        self._begun: set[tuple[Side, Heads]] = set()
        self._pool = pool
        self._own: dict[tuple[Side, Heads], Buffers] = {}  # our shards, rows first, while we send
        self._arrivals: list[tuple[Move, Buffers]] = []  # results, in the order of their shards

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
        for move in self.path.moves[number]:
            transfer = move.transfer
            if transfer.source == transfer.target:
                self._copy_in_place(move)
            elif transfer.source == self.rank:
                messages += [
                    Message(t, transfer.target, receive=False) for t in self._outgoing(move)
                ]
            else:
                messages += [
                    Message(t, transfer.source, receive=True) for t in self._incoming(move)
                ]
        self._transport.post(messages)

    def compute(self, number: int) -> None:
        """Do the work of a step."""
        for work in self.plan.steps[number].work:
            self.launch(work)

    def finish(self, number: int) -> None:
        """Await the transfers of a step; add up results; give buffers back."""
        self._transport.wait()
        for move, buffers in self._arrivals:
            self._add(move, buffers)
        self._arrivals.clear()
        for slot in self.path.last_use.get(number, ()):
            self._give_back(self._buffers.pop(slot, ()))
        for key in [key for key in self._own if self.path.own[key][1] == number]:
            del self._own[key]

    # Shards, wherever they lie.

    def inputs(self, work: Work, side: Side) -> Views:
        """What a launch reads of one side."""
        return self._views(Payload.INPUT, work, side)

    def results(self, work: Work, side: Side) -> Views:
        """Where a launch accumulates what belongs to one side."""
        return self._views(Payload.RESULT, work, side)

    def is_fresh(self, work: Work, side: Side) -> bool:
        """Whether a launch is the first to write there, and names every row; asked before it."""
        if work.owners(side) == (self.rank,):
            fresh = self.path.begins[side] and (side, work.heads) not in self._begun
            self._begun.add((side, work.heads))
            return fresh
        slot = _Slot(Payload.RESULT, side, work.owners(side), work.heads)
        if slot in self._buffers or not self.path.covers(work, side):
            return False
        self._buffers[slot] = self._new_buffer(slot)
        return True

    def _views(self, payload: Payload, work: Work, side: Side) -> Views:
        fields, owners = self.fields[payload, side], work.owners(side)
        if owners == (self.rank,):
            home = self.home[payload, side]
            return tuple(f.of_heads(t, work.heads) for f, t in zip(fields, home, strict=True))
        slot = _Slot(payload, side, owners, work.heads)
        assert payload is Payload.RESULT or slot in self._buffers, f"{slot} has not arrived"
        return tuple(f.view(b) for f, b in zip(fields, self._buffer(slot), strict=True))

    def _copy_in_place(self, move: Move) -> None:
        """Our own shard, into or out of a buffer that holds several."""
        transfer = move.transfer
        fields = self.fields[transfer.payload, transfer.side]
        shard, buffers = self._at_home(transfer), self._buffer(move.slot)
        for of_shard, of_slot in zip(move.of_shard, move.of_slot, strict=True):
            ours = tuple(f.of_rows(t, of_shard) for f, t in zip(fields, shard, strict=True))
            there = tuple(f.view(b[of_slot]) for f, b in zip(fields, buffers, strict=True))
            if transfer.payload is Payload.RESULT:
                self.combine(transfer.side, ours, there)
            else:
                for view, tensor in zip(there, ours, strict=True):
                    view.copy_(tensor)

    def _at_home(self, transfer: Transfer) -> Views:
        """Our own shard, as kernels see it."""
        fields = self.fields[transfer.payload, transfer.side]
        home = self.home[transfer.payload, transfer.side]
        return tuple(f.of_heads(t, transfer.heads) for f, t in zip(fields, home, strict=True))

    def _outgoing(self, move: Move) -> list[Tensor]:
        """What we send: our own shard, or one that is passing through, or what we have added up."""
        transfer = move.transfer
        if transfer.payload is Payload.RESULT or transfer.owner != self.rank:
            return _cut(self._buffer(move.slot), move.of_slot)
        if not move.of_shard:
            return []
        key = transfer.side, transfer.heads
        rows, _ = self.path.own[key]
        if key not in self._own:
            pairs = zip(self.fields[transfer.payload, transfer.side], self._at_home(transfer))
            self._own[key] = tuple(f.rows_first(f.of_rows(t, rows)) for f, t in pairs)
        moved = [slice(each.start - rows.start, each.stop - rows.start) for each in move.of_shard]
        return _cut(self._own[key], moved)

    def _incoming(self, move: Move) -> list[Tensor]:
        """Where what we get belongs: inputs where launches look for them, results in between."""
        transfer = move.transfer
        if transfer.payload is Payload.INPUT:
            return _cut(self._buffer(move.slot), move.of_slot)
        size = sum(rows.stop - rows.start for rows in move.of_parcel)
        buffers = self._take(self.fields[transfer.payload, transfer.side], size, transfer.heads)
        self._arrivals.append((move, buffers))
        return _cut(buffers, move.of_parcel)

    def _add(self, move: Move, buffers: Buffers) -> None:
        """Results of others have arrived: add ours, or pass them on if we have none."""
        transfer = move.transfer
        fields = self.fields[transfer.payload, transfer.side]
        theirs = tuple(f.view(b) for f, b in zip(fields, buffers, strict=True))
        if transfer.owner == self.rank:
            home = self._at_home(transfer)
            row = 0
            for at in _joined(move.of_shard):
                there = slice(row, row + at.stop - at.start)
                ours = tuple(f.of_rows(t, at) for f, t in zip(fields, home, strict=True))
                part = tuple(f.of_rows(t, there) for f, t in zip(fields, theirs, strict=True))
                self.combine(transfer.side, ours, part)
                row = there.stop
        else:
            assert not transfer.cut, "sums on their way are whole"
            if move.slot not in self._buffers:
                self._buffers[move.slot] = buffers
                return
            mine = self._buffers[move.slot]
            ours = tuple(f.view(b) for f, b in zip(fields, mine, strict=True))
            self.combine(transfer.side, ours, theirs)
        self._give_back(buffers)

    # Buffers.

    def _buffer(self, slot: _Slot) -> Buffers:
        if slot not in self._buffers:
            self._buffers[slot] = buffers = self._new_buffer(slot)
            if slot.payload is Payload.RESULT:  # sent even where no launch adds to it
                fields = self.fields[slot.payload, slot.side]
                views = tuple(f.view(b) for f, b in zip(fields, buffers, strict=True))
                self.clear(slot.side, views)
        return self._buffers[slot]

    def _new_buffer(self, slot: _Slot) -> Buffers:
        fields = self.fields[slot.payload, slot.side]
        return self._take(fields, self.path.rows(slot), slot.heads)

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


def _slices(starts: Iterable[int], lengths: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + n) for start, n in zip(starts, lengths, strict=False))


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


def walk(walkers: Sequence[Walker]) -> None:
    """Take all walkers of this process (one, or all virtual ranks) through their plans in step."""
    for number in range(len(walkers[0].plan.steps)):
        for walker in walkers:
            walker.post(number)
        for walker in walkers:
            walker.compute(number)
        for walker in walkers:
            walker.finish(number)
