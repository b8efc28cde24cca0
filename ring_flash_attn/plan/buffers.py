"""Buffer plans: where the shards of a plan lie on their way, as plain data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from .arrays import most_of_each, unique
from .problem import Problem
from .rows import Arrangement, Packing, Rows, chain_rows, count_rows, rows_within
from .steps import Heads, Payload, Plan, Side, Transfer, Work, users_of
from .tiles import Tiles

Ranks = tuple[int, ...]


class Slot(NamedTuple):
    """Where shards lie: the buffer of `owners`, for some heads of one side.

    A relay holds what those that it is `relayed_for` need of one shard.
    """

    payload: Payload
    side: Side
    owners: tuple[int, ...]
    heads: Heads
    relayed_for: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Move:
    """A transfer, and where this rank has its shard: the buffer that it fills or empties.

    Where rows of a message do not lie together, one gather packs those of all such messages that
    leave a buffer in a step, and one scatter unpacks them.

    A copy in place is between a buffer of a launch and our own shard, or what we `relay`.
    """

    transfer: Transfer
    slot: Slot
    of_shard: Rows  # rows of the shard, in the order of the message
    of_slot: Rows  # the same rows, as they lie in the buffer (not used at home)
    packing: Packing | None = None  # rows here of all messages that are packed together
    place: range = range(0)  # those of this message, in what is packed
    home: Packing | None = None  # rows of our own shard, or the relay's, copied in place
    relay: Slot | None = None  # what we relay, where it is copied in place
    of_relay: Rows = ()

    @property
    def rows(self) -> int:
        return count_rows(self.of_shard)

    @property
    def of_home(self) -> Rows:
        """The other rows of a copy in place."""
        return self.of_shard if self.relay is None else self.of_relay


@dataclass(frozen=True, slots=True)
class SingleLaunch:
    """A launch that is all of a plan, and whether it touches every query and every key."""

    tiles: Tiles
    covers_queries: bool
    covers_keys: bool


class BufferPlan:
    """A plan of a problem, and where its shards lie on the way; made once, run many times.

    Attributes:
        sizes: number of rows of our own shards, and of others that travel whole.
        arrangements: where rows lie in buffers of shards that are cut, by side, owners, heads, and
            for whom they are relayed.
        moves: those of each step.
        last_use: after which step each buffer is free again.
        own: of our own shards, the rows that we send as they lie, from first to last, and the last
            step in which we do.
        begins: for each side, whether the first launches on this rank's own results name every row
            of every head, before anything else is added.
        final: for each side, whether this rank's own results arrive FINAL, and then whether that is
            every row of every head.
        single_launch: the launch, if there is one for all and nothing to send.
        lowered: what the engine makes of it for tensors of some shapes; goes with the plan.
    """

    def __init__(self, plan: Plan, problem: Problem) -> None:
        self.plan, self.nheads_k = plan, problem.nheads_k
        launches = [work for step in plan.steps for work in step.work]
        whole = {(t.side, t.owner) for step in plan.steps for t in step.transfers if not t.cut}
        whole |= {(s, w.owners(s)[0]) for w in launches for s in Side if len(w.owners(s)) == 1}
        whole |= {(side, plan.rank) for side in Side}
        self.sizes = {(side, owner): problem.sizes(side)[owner] for side, owner in whole}
        self._covers: dict[tuple[int, Side], bool] = {}
        self._alone: dict[int, bool] = {}
        self._slots = {  # of shards that a launch takes from a buffer
            (payload, side, owner, work.heads): Slot(payload, side, work.owners(side), work.heads)
            for work in launches
            for side in Side
            for owner in work.owners(side)
            for payload in Payload
        }
        self.arrangements: dict[tuple[Side, Ranks, Heads, Ranks], Arrangement] = {}
        for work in launches:
            if work.cut and work.keys != (plan.rank,):
                found = problem.arrangement(work.keys, users_of(work.queries))
                self.arrangements[Side.KEY, work.keys, work.heads, ()] = found
            if work.cut and work.queries != (plan.rank,):
                found = problem.query_arrangement(work.queries)
                self.arrangements[Side.QUERY, work.queries, work.heads, ()] = found
        self.moves = self._find_moves(problem)
        self.final = {side: self._find_final(side) for side in Side}
        self._delivered = {
            move.slot
            for moves in self.moves
            for move in moves
            if move.transfer.payload is Payload.FINAL and move.transfer.source == plan.rank
        }
        self.last_use = self._find_last_use()
        self.own = self._find_own()
        self.begins = {side: self._begins(side) for side in Side}
        self.lowered: dict[Hashable, Any] = {}
        self.single_launch: SingleLaunch | None = None
        if len(launches) == 1 and not any(step.transfers for step in plan.steps):
            (work,) = launches
            assert work.tiles.columns[14:].all(), "nothing is carried"
            self.single_launch = SingleLaunch(work.tiles, *(self.covers(work, s) for s in Side))

    def _find_moves(self, problem: Problem) -> list[list[Move]]:
        def move(transfer: Transfer) -> Move:
            side, owner = transfer.side, transfer.owner
            alone = Slot(transfer.payload, side, (owner,), transfer.heads)  # no launch takes it
            slot = self._slots.get((transfer.payload, side, owner, transfer.heads), alone)
            arrangement = self._arrangement(slot)
            if not transfer.cut:
                assert arrangement is None, f"{transfer} goes whole, but {slot} is cut"
                rows = (range(self.sizes[side, owner]),)
                return Move(transfer, slot, rows, rows)
            if side is Side.QUERY:
                of_shard = problem.asking(owner)
            else:
                of_shard = problem.sent(owner, transfer.users)
            if arrangement is None and owner != self.plan.rank:
                used = slot in self._slots.values()
                assert not used, f"{transfer} is cut, but {slot} is whole"
                assert side is Side.KEY, f"no launch takes {transfer}"
                arrangement = problem.arrangement((owner,), transfer.users)
                # no launch takes it, but it comes
                self.arrangements[slot[1:]] = arrangement
            if arrangement is None or transfer.user != self.plan.rank:  # at home
                return Move(transfer, slot, of_shard, of_shard)
            return Move(transfer, slot, of_shard, arrangement.places[owner])

        def relayed(transfer: Transfer) -> Move:
            owner, users = transfer.owner, users_of(transfer.relayed_for)
            what = transfer.payload, transfer.side, (owner,), transfer.heads
            slot = Slot(*what, transfer.relayed_for)
            self.arrangements[slot[1:]] = problem.arrangement((owner,), users)
            of_shard = problem.sent(owner, transfer.users)
            of_relay = rows_within(of_shard, problem.sent(owner, users))
            if transfer.source == transfer.target:
                return replace(move(transfer), relay=slot, of_relay=of_relay)
            return Move(transfer, slot, of_shard, of_relay)

        def either(transfer: Transfer) -> Move:
            if not transfer.relayed_for:
                return move(transfer)
            end = transfer.source if transfer.leaves_relay else transfer.target
            return relayed(transfer) if end == self.plan.rank else move(transfer)

        return [
            _packed([either(transfer) for transfer in step.transfers], self.plan.rank)
            for step in self.plan.steps
        ]

    @cached_property
    def pieces(self) -> int:
        """Tiles, spans and ranges of rows: what its size in memory goes by."""
        tiles = sum(len(work.tiles) for step in self.plan.steps for work in step.work)
        spans = sum(found.columns.shape[1] for found in self.arrangements.values())
        rows = sum(len(m.of_shard) + len(m.of_slot) for moves in self.moves for m in moves)
        return tiles + spans + rows

    def rows(self, slot: Slot) -> int:
        arrangement = self._arrangement(slot)
        return self.sizes[slot.side, slot.owners[0]] if arrangement is None else arrangement.size

    def is_cut(self, slot: Slot) -> bool:
        """Whether a buffer holds the rows that are needed of some shards, not one as it is."""
        return self._arrangement(slot) is not None

    def _arrangement(self, slot: Slot) -> Arrangement | None:
        """Where rows lie in a buffer; None if it holds a shard as it is."""
        return self.arrangements.get(slot[1:])

    def covers(self, work: Work, side: Side) -> bool:
        """Whether a launch of the plan names every row of one side's buffer."""
        key = id(work), side
        if key not in self._covers:
            start, length, *_ = work.tiles.query if side is Side.QUERY else work.tiles.key
            starts, which = unique(start)
            rows = most_of_each(which, length, len(starts), 0).sum()
            slot = Slot(Payload.RESULT, side, work.owners(side), work.heads)
            self._covers[key] = int(rows) == self.rows(slot)
        return self._covers[key]

    def delivers(self, work: Work, side: Side) -> bool:
        """Whether the results of a launch's buffer leave it FINAL."""
        return Slot(Payload.FINAL, side, work.owners(side), work.heads) in self._delivered

    def alone(self, work: Work) -> bool:
        """Whether a launch of the plan is the only one on its queries and on its keys."""
        if id(work) not in self._alone:
            others = (each for step in self.plan.steps for each in step.work if each is not work)
            taken = {(s, each.owners(s), each.heads) for each in others for s in Side}
            mine = {(side, work.owners(side), work.heads) for side in Side}
            self._alone[id(work)] = not mine & taken
        return self._alone[id(work)]

    def _find_final(self, side: Side) -> tuple[bool, bool]:
        arriving = [
            move
            for moves in self.moves
            for move in moves
            if (move.transfer.payload, move.transfer.side) == (Payload.FINAL, side)
            and move.transfer.target == self.plan.rank
        ]
        covered = sum(move.rows * len(range(*move.transfer.heads)) for move in arriving)
        return bool(arriving), covered == self.sizes[side, self.plan.rank] * self.nheads_k

    def _begins(self, side: Side) -> bool:
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
        return sum(end - start for start, end in begun) == self.nheads_k

    def _find_own(self) -> dict[tuple[Side, Heads], tuple[slice, int]]:
        rank, found = self.plan.rank, dict[tuple[Side, Heads], tuple[slice, int]]()
        for number, moves in enumerate(self.moves):
            for move in moves:
                t, rows = move.transfer, move.of_shard
                ours = t.payload is Payload.INPUT and rank == t.owner == t.source != t.target
                if ours and rows and move.packing is None:
                    start, end = rows[0].start, rows[-1].stop
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
                    if move.transfer.payload is Payload.FINAL:  # what was rounded for it
                        last[move.slot._replace(payload=Payload.RESULT)] = number
                    if move.relay is not None:
                        last[move.relay] = number
        slots = defaultdict(list)
        for slot, number in last.items():
            slots[number].append(slot)
        return slots


def _packed(moves: list[Move], rank: int) -> list[Move]:
    """The moves of a step; those whose rows lie apart share a packing, one for each buffer."""
    found = list(moves)
    loose: dict[tuple[Slot, bool], list[int]] = {}
    for number, move in enumerate(moves):
        transfer = move.transfer
        if transfer.source == transfer.target:
            if len(move.of_home) > 1 or len(move.of_slot) > 1:
                packing, home = Packing(move.of_slot), Packing(move.of_home)
                found[number] = replace(move, packing=packing, home=home)
            continue
        receives = transfer.target == rank
        if receives and transfer.payload is not Payload.INPUT:
            continue  # added, or brought to its place, as it is
        rows, at_home = _local(move, rank)
        if len(rows) > 1:
            here = move.slot._replace(owners=()) if at_home else move.slot
            loose.setdefault((here, receives), []).append(number)
    for numbers in loose.values():
        together = [moves[number] for number in numbers]
        peers = [t.source if t.target == rank else t.target for t in (m.transfer for m in together)]
        counts = [move.rows for move in together]
        rows = chain_rows([_local(move, rank)[0] for move in together])
        packing = Packing(rows, tuple(zip(peers, counts, strict=True)))
        for number, (start, end) in zip(numbers, pairwise([0, *accumulate(counts)]), strict=True):
            found[number] = replace(moves[number], packing=packing, place=range(start, end))
    return found


def _local(move: Move, rank: int) -> tuple[Rows, bool]:
    """The rows that a message leaves or fills on this rank, and whether they are our own."""
    transfer = move.transfer
    sends = transfer.source == rank
    at_home = transfer.owner == rank and sends is (transfer.payload is Payload.INPUT)
    return (move.of_shard, True) if at_home else (move.of_slot, False)
