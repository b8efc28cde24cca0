"""Files of results as flat records: what the page's filters, charts and table work on."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..bench.replays.results import Replay, replay_rows
from ..bench.results import Results, Row, load, number
from ..bench.workload import SHORT_DTYPES, Workload

_WORDS = {
    "sources_per_launch": "{} in a launch",
    "heads_k_stride": "{} KV heads at a time",
    "ranks_per_node": "nodes of {}",
    "backend": "over {}",
}
_ANYTHING = "ring_attention"  # the function whose name does not say its layout and route
_ELSEWHERE = ("world_size", "rank", "link", "layout", "route", "function")  # said otherwise
_SHAPE = ("batch", "seqlen", "nheads", "nheads_k", "headdim", "causal", "window", "dtype")
Sources = Mapping[str, Results]  # by the name of the file


def read(paths: Sequence[Path]) -> Sources:
    """Every file once, with its folder where two have the same name.

    ValueError names the one that cannot be read.
    """
    if not paths:
        raise ValueError("no file to report on")
    once = list({path.resolve(): path for path in paths}.values())
    names = Counter(path.name for path in once)
    return {path.name if names[path.name] == 1 else str(path): load(path) for path in once}


def records(sources: Sources) -> list[dict[str, Any]]:
    """A record for each row of each file, in order; `case` is the same for all ranks of one."""
    cases: dict[str, int] = {}
    found = []
    for file, results in sources.items():
        for place, row in enumerate(results.rows):
            whole = {name: each for name, each in row.placement.items() if name != "rank"}
            parts = [file, row.implementation, row.passes, row.workload, whole]
            key = json.dumps(parts, sort_keys=True, default=str)
            case = cases.setdefault(key, len(cases))
            try:
                record = _record(row, results.peak)
            except (TypeError, ValueError, AttributeError) as error:
                raise ValueError(f"{file}: row {place} is damaged: {error}") from None
            found.append({"file": file, "device": results.device, "case": case, **record})
    return found


def _record(row: Row, peak: Mapping[str, Any]) -> dict[str, Any]:
    """Words and numbers; None where there is none."""
    placement, workload, tflops = row.placement, row.workload, number(row.tflops)
    samples = [each for each in map(number, row.samples_ms) if each is not None]
    ms = statistics.median(samples) if samples else None
    if "world_size" in placement:  # of several devices, nobody moves all of a call
        peak = {name: each for name, each in peak.items() if name != "gbps"}
    elif tflops is None and ms and (cost := _cost(workload, row.passes)) is not None:
        tflops = cost[0] / ms / 1e9
    size = number(row.peak_bytes)
    errors = ((number(each.get("max")), number(each.get("limit"))) for each in row.errors.values())
    shares = (largest / limit for largest, limit in errors if largest is not None and limit)
    return {
        "kind": str(row.kind),
        "implementation": str(row.implementation),
        "passes": str(row.passes),
        "shape": shape(workload),
        "feature": workload.get("feature"),
        "layout": placement.get("layout"),
        "route": placement.get("route"),
        "placement": placement_words(placement),
        "link": placement.get("link"),
        "dtype": workload.get("dtype"),
        "failed": None if row.failed is None else str(row.failed),
        "batch": number(workload.get("batch")),
        "seqlen": number(workload.get("seqlen")),
        "world_size": number(placement.get("world_size")),
        "rank": number(placement.get("rank")),
        "ms": ms,
        "runs": len(row.samples_ms) or None,
        "tflops": tflops,
        "roof": roof(workload, row.passes, peak),
        "peak_mib": None if size is None else size / 2**20,
        "efficiency": number(row.values.get("efficiency_percent")),
        "slowest": number(row.values.get("slowest")),
        "error_share": max(shares, default=None),  # the largest, in parts of what is allowed
        "row": row.to_dict(),
    }


def shape(workload: Mapping[str, Any]) -> str:
    """All of a workload but its batch and length, in words: a family of measurements."""
    heads, heads_k = workload.get("nheads", "?"), workload.get("nheads_k", workload.get("nheads"))
    counts = heads if heads == heads_k else f"{heads}/{heads_k}"
    words = [f"{counts} heads × {workload.get('headdim', '?')}"]
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
    first, shown = placement.get("function"), {"backend"}
    if first in (None, _ANYTHING):
        point = (placement[name] for name in ("layout", "route") if name in placement)
        first, shown = " × ".join(map(str, point)), {*placement}.difference(_ELSEWHERE)
    rest = (
        _WORDS.get(name, name + " {}").format(value)
        for name, value in placement.items()
        if name in shown and value is not None
    )
    return ", ".join(filter(None, (str(first), *rest)))


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


def timelines(sources: Sources) -> Iterator[dict[str, Any]]:
    """Launches and transfers of the slowest rank of each replay that recorded them."""
    for file, results in sources.items():
        replays = results.details.get("replays", {})
        if not isinstance(replays, Mapping):
            raise ValueError(f"{file}: damaged: 'replays' holds no names")
        for name, values in replays.items():
            try:
                replay = Replay.from_dict(values)
                row, *_ = replay_rows(replay)
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise ValueError(f"{file}: replay {name!r} is damaged: {error!r}") from None
            if replay.timeline:
                yield {
                    "name": f"{name}, {replay.title}",
                    "file": file,
                    "kind": row.kind,
                    "implementation": row.implementation,
                    "device": results.device,
                    "shape": shape(row.workload),
                    "note": replay.note,
                    "bars": [
                        [bar.lane, bar.direction, bar.label, round(bar.start, 6), round(bar.end, 6)]
                        for bar in replay.timeline
                    ],
                }
