"""`run`: closed forms, and what must hold for any schedule."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_flash_attn.bench.links import Link, Topology
from ring_flash_attn.simulate.timeline import Stage, run

FAST = Topology.of(Link("fast", 1e9, 1e-6))
HOP, COMPUTE = 1e-6 + 1e6 / 1e9, 2e-3  # a megabyte


def ring(world_size: int, compute: float, size: int, **more: float) -> dict[int, list[Stage]]:
    """Keys go round; the last step sends nothing."""
    return {
        rank: [
            Stage(
                compute,
                (((rank + 1) % world_size, size),) if step < world_size - 1 else (),
                (((rank - 1) % world_size, size),) if step < world_size - 1 else (),
                **more,  # type: ignore[arg-type]
            )
            for step in range(world_size)
        ]
        for rank in range(world_size)
    }


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_a_ring_whose_compute_hides_all(world_size: int) -> None:
    found = run(ring(world_size, COMPUTE, 10**6), FAST)
    assert found.seconds == pytest.approx(world_size * COMPUTE)
    assert all(each.exposed == 0 for each in found.ranks.values())


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_a_ring_that_waits_for_its_links(world_size: int) -> None:
    found = run(ring(world_size, HOP / 4, 10**6, after=1e-5), FAST)
    expected = (world_size - 1) * (HOP + 1e-5) + HOP / 4 + 1e-5
    assert found.seconds == pytest.approx(expected)
    for each in found.ranks.values():
        assert each.exposed == pytest.approx((world_size - 1) * HOP * 3 / 4)


def test_a_rank_without_the_others_waits_for_the_link_alone() -> None:
    schedule = ring(8, HOP / 4, 10**6)
    alone = run({3: schedule[3]}, FAST).ranks[3]
    assert alone == run(schedule, FAST).ranks[3]


def test_a_late_rank_delays_those_that_need_it() -> None:
    schedule = {
        0: [Stage(5e-3), Stage(0, ((1, 10**6),))],
        1: [Stage(), Stage(0, (), ((0, 10**6),))],
    }
    found = run(schedule, FAST)
    assert found.ranks[1].end == pytest.approx(5e-3 + HOP)
    assert found.ranks[1].exposed == pytest.approx(5e-3 + HOP)


def test_lanes_inside_and_outside_work_side_by_side() -> None:
    topology = Topology("two nodes", Link("in", 1e9, 0), Link("out", 1e8, 0), 2)
    both = {
        rank: [
            Stage(0, ((rank ^ 1, 10**6), (rank ^ 2, 10**6)), ((rank ^ 1, 10**6), (rank ^ 2, 10**6)))
        ]
        for rank in range(4)
    }
    assert run(both, topology).seconds == pytest.approx(10e-3)
    one_node = Topology("one", Link("in", 1e9, 0))
    assert run(both, one_node).seconds == pytest.approx(2e-3)


def test_a_message_that_is_awaited_later_hides_behind_several_stages() -> None:
    """A hop between nodes behind the steps of the ring inside."""
    topology = Topology("two nodes", Link("in", 1e9, 0), Link("out", 1e8, 0), 2)
    slow, quick = 10**6, 10**6
    schedule = {
        rank: [
            Stage(4e-3, ((rank ^ 2, slow),), ((rank ^ 2, slow),), awaited=2),
            Stage(4e-3, ((rank ^ 1, quick),), ((rank ^ 1, quick),)),
            Stage(1e-3),
            Stage(1e-3),
        ]
        for rank in range(4)
    }
    found = run(schedule, topology)
    assert found.seconds == pytest.approx(10e-3 + 1e-3)
    assert all(each.exposed == pytest.approx(1e-3) for each in found.ranks.values())


def test_posts_of_one_lane_go_one_after_the_other() -> None:
    schedule = {
        rank: [
            Stage(0, ((1 - rank, 10**6),), ((1 - rank, 10**6),), awaited=1),
            Stage(0, ((1 - rank, 10**6),), ((1 - rank, 10**6),)),
        ]
        for rank in range(2)
    }
    assert run(schedule, FAST).seconds == pytest.approx(2 * HOP)


def test_who_receives_waits_for_a_sender_that_many_want() -> None:
    size = 10**6
    schedule = {0: [Stage(0, tuple((peer, size) for peer in range(1, 5)))]}
    schedule |= {peer: [Stage(0, (), ((0, size),))] for peer in range(1, 5)}
    found = run(schedule, FAST)
    for each in found.ranks.values():
        assert each.end == pytest.approx(1e-6 + 4e-3)


def test_messages_slow_compute_down() -> None:
    found = run(ring(2, COMPUTE, 10**6), FAST, interference=0.25)
    assert found.seconds == pytest.approx(2 * COMPUTE + 0.25 * HOP)
    short = run(ring(2, HOP / 2, 10**6), FAST, interference=0.25)
    assert short.seconds == pytest.approx(HOP + HOP / 2)


def test_gathers_come_before_the_post() -> None:
    schedule = ring(2, COMPUTE, 10**6, before=1e-3)
    assert run(schedule, FAST).seconds == pytest.approx(2 * COMPUTE + 2e-3)


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        ({0: [Stage(0, ((1, 5),))], 1: [Stage()]}, r"rank 0 sends rank 1 messages of \[5\] bytes"),
        ({0: [Stage(0, ((1, 5),))], 1: [Stage(0, (), ((0, 6),))]}, r"which expects \[6\]"),
        (
            {
                0: [Stage(0, ((1, 5),)), Stage(0, (), ((1, 5),))],
                1: [Stage(0, ((0, 5),)), Stage(0, (), ((0, 5),))],
            },
            r"ranks wait for each other: 0 \(stage 0\), 1 \(stage 0\)",
        ),
    ],
)
def test_wrong_schedules_are_refused(schedule: dict[int, list[Stage]], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        run(schedule, FAST)


def test_a_wrong_interference_is_refused() -> None:
    with pytest.raises(ValueError, match="interference must be at least 0"):
        run({}, FAST, interference=1)


@pytest.mark.parametrize("module", ["timeline", "rates", "machine", "gpus", "fit", "points"])
def test_schedules_of_others_are_priced_without_torch(module: str) -> None:
    code = f"import sys, ring_flash_attn.simulate.{module}; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_nothing_takes_no_time() -> None:
    assert run({}, FAST).seconds == 0
    assert run({0: [], 1: []}, FAST).seconds == 0


@st.composite
def schedules(draw: st.DrawFn) -> dict[int, list[Stage]]:
    """Any messages within a stage, any work."""
    world_size, stages = draw(st.integers(1, 5)), draw(st.integers(0, 4))
    seconds = st.floats(0, 1e-2)
    found: dict[int, list[Stage]] = {rank: [] for rank in range(world_size)}
    for _ in range(stages):
        sizes = {
            (a, b): draw(st.integers(0, 10**6))
            for a, b in product(range(world_size), repeat=2)
            if a != b
        }
        awaited = draw(st.integers(0, 2))
        for rank, each in found.items():
            sends = tuple((b, size) for (a, b), size in sizes.items() if a == rank)
            receives = tuple((a, size) for (a, b), size in sizes.items() if b == rank)
            each.append(Stage(draw(seconds), sends, receives, draw(seconds), awaited=awaited))
    return found


@settings(max_examples=60, deadline=None)
@given(schedules(), st.floats(0, 0.5))
def test_what_holds_for_any_schedule(schedule: dict[int, list[Stage]], interference: float) -> None:
    slow = Topology("slow", Link("in", 1e8, 1e-5), Link("out", 1e7, 1e-5), 2)
    fast = Topology("fast", Link("in", 2e8, 1e-5), Link("out", 3e7, 1e-5), 2)
    found = run(schedule, slow, interference)
    for rank, stages in schedule.items():
        times = found.ranks[rank]
        alone = sum(each.compute + each.after for each in stages)
        assert times.busy >= alone * (1 - 1e-9)
        assert times.end == pytest.approx(times.busy + times.exposed)
        for _, _, start, end in times.intervals:
            assert 0 <= start <= end <= times.end * (1 + 1e-9)
    if not interference:
        assert run(schedule, fast).seconds <= found.seconds * (1 + 1e-9)
    silent = {
        rank: [Stage(each.compute, after=each.after) for each in stages]
        for rank, stages in schedule.items()
    }
    nothing = run(silent, slow, interference)
    for rank, stages in schedule.items():
        assert nothing.ranks[rank].exposed == 0
        assert nothing.ranks[rank].end == pytest.approx(sum(s.compute + s.after for s in stages))
