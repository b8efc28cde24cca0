"""What `rfa verify` found, as rows of results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .results import BOTH, VERIFY, Row


def verify_rows(values: Mapping[str, Any]) -> Iterator[Row]:
    """A row for each case and rank.

    Args:
        values: all that was found, as plain values: "configuration", and "cases" with their
            question, function, layout, route, kernel, reason and tensors.
    """
    for case in values["cases"]:
        yield from _rows(case, values["configuration"]["world_size"])


def _rows(case: Mapping[str, Any], world_size: int) -> Iterator[Row]:
    name = case["used_kernel"] or case["kernel"]
    workload, placement = _workload(case), _placement(case, world_size)
    if case["reason"]:
        yield Row(VERIFY, name, BOTH, workload, placement, failed=case["reason"])
        return
    ranks: dict[int, dict[str, Any]] = {}
    for each in case["tensors"]:
        rest = {what: each[what] for what in each if what not in ("tensor", "rank")}
        ranks.setdefault(each["rank"], {})[each["tensor"]] = rest
    for rank, errors in ranks.items():
        yield Row(VERIFY, name, BOTH, workload, {**placement, "rank": rank}, errors=errors)


def _workload(case: Mapping[str, Any]) -> dict[str, Any]:
    question = case["question"]
    lengths = list(question["lengths_q"])
    workload = {
        "batch": question["batch"] or 1,
        "seqlen": sum(lengths),
        "nheads": question["nheads"],
        "nheads_k": question["nheads_k"],
        "headdim": question["headdim"],
        "causal": question["causal"],
        "window": list(question["window_size"]),
        "dtype": question["dtype"],
        "feature": case["feature"],
    }
    return {**workload, "lengths": lengths} if question["batch"] is None else workload


def _placement(case: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    return {
        "world_size": world_size,
        "function": case["function"],
        **{name: case[name] for name in ("layout", "route") if case[name]},
    }
