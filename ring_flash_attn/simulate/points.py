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
LONG = 3.0  # milliseconds of a run that is long enough for the GPU's power limit
# TFLOP/s from which that limit lowers the clock of an H200 in long work (forward and backward):
# between packed documents (517), which keep it, and one document (590 and more), which does not.
HOT = 530.0


class Point(NamedTuple):
    """One kernel on one shape, in one direction."""

    gpu: str
    kernel: str
    passes: str  # "forward" or "backward"
    batch: int
    nheads: int
    nheads_k: int
    headdim: int
    headdim_v: int
    lengths: tuple[int, ...]  # of documents, or of one sequence
    causal: bool
    ms: float
    sustained: bool  # at the clock of long work, which the GPU's power limit allows
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
            sizes = {
                each: int(row[each])
                for each in ("batch", "nheads", "nheads_k", "headdim", "headdim_v")
            }
            yield Point(
                **{each: row[each] for each in ("gpu", "kernel", "passes", "source")},  # type: ignore[arg-type]
                **sizes,  # type: ignore[arg-type]
                lengths=tuple(map(int, row["lengths"].split())),
                causal=row["causal"] == "True",
                ms=float(row["ms"]),
                sustained=row["sustained"] == "True",
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
        if path.name.startswith(("lab_", "packs_")) or "graphs" in path.name:
            continue
        content = json.loads(path.read_text())
        rows, replays = content["rows"], content.get("details", {}).get("replays", {})
        found += [*_of_compared(rows, path.name), *_of_bases(rows, path.name)]
        found += _without_mask(replays, path.name)
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
            yield from _points(name, workload, times, None, source)


def _of_bases(rows: Iterable[Mapping[str, Any]], source: str) -> Iterable[Point]:
    """The same kernel on a rank's own tokens, many times in a row: the base of a replay."""
    runs: dict[str, dict[str, float]] = {}
    for row in rows:
        name, placement = row["implementation"], row.get("placement", {})
        if row["kind"] == "replay" and name in KERNELS and placement["rank"] == 0:
            world_size = placement["world_size"]
            workload = dict(row["workload"])
            if "lengths" in workload:
                workload["lengths"] = [length // world_size for length in workload["lengths"]]
            key = json.dumps([name, workload, {**placement, "link": None}])
            runs.setdefault(key, {})[row["passes"]] = row["values"]["theoretic_ms"] / world_size
    for text, times in runs.items():
        name, workload, _ = json.loads(text)
        base = Workload.from_dict(workload)
        yield from _points(name, base, times, _is_hot(base, times), source)


def _without_mask(replays: Mapping[str, Any], source: str) -> Iterable[Point]:
    """The same on as many tokens without a mask, of files that keep it."""
    for each in replays.values():
        placement, share = each["placement"], Workload.from_dict(each["workload"])
        share = share.share(placement["world_size"])
        plain = Workload(1, share.seqlen, share.nheads, share.nheads_k, share.headdim)
        base, full = (each["ours"][key]["removed"] for key in ("base", "full"))
        hot = _is_hot(share, base)
        yield from _points(placement["kernel"], plain, full, hot, source)


def _is_hot(base: Workload, times: Mapping[str, float]) -> bool:
    """Whether a replay, in which its base is run again and again, is work at a lower clock."""
    return base.flops(BOTH) / times[BOTH] / 1e9 > HOT


def _points(
    kernel: str, workload: Workload, times: Mapping[str, float], sustained: bool | None, source: str
) -> Iterable[Point]:
    for passes, ms in ((FORWARD, times[FORWARD]), (BACKWARD, times[BOTH] - times[FORWARD])):
        yield Point(
            "H200",
            kernel,
            passes,
            workload.batch,
            workload.nheads,
            workload.nheads_k,
            workload.headdim,
            workload.headdim_v or workload.headdim,
            workload.lengths,
            workload.causal,
            round(ms, 5),
            ms > LONG if sustained is None else sustained,
            f"results/{source}",
        )
