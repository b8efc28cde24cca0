"""`run`: when the ranks of a schedule compute, exchange messages and wait.

A schedule is the stages of some ranks. A rank posts the messages of a stage when its compute stream
gets there, computes meanwhile, and awaits both. A message starts when both ends have posted it and
its lane (inside the node, or outside) is free at both: the lanes of a rank work side by side, each
on one post at a time. Ranks that are not in the schedule are ready whenever another rank is.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..bench.links import INSIDE as INSIDE
from ..bench.links import LEVELS, Topology
from ..bench.links import OUTSIDE as OUTSIDE

COMPUTE = "compute"
LANES = (COMPUTE, *LEVELS)  # of a rank


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of one rank: messages are posted, compute runs meanwhile, both are awaited."""

    compute: float = 0.0  # seconds on the compute stream, beside the messages
    sends: tuple[tuple[int, int], ...] = ()  # (peer, bytes)
    receives: tuple[tuple[int, int], ...] = ()
    after: float = 0.0  # seconds on the compute stream once messages have arrived (adds, merges)
    before: float = 0.0  # seconds on the compute stream before the post (rows are gathered)
    awaited: int = 0  # the messages are awaited so many stages later


class Interval(NamedTuple):
    """A bar of a drawing: what a lane did, in which stage, from when to when (seconds)."""

    lane: str
    stage: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class RankTimes:
    """What one rank did."""

    end: float  # seconds since all began
    busy: float  # seconds that its compute stream was at work
    exposed: float  # seconds that it waited for messages: for the links, or for late ranks
    intervals: tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """What all ranks of a schedule did."""

    ranks: Mapping[int, RankTimes]

    @property
    def slowest(self) -> int:
        """The rank that ends last; of several the first."""
        return max(self.ranks, key=lambda rank: (self.ranks[rank].end, -rank))

    @property
    def seconds(self) -> float:
        """Until the last rank has ended."""
        return max((each.end for each in self.ranks.values()), default=0.0)


@dataclass(slots=True, eq=False)
class _Post:
    """The messages of one stage on one lane of a rank."""

    rank: int
    stage: int
    lane: str
    seconds: float = 0.0  # of all its messages together
    messages: list[tuple[_Post | None, float]] = field(default_factory=list)  # other end, seconds
    previous: _Post | None = None  # on the same lane
    start: float = 0.0
    end: float | None = None


class _Rank:
    """Where a rank is, and what it has done."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = stages
        self.posts: list[list[_Post]] = [[] for _ in stages]
        self.begins: list[float] = []  # when it has posted each stage
        self.number = 0
        self.end = self.busy = self.exposed = 0.0
        self.intervals: list[Interval] = []
        self.due: defaultdict[int, list[_Post]] = defaultdict(list)


def run(
    schedule: Mapping[int, Sequence[Stage]], topology: Topology, interference: float = 0.0
) -> Timeline:
    """When the ranks of a schedule do what.

    Args:
        schedule: the stages of each rank; of ranks that are left out nothing is known, and they
            are as early as those that they talk to.
        topology: what lies between the ranks.
        interference: share of its speed that compute loses while messages of its stage are under
            way.

    Raises:
        ValueError: a message without its other end, or of another size there; ranks that wait for
            each other for ever; `interference` is not in [0, 1).
    """
    if not 0 <= interference < 1:
        raise ValueError(f"interference must be at least 0 and less than 1, not {interference}")
    ranks = {rank: _Rank(stages) for rank, stages in schedule.items()}
    _make_posts(ranks, topology)
    waiting = deque(number for number, rank in ranks.items() if rank.stages)
    stuck = 0
    while waiting and stuck < len(waiting):
        number = waiting.popleft()
        moved = _advance(ranks[number], ranks, interference)
        if ranks[number].number < len(ranks[number].stages):
            waiting.append(number)
        stuck = 0 if moved else stuck + 1
    if waiting:
        where = ", ".join(f"{rank} (stage {ranks[rank].number})" for rank in sorted(waiting))
        raise ValueError(f"ranks wait for each other: {where}")
    return Timeline(
        {
            number: RankTimes(rank.end, rank.busy, rank.exposed, tuple(rank.intervals))
            for number, rank in ranks.items()
        }
    )


def _advance(rank: _Rank, ranks: Mapping[int, _Rank], interference: float) -> bool:
    """Bring a rank as far as it gets; whether it got further at all."""
    before = rank.number, len(rank.begins)
    while rank.number < len(rank.stages):
        number, stage = rank.number, rank.stages[rank.number]
        if len(rank.begins) == number:
            rank.begins.append(rank.end + stage.before)
            rank.due[number + stage.awaited] += rank.posts[number]
            if stage.before:
                rank.intervals.append(Interval(COMPUTE, number, rank.end, rank.begins[-1]))
        last = number == len(rank.stages) - 1
        due = [post for at in rank.due if at <= number or last for post in rank.due[at]]
        if not all(_resolve(post, ranks) for post in due):
            break
        _finish(rank, due, interference)
    return (rank.number, len(rank.begins)) != before


def _finish(rank: _Rank, due: Iterable[_Post], interference: float) -> None:
    """Compute and messages of a stage are done."""
    number, stage, begin = rank.number, rank.stages[rank.number], rank.begins[rank.number]
    under_way = [post for post in due if post.stage == number]
    compute = stage.compute
    if interference and under_way:
        first = max(begin, min(post.start for post in under_way))
        shared = max(0.0, max(post.end or 0.0 for post in under_way) - first)
        rest = max(0.0, compute - (first - begin))  # what is left when the messages start
        compute += min(rest / (1 - interference), shared) * interference
    computed = begin + compute
    arrived = max([computed, *(post.end or 0.0 for post in due)])
    rank.end = arrived + stage.after
    rank.busy += stage.before + compute + stage.after
    rank.exposed += arrived - computed
    if compute:
        rank.intervals.append(Interval(COMPUTE, number, begin, computed))
    if stage.after:
        rank.intervals.append(Interval(COMPUTE, number, arrived, rank.end))
    rank.intervals += [Interval(post.lane, post.stage, post.start, post.end or 0.0) for post in due]
    rank.due = defaultdict(list, {at: posts for at, posts in rank.due.items() if at > number})
    rank.number += 1


def _resolve(post: _Post, ranks: Mapping[int, _Rank]) -> bool:
    """Find out when a post starts and ends, if all that it depends on is known."""
    pending = [post]
    under_way = set()
    while pending:
        each = pending[-1]
        if each.end is not None:
            pending.pop()
            continue
        ends = [each, *(other for other, _ in each.messages if other is not None)]
        if any(len(ranks[end.rank].begins) <= end.stage for end in ends):
            return False  # somebody has not posted
        earlier = [end.previous for end in ends if end.previous is not None]
        missing = [before for before in earlier if before.end is None]
        if missing:
            if id(each) in under_way:
                return False  # lanes wait for each other
            under_way.add(id(each))
            pending += missing
            continue
        _settle(each, ranks)
        pending.pop()
    return True


def _settle(post: _Post, ranks: Mapping[int, _Rank]) -> None:
    """When a post starts and ends: its messages share its lane, and the lanes of the others."""

    def ready(end: _Post) -> float:
        free = end.previous.end if end.previous is not None else None
        return max(ranks[end.rank].begins[end.stage], free or 0.0)

    own = ready(post)
    starts = [own if other is None else max(own, ready(other)) for other, _ in post.messages]
    post.start = min(starts)
    ends = (start + seconds for start, (_, seconds) in zip(starts, post.messages))
    post.end = max(post.start + post.seconds, *ends)


def _make_posts(ranks: Mapping[int, _Rank], topology: Topology) -> None:
    """The posts of all ranks, with the other ends of their messages."""
    ends: dict[tuple[int, int], tuple[list[_End], list[_End]]] = {}  # source, target → both ends
    for number, rank in ranks.items():
        last: dict[str, _Post] = {}
        for stage, each in enumerate(rank.stages):
            for lane, sent, received in _by_lane(number, each, topology):
                post = _Post(number, stage, lane, topology.seconds(number, sent, received))
                post.previous, last[lane] = last.get(lane), post
                rank.posts[stage].append(post)
                for peer, size in sent.items():
                    share = min(len(sent) * size, sum(sent.values()))
                    seconds = topology.seconds(number, {peer: share}, {})
                    ends.setdefault((number, peer), ([], []))[0].append((post, size, seconds))
                for peer, size in received.items():
                    share = min(len(received) * size, sum(received.values()))
                    seconds = topology.seconds(number, {}, {peer: share})
                    ends.setdefault((peer, number), ([], []))[1].append((post, size, seconds))
    for (source, target), (sending, receiving) in ends.items():
        _pair(source, target, sending, receiving, known=source in ranks and target in ranks)


_End = tuple[_Post, int, float]  # of a message: its post, bytes, and seconds by this end's share


def _pair(
    source: int, target: int, sending: Sequence[_End], receiving: Sequence[_End], known: bool
) -> None:
    """The n-th message that `source` sends to `target` is the n-th that it receives."""
    if not known:
        for post, _, seconds in [*sending, *receiving]:
            post.messages.append((None, seconds))
        return
    sizes = [[size for _, size, _ in side] for side in (sending, receiving)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"rank {source} sends rank {target} messages of {sizes[0]} bytes, "
            f"which expects {sizes[1]}"
        )
    for (post, _, one), (other, _, two) in zip(sending, receiving):
        seconds = max(one, two)
        post.messages.append((other, seconds))
        other.messages.append((post, seconds))


def _by_lane(
    rank: int, stage: Stage, topology: Topology
) -> Iterable[tuple[str, dict[int, int], dict[int, int]]]:
    """What a stage sends and receives on each lane, by peers; messages of no bytes are none."""
    found: dict[str, tuple[dict[int, int], dict[int, int]]] = {}
    for side, messages in enumerate((stage.sends, stage.receives)):
        for peer, size in messages:
            if size:
                sizes = found.setdefault(topology.level(rank, peer), ({}, {}))[side]
                sizes[peer] = sizes.get(peer, 0) + size
    return ((lane, *sizes) for lane, sizes in found.items())
