"""Findings as rows of results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..results import RING, Row
from ..versus import beside
from ..workload import dtype_name
from .target import Finding, Target


def ring_rows(
    findings: Sequence[Finding],
    passes: Sequence[str],
    place: Mapping[str, Any],
    replayed: bool,
    baselines: Mapping[str, str],
) -> Iterator[Row]:
    """A row for each finding and passes.

    Args:
        findings: what was found.
        passes: what was wanted.
        place: what all have in common: backend, or for replays link.
        replayed: these are replays, of which the slowest rank counts.
        baselines: names of the targets that others are compared with, by the names of those.
    """
    rows = {
        (finding.target.name, each): _row(finding, each, place, replayed)
        for finding in findings
        for each in passes
    }
    for (name, each), row in rows.items():
        yield beside(row, rows[baselines[name], each]) if name in baselines else row


def _row(finding: Finding, passes: str, place: Mapping[str, Any], replayed: bool) -> Row:
    target, kernel = finding.target, finding.target.scenario.kernel
    common = (_workload(target), {**_placement(target), **place})
    if finding.failed is not None:
        return Row(RING, kernel, passes, *common, failed=finding.failed)
    timed = finding.timed[passes]
    row = Row(RING, kernel, passes, *common, timed.samples_ms)
    assert row.ms is not None, "a run at least"
    values = {
        "theoretic_ms": timed.theoretic_ms,
        "efficiency_percent": 100 * timed.theoretic_ms / row.ms,
        "iterations_per_second": 1e3 / row.ms,
    }
    if replayed:
        values["slowest"] = 1.0
    return Row(
        RING,
        row.implementation,
        passes,
        *common,
        timed.samples_ms,
        target.flops(passes) / row.ms / 1e9,
        timed.peak_bytes,
        values,
    )


def _workload(target: Target) -> dict[str, Any]:
    scenario = target.scenario
    workload = {
        "batch": scenario.batch,
        "seqlen": scenario.tokens,
        "nheads": scenario.nheads,
        "nheads_k": scenario.nheads_k,
        "headdim": scenario.headdim,
        "causal": scenario.causal,
        "window": [-1, -1],
        "dtype": dtype_name(scenario.dtype),
    }
    return {**workload, "lengths": list(scenario.lengths)} if scenario.packed else workload


def _placement(target: Target) -> dict[str, Any]:
    scenario = target.scenario
    ways = {name: getattr(scenario, name) for name in ("heads_k_stride", "sources_per_launch")}
    return {
        "world_size": scenario.world_size,
        "layout": scenario.layout,
        "route": scenario.route,
        "function": target.function,
        **{name: value for name, value in ways.items() if value is not None},
    }
