"""Files of results as flat records: what the page's filters, charts and table work on."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bench.results import Results, Row, load, number
from ..bench.workload import SHORT_DTYPES, Workload

_WORDS = {
    "sources_per_launch": "{} in a launch",
    "heads_k_stride": "{} KV heads at a time",
    "backend": "over {}",
}
_ANYTHING = "ring_attention"  # the function whose name does not say its layout and route
_ELSEWHERE = ("world_size", "rank", "link", "layout", "route", "function")  # said otherwise
_SHAPE = ("batch", "seqlen", "nheads", "nheads_k", "headdim", "causal", "window", "dtype")
_MIB = 1 << 20


@dataclass(frozen=True)
class Source:
    """One file.

    Attributes:
        name: of the file, with its folder where two have the same name.
        results: what it holds.
    """

    name: str
    results: Results

    @property
    def device(self) -> str:
        """Where it was measured, in words."""
        return self.results.device


def read(paths: Sequence[Path]) -> list[Source]:
    """Every file once; ValueError that names the one that cannot be read."""
    if not paths:
        raise ValueError("no file to report on")
    once = list({path.resolve(): path for path in paths}.values())
    names = Counter(path.name for path in once)
    return [Source(path.name if names[path.name] == 1 else str(path), load(path)) for path in once]


def header(source: Source) -> dict[str, Any]:
    """What was measured where: a line of the page's first table."""
    results = source.results
    return {
        "file": source.name,
        "device": source.device,
        "command": str(results.command),
        "created": str(results.created),
        "commit": None if results.commit is None else str(results.commit),
        "versions": {str(name): str(each) for name, each in results.versions.items()},
        "settings": {str(name): str(each) for name, each in results.settings.items()},
        "peak": {str(name): each for name, each in results.peak.items()},
        "rows": len(results.rows),
    }


def records(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """A record for each row of each file, in order."""
    cases: dict[str, int] = {}
    found = []
    for source in sources:
        for place, row in enumerate(source.results.rows):
            try:
                words, numbers = _what(source, row, cases), _numbers(source, row)
            except (TypeError, ValueError, AttributeError) as error:
                raise ValueError(f"{source.name}: row {place} is damaged: {error}") from None
            found.append({**words, **numbers, "row": row.to_dict()})
    return found


def shape(workload: Mapping[str, Any]) -> str:
    """All of a workload but its batch and length, in words: a family of measurements."""
    heads, heads_k = workload.get("nheads", "?"), workload.get("nheads_k", workload.get("nheads"))
    words = [f"{heads} heads" if heads == heads_k else f"{heads}/{heads_k} heads"]
    words[0] += f" × {workload.get('headdim', '?')}"
    words.append("causal" if workload.get("causal") else "full")
    window = list(workload.get("window") or (-1, -1))
    if window != [-1, -1]:
        words.append("window " + ", ".join(map(str, window)))
    dtype = str(workload.get("dtype", "?"))
    words.append(SHORT_DTYPES.get(dtype, dtype))
    if "lengths" in workload:
        count = len(workload["lengths"])
        words.append(f"{count} document{'s' * (count != 1)}")
    rest = [name for name in workload if name not in (*_SHAPE, "lengths", "feature")]
    return ", ".join([*words, *(f"{name} {workload[name]}" for name in rest)])


def placement_words(placement: Mapping[str, Any]) -> str:
    """How it was spread, but for the number of ranks and the link: "zigzag × ring".

    A function's name says it all, and what it does by default.
    """
    function = placement.get("function")
    point = " × ".join(str(placement[name]) for name in ("layout", "route") if name in placement)
    if function is not None and function != _ANYTHING:
        backend = placement.get("backend")
        return str(function) if backend is None else f"{function}, over {backend}"
    rest = [
        _WORDS.get(name, name + " {}").format(value)
        for name, value in placement.items()
        if name not in _ELSEWHERE
    ]
    return ", ".join([*([point] if point else []), *rest])


def _what(source: Source, row: Row, cases: dict[str, int]) -> dict[str, Any]:
    """Words: who, what and where. `case` is the same for all ranks of a measurement."""
    placement, workload = row.placement, row.workload
    whole = {name: each for name, each in placement.items() if name != "rank"}
    key = json.dumps(
        [source.name, row.implementation, row.passes, workload, whole], sort_keys=True, default=str
    )
    return {
        "file": source.name,
        "kind": str(row.kind),
        "implementation": str(row.implementation),
        "passes": str(row.passes),
        "device": source.device,
        "shape": shape(workload),
        "feature": workload.get("feature"),
        "layout": placement.get("layout"),
        "route": placement.get("route"),
        "placement": placement_words(placement),
        "link": placement.get("link"),
        "dtype": workload.get("dtype"),
        "case": cases.setdefault(key, len(cases)),
        "failed": None if row.failed is None else str(row.failed),
    }


def _numbers(source: Source, row: Row) -> dict[str, Any]:
    """Numbers, None where there is none. One device without tflops: they follow from its time."""
    samples = [each for each in map(number, row.samples_ms) if each is not None]
    ms = statistics.median(samples) if samples else None
    spread = "world_size" in row.placement
    tflops = number(row.tflops)
    if tflops is None and ms and not spread:
        tflops = _rate(row, ms)
    values = {name: number(each) for name, each in row.values.items()}
    return {
        "batch": number(row.workload.get("batch")),
        "seqlen": number(row.workload.get("seqlen")),
        "world_size": number(row.placement.get("world_size")),
        "rank": number(row.placement.get("rank")),
        "ms": ms,
        "runs": len(row.samples_ms) or None,
        "tflops": tflops,
        "roof": _roof(source, row, spread),
        "peak_mib": None if (size := number(row.peak_bytes)) is None else size / _MIB,
        "efficiency": values.get("efficiency_percent"),
        "slowest": values.get("slowest"),
        "error_share": _error_share(row),
    }


def _rate(row: Row, ms: float) -> float | None:
    if not {"nheads", "headdim", "seqlen"} <= set(row.workload):
        return None
    try:
        return Workload.from_dict(row.workload).flops(row.passes) / ms / 1e9
    except (KeyError, TypeError, ValueError):  # a workload of other numbers
        return None


def _roof(source: Source, row: Row, spread: bool) -> float | None:
    """Memory's part counts on one device only: of several, nobody moves all of a call."""
    peak = dict(source.results.peak)
    if spread:
        peak.pop("gbps", None)
    try:
        return number(roof(row.workload, row.passes, peak))
    except (KeyError, TypeError, ValueError):
        return None


def roof(workload: Mapping[str, Any], passes: str, peak: Mapping[str, Any]) -> float | None:
    """The roofline: TFLOP/s that cannot be exceeded.

    It follows from the device's measured peaks and what a call must move; None where no peak of
    this dtype was measured.
    """
    if "tflops" not in peak or peak.get("dtype", workload.get("dtype")) != workload.get("dtype"):
        return None
    compute = float(peak["tflops"])
    if "gbps" not in peak:
        return compute
    whole = Workload.from_dict(workload)
    intensity = whole.flops(passes) / whole.bytes(passes)  # FLOPs for a byte
    return min(compute, intensity * float(peak["gbps"]) / 1e3)


def _error_share(row: Row) -> float | None:
    """The largest error, in parts of what is allowed."""
    shares = []
    for each in row.errors.values():
        largest, limit = number(each.get("max")), number(each.get("limit"))
        if largest is not None and limit:
            shares.append(largest / limit)
    return max(shares, default=None)
