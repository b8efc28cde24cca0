"""Links and topologies: what a post takes, inside a node and between nodes."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ring_flash_attn.bench import LINKS, Link, Topology, find_link
from ring_flash_attn.bench.links import FORMAT, TOPOLOGIES, link_from_dict, load_topology

FAST, SLOW = Link("fast", 1e9, 1e-3), Link("slow", 1e8, 5e-3)
NODES = Topology("nodes", FAST, SLOW, 4)
FILE: dict[str, Any] = {"format": FORMAT, "version": 1, "topology": asdict(NODES)}


def test_links_by_name_and_in_numbers() -> None:
    assert LINKS["nvlink4"].seconds(0, 450_000_000) == pytest.approx(1e-3 + 10e-6)
    assert LINKS["pcie5"].seconds(64_000, 1) == pytest.approx(1e-6 + 15e-6)
    assert find_link() is None
    assert find_link("ib400", latency_us=3) == Link("ib400", 50e9, 3e-6)
    own = find_link(gbps=2.5)
    assert own == Link("own", 2.5e9, 10e-6)
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


def test_names_say_what_lies_at_both_levels() -> None:
    found = find_link("h100-ib200")
    assert isinstance(found, Topology)
    assert (found.ranks_per_node, found.node(7), found.node(8)) == (8, 0, 1)
    assert (found.link(0, 7), found.link(0, 8)) == (LINKS["nvlink4"], LINKS["ib200"])
    for name, topology in TOPOLOGIES.items():
        assert topology.name == name == name.lower()
        if topology.outside is not None:  # nobody's network is faster than his node
            inside, outside = ({1: 10**9}, {}), ({100: 10**9}, {})
            assert topology.seconds(0, *outside) > topology.seconds(0, *inside)


def test_the_documents_list_every_name() -> None:
    text = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    _, table = text.split("| `--link` |")
    first = [line.split("|")[1] for line in table.split("\n\n")[0].splitlines()[2:]]
    assert set(re.findall(r"`([^`]+)`", "".join(first))) == {*LINKS, *TOPOLOGIES, "FILE.json"}


def test_numbers_of_both_levels() -> None:
    inside, outside = Link("own", 100e9, 3e-6), Link("own", 25e9, 20e-6)
    found = find_link(gbps=100, latency_us=3, network_gbps=25, gpus_per_node=4)
    assert found == Topology("own", inside, outside, 4)
    found = find_link("nvlink4", network_gbps=25, network_latency_us=7, gpus_per_node=2)
    assert found == Topology("nvlink4", LINKS["nvlink4"], Link("own", 25e9, 7e-6), 2)
    changed = find_link("h800-ib400", latency_us=1, network_latency_us=2, gpus_per_node=4)
    inside, outside = Link("nvlink-h800", 200e9, 1e-6), Link("ib400", 50e9, 2e-6)
    assert changed == Topology("h800-ib400", inside, outside, 4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "string"}, "unknown link 'string'; choose one of none, nvlink4"),
        ({"name": "ib400", "gbps": 1.0}, "a bandwidth of 1: give one"),
        ({"name": "h100-ib400", "gbps": 1.0}, "a bandwidth of 1: give one"),
        ({"latency_us": 1.0}, "latency_us 1 needs a link"),
        ({"network_gbps": 5.0, "gpus_per_node": 8}, "network_gbps 5 needs a link"),
        ({"network_latency_us": 5.0}, "network_latency_us 5 needs a link"),
        ({"gpus_per_node": 8}, "gpus_per_node 8 needs a link"),
        ({"gbps": 9.0, "network_gbps": 5.0}, "network_gbps 5 needs gpus_per_node"),
        ({"name": "h100-ib400", "network_gbps": 5.0}, "link 'h100-ib400' has a network"),
        ({"name": "pcie5", "gpus_per_node": 2}, "gpus_per_node 2: link 'pcie5' has no network"),
        ({"name": "l20-pcie", "network_latency_us": 2.0}, "link 'l20-pcie' has no network"),
        ({"gbps": 9.0, "network_gbps": 0.0, "gpus_per_node": 8}, "network_gbps must be positive"),
        ({"name": "h100-ib400", "network_latency_us": -1.0}, "must not be negative, but is -1"),
        ({"name": "h100-ib400", "gpus_per_node": 0}, "ranks_per_node must be positive, not 0"),
    ],
)
def test_numbers_that_do_not_go_together(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        find_link(**wrong)


@pytest.mark.parametrize("link", [None, SLOW, NODES, TOPOLOGIES["rtx4090-pcie"]], ids=str)
def test_a_file_of_results_holds_the_whole_link(link: Link | Topology | None) -> None:
    values = None if link is None else asdict(link)
    assert link_from_dict(json.loads(json.dumps(values))) == link


def test_results_from_before_topologies() -> None:
    assert link_from_dict({"name": "pcie5", "bandwidth": 64e9, "latency": 15e-6}) == LINKS["pcie5"]


def test_a_topology_file(tmp_path: Path) -> None:
    path = tmp_path / "ours.json"
    path.write_text(json.dumps({**FILE, "measured": "anything"}))
    assert find_link(str(path)) == load_topology(path) == NODES
    assert find_link(str(path), latency_us=9) == replace(NODES, inside=replace(FAST, latency=9e-6))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read"),
        ("{", "is not JSON"),
        ("[]", "is not a topology file"),
        (json.dumps({**FILE, "format": "ring_flash_attn results"}), "is not a topology file"),
        (json.dumps({**FILE, "version": 2}), "has version 2, not 1"),
        (json.dumps({**FILE, "topology": {"inside": {}, "outside": None}}), "incomplete"),
        (json.dumps({**FILE, "topology": asdict(FAST)}), "no link inside"),
        (json.dumps({**FILE, "topology": asdict(NODES) | {"outside": None}}), "need a link"),
    ],
)
def test_a_file_that_is_none(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "ours.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        find_link(str(path))
    assert "ours.json" in str(caught.value)
