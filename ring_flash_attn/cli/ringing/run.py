"""Running `rfa ring`: on ranks or by replay, with a line that says what is being done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console

from ...bench.link import NONE
from ...bench.report import Replay
from ...bench.results import BOTH, FORWARD, Results, Row
from ...bench.rings import Finding, Settings, measure_rings, replay_rings, ring_rows
from ..measuring import make_results
from ..screen import status
from .choices import Chosen
from .way import Way


@dataclass(frozen=True)
class Found:
    """All that was found.

    Attributes:
        way: how ranks came about.
        repeats: rounds.
        passes: what was timed.
        findings: of each function, those that no kernel can do at the end.
        replays: by name, if there were any.
    """

    way: Way
    repeats: int
    passes: tuple[str, ...]
    findings: tuple[Finding, ...]
    replays: Mapping[str, Replay]

    def rows(self) -> tuple[Row, ...]:
        """For tables and files."""
        link = NONE if self.way.link is None else self.way.link.name
        place = {"link": link} if self.way.is_replay else {"backend": self.way.used_backend}
        return tuple(ring_rows(self.findings, self.passes, place, self.way.is_replay))

    def results(self) -> Results:
        """For a file."""
        details = {name: each.to_dict() for name, each in self.replays.items()}
        more = {"replays": details} if details else {}
        settings = {"repeats": self.repeats}
        return make_results(self.rows(), self.way.device, settings, details=more)


def run(chosen: Chosen, way: Way, repeats: int, grad: bool, console: Console) -> Found:
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
    return Found(way, repeats, passes, (*findings, *chosen.impossible), replays)
