"""Predictions beside stored replays: how right the simulator is about single ranks of 8 on an H200.

Constants that no source states were fitted on half of these rows (`fitted`); the other half tests.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..bench.links import LINKS, Topology
from ..bench.workload import BOTH, FORWARD, Placement, Workload, problem_of
from .gpus import INTERFERENCE, find_gpu
from .plans import price_rank
from .timeline import run

FILES = ("replays_h200.json", "replay_kernels_h200.json")


@dataclass(frozen=True, slots=True)
class Replayed:
    """One row: a rank's passes with the link, measured and predicted."""

    workload: Workload
    placement: Placement
    rank: int
    passes: str
    measured: float  # ms, the median
    predicted: float
    fitted: bool  # its half of the rows was used for the constants

    @property
    def error(self) -> float:
        """Relative; above 0 where the prediction is too slow."""
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        sources = self.placement.sources_per_launch or ""
        what = "documents" if self.workload.packed else "one document"
        half = "fitted" if self.fitted else "tested"
        return (
            f"{self.placement}, {sources or 'default'} sources, {what}, rank {self.rank}, "
            f"{self.passes}: {self.measured:.2f} ms, predicted {self.predicted:.2f} "
            f"({self.error:+.1%}, {half})"
        )


Key = tuple[str, int, bool, int]  # placement, sources, packed, rank


def stored(folder: Path) -> list[tuple[Workload, Placement, int, str, float]]:
    """The rows of our own ranks."""
    found = []
    for name in FILES:
        for row in json.loads((folder / name).read_text())["rows"]:
            if row["implementation"].startswith("baseline"):
                continue
            at, values = row["placement"], dict(row["workload"])
            values["seqlen"] *= at["world_size"]
            workload = Workload.from_dict(values)
            placement = Placement(
                at["world_size"],
                at["layout"],
                at["route"],
                row["implementation"],
                at.get("heads_k_stride"),
                at.get("sources_per_launch"),
            )
            median = statistics.median(row["samples_ms"])
            found.append((workload, placement, at["rank"], row["passes"], median))
    return found


def replayed(folder: Path, halves: Iterable[bool] = (True, False)) -> Iterator[Replayed]:
    """Every row of the halves that are asked for: fitted, tested."""
    rows, halves = stored(folder), tuple(halves)
    keys = sorted({_key(workload, at, rank) for workload, at, rank, *_ in rows})
    used = {key: number % 2 == 0 for number, key in enumerate(keys)}
    times: dict[Key, dict[str, float]] = {}
    for workload, placement, rank, passes, measured in rows:
        key = _key(workload, placement, rank)
        if used[key] not in halves:
            continue
        if key not in times:
            times[key] = predict(workload, placement, rank)
        yield Replayed(workload, placement, rank, passes, measured, times[key][passes], used[key])


def predict(workload: Workload, placement: Placement, rank: int) -> dict[str, float]:
    """Milliseconds of the forward pass and of both, on an H200 with NVLink 4 and without others."""
    topology = Topology.of(LINKS["nvlink4"])
    problem, gpu = problem_of(workload, placement), find_gpu("H200")
    ends = [
        run({rank: passes.stages}, topology, INTERFERENCE).ranks[rank].end * 1e3
        for passes in price_rank(workload, placement, problem, rank, gpu)
    ]
    return {FORWARD: ends[0], BOTH: sum(ends)}


def _key(workload: Workload, placement: Placement, rank: int) -> Key:
    return str(placement), placement.sources_per_launch or 0, workload.packed, rank
