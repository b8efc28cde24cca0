"""A schedule: what all ranks do at each step, read from their plans, ready to be drawn."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, groupby, pairwise, product

from ..plan.build import make_plan
from ..plan.problem import Problem
from ..plan.steps import Payload, Plan, Side, Transfer

LONGER = 64  # factor from the tokens of a small picture to those of a sequence worth spreading
DIGITS = string.digits + string.ascii_lowercase  # steps and ranks, one character each

# Colours on which white digits can be read, and which stand out from white and from black.
_PALETTE = ("#3b76c4", "#d0652a", "#2b9257", "#8a56b8", "#c23f56", "#1b8f9e", "#8c6a2f", "#5f6f8a")


@dataclass(frozen=True, slots=True)
class Turn:
    """What one rank does in one step."""

    rank: int
    step: int
    work: tuple[str, ...]  # launches, such as "Q1·K0"
    pairs: int  # allowed (query, key) pairs computed, summed over KV heads
    sends: tuple[str, ...]  # messages, such as "K0 → 2"; K stands for keys and values


@dataclass(frozen=True, slots=True)
class Patch:
    """The part of a tile that the mask leaves: pairs of places in the stream."""

    rank: int
    step: int
    pairs: tuple[tuple[int, int], ...]  # (query, key)
    solid: bool  # neighbouring rows hold neighbouring tokens, so that it is one area


@dataclass(frozen=True)
class Schedule:
    """What all ranks do with a problem on a route."""

    route: str
    problem: Problem
    backward: bool = False

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        ranks = range(self.world_size)
        return tuple(make_plan(self.route, self.problem, rank, self.backward) for rank in ranks)

    @cached_property
    def turns(self) -> tuple[tuple[Turn, ...], ...]:
        """By step, then by rank."""
        steps = range(len(self.plans[0].steps))
        return tuple(tuple(self._turn(plan, step) for plan in self.plans) for step in steps)

    @property
    def world_size(self) -> int:
        return self.problem.world_size

    @property
    def rank_pairs(self) -> list[int]:
        """Pairs of each rank, in all steps."""
        return [sum(turn.pairs for turn in turns) for turns in zip(*self.turns)]

    @property
    def step_times(self) -> list[int]:
        """How long each step takes, in pairs: as long as its busiest rank."""
        return [max(turn.pairs for turn in step) for step in self.turns]

    @property
    def busy(self) -> float:
        """The part of all ranks' time that is work, if a step lasts as long as its busiest rank."""
        time = sum(self.step_times) * self.world_size
        return sum(self.rank_pairs) / time if time else 1.0

    def longer(self) -> Schedule:
        """The schedule of documents that are `LONGER` times as long."""
        lengths = tuple(LONGER * length for length in self.problem.lengths_k)
        return replace(self, problem=replace(self.problem, lengths_q=lengths, lengths_k=lengths))

    @property
    def documents(self) -> list[range]:
        """Places of each document in the stream, without empty ones."""
        ends = [0, *accumulate(self.problem.lengths_k)]
        return [range(start, end) for start, end in pairwise(ends) if start < end]

    def owners(self) -> list[int]:
        """The rank of each token of the stream."""
        owner = [0] * sum(self.problem.lengths_k)
        for rank in range(self.world_size):
            for span in self.problem.spans(Side.KEY, rank):
                for i in range(span.length):
                    owner[span.index + i * span.stride] = rank
        return owner

    def patches(self, head: int = 0) -> Iterator[Patch]:
        """The picture of one KV head."""
        for plan, number in product(self.plans, range(len(self.plans[0].steps))):
            works = (work for work in plan.steps[number].work if head in range(*work.heads))
            for tile in chain.from_iterable(work.tiles for work in works):
                query, key = tile.query, tile.key
                pairs = tuple(
                    (query.index + i * query.stride, key.index + j * key.stride)
                    for i in range(query.length)
                    for j in range(key.length)
                    if tile.low <= j - i <= tile.high
                )
                yield Patch(plan.rank, number, pairs, query.stride == key.stride == 1)

    def _turn(self, plan: Plan, number: int) -> Turn:
        step = plan.steps[number]
        sent = (each for each in step.transfers if each.source == plan.rank != each.target)
        return Turn(
            plan.rank,
            number,
            tuple(f"Q{ranges(each.queries)}·K{ranges(each.keys)}" for each in step.work),
            sum(tile.pairs * len(range(*each.heads)) for each in step.work for tile in each.tiles),
            tuple(map(self._message, sent)),
        )

    def _message(self, transfer: Transfer) -> str:
        what = "Q" if transfer.side is Side.QUERY else "K"
        if transfer.payload is not Payload.INPUT:
            what = f"d{what}" if self.backward else "out"
        all_heads = transfer.heads == self.problem.all_heads
        heads = "" if all_heads else f" (head {ranges(range(*transfer.heads))})"
        return f"{what}{transfer.owner}{heads} → {transfer.target}"


def colour(rank: int, world_size: int) -> str:
    """A rank's colour, #rrggbb."""
    if world_size <= len(_PALETTE):
        return _PALETTE[rank]
    parts = []
    for offset in (0, 2, 1):  # red, green, blue on the colour wheel
        distance = abs((rank / world_size * 3 + offset + 1.5) % 3 - 1.5)
        parts.append(round(60 + 140 * max(0.0, min(1.0, 1.25 - distance))))
    return "#" + "".join(f"{part:02x}" for part in parts)


def percent(share: float, digits: int = 0) -> str:
    """0.594 → "59 %"."""
    return f"{100 * share:.{digits}f} %"


def ranges(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 → "1–3, 7"; 1, 5, 9 → "1, 5, 9"."""
    runs = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}–{members[-1]}")
    return ", ".join(runs)
