"""The planner: what it ranks, what it refuses, and what it says about it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from ring_flash_attn.bench.links import Link, Topology
from ring_flash_attn.bench.workload import Placement, Workload
from ring_flash_attn.plan.build import BY_NODES, route_names
from ring_flash_attn.plan.layout import get_layout
from ring_flash_attn.plan.problem import Problem
from ring_flash_attn.plan.steps import Side
from ring_flash_attn.plan.tiles import Mask
from ring_flash_attn.simulate.candidates import candidates
from ring_flash_attn.simulate.forecast import sample
from ring_flash_attn.simulate.planner import plan_for
from ring_flash_attn.simulate.ranking import Ranking

SLOW = Link("slow", 1e8, 1e-5)
SMALL = {"world_size": 4, "seqlen": 1024, "nheads": 8, "nheads_k": 2, "kernel": "triton"}


@pytest.fixture(scope="module")
def small() -> Ranking:
    return plan_for(topology="nvlink4", memory_limit=100 * 2**20, **SMALL)


def test_all_routes_are_candidates(small: Ranking) -> None:
    found = [*small.ranked, *small.slower, *small.refused]
    # Without nodes, a mesh is an all-to-all.
    assert {each.placement.route for each in found} >= set(route_names()) - {"mesh"}


def test_packs_on_nodes_may_be_placed_by_nodes() -> None:
    """And routes that know nodes are priced with those; the line of Python says how."""
    pack = {"documents": "magi", "seed": 45, "nheads": 64, "nheads_k": 8, "kernel": "triton"}
    found = plan_for(topology="h200-ib400", world_size=64, **pack)
    assert found.best.placement.layout == "Balanced(ranks_per_node=8)"
    assert found.best.placement.ranks_per_node == 8
    assert "layout=ring_flash_attn.Balanced(ranks_per_node=8), route=" in found.python
    every = [*found.ranked, *found.slower]
    alike = min(each.seconds for each in every if each.placement.layout == "balanced")
    assert found.best.seconds < alike
    one_node = plan_for(topology="nvlink4", world_size=4, seqlen=1024, **pack)
    assert any(each.placement.layout == "balanced" for each in one_node.ranked)


@pytest.mark.parametrize(("world_size", "node"), [(20, 5), (36, 6), (24, 8)])
def test_nodes_need_not_divide_the_ranks(world_size: int, node: int) -> None:
    """Routes that know nodes are candidates with smaller ones then."""
    options = {**SMALL, "world_size": world_size, "layouts": ["zigzag"]}
    found = plan_for(topology="h200-ib400", **options)
    every = [each.placement for each in (*found.ranked, *found.slower)]
    for route in BY_NODES:
        assert node in {each.ranks_per_node for each in every if each.route == route}


def test_the_best_is_the_fastest(small: Ranking) -> None:
    times = [each.seconds for each in small.ranked]
    assert times == sorted(times)
    assert all(each.seconds >= small.best.seconds for each in small.slower)
    assert sorted(small.best.ranks) == [0, 1, 2, 3]
    assert all(each.memory <= 100 * 2**20 for each in (*small.ranked, *small.slower))


def test_others_have_a_reason(small: Ranking) -> None:
    assert small.why(small.best) == ""
    for each in (*small.ranked[1:], *small.slower):
        assert "% slower: " in small.why(each)
    for each in small.refused:
        assert each.why


def test_one_line_of_python_makes_the_call(small: Ranking) -> None:
    placement = small.best.placement
    assert f"layout={placement.layout!r}, route={placement.route!r}" in small.python
    assert "causal=True, seqlen=4096, group=group)" in small.python
    compile(small.python, "line", "eval")


def test_a_file_has_it_all(small: Ranking) -> None:
    values = json.loads(json.dumps(small.to_dict()))
    assert values["format"] == "ring_flash_attn plan"
    assert len(values["ranked"]) == len(small.ranked)
    assert values["ranked"][0]["ranks_priced"] == list(small.best.ranks)
    assert values["gpu"] == "H200"


def test_equal_calls_choose_alike(small: Ranking) -> None:
    again = plan_for(topology="nvlink4", memory_limit=100 * 2**20, **SMALL)
    assert again.to_dict() == small.to_dict()


def test_a_slow_link_changes_the_choice() -> None:
    slow = plan_for(topology=SLOW, routes=["ring", "all_to_all"], layouts=["zigzag"], **SMALL)
    fast = plan_for(topology="nvlink4", routes=["ring", "all_to_all"], layouts=["zigzag"], **SMALL)
    assert slow.best.exposed > slow.best.busy  # most of the time it waits
    assert fast.best.exposed < fast.best.busy
    assert slow.best.seconds > fast.best.seconds


def test_nodes_make_the_mesh_a_candidate() -> None:
    topology = Topology("two nodes", Link("in", 4e11, 1e-5), Link("out", 1e10, 2e-5), 2)
    found = plan_for(topology=topology, routes=["mesh"], layouts=["zigzag"], **SMALL)
    parameters = [each.placement.parameters for each in (*found.ranked, *found.slower)]
    assert {"ranks_per_node": 2} in parameters


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"world_size": 0}, "world_size must be a positive integer of 64 bits, not 0"),
        ({"topology": "none"}, "topology 'none': a plan needs to know"),
        ({"topology": "token ring"}, "unknown link 'token ring'"),
        ({"gpu": "P100"}, "unknown GPU 'P100'"),
        ({"preset": "gpt9"}, "unknown preset 'gpt9'"),
        ({"kernel": "fa9"}, "unknown kernel 'fa9'"),
        ({"kernel": "reference"}, "no rate of kernel 'reference' forward with head dimension 128"),
        ({"kernel": None, "headdim": 40}, "headdim 40: no kernel has a rate for it on H200"),
        ({"memory_limit": 1024}, "no placement is possible: .* holds .* MiB, more than the limit"),
        ({"cu_seqlens": (0, 7)}, "cu_seqlens ends at 7, but 4 ranks of 1024 have 4096"),
        ({"routes": ["bus"]}, "unknown route 'bus'"),
        ({"seed": 3}, "seed 3: only for documents"),
    ],
)
def test_what_cannot_be_planned_is_refused(changes: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        plan_for(**{"topology": "nvlink4", "layouts": ["zigzag"], **SMALL, **changes})


@pytest.mark.parametrize("name", ["world_size", "seqlen", "memory_limit"])
@pytest.mark.parametrize("value", [2.0, True, "4"])
def test_numbers_are_integers(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a positive integer"):
        plan_for(**{"topology": "nvlink4", **SMALL, name: value})


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="plan_for has no argument 'head_size'"):
        plan_for(topology="nvlink4", head_size=3, **SMALL)


def test_estimates_are_named() -> None:
    found = plan_for(topology="nvlink4", gpu="H100", layouts=["zigzag"], routes=["ring"], **SMALL)
    assert found.estimates[0] == "rates of triton on H100"


@pytest.mark.slow
def test_a_thousand_ranks_and_five_thousand_documents_in_time(tmp_path: Path) -> None:
    started = time.process_time()
    found = plan_for(world_size=1024, topology="h200-ib400", documents="magi", document_cap=0.01)
    taken = time.process_time() - started
    assert len(found.workload.lengths) > 5000
    assert 3 < len(found.best.ranks) <= 5
    assert {0, 1023} <= set(found.best.ranks)
    assert isinstance(found.best.placement, Placement)
    assert taken < 60


@pytest.mark.parametrize("layout", ["flat_contiguous", "zigzag"])
def test_ranks_with_most_pairs_are_priced_whatever_travels(layout: str) -> None:
    """Where queries travel, a rank computes the pairs of its own keys."""
    lengths, size = (700, 40, 90, 410, 300, 20), 24
    problem = Problem(get_layout(layout), lengths, lengths, size, Mask(right=0))

    def pairs(rank: int, side: Side) -> int:
        return sum(
            position + 1 if side is Side.QUERY else lengths[span.document] - position
            for span in problem.spans(side, rank)
            for position in (span.position + span.stride * i for i in range(span.length))
        )

    chosen = sample(problem)
    for side in Side:
        most = max(pairs(rank, side) for rank in range(size))
        assert max(pairs(rank, side) for rank in chosen[:2]) == most


def test_layouts_that_leave_crumbs_are_priced_only_if_they_are_named() -> None:
    pack = tuple(range(0, 64 * 512 + 1, 64))  # 512 documents: zigzag has 2 pieces of each on a rank
    workload = Workload(1, pack[-1], 8, 2, 128, True, cu_seqlens=pack)
    machine = Topology.of(Link("link", 4e11, 1e-5))
    found, refused = candidates(workload, 32, machine, "triton")
    assert {each.layout for each in found} >= {"balanced", "flat_contiguous"}
    assert "zigzag" not in {each.layout for each in found}
    whys = {each.route: why for each, why in refused if each.layout == "zigzag"}
    assert set(whys) == set(route_names())
    assert set(whys.values()) == {"it cuts documents into 32,768 pieces, more than 10,000"}
    found, refused = candidates(workload, 32, machine, "triton", ["zigzag"], ["ring"])
    assert {(each.layout, each.route) for each in found} == {("zigzag", "ring")}
    assert refused == []
