"""What a replay found, and what follows from it: rates, efficiencies, rows of results; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from ..results import REPLAY, Row
from ..workload import BOTH, FLOPS, FORWARD, Link, Placement, Workload

COMPUTE, TRANSFERS = "compute", "transfers"  # lanes of a timeline
Times = dict[str, float]  # ms of the forward pass, and of "both" passes together


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
    """Times and memory of one rank, or of one device, by passes.

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
    peak: dict[str, int] | None
    runs: dict[str, list[float]]

    @property
    def times(self) -> Times:
        """What counts: over the link, if there is one."""
        return self.removed if self.linked is None else self.linked

    @property
    def is_host_bound(self) -> bool:
        """Whether queueing took longer than the device did: with no lead it would wait."""
        return any(self.host[passes] > self.times[passes] for passes in (FORWARD, BOTH))


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
        base_pairs, base: one rank's own tokens on one device; pairs are summed over query heads.
        full_pairs, full: as many queries and keys without a mask.
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

    def theoretic(self, passes: str) -> float:
        """World size times the base: ms that a rank would take if scaling were ideal."""
        return self.world_size * self.base.times[passes]

    def slowest(self, passes: str) -> RankResult:
        """The rank that the others wait for."""
        return max(self.ranks, key=lambda each: each.measured.times[passes])

    def rate(self, pairs: int, measured: Measured, passes: str) -> float:
        """TFLOP/s."""
        return FLOPS[passes] * pairs * self.flops_per_pair / measured.times[passes] / 1e9

    def values(self, result: RankResult, passes: str) -> dict[str, float]:
        """What follows for a rank, as in rows of results.

        Efficiency is theoretic over measured time; at full rate, the base's pairs take as long as
        they would without a mask. Exposed is what the link costs beyond what computation hides.
        """
        measured, theoretic = result.measured, self.theoretic(passes)
        time = measured.times[passes]
        full_rate = self.full.times[passes] * self.world_size * self.base_pairs / self.full_pairs
        exposed = {"exposed_ms": time - measured.removed[passes]} if measured.linked else {}
        return {
            "theoretic_ms": theoretic,
            "efficiency_percent": 100 * theoretic / time,
            "full_rate_efficiency_percent": 100 * full_rate / time,
            **exposed,
            "host_ms": measured.host[passes],
            "slowest": float(result is self.slowest(passes)),
        }


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
        return f"rank {self.ours.slowest(BOTH).rank} of {self.placement.world_size}"

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
        link, baseline = values["placement"]["link"], values["baseline"]
        read = {
            "workload": Workload.from_dict(values["workload"]),
            "placement": Placement(**{**values["placement"], "link": link and Link(**link)}),
            "ours": _design(values["ours"]),
            "baseline": baseline and _design(baseline),
            "timeline": tuple(Bar(**bar) for bar in values["timeline"]),
        }
        return cls(**{**values, **read})


def _design(values: Mapping[str, Any]) -> Design:
    single = {name: Measured(**values[name]) for name in ("base", "full")}
    return Design(**{**values, **single, "ranks": tuple(map(_rank, values["ranks"]))})


def _rank(values: Mapping[str, Any]) -> RankResult:
    costs = tuple(PassCost(**each) for each in values["costs"])
    return RankResult(**{**values, "costs": costs, "measured": Measured(**values["measured"])})


def replay_rows(replay: Replay) -> Iterator[Row]:
    """Rows of results, for each design, pass and rank; slowest = 1.0 in those of the slowest."""
    workload, link = replay.placement.describe(replay.workload), replay.placement.link_name
    for design in replay.designs:
        name, placement = replay.placement.kernel, replay.placement
        if design is not replay.ours:
            name, placement = design.name, Placement(design.world_size, "zigzag", "ring")
        for passes, each in product((FORWARD, BOTH), design.ranks):
            measured = each.measured
            yield Row(
                REPLAY,
                name,
                passes,
                workload,
                {**placement.to_dict(), "link": link, "rank": each.rank},
                tuple(measured.runs[passes]),
                design.rate(each.pairs, measured, passes),
                None if measured.peak is None else measured.peak[passes],
                design.values(each, passes),
            )
