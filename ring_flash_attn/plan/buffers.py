"""Buffer plans: where the shards of a plan lie on their way, as plain data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from .pieces import Piece, arrange
from .problem import Problem
from .steps import Heads, Payload, Plan, Side, Transfer, Work
from .tiles import Tile


@dataclass(frozen=True, slots=True)
class Slot:
    """Where shards lie: the buffer of `owners`, for some heads of one side."""

    payload: Payload
    side: Side
    owners: tuple[int, ...]
    heads: Heads


@dataclass(frozen=True, slots=True)
class Move:
    """A transfer, and where this rank has its shard: the buffer that it fills or empties."""

    transfer: Transfer
    slot: Slot
    of_shard: tuple[slice, ...]  # rows of the shard, one slice for each message
    of_slot: tuple[slice, ...]  # the same rows, as they lie in the buffer (not used at home)


@dataclass(frozen=True, slots=True)
class SingleLaunch:
    """A launch that is all of a plan, and whether it touches every query and every key."""

    tiles: tuple[Tile, ...]
    covers_queries: bool
    covers_keys: bool


class BufferPlan:
    """A plan of a problem, and where its shards lie on the way; made once, run many times.

    Attributes:
        sizes: number of rows of each side and owner.
        places: for launches on keys that are cut, by owners, where each piece begins in the buffer.
        moves: those of each step.
        last_use: after which step each buffer is free again.
        own: of our own shards, the rows that we send, from first to last, and the last step in
            which we do.
        begins: for each side, whether the first launches on this rank's own results name every row
            of every head, before anything else is added.
        single_launch: the launch, if there is one for all and nothing to send.
    """

    def __init__(self, plan: Plan, problem: Problem) -> None:
        self.plan = plan
        ranks = range(problem.world_size)
        self.sizes = {(side, rank): problem.size(side, rank) for side in Side for rank in ranks}
        self._covers: dict[tuple[int, Side], bool] = {}
        launches = [work for step in plan.steps for work in step.work]
        self._slots = {  # of shards that a launch takes from a buffer
            (payload, side, owner, work.heads): Slot(payload, side, work.owners(side), work.heads)
            for work in launches
            for side in Side
            for owner in work.owners(side)
            for payload in Payload
        }
        self.places = {
            owners: arrange(problem.pieces(owner, plan.rank) for owner in owners)
            for owners in {work.keys for work in launches if work.cut}
        }
        self.moves = self._find_moves(problem)
        self.last_use = self._find_last_use()
        self.own = self._find_own()
        self.begins = {side: self._begins(side, problem.nheads_k) for side in Side}
        self.single_launch: SingleLaunch | None = None
        if len(launches) == 1 and not any(step.transfers for step in plan.steps):
            (work,) = launches
            assert all(tile.first and tile.last for tile in work.tiles), "nothing is carried"
            self.single_launch = SingleLaunch(work.tiles, *(self.covers(work, s) for s in Side))

    def _find_moves(self, problem: Problem) -> list[list[Move]]:
        def move(transfer: Transfer) -> Move:
            side, owner = transfer.side, transfer.owner
            alone = Slot(transfer.payload, side, (owner,), transfer.heads)  # no launch takes it
            slot = self._slots.get((transfer.payload, side, owner, transfer.heads), alone)
            places = self._places(slot)
            if not transfer.cut:
                assert places is None, f"{transfer} goes whole, but {slot} holds pieces"
                return Move(transfer, slot, *[(slice(0, self.sizes[side, owner]),)] * 2)
            pieces = problem.pieces(owner, transfer.user)
            lengths = [piece.length for piece in pieces]
            of_shard = _slices([piece.start for piece in pieces], lengths)
            if places is None or transfer.user != self.plan.rank:  # at home, or for no launch
                used = owner != self.plan.rank and slot in self._slots.values()
                assert not used, f"{transfer} is cut, but {slot} is whole"
                return Move(transfer, slot, of_shard, of_shard)
            of_slot = _slices([places[piece] for piece in pieces], lengths)
            return Move(transfer, slot, of_shard, of_slot)

        return [[move(transfer) for transfer in step.transfers] for step in self.plan.steps]

    def rows(self, slot: Slot) -> int:
        places = self._places(slot)
        if places is None:
            return self.sizes[slot.side, slot.owners[0]]
        return sum(piece.length for piece in places)

    def _places(self, slot: Slot) -> dict[Piece, int] | None:
        """Where pieces lie in a buffer; None if it holds a shard as it is."""
        return self.places.get(slot.owners) if slot.side is Side.KEY else None

    def covers(self, work: Work, side: Side) -> bool:
        """Whether a launch of the plan names every row of one side's buffer."""
        key = id(work), side
        if key not in self._covers:
            spans = (tile.query if side is Side.QUERY else tile.key for tile in work.tiles)
            rows = {span.start: span.length for span in spans}
            slot = Slot(Payload.RESULT, side, work.owners(side), work.heads)
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

    def _find_last_use(self) -> dict[int, list[Slot]]:
        last: dict[Slot, int] = {}
        for number, step in enumerate(self.plan.steps):
            for work in step.work:
                for side in Side:
                    last[Slot(Payload.INPUT, side, work.owners(side), work.heads)] = number
            for move in self.moves[number]:
                if move.transfer.source == self.plan.rank:
                    last[move.slot] = number
        slots = defaultdict(list)
        for slot, number in last.items():
            slots[number].append(slot)
        return slots


def _slices(starts: Iterable[int], lengths: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + n) for start, n in zip(starts, lengths, strict=False))
