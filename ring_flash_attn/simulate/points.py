"""Points: measured times of kernels on one GPU, from which rates are fitted; files in `data/`."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ..bench.workload import BACKWARD, BOTH, FORWARD, Workload
from .rates import Band, causal, full, turned

DATA = Path(__file__).parent / "data"
_NAMES = {"SDPA cuDNN": "cudnn", "flash-attn 4": "fa4"}  # how `rfa compare` calls libraries
KERNELS = ("triton", "cute", "fa4", "cudnn", "fa2")
SUSTAINED = 3.0  # milliseconds from which a run is long enough for the GPU's power limit


class Point(NamedTuple):
    """One kernel on one shape, in one direction."""

    gpu: str
    kernel: str
    passes: str  # "forward" or "backward"
    batch: int
    nheads: int
    headdim: int
    headdim_v: int
    lengths: tuple[int, ...]  # of documents, or of one sequence
    causal: bool
    ms: float
    sustained: bool  # many runs in a row, or a long one: at the clock of long work
    source: str

    def shards(self) -> list[list[Band]]:
        """The bands that `rates.seconds` takes."""
        make = causal if self.causal else full
        bands = [make(length, length) for length in self.lengths]
        return [[turned(band) if self.passes == BACKWARD else band] for band in bands]

    @property
    def rows(self) -> int:
        """Queries, over batch and heads."""
        return sum(self.lengths) * self.batch * self.nheads


@cache
def read_points() -> tuple[Point, ...]:
    """All points of all files."""
    return tuple(point for path in sorted(DATA.glob("*.csv")) for point in _read(path))


def _read(path: Path) -> Iterable[Point]:
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            yield Point(
                row["gpu"],
                row["kernel"],
                row["passes"],
                *(int(row[name]) for name in ("batch", "nheads", "headdim", "headdim_v")),
                tuple(map(int, row["lengths"].split())),
                row["causal"] == "True",
                float(row["ms"]),
                row["sustained"] == "True",
                row["source"],
            )


def write_points(points: Sequence[Point], path: Path) -> None:
    """The file that `read_points` reads."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Point._fields)
        for point in points:
            lengths = " ".join(map(str, point.lengths))
            writer.writerow(point._replace(lengths=lengths))  # type: ignore[arg-type]


def points_of_results(folder: Path) -> list[Point]:
    """Those of an H200: single calls of `rfa compare`, and the bases of replays."""
    found = []
    for path in sorted(folder.glob("*_h200.json")):
        if path.name.startswith("lab_") or "graphs" in path.name:
            continue
        rows = json.loads(path.read_text())["rows"]
        found += [*_of_compared(rows, path.name), *_of_bases(rows, path.name)]
    return found


def _of_compared(rows: Iterable[Mapping[str, Any]], source: str) -> Iterable[Point]:
    runs: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        name = _NAMES.get(row["implementation"], row["implementation"])
        if row["kind"] == "compare" and name in KERNELS and "samples_ms" in row:
            of_one = runs.setdefault((name, json.dumps(row["workload"])), {})
            of_one[row["passes"]] = statistics.median(row["samples_ms"])
    for (name, text), times in runs.items():
        workload = Workload.from_dict(json.loads(text))
        plain = workload.window == (-1, -1) and not set(workload.features) - {"headdim_v"}
        if plain and times.keys() >= {FORWARD, BOTH}:
            yield from _points(name, workload, times, False, source)


def _of_bases(rows: Iterable[Mapping[str, Any]], source: str) -> Iterable[Point]:
    """The same kernel on a rank's own tokens, many times in a row: the base of a replay."""
    runs: dict[str, dict[str, float]] = {}
    for row in rows:
        name, placement = row["implementation"], row.get("placement", {})
        if row["kind"] == "replay" and name in KERNELS and placement["rank"] == 0:
            world_size = placement["world_size"]
            base = row["values"]["theoretic_ms"] / world_size
            workload = dict(row["workload"])
            if "lengths" in workload:
                workload["lengths"] = [length // world_size for length in workload["lengths"]]
            key = json.dumps([name, workload, {**placement, "link": None}])
            runs.setdefault(key, {})[row["passes"]] = base
    for text, times in runs.items():
        name, workload, _ = json.loads(text)
        yield from _points(name, Workload.from_dict(workload), times, True, source)


def _points(
    kernel: str, workload: Workload, times: Mapping[str, float], in_a_row: bool, source: str
) -> Iterable[Point]:
    for passes, ms in ((FORWARD, times[FORWARD]), (BACKWARD, times[BOTH] - times[FORWARD])):
        yield Point(
            "H200",
            kernel,
            passes,
            workload.batch,
            workload.nheads,
            workload.headdim,
            workload.headdim_v or workload.headdim,
            workload.lengths,
            workload.causal,
            round(ms, 5),
            in_a_row or ms > SUSTAINED,
            f"results/{source}",
        )
