"""Links and topologies: what a post takes, inside a node and between nodes."""

from __future__ import annotations

import math
import re

import pytest

from ring_flash_attn.bench import LINKS, Link, Topology, find_link

FAST, SLOW = Link("fast", 1e9, 1e-3), Link("slow", 1e8, 5e-3)
NODES = Topology("nodes", FAST, SLOW, 4)


def test_links_by_name_and_in_numbers() -> None:
    assert LINKS["nvlink4"].seconds(0, 450_000_000) == pytest.approx(1e-3 + 10e-6)
    assert LINKS["pcie5"].seconds(64_000, 1) == pytest.approx(1e-6 + 15e-6)
    assert find_link() is None
    assert find_link("ib400", latency_us=3) == Link("ib400", 50e9, 3e-6)
    own = find_link(gbps=2.5)
    assert own is not None
    assert own.bandwidth == 2.5e9
    for wrong in ({"name": "string"}, {"name": "ib400", "gbps": 1.0}, {"latency_us": 1.0}):
        with pytest.raises(ValueError):
            find_link(**wrong)  # type: ignore[arg-type]
    for numbers in ((0.0, 0.0), (-1.0, 0.0), (1.0, -1.0), (math.inf, 0.0)):
        with pytest.raises(ValueError, match="must"):
            Link("wrong", *numbers)


def test_a_shared_link_has_the_traffic_of_all() -> None:
    shared = Link("shared", 1e9, 1e-3, shared_by=4)
    assert shared.seconds(1_000_000, 3_000_000) == pytest.approx(1e-3 + 4 * 3e-3)
    assert "shared by 4 GPUs" in str(shared)
    with pytest.raises(ValueError, match="shared by one GPU or more, not 0"):
        Link("wrong", 1e9, 0.0, 0)


def test_ranks_follow_each_other_in_a_node() -> None:
    assert [NODES.node(rank) for rank in range(9)] == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert NODES.link(4, 7) is FAST
    assert NODES.link(4, 3) is SLOW
    assert NODES.link(0, 8) is SLOW


def test_both_levels_work_at_once() -> None:
    sent, received = {1: 1000_000, 2: 2000_000, 4: 200_000}, {3: 500_000, 9: 300_000}
    inside, outside = 1e-3 + 3e-3, 5e-3 + 3e-3
    assert NODES.lanes(0, sent, received) == pytest.approx({"inside": inside, "outside": outside})
    assert NODES.seconds(0, sent, received) == pytest.approx(outside)
    assert NODES.seconds(0, {1: 50_000_000}, {4: 1}) == pytest.approx(51e-3)
    assert NODES.lanes(5, {}, {4: 0}) == {"inside": 1e-3}  # it takes its latency
    assert NODES.seconds(0, {}, {}) == 0


def test_a_link_is_a_topology_of_one_node() -> None:
    one = Topology.of(SLOW)
    assert one.node(100) == 0
    assert one.seconds(0, {100: 30}, {1: 100, 64: 200}) == SLOW.seconds(30, 300)
    assert str(one) == str(SLOW)
    assert Topology.of(NODES) is NODES


@pytest.mark.parametrize(
    ("outside", "ranks", "message"),
    [
        (SLOW, None, "need a number of ranks per node"),
        (None, 8, "need a link outside"),
        (SLOW, 0, "ranks_per_node must be positive, not 0"),
    ],
)
def test_half_a_topology_is_refused(outside: Link | None, ranks: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape("topology 'half': ") + ".*" + message):
        Topology("half", FAST, outside, ranks)
