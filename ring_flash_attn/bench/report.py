"""What a replay found, and what follows from it: rates, efficiencies, exposed communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from .holdings import Walked
from .link import Link
from .timeline import Bar

BOTH_FLOPS = 3.5  # forward and backward, in units of the forward pass


@dataclass(frozen=True, slots=True)
class Times:
    """ms of a forward pass, and of a forward and a backward pass."""

    forward: float
    both: float

    def __sub__(self, other: Times) -> Times:
        return Times(self.forward - other.forward, self.both - other.both)

    def __mul__(self, factor: float) -> Times:
        return Times(self.forward * factor, self.both * factor)

    def share_of(self, other: Times) -> Times:
        """In percent."""
        return Times(100 * self.forward / other.forward, 100 * self.both / other.both)


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes above inputs, outputs and gradients."""

    forward: int
    both: int


@dataclass(frozen=True, slots=True)
class Runs:
    """ms of every run, in order."""

    forward: tuple[float, ...]
    both: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """One contender.

    Attributes:
        removed: with messages that cost nothing; all there is on one device.
        linked: over the emulated link, if there is one.
        host: ms until all was queued of what `times` says.
        peak: None where it cannot be measured.
        runs: whose medians `times` are; None in old files.
    """

    removed: Times
    linked: Times | None
    host: Times
    peak: Peak | None
    runs: Runs | None = None

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
        walked: what its passes come to, computed; nothing for other designs.
        measured: times and memory.
    """

    rank: int
    tokens: int
    pairs: int
    walked: tuple[Walked, ...]
    measured: Measured


@dataclass(frozen=True, slots=True)
class Design:
    """One way to do it: its single-device base and its ranks.

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
        """World size times the base: what a rank would take if spreading cost nothing."""
        return self.base.times * self.world_size

    @property
    def at_full_rate(self) -> Times:
        """The same for the base's pairs at the rate of a block without a mask."""
        return self.full.times * (self.world_size * self.base_pairs / self.full_pairs)

    def slowest(self, both: bool) -> RankResult:
        """The rank that the others wait for, forward, or forward and backward together."""

        def time(each: RankResult) -> float:
            return each.measured.times.both if both else each.measured.times.forward

        return max(self.ranks, key=time)

    def rate(self, pairs: int, times: Times) -> Times:
        """TFLOP/s."""
        flops = pairs * self.flops_per_pair / 1e9  # and ms: 10⁹ for a TFLOP/s
        return Times(flops / times.forward, BOTH_FLOPS * flops / times.both)

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
        scenario: what was replayed, as plain values.
        device, versions: where.
        link: what was emulated; None: communication was removed.
        repeats: rounds of the medians.
        ours: this library.
        existing: the existing library's zigzag design, if asked for.
        timeline: of the slowest rank, if asked for.
    """

    scenario: dict[str, Any]
    device: str
    versions: dict[str, str]
    link: Link | None
    repeats: int
    ours: Design
    existing: Design | None = None
    timeline: tuple[Bar, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with what follows from them under "derived"."""
        designs = {"ours": self.ours, "existing": self.existing}
        derived = {name: _derived(each) for name, each in designs.items() if each is not None}
        return {**asdict(self), "derived": derived}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Replay:
        """The replay that `to_dict` wrote, perhaps by way of JSON."""
        given = {each.name: values[each.name] for each in fields(cls)}
        given["link"] = None if given["link"] is None else Link(**given["link"])
        given["ours"] = _design(given["ours"])
        given["existing"] = None if given["existing"] is None else _design(given["existing"])
        given["timeline"] = tuple(Bar(**bar) for bar in given["timeline"])
        return cls(**given)


def _derived(design: Design) -> dict[str, Any]:
    ranks = {
        str(each.rank): {
            "tflops": asdict(design.rate(each.pairs, each.measured.times)),
            "efficiency_percent": asdict(design.efficiency(each)),
            "full_rate_efficiency_percent": asdict(design.full_rate_efficiency(each)),
            "exposed_ms": None if (gap := each.measured.exposed) is None else asdict(gap),
        }
        for each in design.ranks
    }
    return {
        "theoretic_ms": asdict(design.theoretic),
        "at_full_rate_ms": asdict(design.at_full_rate),
        "slowest": {
            "forward": design.slowest(both=False).rank,
            "both": design.slowest(both=True).rank,
        },
        "ranks": ranks,
    }


def _design(values: Mapping[str, Any]) -> Design:
    ranks = tuple(
        RankResult(
            **{
                **each,
                "walked": tuple(Walked(**walked) for walked in each["walked"]),
                "measured": _measured(each["measured"]),
            }
        )
        for each in values["ranks"]
    )
    alone = {name: _measured(values[name]) for name in ("base", "full")}
    return Design(**{**values, **alone, "ranks": ranks})


def _measured(values: Mapping[str, Any]) -> Measured:
    linked, peak, runs = values["linked"], values["peak"], values.get("runs")
    return Measured(
        Times(**values["removed"]),
        None if linked is None else Times(**linked),
        Times(**values["host"]),
        None if peak is None else Peak(**peak),
        None if runs is None else Runs(tuple(runs["forward"]), tuple(runs["both"])),
    )
