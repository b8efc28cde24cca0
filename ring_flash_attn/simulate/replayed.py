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
from .forecast import sample
from .gpus import INTERFERENCE, find_gpu
from .plans import price_rank
from .timeline import run

FUNCTIONS = "ring_h200.json"  # the slowest of three ranks of each distributed function
FILES = ("replays_h200.json", "replay_kernels_h200.json")
PACKS = "packs_h200.json"  # packs of documents that were drawn: no row was used for anything
_EIGHT = 8  # ranks of a group


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


def stored(
    folder: Path, files: Iterable[str] = FILES
) -> list[tuple[Workload, Placement, int, str, float]]:
    """The rows of our own ranks of 8."""
    found = []
    for name in files:
        for row in json.loads((folder / name).read_text())["rows"]:
            at, values = row["placement"], dict(row["workload"])
            if row["implementation"].startswith("baseline") or at["world_size"] != _EIGHT:
                continue
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


def packs(folder: Path) -> Iterator[Replayed]:
    """Every row of the packs that were drawn."""
    times: dict[tuple[str, str, int], dict[str, float]] = {}
    for workload, placement, rank, passes, measured in stored(folder, [PACKS]):
        key = str(placement), str(workload.drawn), rank
        if key not in times:
            times[key] = predict(workload, placement, rank)
        yield Replayed(workload, placement, rank, passes, measured, times[key][passes], False)


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


def functions(folder: Path) -> Iterator[tuple[str, str, float, float]]:
    """Distributed functions: name, passes, measured and predicted ms of the slowest rank.

    None of these rows was used to fit anything, and most have other layouts or routes.
    """
    predicted: dict[str, dict[str, float]] = {}
    for row in json.loads((folder / FUNCTIONS).read_text())["rows"]:
        at, values = row["placement"], dict(row["workload"])
        name, size = at["function"], at["world_size"]
        if name not in predicted:
            values["seqlen"] *= size
            parameters = [at.get(each) for each in ("heads_k_stride", "sources_per_launch")]
            placement = Placement(
                size, at["layout"], at["route"], row["implementation"], *parameters
            )
            workload = Workload.from_dict(values)
            busiest = sample(problem_of(workload, placement))[0]
            ranks = [predict(workload, placement, rank) for rank in {0, busiest, size - 1}]
            predicted[name] = {way: max(each[way] for each in ranks) for way in (FORWARD, BOTH)}
        measured = statistics.median(row["samples_ms"])
        yield name, row["passes"], measured, predicted[name][row["passes"]]


def function_table(folder: Path) -> list[str]:
    """That of docs/planner.md."""
    lines = ["| function | passes | measured, ms | predicted | error |", "|---|---|---|---|---|"]
    for name, passes, measured, predicted in functions(folder):
        what = "forward + backward" if passes == BOTH else passes
        error = _percent(predicted / measured - 1, "+")
        lines.append(f"| `{name}` | {what} | {measured:.2f} | {predicted:.2f} | {error} |")
    return lines


def tables(rows: Iterable[Replayed], drawn: Iterable[Replayed]) -> list[str]:
    """Those of docs/planner.md: both halves and packs, and by kernel, layout and route."""
    rows, drawn = list(rows), list(drawn)
    lines = ["| | rows | median error | worst | within 10 % |", "|---|---|---|---|---|"]
    fitted, tested = ([row for row in rows if row.fitted is half] for half in (True, False))
    for name, some in (("fitted", fitted), ("tested", tested), ("packs", drawn)):
        errors = [abs(row.error) for row in some]
        numbers = f"{_percent(statistics.median(errors))} | {_percent(max(errors))}"
        within = sum(error <= 0.1 for error in errors)
        lines.append(f"| {name} | {len(errors)} | {numbers} | {within} |")
    rows += drawn
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        what = "documents" if row.workload.packed else "one document"
        where = f"{row.placement.layout} × {row.placement.route}"
        groups.setdefault((row.placement.kernel, where, what), []).append(row.error)
    lines += ["", "| kernel | layout × route | tokens | rows | median error | from … to |"]
    lines.append("|---|---|---|---|---|---|")
    for (kernel, where, what), errors in sorted(groups.items()):
        middle = _percent(statistics.median(map(abs, errors)))
        span = f"{_percent(min(errors), '+')} … {_percent(max(errors), '+')}"
        lines.append(f"| `{kernel}` | {where} | {what} | {len(errors)} | {middle} | {span} |")
    return lines


def _percent(share: float, sign: str = "") -> str:
    return f"{100 * share:{sign}.1f} %".replace("-", "−")
