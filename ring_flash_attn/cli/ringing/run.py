"""Running `rfa ring`: on ranks or by replay, with a line that says what is being done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from rich.console import Console

from ...bench.link import NONE
from ...bench.machine import make_results
from ...bench.ranks import Finding, Settings, measure_rings, replay_rings, ring_rows
from ...bench.report import Replay
from ...bench.results import BOTH, FORWARD, Results, Row
from ...bench.versus import Limits
from ..screen import status
from ..versus import compared
from .choices import Chosen
from .way import Way


@dataclass(frozen=True)
class Found:
    """All that was found.

    Attributes:
        way: how ranks came about.
        repeats: rounds.
        passes: what was timed.
        findings: of each function and kernel, those that the kernel cannot do at the end.
        replays: by name, if there were any.
        versus: kernel that the others are compared with; "" if there are no others.
        baselines: the targets with it, by the names of those that are compared with them.
        limits: of a gate.
    """

    way: Way
    repeats: int
    passes: tuple[str, ...]
    findings: tuple[Finding, ...]
    replays: Mapping[str, Replay]
    versus: str
    baselines: Mapping[str, str]
    limits: Limits | None

    def rows(self) -> tuple[Row, ...]:
        """For tables and files."""
        link = NONE if self.way.link is None else self.way.link.name
        place = {"link": link} if self.way.is_replay else {"backend": self.way.used_backend}
        replayed = self.way.is_replay
        return tuple(ring_rows(self.findings, self.passes, place, replayed, self.baselines))

    def groups(self) -> list[tuple[Row, list[Row]]]:
        """Rows of each baseline, with those that are compared with it."""
        names = [finding.target.name for finding in self.findings]
        rows = dict(zip(product(names, self.passes), self.rows(), strict=True))
        return [
            (
                rows[base, passes],
                [rows[name, passes] for name, its in self.baselines.items() if name != its == base],
            )
            for passes in self.passes
            for base in dict.fromkeys(self.baselines.values())
        ]

    def results(self) -> Results:
        """For a file."""
        details = {name: each.to_dict() for name, each in self.replays.items()}
        more = {"replays": details} if details else {}
        settings = {"repeats": self.repeats, **compared(self.versus, self.limits)}
        return make_results(self.rows(), self.way.device, settings, details=more)


def run(
    chosen: Chosen, way: Way, repeats: int, grad: bool, limits: Limits | None, console: Console
) -> Found:
    """Time the targets; `launch.RanksFailed` if a rank died in the middle of the rounds."""
    passes = (FORWARD, BOTH) if grad else (FORWARD,)
    replays: dict[str, Replay] = {}
    with status(console, "replaying" if way.backend is None else "timing") as report:
        if way.backend is None:
            findings, replays = replay_rings(chosen.targets, way.link, repeats, passes, report)
        else:
            where = (way.world_size, way.device.type, way.backend)
            settings = Settings(*where, repeats, grad, way.timeout)
            findings = measure_rings(chosen.targets, settings, report)
    every = (*findings, *chosen.impossible)
    beside = (chosen.versus, chosen.baselines, limits)
    return Found(way, repeats, passes, every, replays, *beside)
