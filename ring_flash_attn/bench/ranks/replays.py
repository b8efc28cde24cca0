"""`replay_rings`: the points of distributed functions on one device, by replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ..link import Link
from ..replay_results import samples
from ..report import Replay
from ..results import BOTH
from ..scenario import Scenario
from ..session import Session
from .on_rank import in_words
from .target import Finding, Target, Timed


def replay_rings(
    targets: Sequence[Target],
    link: Link | None,
    repeats: int,
    passes: Sequence[str],
    report: Callable[[str], None],
) -> tuple[list[Finding], dict[str, Replay]]:
    """Replay ranks of each target, one at a time; targets of one scenario share a replay.

    Of all ranks these three: the first, which receives most, the last, and the one with most pairs.

    Args:
        targets: what to time.
        link: what is emulated; None: communication is removed.
        repeats: rounds.
        passes: what is wanted.
        report: is told what is being done.

    Returns:
        What was found, and the replays by the name of the first target that they are for.
    """
    known: dict[Scenario, Replay | str] = {}
    findings: list[Finding] = []
    replays: dict[str, Replay] = {}
    for target in targets:
        if target.scenario not in known:
            known[target.scenario] = _replayed(target, link, repeats, report)
        found = known[target.scenario]
        if isinstance(found, str):
            findings.append(Finding(target, failed=found))
            continue
        if found not in replays.values():
            replays[target.name] = found
        findings.append(Finding(target, {each: _timed(found, each) for each in passes}))
    return findings, replays


def _replayed(
    target: Target, link: Link | None, repeats: int, report: Callable[[str], None]
) -> Replay | str:
    """The replay, or why there is none."""

    def say(line: str) -> None:
        report(f"{target.name}: {line}")

    scenario = target.scenario
    ranks = sorted({0, scenario.busiest_rank, scenario.world_size - 1})
    try:
        return Session(replace(scenario, ranks=tuple(ranks)), link, repeats, say).run(None, False)
    except Exception as error:  # of any library: the other functions go on
        failed = in_words(error)
    if target.scenario.device.type == "cuda":
        torch.cuda.empty_cache()
    return failed


def _timed(replay: Replay, passes: str) -> Timed:
    ranks = [each.measured for each in replay.ours.ranks]
    peaks = [getattr(each.peak, passes) for each in ranks if each.peak is not None]
    slowest = replay.ours.slowest(both=passes == BOTH)
    return Timed(
        samples(slowest.measured, passes),
        getattr(replay.ours.theoretic, passes),
        max(peaks, default=None),
    )
