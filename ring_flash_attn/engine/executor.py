"""The executor: runs what a plan was lowered to, action by action.

`lowering.py` has worked out what is known from the plan and the shapes: which rows of which memory,
and in which order. Here that meets the tensors of a pass. All buffers of a pass lie in its arenas,
one for each dtype. It takes them from the pool when it begins, on its own stream, and gives them
back when it ends: no two passes share memory, and what the user gets is never in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..comm import Message, Transport
from ..kernels.rows import Part, add_from_arena, add_parts, adding, copy_rows, is_fused
from ..plan.buffers import BufferPlan
from ..plan.rows import Packing
from ..plan.steps import Payload, Side, Step, Work
from ..trace import span
from .packing import part_table, row_numbers

Views = tuple[Tensor, ...]
Strided = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides, offset


class Pool:
    """Where arenas come from and go to: here, torch's allocator."""

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for so many numbers; what is in it is anybody's guess."""
        return torch.empty(size, dtype=dtype, device=device)

    def give(self, arena: Tensor) -> None:
        """It is not used any more."""


class Pass(Protocol):
    """Forward or backward on one rank: its plan, its tensors, and what a launch does."""

    buffer_plan: BufferPlan
    program: Program
    pool: Pool
    device: torch.device

    def home(self, payload: Payload, side: Side) -> Views:
        """Its own shards, as kernels see them.

        Made when they are first asked for: the first post leaves before anything is launched.
        """

    def launch(self, launch: RunKernel, tensors: Sequence[Tensor]) -> None:
        """Run the kernel on what it reads and where it accumulates, in the order of its places."""

    def combine(self, ours: Views, theirs: Views) -> None:
        """Add what others have accumulated to what is accumulated here."""

    def clear(self, views: Views) -> None:
        """Make accumulators empty."""


# Places: where a tensor is found when an action runs.


class ArenaView:
    """A view of an arena; its offset is settled when all buffers of the plan are known."""

    __slots__ = ("arena", "offset", "shape", "strides")

    def __init__(self, arena: int, strided: Strided) -> None:
        self.arena = arena
        self.shape, self.strides, self.offset = strided

    def find(self, run: Executor) -> Tensor:
        return run.arenas[self.arena].as_strided(self.shape, self.strides, self.offset)


_HOMES = [(payload, side) for payload in Payload for side in Side]


class HomePart(NamedTuple):
    """A tensor of our own shard, as kernels see it, or a part of it."""

    home: int  # which payload of which side
    number: int  # of the tensor
    part: tuple[slice, ...] | None

    @classmethod
    def of(
        cls, payload: Payload, side: Side, number: int, part: tuple[slice, ...] | None
    ) -> HomePart:
        return cls(_HOMES.index((payload, side)), number, part)

    def find(self, run: Executor) -> Tensor:
        home = run.homes[self.home]
        if home is None:
            home = run.homes[self.home] = run.work.home(*_HOMES[self.home])
        return home[self.number] if self.part is None else home[self.number][self.part]


class OutgoingPart(NamedTuple):
    """Rows of our own shard, as `BringOut` has left them."""

    key: int
    number: int  # of the tensor
    rows: slice

    def find(self, run: Executor) -> Tensor:
        return run.outgoing[self.key][self.number][self.rows]


Place = ArenaView | HomePart | OutgoingPart
Places = tuple[Place, ...]


# Actions: what a step does, in order.


class SideBySide(NamedTuple):
    """Some of the tensors that are brought out, in one: its shape, and where each lies in it."""

    numbers: tuple[int, ...]  # of the tensors
    shape: tuple[int, ...]
    views: tuple[Strided, ...]

    def fill(self, home: Sequence[Tensor]) -> Tensor:
        ours = [home[number] for number in self.numbers]
        found = _side_by_side(ours, self.shape)
        if found is None:
            found = torch.empty(self.shape, dtype=ours[0].dtype, device=ours[0].device)
            for view, tensor in zip(self.views, ours, strict=True):
                found.as_strided(*view).copy_(tensor)
        return found


class BringOut(NamedTuple):
    """Rows of our own shard, as messages take them; copied only if they lie otherwise.

    With `side_by_side`, tensors of a kind go into one.
    """

    key: int
    sources: Places
    side_by_side: tuple[SideBySide, ...] | None

    def run(self, run: Executor) -> None:
        home = [place.find(run) for place in self.sources]
        if self.side_by_side is None:
            run.outgoing[self.key] = tuple([rows_first(tensor) for tensor in home])
        else:
            run.outgoing[self.key] = tuple([each.fill(home) for each in self.side_by_side])


class PutAway(NamedTuple):
    """What `BringOut` has left is not sent any more."""

    key: int

    def run(self, run: Executor) -> None:
        run.outgoing[self.key] = ()


class Post(NamedTuple):
    """The messages of a step: where they lie, the peer, and whether it is received from."""

    step: int
    messages: tuple[tuple[Place, int, bool], ...]

    def run(self, run: Executor) -> None:
        messages = [Message(place.find(run), peer, get) for place, peer, get in self.messages]
        with span(_post_name, run.rank, self.step, messages):
            run.transport.post(messages)


class Wait(NamedTuple):
    """For the messages of a step."""

    step: int
    moves: bool  # there are any, or copies in place

    def run(self, run: Executor) -> None:
        with span(_wait_name, run.rank, self):
            run.transport.wait()


class Copy(NamedTuple):
    """Rows: all, or those `taken`; to the places `at`, if they lie apart there.

    Tensors are `stored` rows first, or as kernels see them.
    """

    targets: Places
    sources: Places
    at: Packing | None = None
    taken: Packing | None = None
    stored: bool = False

    def run(self, run: Executor) -> None:
        at, taken = run.numbers(self.at), run.numbers(self.taken)
        for place, other in zip(self.targets, self.sources, strict=True):
            target, source = place.find(run), other.find(run)
            dim = 0 if self.stored else 1 if source.dim() == 4 else 2  # a number a row comes last
            if at is not None:
                copy_rows(target, source, at, taken, dim)
            elif taken is not None:
                torch.index_select(source, dim, taken, out=target)
            else:
                target.copy_(source)


class Combine(NamedTuple):
    """Results of others, of all rows, with ours."""

    ours: Places
    theirs: Places

    def run(self, run: Executor) -> None:
        ours = tuple([place.find(run) for place in self.ours])
        run.work.combine(ours, tuple([place.find(run) for place in self.theirs]))


class Added(NamedTuple):
    """Gradients of some rows in a buffer: which rows of ours they belong to, which are `taken`."""

    theirs: tuple[ArenaView, ...]
    at: Packing
    taken: Packing | None = None  # all


@dataclass(frozen=True, slots=True, eq=False)
class AddParts:
    """Gradients of some rows, from others or another buffer, added to ours part after part.

    Compared by identity, so that its table on a GPU can be cached.
    """

    ours: Places
    parts: tuple[Added, ...]

    def run(self, run: Executor) -> None:
        ours = [place.find(run) for place in self.ours]
        with span("add gradients"):
            instead = adding.get()
            if instead is not None:
                instead(self._moved(ours))
            elif is_fused(ours[0]):
                self._fused(ours, run)
            else:
                parts = (
                    Part(
                        [view.find(run) for view in theirs],
                        run.rows(at),
                        None if taken is None else run.rows(taken),
                    )
                    for theirs, at, taken in self.parts
                )
                add_parts(ours, parts)

    def _fused(self, ours: Sequence[Tensor], run: Executor) -> None:
        rows, views = ours[0].shape[1], self.parts[0].theirs
        runs = [
            (theirs[0].offset, theirs[0].strides[1], at, taken) for theirs, at, taken in self.parts
        ]
        table = part_table(self, rows, runs, run.device)
        firsts = [view.offset - views[0].offset for view in views]
        add_from_arena(ours, run.arenas[views[0].arena], table, firsts, views[0].strides[0])

    def _moved(self, ours: Sequence[Tensor]) -> int:
        """Bytes that are read and written."""
        added = sum(part.at.total for part in self.parts)
        row = sum(mine.nbytes for mine in ours) // max(1, ours[0].shape[1])
        return row * (added + 2 * min(added, ours[0].shape[1]))


class Clear(NamedTuple):
    """Accumulators, before anything is added to them."""

    places: Places

    def run(self, run: Executor) -> None:
        run.work.clear(tuple([place.find(run) for place in self.places]))


class RunKernel(NamedTuple):
    """The kernel, on what it reads of queries and keys, and where it accumulates for both.

    `fresh_q` and `fresh_k` say that a launch is the first to write there, and names every row;
    `final`, that its results leave it in the user's dtype, and `begins`, that it is the first to
    write them. Sums of final outputs come after these, if the kernel needs them.
    """

    work: Work
    places: Places
    fresh_q: bool
    fresh_k: bool
    final: bool = False
    begins: bool = False

    def run(self, run: Executor) -> None:
        run.work.launch(self, [place.find(run) for place in self.places])


Action = BringOut | PutAway | Post | Wait | Copy | Combine | AddParts | Clear | RunKernel
Actions = tuple[Action, ...]


class Program(NamedTuple):
    """What a plan is lowered to.

    Attributes:
        posts, launches, finishes: of each step; virtual ranks all post before any of them computes.
        arenas: dtypes and sizes.
        outgoing: how many kinds of rows are brought out.
    """

    posts: tuple[Actions, ...]
    launches: tuple[Actions, ...]
    finishes: tuple[Actions, ...]
    arenas: tuple[tuple[torch.dtype, int], ...]
    outgoing: int


class Executor:
    """Runs the program of a pass on one rank."""

    def __init__(self, work: Pass, transport: Transport) -> None:
        self.work, self.transport, self.device = work, transport, work.device
        self.buffer_plan, self.plan = work.buffer_plan, work.buffer_plan.plan
        self.rank, self.program = self.plan.rank, work.program
        arenas = self.program.arenas
        self.arenas = [work.pool.take(size, dtype, self.device) for dtype, size in arenas]
        self.homes: list[Views | None] = [None] * len(_HOMES)
        self.outgoing: list[Views] = [()] * self.program.outgoing

    def numbers(self, packing: Packing | None) -> Tensor | None:
        """On the device, for the current stream."""
        return None if packing is None else row_numbers(packing, self.device)

    def rows(self, packing: Packing) -> Tensor | slice:
        """The same, or a slice where they follow each other."""
        found = packing.slice
        return row_numbers(packing, self.device) if found is None else found

    def close(self) -> None:
        """The pass is done."""
        for arena in self.arenas:
            self.work.pool.give(arena)
        self.arenas.clear()

    def abandon(self, drain: bool) -> None:
        """The pass has failed: tell the transport which steps have messages."""
        steps = [
            any(move.transfer.source != move.transfer.target for move in moves)
            for moves in self.buffer_plan.moves
        ]
        self.transport.abandon(steps, drain)


def run_steps(executors: Sequence[Executor]) -> None:
    """Run all ranks of this process (one, or all virtual ranks), each step on all of them.

    If that fails, what was posted is drained.
    """
    try:
        for number in range(len(executors[0].plan.steps)):
            with span(_step_name, executors, number):
                for run in executors:
                    for action in run.program.posts[number]:
                        action.run(run)
                for run in executors:
                    for action in run.program.launches[number]:
                        action.run(run)
                for run in executors:
                    for action in run.program.finishes[number]:
                        action.run(run)
        for run in executors:
            run.close()
    except BaseException as error:
        for run in executors:
            run.abandon(drain=isinstance(error, Exception))
        raise


def rows_first(tensor: Tensor) -> Tensor:
    """What kernels see → rows first, contiguous (a copy only if need be)."""
    moved = tensor.permute(2, 0, 1) if tensor.dim() == 3 else tensor.transpose(0, 1)
    return moved.contiguous()


def _side_by_side(home: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor | None:
    """Our own rows as one rows-first tensor, if that is how they lie: packed k and v."""
    first = home[0]
    if shape[1] > 1 or not shape[0] or len(shape) == 3:
        return None
    width, place = shape[2] * shape[3], first.data_ptr()
    if len({x.untyped_storage().data_ptr() for x in home}) > 1:
        return None
    for tensor in home:
        _, _, nheads, headdim = tensor.shape
        wanted = zip(tensor.shape[1:], tensor.stride()[1:], (width, headdim, 1), strict=True)
        if tensor.data_ptr() != place or any(n > 1 and a != b for n, a, b in wanted):
            return None
        place += nheads * headdim * tensor.element_size()
    return first.as_strided(shape, (width, width, shape[3], 1))


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


def _wait_name(rank: int, wait: Wait) -> str:
    return f"rank {rank} waits for the transfers of step {wait.step}" if wait.moves else ""


def _post_name(rank: int, number: int, messages: Sequence[Message]) -> str:
    if not messages:
        return ""
    received = sum(message.receive for message in messages)
    size = sum(message.tensor.nbytes for message in messages) / 1e6
    return (
        f"rank {rank} posts the transfers of step {number}: "
        f"{len(messages) - received} sends, {received} receives, {size:.3g} MB"
    )
