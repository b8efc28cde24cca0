"""Replays: a rank alone does what it does among others, and what is reported follows from it."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from plain_library import register_plain
from replays import TorchBlock, ranks, small, tensors
from rich.table import Table
from simulate import needed_rows
from typer.testing import CliRunner, Result

from ring_flash_attn.bench import LINKS, Link, Replay, Topology, replay
from ring_flash_attn.bench.replays import emulated, run
from ring_flash_attn.bench.replays.rank import LibraryRanks, PersistentPool, ReplayedRank
from ring_flash_attn.bench.replays.results import (
    COMPUTE,
    TRANSFERS,
    Design,
    Measured,
    RankResult,
    pack_rates,
    replay_rows,
)
from ring_flash_attn.bench.results import HOST_WAITS, load
from ring_flash_attn.bench.timing import Samples
from ring_flash_attn.bench.workload import BACKWARD, BOTH, FORWARD, Workload
from ring_flash_attn.cli.app import app
from ring_flash_attn.cli.replay import _costs, _table, explain, notes
from ring_flash_attn.draw.svg import draw_timeline
from ring_flash_attn.kernels.base import Kernels
from ring_flash_attn.plan.build import make_plan, route_names
from ring_flash_attn.plan.layout import layout_names
from ring_flash_attn.plan.steps import Payload, Plan, Side, Transfer

FAST = Link("fast", 1e15, 0.0)

# A rank alone.


def row_bytes(transfer: Transfer, workload: Workload, backward: bool) -> int:
    """Of one row and one KV head, as docs/design.md says what travels."""
    group, d = workload.nheads // workload.nheads_k, workload.headdim
    element = workload.torch_dtype.itemsize
    if transfer.side is Side.KEY:
        return 2 * d * (4 if transfer.payload is Payload.RESULT else element)
    if transfer.payload is Payload.FINAL:
        return group * (d * element if backward else d * element + 4)
    if transfer.payload is Payload.INPUT:
        return group * (2 * d * element + 2 * 4 if backward else d * element)
    return group * 4 * (d if backward else d + 1)


def plan_bytes(
    plan: Plan, group: LibraryRanks, backward: bool, step: int | None = None, peers: Any = None
) -> tuple[int, int]:
    """Sent and received: of all steps or of one, with all peers or with these."""
    sent = received = 0
    steps = plan.steps if step is None else plan.steps[step : step + 1]
    for transfer in (t for each in steps for t in each.transfers):
        peer = transfer.target if transfer.source == plan.rank else transfer.source
        if peer != plan.rank and (peers is None or peer in peers):
            rows = group.size(transfer.owner)
            if transfer.cut:
                rows = len(needed_rows(group.problem, transfer))
            heads = transfer.heads[1] - transfer.heads[0]
            size = rows * heads * group.workload.batch
            size *= row_bytes(transfer, group.workload, backward)
            sent += size * (transfer.source == plan.rank)
            received += size * (transfer.target == plan.rank)
    return sent, received


@pytest.mark.parametrize("cu_seqlens", [[0, 21, 21, 60], [0, 7, 8, 8, 52]], ids=["even", "uneven"])
@pytest.mark.parametrize("route", route_names())
@pytest.mark.parametrize("layout", layout_names())
def test_every_layout_and_route_is_replayed(layout: str, route: str, cu_seqlens: list[int]) -> None:
    """Documents are those of all ranks, and need not divide by their number."""
    given = {"layout": layout, "route": route, "cu_seqlens": cu_seqlens}
    found = replay(**small(**given, ranks=[2, 1]), link="ib400", timeline=True)
    group = ranks(**given)
    assert [each.rank for each in found.ours.ranks] == [2, 1]
    assert sum(map(group.size, range(3))) == cu_seqlens[-1] == found.workload.seqlen
    for each in found.ours.ranks:
        for cost, backward in zip(each.costs, (False, True), strict=True):
            plan = make_plan(route, group.problem, each.rank, backward)
            assert cost.launches == sum(len(step.work) for step in plan.steps)
            assert (cost.sent, cost.received) == plan_bytes(plan, group, backward)
            assert each.pairs == 2 * plan.pairs
        assert each.tokens == group.size(each.rank)
    slowest = found.ours.slowest(BOTH)
    for direction, cost in zip((FORWARD, BACKWARD), slowest.costs, strict=True):
        bars = [bar for bar in found.timeline if bar.direction == direction]
        assert sum(bar.lane == COMPUTE for bar in bars) == cost.launches
        assert sum(bar.lane == TRANSFERS for bar in bars) == cost.posts


def test_all_pairs_of_documents_are_computed_by_somebody() -> None:
    """In shards of one stream that is cut anywhere."""
    documents = {"cu_seqlens": [0, 7, 8, 8, 52], "layout": "flat_contiguous"}
    found = replay(**small(**documents, route="all_gather"))
    assert [each.tokens for each in found.ours.ranks] == [17, 17, 18]
    lengths = (7, 1, 44)
    assert sum(each.pairs for each in found.ours.ranks) == 4 * sum(
        length * (length + 1) // 2 for length in lengths
    )
    assert found.ours.base_pairs == 4 * (2 * 3 // 2 + 15 * 16 // 2)  # 2, 0, 0 and 15 tokens
    (row, *_) = replay_rows(found)
    assert (row.workload["seqlen"], row.workload["lengths"]) == (17, [7, 1, 0, 44])
    assert row.placement == {
        "world_size": 3,
        "layout": "flat_contiguous",
        "route": "all_gather",
        "link": "none",
        "rank": 0,
    }


def test_a_kernel_of_blocks_holds_no_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the query ring, out travels in its place."""
    register_plain(monkeypatch)
    groups = [
        ranks(kernel=kernel, world_size=2, route="query_ring", causal=False)
        for kernel in ("plain", "reference")
    ]
    ours, theirs = (group.describe(0)[2][1] for group in groups)
    assert "delta" in theirs.held
    assert "delta" not in ours.held
    assert ours.sent - theirs.sent == 20 * 4 * (8 * 2 - 4)


def test_several_sources_in_one_launch() -> None:
    """Two launches each; a post forward, one more backward; what is held is named once."""
    found = replay(**small(world_size=4, sources_per_launch=3, ranks=[3], dtype=torch.float32))
    forward, backward = found.ours.ranks[0].costs
    assert (forward.launches, backward.launches) == (2, 2)
    assert (forward.posts, backward.posts) == (1, 2)
    assert list(forward.held) == ["K, V in flight"]
    assert "A launch takes the keys of up to 3 other ranks." in list(explain([found]))


def test_bytes_of_queries_that_travel_backward() -> None:
    """On 2 ranks: q, dout, lse and delta go one way, dq comes back."""
    group = ranks(world_size=2, route="query_ring", causal=False)
    _, backward = group.describe(0)[2]
    rows = 20 * 4
    assert backward.sent == rows * (2 * 8 * 2 + 2 * 4) + rows * 8 * 4
    assert backward.received == backward.sent
    assert backward.held["Q, dout in flight"] == rows * 2 * 8 * 2
    assert backward.held["delta"] == rows * 4


class Spy:
    """A kernel that notes the tiles of its launches."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self.tiles = kernel, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def forward(self, *args: Any) -> None:
        self.tiles.append(args[3])
        self._kernel.forward(*args)

    def backward(self, *args: Any) -> None:
        self.tiles.append(args[4])
        self._kernel.backward(*args)


class NotedLink:
    """A link that notes seconds, and takes none."""

    def __init__(self, level: str, posts: list[tuple[str, str, float]]) -> None:
        self._level, self._posts = level, posts

    def post(self, copies: Any, seconds: float, label: str, recorder: Any) -> Any:
        self._posts.append((label, self._level, seconds))
        for target, source in copies:
            target.copy_(source)
        return lambda: None


@pytest.mark.parametrize("route", route_names())
def test_posts_are_priced_by_peer(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 2 and 3 are a node, and bytes to and from each level go over its own link."""
    nodes = Topology("nodes", Link("in", 1e9, 1.0), Link("out", 1e6, 2.0), 2)
    posts: list[tuple[str, str, float]] = []
    monkeypatch.setattr(emulated, "link_of", lambda device, level: NotedLink(level, posts))
    group = ranks(world_size=5, route=route)
    group.rank(2, nodes).both()
    expected = []
    for backward in (False, True):
        plan = make_plan(route, group.problem, 2, backward)
        for number in range(len(plan.steps)):
            for level, peers in (("inside", {3}), ("outside", {0, 1, 4})):
                sizes = plan_bytes(plan, group, backward, number, peers)
                link = nodes.inside if level == "inside" else nodes.outside
                assert link is not None
                if any(sizes):
                    seconds = link.latency + max(sizes) / link.bandwidth
                    expected.append((str(number), level, pytest.approx(seconds)))
    assert sorted(posts, key=lambda post: post[:2]) == sorted(expected, key=lambda post: post[:2])
    assert {level for _, level, _ in posts} >= {"outside"}


@pytest.mark.parametrize("route", route_names())
def test_a_rank_alone_launches_what_its_plans_say(route: str) -> None:
    for rank in range(3):
        alone = ranks(route=route).rank(rank, None)
        spy = Spy(alone.prepared.kernels.forward)
        replace(alone, prepared=replace(alone.prepared, kernels=Kernels(spy, spy))).both()
        (local,) = alone.prepared.ranks
        works = [
            work.tiles
            for path in (local.forward, local.backward)
            for step in path.plan.steps
            for work in step.work
        ]
        assert spy.tiles == works


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("route", route_names())
@pytest.mark.parametrize("link", [None, FAST], ids=["removed", "emulated"])
def test_numbers_are_sane(
    route: str, link: Link | None, dtype: torch.dtype, nan_memory: None
) -> None:
    heads = 1 if route == "all_gather" else None
    one_rank = ranks(route=route, heads_k_stride=heads, dtype=dtype).rank(1, link)
    for _ in range(30):
        assert all(x.isfinite().all() for x in tensors(one_rank))


@pytest.mark.parametrize("route", route_names())
def test_buffers_that_stay_are_used_again(route: str) -> None:
    one_rank = ranks(route=route).rank(1, None)
    (local,) = one_rank.prepared.ranks
    assert isinstance(local.pool, PersistentPool)
    assert local.pool.free == {}
    counts = []
    for _ in range(3):
        one_rank.both()
        counts.append({key: len(buffers) for key, buffers in local.pool.free.items()})
    assert counts[0]
    assert counts[0] == counts[1] == counts[2]


def test_what_a_ring_holds_is_what_the_documents_say() -> None:
    """2 shards of K and V, 3 of dK and dV, the state, the accumulators (docs/design.md)."""
    group = ranks(world_size=8, sources_per_launch=1)
    forward, backward = group.describe(3)[2]
    keys = 2 * 20 * 2 * 8 * 2  # K and V of a shard, bytes
    queries = 20 * 4 * 8 * 4  # out or dQ in fp32
    assert forward.held == {"state of out, fp32": queries, "K, V in flight": 2 * keys}
    assert backward.held == {
        "accumulators of dQ, dK, dV, fp32": queries + 2 * keys,
        "delta": 20 * 4 * 4,
        "K, V in flight": 2 * keys,
        "dK, dV in flight": 3 * 2 * keys,
    }


@pytest.mark.parametrize("cu_seqlens", [None, [0, 3, 9, 10, 14, 16, 20]], ids=["one", "documents"])
@pytest.mark.parametrize("sources", [2, 3, 7])
@pytest.mark.parametrize("world_size", [8, 16])
def test_what_groups_hold(world_size: int, sources: int, cu_seqlens: list[int] | None) -> None:
    """2 G shards of K and V and 3 G of dK and dV at most, however many ranks there are.

    Of documents also G shards of K and V that leave, as their rows lie apart.
    """
    keys = 2 * 20 * 2 * 8 * 2
    given: dict[str, Any] = {"world_size": world_size, "sources_per_launch": sources}
    if cu_seqlens is not None:
        given["cu_seqlens"] = [world_size * offset for offset in cu_seqlens]
    group = ranks(**given)
    found = []
    for rank in range(world_size):
        forward, backward = group.describe(rank)[2]
        most = 2 if cu_seqlens is None else 3
        assert forward.held["K, V in flight"] <= most * sources * keys
        assert backward.held["K, V in flight"] <= most * sources * keys
        assert backward.held["dK, dV in flight"] <= 3 * sources * 2 * keys
        found.append(forward.held["K, V in flight"])
    if cu_seqlens is None:
        assert 2 * found[-1] == found[0], "zigzag: the last rank needs half of each shard"


# What follows.


def by_pass(forward: float, both: float) -> dict[str, float]:
    return {FORWARD: forward, BOTH: both}


def measured(forward: float, both: float, *linked: float) -> Measured:
    times, runs = by_pass(forward, both), {FORWARD: [forward], BOTH: [both]}
    peak = {FORWARD: 1, BOTH: 2}
    return Measured(times, by_pass(*linked) if linked else None, times, peak, runs)


def design() -> Design:
    """8 ranks, 2000 pairs each; base 1 and 3 ms, in full twice the pairs in 1.5 and 5 ms."""
    ranks = (
        RankResult(0, 10, 2000, (), measured(9, 26, 10, 30)),
        RankResult(1, 10, 2000, (), measured(10, 25, 12.5, 25)),
    )
    numbers = {"world_size": 8, "flops_per_pair": 10**6, "base_pairs": 250, "full_pairs": 500}
    return Design("a design", base=measured(1, 3), full=measured(1.5, 5), ranks=ranks, **numbers)


def test_efficiency_and_rates() -> None:
    ours = design()
    first, second = ours.ranks
    assert [ours.theoretic(passes) for passes in (FORWARD, BOTH)] == [8, 24]

    def follows(rank: RankResult, name: str) -> list[float]:
        return [ours.values(rank, passes)[name] for passes in (FORWARD, BOTH)]

    assert follows(first, "theoretic_ms") == [8, 24]
    assert follows(first, "efficiency_percent") == [80, 80]
    assert follows(second, "efficiency_percent") == [64, 96]
    # 8 × 250 pairs at the rate of 500 in 1.5 and 5 ms: 6 and 20 ms
    assert follows(first, "full_rate_efficiency_percent") == [60, pytest.approx(100 * 2 / 3)]
    assert follows(first, "exposed_ms") == [1, 4]
    assert follows(first, "host_ms") == [9, 26]
    assert "exposed_ms" not in ours.values(replace(first, measured=ours.base), FORWARD)
    assert (ours.slowest(FORWARD), ours.slowest(BOTH)) == (second, first)
    assert (follows(first, "slowest"), follows(second, "slowest")) == ([0, 1], [1, 0])
    # 2000 pairs of 10⁶ FLOPs in 10 ms: 0.2 TFLOP/s; 3.5 times as many in 30 ms
    rates = [ours.rate(2000, first.measured, passes) for passes in (FORWARD, BOTH)]
    assert rates == [pytest.approx(0.2), pytest.approx(7 / 30)]


def test_rates_of_packs_are_those_of_sums() -> None:
    """Two packs on 2 ranks. The slowest backward is neither the slowest forward nor of both."""
    one, two = (replay(**small(world_size=2, documents="magi", seed=seed)) for seed in (3, 4))
    first = measured(9, 20, 10, 30), measured(1, 1, 12, 31), measured(1, 1, 2, 23)
    second = (measured(4, 9),)
    packs = []
    for each, times in ((one, first), (two, second)):
        ranks = tuple(RankResult(rank, 1, 1, (), time) for rank, time in enumerate(times))
        packs.append(replace(each, ours=replace(each.ours, ranks=ranks)))
    # of causal documents, 4 heads of 8: forward 4 · 8 FLOPs a pair, on each of 2 GPUs a half
    flops = [4 * 4 * 8 * sum(n * (n + 1) // 2 for n in each.workload.lengths) / 2 for each in packs]
    for passes, factor, times, slowest in (
        (FORWARD, 1.0, (12, 4), (1, 0)),
        (BACKWARD, 2.5, (21, 5), (2, 0)),
    ):
        found = pack_rates(packs, passes)
        assert [each.seed for each in found.packs] == [3, 4]
        assert tuple(each.rank for each in found.packs) == slowest
        assert tuple(each.ms for each in found.packs) == times
        rates = [factor * own / ms / 1e9 for own, ms in zip(flops, times)]
        assert [each.tflops for each in found.packs] == pytest.approx(rates)
        assert found.tflops == pytest.approx(factor * sum(flops) / sum(times) / 1e9)
        assert found.worst == min(found.packs, key=lambda pack: pack.tflops)
        assert (found.packs[0].ndocuments, found.packs[0].longest) == (
            len(one.workload.lengths),
            max(one.workload.lengths),
        )


def test_one_device_works_as_long_as_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The base 4 times in a row, whole blocks of twice its pairs half as often; then per run."""
    runs: list[int] = []
    plain = ReplayedRank.forward

    def counted(self: ReplayedRank) -> object:
        runs[-1] += 1
        return plain(self)

    def timed(works: Any, *_: object) -> dict[Any, Samples]:
        found = {}
        for key, work in works.items():
            runs.append(0)
            work()
            found[key] = Samples((8.0 * runs[-1],), (4.0,))
        return found

    monkeypatch.setattr(run, "interleaved", timed)
    monkeypatch.setattr(ReplayedRank, "forward", counted)
    runs.append(0)  # what is run for its memory
    found = replay(**small(world_size=4, seqlen=512, ranks=[1]), link="pcie5")
    assert runs[1:] == [4, 4, 2, 2, 1, 1, 1, 1]
    assert found.ours.base.removed == found.ours.full.removed == by_pass(8, 8)
    assert found.ours.base.host == by_pass(1, 1)
    assert found.ours.full.host == by_pass(2, 2)
    assert found.ours.ranks[0].measured.removed == by_pass(8, 8)


def test_pairs_and_flops_of_a_workload() -> None:
    found = replay(**small(world_size=4, seqlen=16)).ours
    assert found.base_pairs == 4 * 16 * 17 // 2
    assert found.full_pairs == 4 * 16 * 16
    assert sum(each.pairs for each in found.ranks) == 4 * 64 * 65 // 2
    assert found.flops_per_pair == 4 * 8
    documents = replay(**small(cu_seqlens=[0, 9, 30])).ours
    assert documents.base_pairs == 4 * (3 * 4 // 2 + 7 * 8 // 2)
    assert documents.full_pairs == 4 * 10 * 10


# Reports.


@pytest.fixture(scope="module")
def found() -> Replay:
    """One replay for all that follows."""
    return replay(**small(), link="nvlink4", baseline=TorchBlock(), timeline=True)


def test_json_there_and_back(found: Replay) -> None:
    values = json.loads(json.dumps(found.to_dict()))
    assert Replay.from_dict(values) == found
    assert values["workload"]["dtype"] == "bfloat16"
    assert values["placement"]["kernel"] == "reference"
    assert values["ours"]["ranks"][1]["measured"]["linked"]["forward"] > 0
    removed = replay(**small(ranks=[0]))
    values = removed.to_dict()
    assert (values["placement"]["link"], values["baseline"], values["timeline"]) == (None,) * 2 + (
        (),
    )
    assert Replay.from_dict(json.loads(json.dumps(values))) == removed


def test_the_timeline_is_a_picture(found: Replay) -> None:
    root = ElementTree.fromstring(draw_timeline(found))
    boxes = root.findall("{http://www.w3.org/2000/svg}rect")
    assert len(boxes) == len(found.timeline) + 2  # and the legend
    for bar in found.timeline:
        assert 0 <= bar.start <= bar.end
    texts = [text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any("A replay on one device" in text for text in texts)
    with pytest.raises(ValueError, match="nothing was recorded"):
        draw_timeline(replace(found, timeline=()))


def test_wrong_arguments_are_refused_before_anything_runs() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"layout": "spiral"}, "unknown layout 'spiral'"),
        ({"route": "teleport"}, "unknown route 'teleport'"),
        ({"kernel": "abacus"}, "unknown kernel 'abacus'"),
        ({"world_size": 0}, "world_size must be positive, not 0"),
        ({"ranks": [3]}, "rank 3 is not one of 0 … 2"),
        ({"nheads": 3}, "multiple"),
        ({"heads_k_stride": 1}, "heads_k_stride = 1"),
        ({"cu_seqlens": [1, 5]}, "cu_seqlens 1,5"),
        ({"cu_seqlens": [0, 2]}, "cu_seqlens ends at 2: fewer tokens than 3 ranks"),
        ({"cu_seqlens": [0, 5, 20], "seqlen": 20}, "of the whole stream.* must end at 3 × 20 = 60"),
        ({"cu_seqlens": [0, 5], "batch": 2}, "batch 2: packed documents have batch 1"),
        ({"documents": "magi", "cu_seqlens": [0, 60]}, "documents 'magi' and cu_seqlens 0,60"),
        ({"documents": "abacus"}, "there is no file abacus"),
        ({"documents": "magi", "batch": 2}, "batch 2: packed documents have batch 1"),
        ({"seed": 42}, "seed 42: only for documents from a histogram"),
        ({"device": "abacus"}, "device .abacus. does not exist"),
        ({"repeats": 0}, "repeats must be positive"),
        ({"link": "string"}, "unknown link 'string'"),
        ({"baseline": True}, "fa2: it needs an NVIDIA GPU"),
        ({"existing": "fa4"}, "the baseline: fa4: "),
        ({"existing": "fa4", "baseline": True}, "the old name of baseline"),
        ({"baseline": "abacus"}, "unknown library 'abacus'; choose one of fa4, "),
        ({"baseline": TorchBlock(), "causal": False}, "only the causal one"),
        ({"baseline": TorchBlock(), "seqlen": 21}, "21 tokens are odd"),
        ({"dtype": torch.int32}, "unknown dtype 'int32'"),
    ]
    for changes, message in wrong:
        with pytest.raises(ValueError, match=message):
            replay(**small(**changes))
    with pytest.raises(NotImplementedError, match="needs a GPU"):
        replay(**small(kernel="triton"))


def test_a_host_that_is_too_slow_is_named(found: Replay) -> None:
    """Where queueing takes longer than the device, times are not the device's."""

    def with_host(*host: float) -> Replay:
        first, *others = found.ours.ranks
        slow = replace(first, measured=replace(measured(3, 5, 4, 6), host=by_pass(*host)))
        fine = [replace(each, measured=measured(3, 5)) for each in others]
        ours = replace(found.ours, ranks=(slow, *fine))
        return replace(found, ours=ours, baseline=None, device="a GPU")

    says = [list(notes([with_host(*host)])) for host in ((4, 6), (4.5, 6), (4, 6.5))]
    assert ["work of ranks 0 than" in lines[-1] for lines in says] == [False, True, True]
    assert [HOST_WAITS in lines for lines in says] == [False, True, True]


def test_what_a_launch_and_a_post_cost_the_host(found: Replay) -> None:
    """Beside the device's times, in µs of the pass over their number."""
    first = found.ours.ranks[0]
    slow = replace(first, measured=replace(measured(3, 5, 4, 6), host=by_pass(4.5, 9.5)))
    slowest = replace(found, ours=replace(found.ours, ranks=(slow,)))
    assert "4.500*" in _column(_table(slowest.ours), "host")
    for cost, ms, way in zip(first.costs, (4.5, 5.0), (0, 1), strict=True):
        table = _costs(slowest)
        assert _column(table, "host µs a launch")[way] == f"{1e3 * ms / cost.launches:.0f}"
        assert _column(table, "a post")[way] == f"{1e3 * ms / cost.posts:.0f}"


def _column(table: Table, header: str) -> list[str]:
    return next([*map(str, each.cells)] for each in table.columns if each.header == header)


# The command line.


def rfa(*arguments: str) -> Result:
    """Run `rfa replay`; the output is wide enough not to be wrapped."""
    return CliRunner().invoke(app, ["replay", *arguments], env={"COLUMNS": "160"})


SHAPE = ("--seqlen", "16", "--nheads", "4", "--nheads-k", "2", "--headdim", "8", "--repeats", "1")
HERE = (*SHAPE, "--device", "cpu", "--world-size", "2")


def test_the_command_says_what_it_is(tmp_path: Path) -> None:
    files = tmp_path / "new" / "replay.json", tmp_path / "replay.svg"
    written = ("--json", str(files[0]), "--svg", str(files[1]))
    result = rfa(*HERE, "--repeats", "3", "--link", "pcie5", *written)
    assert result.exit_code == 0, result.output
    for words in (
        "A replay of zigzag × ring × reference: ranks of 2",
        "on one device",
        "Communication is emulated, pcie5: 64 GB/s each way, 15 µs for each post",
        "what it receives is random data",
        "slowest",
        "2 × base",
        "K, V in flight",
        "say little about GPUs",
    ):
        assert words in result.output
    results = load(files[0])
    (found,) = (Replay.from_dict(each) for each in results.details["replays"].values())
    assert found.link == LINKS["pcie5"]
    assert [(row.passes, row.placement["rank"]) for row in results.rows] == [
        (FORWARD, 0),
        (FORWARD, 1),
        (BOTH, 0),
        (BOTH, 1),
    ]
    for row, rank in zip(results.rows, (*found.ours.ranks, *found.ours.ranks), strict=True):
        assert row.ms == rank.measured.times[row.passes]
        assert len(row.samples_ms) >= 3, "every run"
        assert list(row.samples_ms) == rank.measured.runs[row.passes]
        assert row.values == found.ours.values(rank, row.passes)
    ElementTree.parse(files[1])


def test_the_command_with_nodes(tmp_path: Path) -> None:
    file, layout = tmp_path / "replay.json", "Balanced(ranks_per_node=2)"
    ranks = ("--device", "cpu", "--world-size", "4", "--cu-seqlens", "0,35,45,64")
    options = ("--layout", layout, "--route", "double_ring", "--ranks-per-node", "2")
    result = rfa(*SHAPE, *ranks, *options, "--json", str(file))
    assert result.exit_code == 0, result.output
    assert {row.placement["layout"] for row in load(file).rows} == {layout}


def test_the_command_with_a_network(tmp_path: Path) -> None:
    files = tmp_path / "replay.json", tmp_path / "replay.svg"
    written = ("--json", str(files[0]), "--svg", str(files[1]))
    ours = ("--link", "h800-ib200", "--gpus-per-node", "2", "--network-latency-us", "7")
    result = rfa(
        *HERE, "--world-size", "3", "--rank", "1", "--route", "all_gather", *ours, *written
    )
    assert result.exit_code == 0, result.output
    expected = (
        "Communication is emulated, h800-ib200: nodes of 2 ranks; inside nvlink-h800: 200 GB/s "
        "each way, 10 µs for each post; outside ib200: 25 GB/s each way, 7 µs for each post"
    )
    assert expected in " ".join(result.output.split())
    results = load(files[0])
    (found,) = (Replay.from_dict(each) for each in results.details["replays"].values())
    network = Link("ib200", 25e9, 7e-6)
    assert found.link == Topology("h800-ib200", LINKS["nvlink-h800"], network, 2)
    assert {row.placement["link"] for row in results.rows} == {"h800-ib200"}
    assert {bar.lane for bar in found.timeline} == {"compute", "transfers", "network"}
    root = ElementTree.parse(files[1])
    assert "network" in [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]


def test_the_command_without_communication() -> None:
    documents = ("--cu-seqlens", "0,11,32", "--rank", "1", "--full")  # 16 tokens of each rank
    result = rfa(*HERE, *documents, "--route", "all_gather", "--heads-k-stride", "1")
    assert result.exit_code == 0, result.output
    assert "Communication is removed" in result.output
    assert "16 tokens of 2 documents (32 tokens)" in result.output
    assert "rank 0" not in result.output
    assert "n/a" in result.output


def test_packs_are_written_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a later one fails, those before it are in the file; and several files become one."""
    file, joined = tmp_path / "packs.json", tmp_path / "joined.json"

    def failing(**options: Any) -> Replay:
        if options["seed"] == 9:
            raise ValueError("out of luck")
        return replay(**options)

    monkeypatch.setattr("ring_flash_attn.bench.replay", failing)
    packs = ("--documents", "magi", "--seed", "7,9", "--json", str(file))
    assert "out of luck" in rfa(*HERE, *packs).output
    found = load(file)
    (one,) = found.details["packs"][FORWARD]["packs"]
    assert one["seed"] == 7

    path = Path(__file__).parents[2] / "benchmarks" / "packs.py"
    spec = spec_from_file_location("benchmarks_packs", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(str(joined), str(file))
    whole = load(joined)
    ((title, pack),) = whole.details["packs"].items()
    assert title.startswith("2 ranks, zigzag × ring × reference")
    assert pack[FORWARD] == one
    assert len(whole.rows) == len(found.rows) == 4
    assert max(whole.details["medians_ms"][title][FORWARD]) == pytest.approx(one["ms"], abs=1e-4)
    assert "--json" not in json.loads(joined.read_text())["command"]


def test_the_command_measures_several_packs(tmp_path: Path) -> None:
    file = tmp_path / "packs.json"
    histogram = tmp_path / "short.csv"
    histogram.write_text("low,high,weight\n1,9,1\n")
    packs = ("--documents", str(histogram), "--seed", "7,5,7", "--document-cap", "0.2")
    result = rfa(*HERE, *packs, "--rank", "1", "--layout", "stripe", "--json", str(file))
    assert result.exit_code == 0, result.output
    drawn = "Documents were drawn from short.csv, none longer than 0.2 of all tokens; seeds 7, 5."
    assert drawn in result.output
    assert "packs: stripe × ring × reference, the slowest of 1 of 2 ranks" in result.output
    results = load(file)
    replays = [Replay.from_dict(each) for each in results.details["replays"].values()]
    assert [each.workload.drawn.seed for each in replays if each.workload.drawn] == [7, 5]
    assert list(results.details["replays"]) == [each.name for each in replays]
    assert [(row.workload["seed"], row.passes, row.placement["rank"]) for row in results.rows] == [
        (seed, passes, 1) for seed in (7, 5) for passes in (FORWARD, BOTH)
    ]
    for row in results.rows:
        assert sum(row.workload["lengths"]) == 32
        assert max(row.workload["lengths"]) <= 6
    lines = {line.split()[0]: line.split() for line in result.output.splitlines() if line.split()}
    for at, passes in ((0, FORWARD), (1, BACKWARD)):
        found, written = pack_rates(replays, passes), results.details["packs"][passes]
        assert written == json.loads(json.dumps(found.to_dict()))
        assert written["worst"]["tflops"] == min(each["tflops"] for each in written["packs"])
        for pack in found.packs:
            cells = lines[str(pack.seed)]
            assert cells[1:3] == [str(pack.ndocuments), str(pack.longest)]
            assert cells[3 + 3 * at : 6 + 3 * at] == [f"{pack.ms:.3f}", f"{pack.tflops:.4g}", "1"]
        assert lines["all"][1 + 2 * at : 3 + 2 * at] == [f"{found.ms:.3f}", f"{found.tflops:.4g}"]
        worst = ["seed", str(found.worst.seed), f"{found.worst.tflops:.4g}"]
        assert lines["worst"][1 + 3 * at : 4 + 3 * at] == worst
    same = CliRunner().invoke(app, ["diff", str(file), str(file)], env={"COLUMNS": "400"}).output
    for each in replays:
        assert f"{len(each.workload.lengths)} documents of short.csv, seed" in same
    assert ("seed 7" in same, "seed 5" in same) == (True, True)


def test_the_command_measures_one_pack(tmp_path: Path) -> None:
    """Every rank is shown, as without documents; and the pack."""
    result = rfa(*HERE, "--documents", "magi", "--svg", str(tmp_path / "timeline.svg"))
    assert result.exit_code == 0, result.output
    assert "none longer than 0.25 of all tokens; seed 42." in result.output
    assert "packs: zigzag × ring × reference, the slowest of 2 ranks" in result.output
    assert "rank 1" in result.output
    assert "2 × base" in result.output
    assert "packs" not in rfa(*HERE).output
    ElementTree.parse(tmp_path / "timeline.svg")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--link", "string"), "string"),
        (("--documents", "abacus"), "'--documents': there is no file abacus, and no histogram but"),
        (("--documents", "magi", "--cu-seqlens", "0,16"), "--documents 'magi' and --cu-seqlens 0,"),
        (("--documents", "magi", "--seed", "4,x"), "--seed must be a whole number or several"),
        (("--documents", "magi", "--seed", "4,-2"), "--seed -2 must not be negative"),
        (("--documents", "magi", "--document-cap", "2"), "--document-cap 2 must be above 0"),
        (("--documents", "magi", "--batch", "2"), "--batch 2: packed documents"),
        (("--seed", "42"), "--seed 42: only for documents from a histogram"),
        (("--document-cap", "0.5"), "--document-cap 0.5: only for documents from a histogram"),
        (("--documents", "magi", "--seed", "1,2", "--svg", "x.svg"), "a timeline is of one pack"),
        (("--link", "ib400", "--link-gbps", "3"), "--link 'ib400' and --link-gbps 3: give"),
        (("--latency-us", "3"), "--latency-us 3 needs a link"),
        (("--link-gbps", "9", "--network-gbps", "5"), "--network-gbps 5 needs --gpus-per-node"),
        (
            ("--link", "a100-ib400", "--network-gbps", "5"),
            "--network-gbps 5: link 'a100-ib400' has",
        ),
        (("--link-gbps", "0"), "--link-gbps must be positive"),
        (("--link", "ib400", "--latency-us", "-1"), "--latency-us must not be negative"),
        (("--world-size", "0"), "world-size"),
        (("--world-size", "2", "--rank", "2"), "rank 2"),
        (("--layout", "spiral"), "spiral"),
        (("--route", "teleport"), "teleport"),
        (("--kernel", "abacus"), "abacus"),
        (("--kernel", "triton"), "needs a GPU"),
        (("--dtype", "int8"), "int8"),
        (("--existing",), "NVIDIA GPU"),
        (("--existing-kernel", "abacus"), "abacus"),
        (("--baseline",), "--baseline: fa2"),
        (("--baseline-kernel", "abacus"), "abacus"),
        (("--cu-seqlens", "0,5,16"), "--seqlen 16 and --cu-seqlens 0,5,16: offsets are those of"),
        (("--device", "abacus"), "abacus"),
        (("--json", "/"), "cannot write /"),
        (("--svg", "/dev/null/picture.svg"), "cannot write /dev/null"),
    ],
)
def test_wrong_options_are_refused_by_name(arguments: tuple[str, ...], word: str) -> None:
    result = rfa(*SHAPE, "--device", "cpu", *arguments)
    assert result.exit_code == 2
    assert word in result.output


def test_wrong_offsets_are_refused() -> None:
    result = rfa("--device", "cpu", "--cu-seqlens", "0,x")
    assert result.exit_code == 2
    assert "--cu-seqlens must be whole numbers and commas, not '0,x'" in result.output
