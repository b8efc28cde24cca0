"""`rfa link`: what it measures between ranks, and the topology that comes of it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from ring_flash_attn.bench import Link, Topology, find_link
from ring_flash_attn.bench.ranks import Settings
from ring_flash_attn.bench.ranks.links import (
    all_pairs,
    all_together,
    fit,
    measure_links,
    node_size,
)
from ring_flash_attn.cli.app import app

CPU = torch.device("cpu")
SIZES = (1000, 100_000, 10_000_000)


def rfa(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


@pytest.mark.parametrize(("latency", "bandwidth"), [(1e-5, 450e9), (0.0, 1e9), (3e-3, 1e8)])
def test_a_fit_finds_latency_and_bandwidth(latency: float, bandwidth: float) -> None:
    seconds = {size: latency + size / bandwidth for size in SIZES}
    assert fit(seconds) == pytest.approx((latency, bandwidth), rel=1e-6, abs=1e-12)


def test_a_fit_of_noise() -> None:
    latency, bandwidth = fit({1000: 1e-7, 10_000_000: 0.1})  # faster than any line from above 0
    assert latency == 0
    assert bandwidth > 0
    with pytest.raises(ValueError, match="sizes 10, 20: larger ones do not take longer"):
        fit({10: 2.0, 20: 1.0})


@pytest.mark.parametrize(
    ("hosts", "given", "expected"),
    [("aaaa", None, 4), ("aabb", None, 2), ("ab", None, 1), ("aaaa", 2, 2), ("abcd", 4, 4)],
)
def test_hosts_are_nodes(hosts: str, given: int | None, expected: int) -> None:
    assert node_size(hosts, given) == expected


@pytest.mark.parametrize(("hosts", "given"), [("aab", None), ("abab", None), ("aabbb", None)])
def test_nodes_that_differ_are_refused(hosts: str, given: int | None) -> None:
    with pytest.raises(ValueError, match="as many on each, one after the other"):
        node_size(hosts, given)


def test_every_pair_and_then_all_ranks() -> None:
    pairs = all_pairs(4, 2)
    assert [(traffic.level, *traffic.targets) for traffic in pairs] == [
        ("inside", 0, 1),
        ("outside", 0, 2),
        ("outside", 0, 3),
        ("outside", 1, 2),
        ("outside", 1, 3),
        ("inside", 2, 3),
    ]
    assert all(
        traffic.targets[traffic.targets[rank]] == rank
        for traffic in pairs
        for rank in traffic.targets
    )
    inside, outside = all_together(6, 3)
    assert (inside.level, dict(inside.targets)) == ("inside", {0: 1, 1: 2, 2: 0, 3: 4, 4: 5, 5: 3})
    assert (outside.level, dict(outside.targets)) == (
        "outside",
        {0: 3, 1: 4, 2: 5, 3: 0, 4: 1, 5: 2},
    )
    assert [traffic.level for traffic in all_together(3, 1)] == ["outside"]
    assert [traffic.level for traffic in all_together(3, 3)] == ["inside"]


class FakeRanks:
    """Stands for real ranks: posts take what a topology says, on the slower rank of each pair."""

    def __init__(self, topology: Topology, hosts: Sequence[str]) -> None:
        self._topology, self._hosts = topology, hosts

    def start(self, body: Any, args: tuple[Any, ...]) -> Iterator[list[Any]]:
        sizes, repeats, _, gpus_per_node = args
        nodes = len(self._hosts), node_size(self._hosts, gpus_per_node)
        yield list(self._hosts)
        for traffic in all_pairs(*nodes) + all_together(*nodes):
            yield [self._seconds(rank, traffic.targets, sizes, repeats) for rank in range(nodes[0])]

    def _seconds(
        self, rank: int, targets: Mapping[int, int], sizes: Sequence[int], repeats: int
    ) -> dict[int, tuple[float, ...]]:
        if rank not in targets:
            return {}
        early = 0.5 if rank % 2 else 1.0  # the slowest counts
        return {
            n: (early * self._topology.seconds(rank, {targets[rank]: n}, {}),) * repeats
            for n in sizes
        }


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Topology:
    """Four ranks on two hosts."""
    there = Topology("there", Link("in", 4e9, 1e-5), Link("out", 1e9, 3e-4), 2)
    ranks = FakeRanks(there, ["one", "one", "two", "two"])
    monkeypatch.setattr(Settings, "start", lambda self, body, args: ranks.start(body, args))
    return there


def test_the_topology_is_what_is_there(fake: Topology, tmp_path: Path) -> None:
    file = tmp_path / "new" / "ours.json"
    result = rfa("link", "--device", "cpu", "--world-size", "4", "--json", str(file))
    assert result.exit_code == 0, result.output
    for words in ("4 ranks in 2 nodes over gloo", "slowest pair: 0, 2", "all at once", "4 MiB"):
        assert words in result.output
    assert "say little about GPUs" in result.output
    found = find_link(str(file))
    assert isinstance(found, Topology)
    assert (found.name, found.ranks_per_node) == ("measured", 2)
    for link, expected in ((found.inside, fake.inside), (found.outside, fake.outside)):
        assert link is not None
        assert expected is not None
        assert link.bandwidth == pytest.approx(expected.bandwidth)
        assert link.latency == pytest.approx(expected.latency)
    written = json.loads(file.read_text())
    assert written["measured"]["hosts"] == ["one", "one", "two", "two"]
    assert written["measured"]["backend"] == "gloo"
    assert [pair["ranks"] for pair in written["measured"]["pairs"]][:2] == [[0, 1], [0, 2]]
    assert all(len(ms) == 9 for ms in written["measured"]["pairs"][0]["ms"].values())
    assert written["versions"]["torch"]


def test_one_node_and_nodes_of_one_gpu(fake: Topology) -> None:
    settings = Settings(4, CPU, "gloo", repeats=1)
    one = measure_links(settings, SIZES, 4, lambda line: None).topology("one", "gloo")
    assert (one.outside, one.ranks_per_node) == (None, None)
    each = measure_links(settings, SIZES, 1, lambda line: None).topology("each", "gloo")
    assert each.ranks_per_node == 1
    assert each.outside == each.inside


@pytest.mark.slow
def test_processes_of_this_machine(tmp_path: Path) -> None:
    file = tmp_path / "ours.json"
    options = ("--device", "cpu", "--world-size", "3", "--sizes", "4096,4194304", "--repeats", "3")
    result = rfa("link", *options, "--gpus-per-node", "1", "--name", "ours", "--json", str(file))
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())["measured"]
    assert found["hosts"] == [socket.gethostname()] * 3
    assert [pair["ranks"] for pair in found["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    for each in (*found["pairs"], *found["together"]):
        assert each["level"] == "outside"
        assert {size: len(ms) for size, ms in each["ms"].items()} == {"4096": 3, "4194304": 3}
        assert min(each["ms"]["4096"]) > 0
    link = find_link(str(file))
    assert isinstance(link, Topology)
    assert (link.name, link.ranks_per_node) == ("ours", 1)
    shape = ("--seqlen", "8", "--nheads", "2", "--nheads-k", "2", "--headdim", "8")
    place = ("--world-size", "2", "--rank", "0", "--repeats", "1", "--device", "cpu")
    replayed = rfa("replay", *shape, *place, "--link", str(file))
    assert replayed.exit_code == 0, replayed.output
    assert "Communication is emulated, ours: nodes of 1 ranks" in replayed.output
