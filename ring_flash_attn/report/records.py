"""Files of results as flat records: what the page's filters, charts and table work on."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bench.replays.results import Replay, replay_rows
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
        "device": source.results.device,
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
        "device": source.results.device,
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
    tflops, peak = number(row.tflops), dict(source.results.peak)
    if "world_size" in row.placement:  # of several devices, nobody moves all of a call
        peak.pop("gbps", None)
    elif tflops is None and ms:
        cost = _cost(row.workload, row.passes)
        tflops = None if cost is None else cost[0] / ms / 1e9
    values = {name: number(each) for name, each in row.values.items()}
    return {
        "batch": number(row.workload.get("batch")),
        "seqlen": number(row.workload.get("seqlen")),
        "world_size": number(row.placement.get("world_size")),
        "rank": number(row.placement.get("rank")),
        "ms": ms,
        "runs": len(row.samples_ms) or None,
        "tflops": tflops,
        "roof": roof(row.workload, row.passes, peak),
        "peak_mib": None if (size := number(row.peak_bytes)) is None else size / _MIB,
        "efficiency": values.get("efficiency_percent"),
        "slowest": values.get("slowest"),
        "error_share": _error_share(row),
    }


def roof(workload: Mapping[str, Any], passes: str, peak: Mapping[str, Any]) -> float | None:
    """The roofline: TFLOP/s that cannot be exceeded.

    It follows from the device's measured peaks and what a call must move; None where no peak of
    this dtype was measured.
    """
    compute, gbps = number(peak.get("tflops")), number(peak.get("gbps"))
    if compute is None or peak.get("dtype", workload.get("dtype")) != workload.get("dtype"):
        return None
    if gbps is None:
        return compute
    cost = _cost(workload, passes)
    return None if cost is None else min(compute, cost[0] / cost[1] * gbps / 1e3)


def _cost(workload: Mapping[str, Any], passes: str) -> tuple[float, int] | None:
    """FLOPs, and bytes that must be moved; None for a workload of other numbers."""
    if not {"nheads", "headdim", "seqlen"} <= set(workload):
        return None
    try:
        whole = Workload.from_dict(workload)
        return whole.flops(passes), whole.bytes(passes)
    except (KeyError, TypeError, ValueError):
        return None


def _error_share(row: Row) -> float | None:
    """The largest error, in parts of what is allowed."""
    shares = []
    for each in row.errors.values():
        largest, limit = number(each.get("max")), number(each.get("limit"))
        if largest is not None and limit:
            shares.append(largest / limit)
    return max(shares, default=None)


def timelines(sources: Sequence[Source]) -> Iterator[dict[str, Any]]:
    """Launches and transfers of the slowest rank of each replay that recorded them."""
    for source in sources:
        replays = source.results.details.get("replays", {})
        if not isinstance(replays, Mapping):
            raise ValueError(f"{source.name}: damaged: 'replays' holds no names")
        for name, values in replays.items():
            try:
                replay = Replay.from_dict(values)
                row, *_ = replay_rows(replay)
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise ValueError(f"{source.name}: replay {name!r} is damaged: {error!r}") from None
            if replay.timeline:
                yield {
                    "name": f"{name}, {replay.title}",
                    "file": source.name,
                    "kind": row.kind,
                    "implementation": row.implementation,
                    "device": source.results.device,
                    "shape": shape(row.workload),
                    "note": replay.note,
                    "bars": [
                        [bar.lane, bar.direction, bar.label, round(bar.start, 6), round(bar.end, 6)]
                        for bar in replay.timeline
                    ],
                }
