"""Stages of plans: bytes as replays counted them, times as they measured them."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch

from ring_flash_attn.bench.workload import Placement, Workload, problem_of
from ring_flash_attn.plan.build import route_names
from ring_flash_attn.plan.layout import layout_names
from ring_flash_attn.simulate.gpus import find_gpu
from ring_flash_attn.simulate.meter import Meter
from ring_flash_attn.simulate.plans import PricedPass, price_rank
from ring_flash_attn.simulate.replayed import (
    function_table,
    functions,
    packs,
    replayed,
    tables,
)

RESULTS = Path(__file__).parents[2] / "results"
SMALL = Workload(1, 4096, 8, 2, 128, True)
PACK = Workload(1, nheads=8, nheads_k=2, headdim=128, causal=True, cu_seqlens=(0, 700, 701, 4001))


def priced(workload: Workload, placement: Placement, rank: int) -> tuple[PricedPass, PricedPass]:
    return price_rank(workload, placement, problem_of(workload, placement), rank, find_gpu("H200"))


@pytest.mark.parametrize("kernel", ["triton", "fa2", "cudnn"])
@pytest.mark.parametrize("route", route_names())
@pytest.mark.parametrize("workload", [SMALL, PACK], ids=["one", "pack"])
def test_what_one_rank_sends_another_receives(route: str, workload: Workload, kernel: str) -> None:
    """Summed over all ranks, in each stage of both passes; every rank has as many stages."""
    placement = Placement(3, "zigzag", route, kernel)
    ranks = [priced(workload, placement, rank) for rank in range(3)]
    for way in (0, 1):
        stages = [each[way].stages for each in ranks]
        assert len({len(each) for each in stages}) == 1
        for together in zip(*stages):
            sent = sorted((a, b, n) for a, stage in enumerate(together) for b, n in stage.sends)
            got = sorted((b, a, n) for a, stage in enumerate(together) for b, n in stage.receives)
            assert sent == got
        for passes in (each[way] for each in ranks):
            assert passes.launches >= 1
            assert all(stage.compute >= 0 for stage in passes.stages)


def stored_costs() -> list[tuple[str, dict]]:
    content = json.loads((RESULTS / "replays_h200.json").read_text())
    return sorted(content["details"]["replays"].items())


@pytest.mark.parametrize(("name", "stored"), stored_costs()[::4])
def test_bytes_and_launches_are_those_that_replays_counted(name: str, stored: dict) -> None:
    placement = Placement(**{**stored["placement"], "link": None})
    workload = Workload.from_dict(stored["workload"])
    # Packed documents travel a little otherwise since those were counted, and so do the groups of a
    # ring in its backward pass.
    close = 0.03 if workload.packed else 0
    grouped = placement.route == "ring" and placement.sources_per_launch != 1
    for rank in stored["ours"]["ranks"][:2]:
        every = list(zip(priced(workload, placement, rank["rank"]), rank["costs"]))
        for passes, cost in every[: 1 if grouped else 2]:
            assert passes.sent == pytest.approx(cost["sent"], rel=close)
            assert passes.received == pytest.approx(cost["received"], rel=close)
            assert sum(bool(s.sends or s.receives) for s in passes.stages) == cost["posts"]
            if not workload.packed:
                assert passes.held == pytest.approx(sum(cost["held"].values()), rel=0.01)


@pytest.mark.parametrize("layout", layout_names())
def test_more_work_takes_longer(layout: str) -> None:
    placement = Placement(4, layout, "ring", "triton")
    times = []
    for seqlen in (4096, 8192):
        workload = Workload(1, seqlen * 4, 8, 2, 128, True)
        passes = priced(workload, placement, 1)
        times.append([sum(stage.compute for stage in each.stages) for each in passes])
    assert all(long > 2 * short for short, long in zip(*times))


def test_the_meter_counts_bytes_of_operations() -> None:
    gpu = find_gpu("H200")
    meter = Meter(gpu)
    x = torch.empty(1000, 128, device="meta")
    with meter:
        meter.post([])
        x.clone()
        x.view(-1)
        torch.empty_like(x)
        meter.wait()
        x.add_(x)
    first = meter.finished()[0]
    assert first.compute == pytest.approx(gpu.moving(2 * x.nbytes))
    assert first.after == pytest.approx(gpu.moving(3 * x.nbytes))


@pytest.mark.slow
def test_replays_are_predicted() -> None:
    """Constants were fitted on one half; the other half is no worse. The page has these numbers."""
    rows, drawn = list(replayed(RESULTS)), list(packs(RESULTS))
    assert (len(rows), len(drawn)) == (176, 80)
    page = (RESULTS.parent / "docs" / "planner.md").read_text()
    assert "\n".join(tables(rows, drawn)) in page
    assert "\n".join(function_table(RESULTS)) in page
    errors = [abs(found / measured - 1) for _, _, measured, found in functions(RESULTS)]
    assert max(errors) < 0.06
    errors = [abs(row.error) for row in drawn]
    assert statistics.median(errors) < 0.065
    assert max(errors) < 0.13
    for half in (True, False):
        errors = [abs(row.error) for row in rows if row.fitted is half]
        assert statistics.median(errors) < 0.035
        assert sum(error > 0.1 for error in errors) <= 6
        assert max(errors) < 0.21


def test_some_replays_are_predicted() -> None:
    rows = [row for row in replayed(RESULTS, [False]) if row.placement.kernel == "cute"]
    assert rows
    assert all(abs(row.error) < 0.08 for row in rows), [str(row) for row in rows]
