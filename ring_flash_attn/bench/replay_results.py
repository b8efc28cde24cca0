"""Replays as rows of results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .report import Design, Measured, RankResult, Replay
from .results import BOTH, FORWARD, REPLAY, Row


def replay_rows(replay: Replay) -> Iterator[Row]:
    """A row for each design, rank and way; rows of the slowest rank have the value slowest = 1."""
    scenario = replay.scenario
    workload = {
        "batch": scenario["batch"],
        "seqlen": sum(scenario["lengths"]),
        "nheads": scenario["nheads"],
        "nheads_k": scenario["nheads_k"],
        "headdim": scenario["headdim"],
        "causal": scenario["causal"],
        "window": [-1, -1],
        "dtype": scenario["dtype"],
    }
    if scenario["packed"]:
        workload["lengths"] = list(scenario["lengths"])
    placement: dict[str, Any] = {
        "world_size": scenario["world_size"],
        "link": "none" if replay.link is None else replay.link.name,
    }
    ways = {name: scenario[name] for name in ("heads_k_stride", "sources_per_launch")}
    ours = {
        "layout": scenario["layout"],
        "route": scenario["route"],
        **{name: value for name, value in ways.items() if value is not None},
    }
    yield from _rows(replay.ours, scenario["kernel"], workload, {**placement, **ours})
    if replay.existing is not None:
        theirs = {"layout": "zigzag", "route": "ring"}
        yield from _rows(replay.existing, replay.existing.name, workload, {**placement, **theirs})


def _rows(
    design: Design, name: str, workload: dict[str, Any], placement: dict[str, Any]
) -> Iterator[Row]:
    for passes in (FORWARD, BOTH):
        slowest = design.slowest(both=passes == BOTH)
        for each in design.ranks:
            yield Row(
                REPLAY,
                name,
                passes,
                workload,
                {**placement, "rank": each.rank},
                samples(each.measured, passes),
                getattr(design.rate(each.pairs, each.measured.times), passes),
                None if each.measured.peak is None else getattr(each.measured.peak, passes),
                {**_values(design, each, passes), "slowest": float(each is slowest)},
            )


def samples(measured: Measured, passes: str) -> tuple[float, ...]:
    """Every run; the median alone of old files."""
    if measured.runs is None:
        return (getattr(measured.times, passes),)
    found: tuple[float, ...] = getattr(measured.runs, passes)
    return found


def _values(design: Design, each: RankResult, passes: str) -> dict[str, float]:
    values = {
        "theoretic_ms": design.theoretic,
        "efficiency_percent": design.efficiency(each),
        "full_rate_efficiency_percent": design.full_rate_efficiency(each),
        "exposed_ms": each.measured.exposed,
        "host_ms": each.measured.host,
    }
    return {name: getattr(value, passes) for name, value in values.items() if value is not None}
