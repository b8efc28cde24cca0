"""What a replay found, and what follows from it: rates, efficiencies, rows of results; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Generic, TypeVar

from ..link import Link
from ..results import REPLAY, Row
from ..workload import BOTH, FLOPS, FORWARD, Placement, Workload

COMPUTE, TRANSFERS = "compute", "transfers"  # lanes of a timeline
Value = TypeVar("Value")


@dataclass(frozen=True)
class ByPass(Generic[Value]):
    """A value of the forward pass, and one of the forward and the backward pass together."""

    forward: Value
    both: Value

    def __getitem__(self, passes: str) -> Value:
        return {FORWARD: self.forward, BOTH: self.both}[passes]

    def __sub__(self: Times, other: Times) -> Times:
        return ByPass(self.forward - other.forward, self.both - other.both)

    def __mul__(self: Times, factor: float) -> Times:
        return ByPass(self.forward * factor, self.both * factor)

    def share_of(self: Times, other: Times) -> Times:
        """In percent."""
        return ByPass(100 * self.forward / other.forward, 100 * self.both / other.both)


Times = ByPass[float]  # ms, or what follows from them


@dataclass(frozen=True, slots=True)
class Bar:
    """One launch or one post of a timeline.

    Attributes:
        lane: "compute" or "transfers".
        direction: "forward" or "backward".
        label: number of its step.
        start, end: ms since the run began.
    """

    lane: str
    direction: str
    label: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class PassCost:
    """What one pass of a rank launches, sends and holds; computed, not measured.

    Attributes:
        launches: of the kernel.
        posts: with messages.
        sent, received: bytes.
        held: bytes beside inputs and outputs, by name; of each the most at any time.
    """

    launches: int
    posts: int
    sent: int
    received: int
    held: dict[str, int]


@dataclass(frozen=True, slots=True)
class Measured:
    """Times and memory of one rank, or of one device.

    Attributes:
        removed: with messages that cost nothing; all there is on one device.
        linked: over the emulated link, if there is one.
        host: ms until all was queued of what `times` says.
        peak: bytes above inputs, outputs and gradients; None where it cannot be measured.
        runs: ms of every run, in order; `times` are their medians.
    """

    removed: Times
    linked: Times | None
    host: Times
    peak: ByPass[int] | None
    runs: ByPass[tuple[float, ...]]

    @property
    def times(self) -> Times:
        """What counts: over the link, if there is one."""
        return self.removed if self.linked is None else self.linked

    @property
    def is_host_bound(self) -> bool:
        """Whether queueing took longer than the device did: with no lead it would wait."""
        return self.host.forward > self.times.forward or self.host.both > self.times.both

    @property
    def exposed(self) -> Times | None:
        """What the link costs beyond what is hidden behind computation."""
        return None if self.linked is None else self.linked - self.removed


@dataclass(frozen=True, slots=True)
class RankResult:
    """One rank.

    Attributes:
        rank, tokens: which, and how many it holds.
        pairs: (query, key) pairs that it computes, summed over query heads.
        costs: of its forward and its backward pass; nothing for the baseline.
        measured: times and memory.
    """

    rank: int
    tokens: int
    pairs: int
    costs: tuple[PassCost, ...]
    measured: Measured


@dataclass(frozen=True, slots=True)
class Design:
    """This library or the baseline: its ranks, and the same kernel on one device.

    Attributes:
        name: in words.
        world_size: number of ranks.
        flops_per_pair: of the forward pass, for a pair and a query head.
        base_pairs: pairs of one rank's own tokens, summed over query heads.
        base: the same kernel on these, on one device.
        full_pairs: pairs of as many queries and keys without a mask.
        full: the same kernel on these, on one device.
        ranks: those that were replayed.
    """

    name: str
    world_size: int
    flops_per_pair: int
    base_pairs: int
    base: Measured
    full_pairs: int
    full: Measured
    ranks: tuple[RankResult, ...]

    @property
    def theoretic(self) -> Times:
        """World size times the base: what a rank would take if scaling were ideal."""
        return self.base.times * self.world_size

    @property
    def at_full_rate(self) -> Times:
        """The same for the base's pairs at the rate of a block without a mask."""
        return self.full.times * (self.world_size * self.base_pairs / self.full_pairs)

    def slowest(self, both: bool) -> RankResult:
        """The rank that the others wait for, forward, or forward and backward together."""
        return max(self.ranks, key=lambda each: each.measured.times[BOTH if both else FORWARD])

    def rate(self, pairs: int, times: Times) -> Times:
        """TFLOP/s."""
        flops = pairs * self.flops_per_pair / 1e9  # and ms: 10⁹ for a TFLOP/s
        return ByPass(flops / times.forward, FLOPS[BOTH] * flops / times.both)

    def efficiency(self, result: RankResult) -> Times:
        """Theoretic over measured, in percent."""
        return self.theoretic.share_of(result.measured.times)

    def full_rate_efficiency(self, result: RankResult) -> Times:
        """The same against the kernel's rate without a mask."""
        return self.at_full_rate.share_of(result.measured.times)


@dataclass(frozen=True, slots=True)
class Replay:
    """All that a replay found.

    Attributes:
        workload: what all ranks compute together.
        placement: how it is spread; the kernel is the one that was chosen.
        device, versions: where.
        repeats: rounds of the medians.
        ours: this library.
        baseline: ring-flash-attn 0.1.8's zigzag design, if asked for.
        timeline: of the slowest rank, if asked for.
    """

    workload: Workload
    placement: Placement
    device: str
    versions: dict[str, str]
    repeats: int
    ours: Design
    baseline: Design | None = None
    timeline: tuple[Bar, ...] = ()

    @property
    def link(self) -> Link | None:
        """What was emulated; None: communication was removed."""
        return self.placement.link

    @property
    def designs(self) -> tuple[Design, ...]:
        """This library's, and the baseline's if there is one."""
        return (self.ours,) if self.baseline is None else (self.ours, self.baseline)

    @property
    def title(self) -> str:
        """Whose timeline it is."""
        return f"rank {self.ours.slowest(both=True).rank} of {self.placement.world_size}"

    @property
    def note(self) -> str:
        """What a timeline is of, in a sentence."""
        link = "communication removed" if self.link is None else f"emulated link {self.link}"
        return f"A replay on one device ({self.device}); {link}."

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `replay_rows` has what follows from them."""
        return {**asdict(self), "workload": self.workload.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Replay:
        """The replay that `to_dict` wrote, also from JSON."""
        link = values["placement"]["link"]
        placement = {**values["placement"], "link": None if link is None else Link(**link)}
        read = {
            "workload": Workload.from_dict(values["workload"]),
            "placement": Placement(**placement),
            "ours": _design(values["ours"]),
            "baseline": None if values["baseline"] is None else _design(values["baseline"]),
            "timeline": tuple(Bar(**bar) for bar in values["timeline"]),
        }
        return cls(**{**values, **read})


def _design(values: Mapping[str, Any]) -> Design:
    single = {name: _measured(values[name]) for name in ("base", "full")}
    return Design(**{**values, **single, "ranks": tuple(map(_rank, values["ranks"]))})


def _rank(values: Mapping[str, Any]) -> RankResult:
    costs = tuple(PassCost(**each) for each in values["costs"])
    return RankResult(**{**values, "costs": costs, "measured": _measured(values["measured"])})


def _measured(values: Mapping[str, Any]) -> Measured:
    read: dict[str, Any] = {name: each and ByPass(**each) for name, each in values.items()}
    runs = ByPass(*(tuple(values["runs"][passes]) for passes in (FORWARD, BOTH)))
    return Measured(**{**read, "runs": runs})


def replay_rows(replay: Replay) -> Iterator[Row]:
    """Rows of results, for each design, pass and rank; slowest = 1.0 in those of the slowest."""
    workload, link = replay.placement.describe(replay.workload), replay.placement.link_name
    for design in replay.designs:
        name, placement = replay.placement.kernel, replay.placement
        if design is not replay.ours:
            name, placement = design.name, Placement(design.world_size, "zigzag", "ring")
        for passes, each in product((FORWARD, BOTH), design.ranks):
            measured = each.measured
            numbers = {
                "theoretic_ms": design.theoretic,
                "efficiency_percent": design.efficiency(each),
                "full_rate_efficiency_percent": design.full_rate_efficiency(each),
                "exposed_ms": measured.exposed,
                "host_ms": measured.host,
            }
            values = {what: times[passes] for what, times in numbers.items() if times}
            slowest = each is design.slowest(both=passes == BOTH)
            yield Row(
                REPLAY,
                name,
                passes,
                workload,
                {**placement.to_dict(), "link": link, "rank": each.rank},
                measured.runs[passes],
                design.rate(each.pairs, measured.times)[passes],
                None if measured.peak is None else measured.peak[passes],
                {**values, "slowest": float(slowest)},
            )
