"""Lowering: a buffer plan, for tensors of given shapes, as the actions of a program.

Every buffer that travels is stored rows first, (seqlen, batch, nheads, …), so that rows that follow
each other are a contiguous part of it; kernels see it as (batch, seqlen, nheads, …). Where shards
are cut, k and v (dk and dv, or what else has one dtype) of a row lie side by side in one buffer,
and are one message.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from ..plan.arena import Extent, place
from ..plan.buffers import BufferPlan, Move, Slot
from ..plan.rows import Packing
from ..plan.steps import Heads, Payload, Side, Work
from .executor import (
    Action,
    Actions,
    Added,
    AddParts,
    ArenaView,
    BringOut,
    Clear,
    Combine,
    Copy,
    HomePart,
    OutgoingPart,
    Places,
    Post,
    Program,
    PutAway,
    RunKernel,
    SideBySide,
    Strided,
    Wait,
)

_ALIGNED = 128  # bytes: where a buffer begins in its arena


class Field(NamedTuple):
    """One tensor of a payload: heads for each KV head, last dimension (None: a number a row)."""

    heads: int
    headdim: int | None
    dtype: torch.dtype


Fields = tuple[Field, ...]
Payloads = Mapping[tuple[Payload, Side], Fields]  # what each consists of


def _groups(fields: Fields) -> list[tuple[int, ...]]:
    """Fields that lie side by side where shards are cut: vectors of one dtype, numbers of one."""
    groups: dict[tuple[torch.dtype, bool], list[int]] = {}
    for number, field in enumerate(fields):
        groups.setdefault((field.dtype, field.headdim is None), []).append(number)
    return [tuple(group) for group in groups.values()]


class Buffer(NamedTuple):
    """Rows of fields that lie side by side; `number` is that of its block in the arena.

    `group` numbers the fields among those of the payload.
    """

    number: int
    group: tuple[int, ...]
    fields: Fields
    size: int
    batch: int
    heads: Heads

    @property
    def width(self) -> int:
        """Numbers of a row, for one sequence of the batch."""
        return _columns(self.fields, self.heads[1] - self.heads[0])[-1]

    def stored(self, rows: range) -> Strided:
        """Some rows, rows first: contiguous."""
        width, last = self.width, math.gcd(*(field.headdim or 1 for field in self.fields))
        sizes: tuple[int, ...] = (width // last, last)
        steps: tuple[int, ...] = (last, 1)
        if self.fields[0].headdim is None:
            sizes, steps = (width,), (1,)
        strides = (self.batch * width, width, *steps)
        return (len(rows), self.batch, *sizes), strides, rows.start * self.batch * width

    def seen(self, number: int, rows: range) -> Strided:
        """Some rows of one field, as kernels see it."""
        batch, width, field = self.batch, self.width, self.fields[number]
        nheads = (self.heads[1] - self.heads[0]) * field.heads
        columns = _columns(self.fields, self.heads[1] - self.heads[0])
        first = rows.start * batch * width + columns[number]
        if field.headdim is None:
            return (batch, nheads, len(rows)), (width, 1, batch * width), first
        strides = (width, batch * width, field.headdim, 1)
        return (batch, len(rows), nheads, field.headdim), strides, first


@functools.lru_cache(256)
def _columns(fields: Fields, heads: int) -> tuple[int, ...]:
    """Numbers of a row of the first fields, of 0, 1, … of them, for so many KV heads."""
    each = (field.heads * (field.headdim or 1) * heads for field in fields)
    return tuple(accumulate(each, initial=0))


Buffers = tuple[Buffer, ...]  # of a payload: one for each group where shards are cut, or each field


def lower(
    buffer_plan: BufferPlan, payloads: Payloads, batch: int, writes: bool, direct: bool
) -> Program:
    """What a pass does, action by action.

    Args:
        buffer_plan: the plan.
        payloads: what travels and accumulates; forward, keys have no result.
        batch: of all tensors.
        writes: whether the kernel writes what is fresh, so that it is not cleared.
        direct: whether it writes results in the user's dtype, where it is the only one to do so.
    """
    lowering = _Lowering(buffer_plan, payloads, batch, writes, direct)
    steps = range(len(buffer_plan.plan.steps))
    phases = [(lowering.post(n), lowering.compute(n), lowering.finish(n)) for n in steps]
    posts, launches, finishes = zip(*phases, strict=True)
    return Program(posts, launches, finishes, lowering.settle(), len(buffer_plan.own))


class _Lowering:
    """Goes through the steps of a plan, and notes what there is to do and which buffers it takes.

    Buffers and views are numbers and shapes here; `settle` puts them in their places.
    """

    def __init__(
        self, buffer_plan: BufferPlan, payloads: Payloads, batch: int, writes: bool, direct: bool
    ) -> None:
        self._plan, self._steps = buffer_plan, buffer_plan.plan.steps
        self._rank, self._batch = buffer_plan.plan.rank, batch
        self._payloads = payloads
        self._writes, self._direct = writes, direct
        self._backward = (Payload.RESULT, Side.KEY) in payloads
        self._actions: list[Action] = []
        self._step = 0
        self._dtypes: list[torch.dtype] = []  # of the arenas
        self._blocks: list[tuple[torch.dtype, Extent]] = []
        self._views: list[tuple[ArenaView, int]] = []  # and the number of its block
        self._slots: dict[Slot, Buffers] = {}
        self._begun: set[tuple[Side, Heads]] = set()
        self._keys = {key: number for number, key in enumerate(buffer_plan.own)}
        self._brought: set[int] = set()
        self._arrivals: list[tuple[Move, Buffers]] = []  # results, in the order of their shards
        self._packed: dict[Packing, Buffers] = {}  # messages of this step whose rows lie apart
        self._unpacked: list[Move] = []  # of each packing that arrives, one
        self._sums: dict[object, tuple[Places, list[Added]]] = {}  # what this step adds to what
        self._written: set[Slot] = set()  # final results that launches write themselves

    # Steps.

    def post(self, number: int) -> Actions:
        self._step = number
        messages, stays = [], []
        for move in self._plan.moves[number]:
            transfer = move.transfer
            if transfer.source == transfer.target:
                stays.append(move)
            elif transfer.source == self._rank:
                messages += [(each, transfer.target, False) for each in self._outgoing(move)]
            else:
                messages += [(each, transfer.source, True) for each in self._incoming(move)]
        self._actions.append(Post(number, tuple(messages)))
        for move in stays:
            self._copy_in_place(move)
        return self._taken()

    def compute(self, number: int) -> Actions:
        for work in self._steps[number].work:
            inputs = [place for side in Side for place in self._shards(Payload.INPUT, work, side)]
            launch = self._gradients(work) if self._backward else self._outputs(work)
            self._actions.append(launch._replace(places=(*inputs, *launch.places)))
        return self._taken()

    def finish(self, number: int) -> Actions:
        """Await the transfers of a step; add up results; give buffers back."""
        self._actions.append(Wait(number, bool(self._plan.moves[number])))
        for move in self._unpacked:
            assert move.packing is not None
            whole, arrived = self._buffer(move.slot), self._packed[move.packing]
            self._actions.append(
                Copy(self._rows_of(whole), self._rows_of(arrived), at=move.packing, stored=True)
            )
        for move, buffers in self._arrivals:
            self._add(move, buffers)
        self._actions += [AddParts(ours, tuple(parts)) for ours, parts in self._sums.values()]
        for buffers in self._packed.values():
            self._give_back(buffers)
        for each in (self._unpacked, self._arrivals, self._packed, self._sums):
            each.clear()
        for slot in self._plan.last_use.get(number, ()):
            self._give_back(self._slots.pop(slot, ()))
        for key, (_, last) in self._plan.own.items():
            if last == number:
                self._actions.append(PutAway(self._keys[key]))
        return self._taken()

    def settle(self) -> tuple[tuple[torch.dtype, int], ...]:
        """Give every view its place; returns dtypes and sizes of the arenas."""
        sizes = []
        for dtype in self._dtypes:
            mine = [n for n, (each, _) in enumerate(self._blocks) if each is dtype]
            offsets, size = place([self._blocks[n][1] for n in mine])
            of_block = dict(zip(mine, offsets, strict=True))
            for view, number in self._views:
                if number in of_block:
                    view.offset += of_block[number]
            sizes.append((dtype, size))
        return tuple(sizes)

    def _taken(self) -> Actions:
        actions, self._actions = tuple(self._actions), []
        return actions

    # Results of launches.

    def _outputs(self, work: Work) -> RunKernel:
        """A launch forward, and where its results go."""
        if not self._plan.delivers(work, Side.QUERY):
            places = self._shards(Payload.RESULT, work, Side.QUERY)
            return RunKernel(work, places, fresh_q=False, fresh_k=False)
        at_home = work.queries == (self._rank,)  # begun before the first launch
        slot = Slot(Payload.FINAL, Side.QUERY, work.queries, work.heads)
        begins = not at_home and slot not in self._slots
        fresh = begins and self._writes and self._plan.covers(work, Side.QUERY)
        places = self._shards(Payload.FINAL, work, Side.QUERY)
        out, summed = (self._payloads[p, Side.QUERY][0] for p in (Payload.FINAL, Payload.RESULT))
        if out != summed and not (self._direct and self._plan.alone(work)):
            if fresh:
                self._buffer(slot._replace(payload=Payload.RESULT), clear=False)
            sums, _ = self._shards(Payload.RESULT, work, Side.QUERY)
            places = (*places, sums)
        return RunKernel(work, places, fresh, False, final=True, begins=begins)

    def _gradients(self, work: Work) -> RunKernel:
        """A launch backward; alone, it may write what the user gets."""
        plan = self._plan
        whole = all(plan.delivers(work, side) and plan.covers(work, side) for side in Side)
        final = whole and plan.alone(work) and self._direct
        fresh_q, fresh_k = (final or (self._writes and self._is_fresh(work, side)) for side in Side)
        payload = Payload.FINAL if final else Payload.RESULT
        places = [place for side in Side for place in self._shards(payload, work, side)]
        return RunKernel(work, tuple(places), fresh_q, fresh_k, final, begins=final)

    # Shards, wherever they lie.

    def _shards(self, payload: Payload, work: Work, side: Side) -> Places:
        """What a launch reads of one side, or where it accumulates what belongs to it."""
        owners = work.owners(side)
        slot = Slot(payload, side, owners, work.heads)
        if payload is Payload.FINAL:
            self._written.add(slot)
        if owners == (self._rank,):
            return self._at_home(payload, side, work.heads)
        assert payload is not Payload.INPUT or slot in self._slots, f"{slot} has not arrived"
        return self._seen(self._buffer(slot))

    def _is_fresh(self, work: Work, side: Side) -> bool:
        """Whether a launch is the first to write there, and names every row; asked before it."""
        if work.owners(side) == (self._rank,):
            fresh = self._plan.begins[side] and (side, work.heads) not in self._begun
            self._begun.add((side, work.heads))
            return fresh
        slot = Slot(Payload.RESULT, side, work.owners(side), work.heads)
        if slot in self._slots or not self._plan.covers(work, side):
            return False
        self._buffer(slot, clear=False)
        return True

    def _copy_in_place(self, move: Move) -> None:
        """Our own shard, into or out of a buffer that holds several."""
        transfer = move.transfer
        home = transfer.payload, transfer.side, transfer.heads
        if transfer.payload is Payload.FINAL and move.slot.owners == (self._rank,):
            if move.slot not in self._written:
                sums = self._at_home(Payload.RESULT, *home[1:])
                self._actions.append(Copy(self._at_home(*home), sums))
            return
        buffers = self._buffer(move.slot)
        if transfer.payload is Payload.RESULT:
            assert transfer.side is Side.KEY, "outputs travel whole, or FINAL"
            if move.rows:
                at = move.home or Packing(move.of_home)
                taken = move.packing or Packing(move.of_slot)
                part = Added(self._seen(buffers), at, taken)
                self._actions.append(AddParts(self._held(move), (part,)))
            return
        if move.packing is None:
            (of_home,), (of_slot,) = move.of_home or (range(0),), move.of_slot or (range(0),)
            ours, there = self._held(move, of_home), self._seen(buffers, of_slot)
        else:
            ours, there = self._held(move), self._seen(buffers)
        if transfer.payload is Payload.FINAL:
            self._actions.append(Copy(ours, there, at=move.home, taken=move.packing))
        else:
            self._actions.append(Copy(there, ours, at=move.packing, taken=move.home))

    def _outgoing(self, move: Move) -> Places:
        """What we send: our own shard, or one that is passing through, or what we have added up."""
        transfer = move.transfer
        at_home = transfer.payload is Payload.INPUT and transfer.owner == self._rank
        if move.packing is not None:
            if move.packing not in self._packed:
                self._packed[move.packing] = self._pack(move, at_home)
            return self._rows_of(self._packed[move.packing], (move.place,))
        if not at_home:
            return self._rows_of(self._buffer(move.slot), move.of_slot)
        if not move.of_shard:
            return ()
        own = transfer.side, transfer.heads
        rows, _ = self._plan.own[own]
        key = self._keys[own]
        if key not in self._brought:
            self._bring_out(move, key, range(rows.start, rows.stop))
        (sent,), first = move.of_shard, rows.start
        fields = self._payloads[transfer.payload, transfer.side]
        count = len(_groups(fields) if transfer.cut else fields)
        part = slice(sent.start - first, sent.stop - first)
        return tuple(OutgoingPart(key, number, part) for number in range(count))

    def _bring_out(self, move: Move, key: int, rows: range) -> None:
        transfer = move.transfer
        self._brought.add(key)
        sources = self._at_home(transfer.payload, transfer.side, transfer.heads, rows)
        if not transfer.cut:
            self._actions.append(BringOut(key, sources, None))
            return
        fields, found = self._payloads[transfer.payload, transfer.side], []
        everything = range(len(rows))
        for group in _groups(fields):
            of_group = tuple(fields[number] for number in group)
            size = len(rows), self._batch
            buffer = Buffer(-1, group, of_group, *size, transfer.heads)  # not in an arena
            shape, _, _ = buffer.stored(everything)
            views = tuple(buffer.seen(number, everything) for number in range(len(group)))
            found.append(SideBySide(group, shape, views))
        self._actions.append(BringOut(key, sources, tuple(found)))

    def _incoming(self, move: Move) -> Places:
        """Where what we get belongs: inputs where launches look for them, results in between."""
        transfer = move.transfer
        if transfer.payload is not Payload.INPUT:
            buffers = self._take(
                transfer.payload, transfer.side, move.rows, transfer.heads, transfer.cut
            )
            self._arrivals.append((move, buffers))
            return self._rows_of(buffers)
        if move.packing is None:
            return self._rows_of(self._buffer(move.slot), move.of_slot)
        if move.packing not in self._packed:
            self._packed[move.packing] = self._take_packed(move)
            self._unpacked.append(move)
        return self._rows_of(self._packed[move.packing], (move.place,))

    def _pack(self, move: Move, at_home: bool) -> Buffers:
        """Gather the rows of all messages that leave our own shard, or a buffer, in this step."""
        transfer, packing = move.transfer, move.packing
        buffers = self._take_packed(move)
        if at_home:
            home = self._at_home(transfer.payload, transfer.side, transfer.heads)
            self._actions.append(Copy(self._seen(buffers), home, taken=packing))
        else:
            whole = self._rows_of(self._buffer(move.slot))
            self._actions.append(Copy(self._rows_of(buffers), whole, taken=packing, stored=True))
        return buffers

    def _add(self, move: Move, buffers: Buffers) -> None:
        """Results of others have arrived: add ours, or pass them on if we have none.

        Those that are final take their places.
        """
        transfer = move.transfer
        home = transfer.payload, transfer.side, transfer.heads
        if transfer.payload is Payload.FINAL:
            theirs = self._seen(buffers)
            if len(move.of_shard) == 1:
                self._actions.append(Copy(self._at_home(*home, move.of_shard[0]), theirs))
            else:
                at = move.packing or Packing(move.of_shard)
                self._actions.append(Copy(self._at_home(*home), theirs, at=at))
        elif transfer.cut:  # always ours, or what we relay
            relayed = transfer.owner != self._rank
            target = move.slot if relayed else home
            _, parts = self._sums.setdefault(target, (self._held(move), []))
            at = Packing(move.of_slot if relayed else move.of_shard)
            parts.append(Added(self._seen(buffers), at))
        elif transfer.owner == self._rank:
            self._actions.append(Combine(self._held(move), self._seen(buffers)))
        elif move.slot not in self._slots:
            self._slots[move.slot] = buffers
            return
        else:
            ours = self._seen(self._slots[move.slot])
            self._actions.append(Combine(ours, self._seen(buffers)))
        self._give_back(buffers)

    def _held(self, move: Move, rows: range | None = None) -> Places:
        """Our own shard, or what we relay of another, or some rows of it, as kernels see it."""
        transfer = move.transfer
        if transfer.owner == self._rank:
            return self._at_home(transfer.payload, transfer.side, transfer.heads, rows)
        return self._seen(self._buffer(move.relay or move.slot), rows)

    def _at_home(
        self, payload: Payload, side: Side, heads: Heads, rows: range | None = None
    ) -> Places:
        """Our own shard, or some rows of it, as kernels see it."""
        all_rows, nheads_k = self._plan.sizes[side, self._rank], self._plan.nheads_k
        every = slice(None)
        of_rows = every if rows is None or len(rows) == all_rows else slice(rows.start, rows.stop)
        found = []
        for number, field in enumerate(self._payloads[payload, side]):
            of_heads = slice(heads[0] * field.heads, heads[1] * field.heads)
            of_heads = every if heads == (0, nheads_k) else of_heads
            part = (of_heads, of_rows) if field.headdim is None else (of_rows, of_heads)
            whole = part == (every, every)
            found.append(HomePart.of(payload, side, number, None if whole else (every, *part)))
        return tuple(found)

    # Buffers.

    def _buffer(self, slot: Slot, clear: bool = True) -> Buffers:
        if slot not in self._slots:
            summed = slot._replace(payload=Payload.RESULT)
            if slot.payload is Payload.FINAL and summed in self._slots:
                self._slots[slot] = self._rounded(slot, summed)
                return self._slots[slot]
            rows, cut = self._plan.rows(slot), self._plan.is_cut(slot)
            buffers = self._take(slot.payload, slot.side, rows, slot.heads, cut)
            self._slots[slot] = buffers
            if clear and slot.payload is Payload.RESULT:  # sent even where no launch adds to it
                self._actions.append(Clear(self._seen(buffers)))
        return self._slots[slot]

    def _rounded(self, slot: Slot, summed: Slot) -> Buffers:
        """What is final, from what was added up for it: the same buffers if the dtype is."""
        if self._payloads[slot[:2]] == self._payloads[summed[:2]]:
            return self._slots.pop(summed)
        rows, cut = self._plan.rows(slot), self._plan.is_cut(slot)
        buffers = self._take(slot.payload, slot.side, rows, slot.heads, cut)
        sums = self._rows_of(self._slots[summed])
        self._actions.append(Copy(self._rows_of(buffers), sums, stored=True))
        return buffers

    def _take_packed(self, move: Move) -> Buffers:
        """For all messages that are packed together."""
        transfer, packing = move.transfer, move.packing
        assert packing is not None
        what = transfer.payload, transfer.side
        return self._take(*what, packing.total, transfer.heads, transfer.cut)

    def _take(self, payload: Payload, side: Side, size: int, heads: Heads, cut: bool) -> Buffers:
        """Buffers for `size` rows, in use from now on."""
        fields = self._payloads[payload, side]
        found = []
        for group in _groups(fields) if cut else [(number,) for number in range(len(fields))]:
            of_group = tuple(fields[number] for number in group)
            buffer = Buffer(len(self._blocks), group, of_group, size, self._batch, heads)
            dtype = of_group[0].dtype
            if dtype not in self._dtypes:
                self._dtypes.append(dtype)
            aligned = _ALIGNED // dtype.itemsize
            numbers = -(-size * self._batch * buffer.width // aligned) * aligned
            self._blocks.append((dtype, Extent(numbers, self._step, len(self._steps))))
            found.append(buffer)
        return tuple(found)

    def _give_back(self, buffers: Iterable[Buffer]) -> None:
        for buffer in buffers:
            dtype, block = self._blocks[buffer.number]
            self._blocks[buffer.number] = dtype, block._replace(last=self._step)

    def _rows_of(
        self, buffers: Buffers, rows: Sequence[range] | None = None
    ) -> tuple[ArenaView, ...]:
        """Some rows of each, as messages take them; both ends list them alike."""
        return tuple(
            self._view(buffer, buffer.stored(each))
            for buffer in buffers
            for each in ((range(buffer.size),) if rows is None else rows)
        )

    def _seen(self, buffers: Buffers, rows: range | None = None) -> tuple[ArenaView, ...]:
        """All fields, or some rows of them, as kernels see them."""
        found = {
            number: self._view(buffer, buffer.seen(n, range(buffer.size) if rows is None else rows))
            for buffer in buffers
            for n, number in enumerate(buffer.group)
        }
        return tuple(found[number] for number in range(len(found)))

    def _view(self, buffer: Buffer, strided: Strided) -> ArenaView:
        view = ArenaView(self._dtypes.index(buffer.fields[0].dtype), strided)
        self._views.append((view, buffer.number))
        return view
