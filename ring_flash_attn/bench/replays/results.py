"""What a replay found, and what follows from it: rates, efficiencies, rows of results; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from ..links import Link, Topology, link_from_dict
from ..results import REPLAY, Row, host_mark
from ..workload import BACKWARD, BOTH, FLOPS, FORWARD, Placement, Workload

# Lanes of a timeline; NETWORK has the transfers between nodes.
COMPUTE, TRANSFERS, NETWORK = LANES = ("compute", "transfers", "network")
Times = dict[str, float]  # ms of the forward pass, and of "both" passes together


@dataclass(frozen=True, slots=True)
class Bar:
    """One launch or one post of a timeline."""

    lane: str  # COMPUTE, TRANSFERS or NETWORK
    direction: str  # "forward" or "backward"
    label: str  # number of its step
    start: float  # ms since the run began
    end: float


@dataclass(frozen=True, slots=True)
class PassCost:
    """What one pass of a rank launches, sends and holds; counted, not measured."""

    launches: int
    posts: int  # with messages
    sent: int  # bytes
    received: int
    held: dict[str, int]  # bytes beside inputs and outputs, by name; of each the most at any time


@dataclass(frozen=True, slots=True)
class Measured:
    """Times and memory of one rank, or of one device, by passes."""

    removed: Times  # with messages that cost nothing; all there is on one device
    linked: Times | None  # over the emulated link, if there is one
    host: Times  # ms until all was queued of what `times` says
    peak: dict[str, int] | None  # bytes above inputs, outputs and gradients, where measured
    runs: dict[str, list[float]]  # every run, in order; `times` are their medians

    @property
    def times(self) -> Times:
        """What counts: over the link, if there is one."""
        return self.removed if self.linked is None else self.linked

    def ms(self, passes: str) -> float:
        """Of these passes; backward alone is what both take beyond forward."""
        times = self.times
        return times[BOTH] - times[FORWARD] if passes == BACKWARD else times[passes]

    def host_ms(self, passes: str) -> float:
        """The host's, likewise."""
        host = self.host
        return host[BOTH] - host[FORWARD] if passes == BACKWARD else host[passes]

    @property
    def is_host_bound(self) -> bool:
        """Whether queueing took longer than the device did: with no lead it would wait."""
        return any(host_mark(self.host[each], self.times[each]) for each in (FORWARD, BOTH))


@dataclass(frozen=True, slots=True)
class RankResult:
    """One rank."""

    rank: int
    tokens: int
    pairs: int  # (query, key) pairs that it computes, summed over query heads
    costs: tuple[PassCost, ...]  # of its forward and its backward pass; none of the baseline's
    measured: Measured


@dataclass(frozen=True, slots=True)
class Design:
    """This library or the baseline: its ranks, and the same kernel on one device."""

    name: str
    world_size: int
    flops_per_pair: int  # of the forward pass, for a pair and a query head
    base_pairs: int  # of one rank's own tokens, summed over query heads
    base: Measured  # these on one device
    full_pairs: int  # of as many queries and keys without a mask
    full: Measured
    ranks: tuple[RankResult, ...]  # those that were replayed

    def theoretic(self, passes: str) -> float:
        """World size times the base: ms that a rank would take if scaling were ideal."""
        return self.world_size * self.base.times[passes]

    def slowest(self, passes: str) -> RankResult:
        """The rank that the others wait for."""
        return max(self.ranks, key=lambda each: each.measured.ms(passes))

    def rate(self, pairs: int, measured: Measured, passes: str) -> float:  # TFLOP/s
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
    """All that a replay found."""

    workload: Workload  # what all ranks compute together
    placement: Placement  # with the kernel that was chosen
    device: str
    versions: dict[str, str]
    repeats: int  # rounds of the medians
    ours: Design
    baseline: Design | None = None  # ring-flash-attn 0.1.8's, if asked for
    timeline: tuple[Bar, ...] = ()  # of the slowest rank, if asked for

    @property
    def link(self) -> Link | Topology | None:
        """What was emulated; None: communication was removed."""
        return self.placement.link

    @property
    def designs(self) -> tuple[Design, ...]:
        return (self.ours,) if self.baseline is None else (self.ours, self.baseline)

    @property
    def name(self) -> str:
        """The design's, and where its documents come from if they were drawn."""
        drawn = self.workload.drawn
        return f"{self.ours.name}{f', {drawn.documents}, seed {drawn.seed}' if drawn else ''}"

    @property
    def title(self) -> str:
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
        link, baseline = link_from_dict(values["placement"]["link"]), values["baseline"]
        read = {
            "workload": Workload.from_dict(values["workload"]),
            "placement": Placement(**{**values["placement"], "link": link}),
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


@dataclass(frozen=True, slots=True)
class PackRate:
    """One pass of a pack that was drawn: its slowest rank, which all others wait for."""

    seed: int
    ndocuments: int
    longest: int  # tokens
    rank: int
    ms: float
    tflops: float  # per GPU: the FLOPs of an average rank, in the time of the slowest


@dataclass(frozen=True, slots=True)
class PackRates:
    """One pass of several packs."""

    passes: str
    ms: float  # of the slowest ranks, summed over packs
    tflops: float  # per GPU: FLOPs of an average rank, summed over packs, in these ms
    packs: tuple[PackRate, ...]

    @property
    def worst(self) -> PackRate:
        """The pack with the fewest TFLOP/s."""
        return min(self.packs, key=lambda pack: pack.tflops)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "worst": asdict(self.worst)}


def pack_rates(replays: Sequence[Replay], passes: str) -> PackRates:
    """TFLOP/s per GPU, forward or backward, over packs that were drawn: ΣFLOPs / Σtime."""
    packs, flops = [], 0.0
    for each in replays:
        drawn, slowest = each.workload.drawn, each.ours.slowest(passes)
        assert drawn is not None
        ms = slowest.measured.ms(passes)
        own = each.workload.flops(passes) / each.placement.world_size
        lengths = each.workload.lengths
        sizes = (drawn.seed, len(lengths), max(lengths), slowest.rank)
        packs.append(PackRate(*sizes, ms, own / ms / 1e9))
        flops += own
    total = sum(pack.ms for pack in packs)
    return PackRates(passes, total, flops / total / 1e9, tuple(packs))
