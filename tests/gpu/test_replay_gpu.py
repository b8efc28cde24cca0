"""Replays on a GPU: the emulated link by the GPU's own clock, sane numbers, everything at once."""

from __future__ import annotations

import json
from itertools import pairwise
from xml.etree import ElementTree

import pytest
import torch
from replays import baseline_in_threads, ranks, small, tensors

from ring_flash_attn.bench import LINKS, Link, Replay, Topology, replay
from ring_flash_attn.bench.replays.baseline import NativeAttention, scripted_merge
from ring_flash_attn.bench.replays.emulated import EmulatedRanks, RandomData
from ring_flash_attn.bench.replays.results import COMPUTE, TRANSFERS
from ring_flash_attn.bench.workload import BOTH, FORWARD
from ring_flash_attn.comm import Message
from ring_flash_attn.draw.svg import draw_timeline
from ring_flash_attn.plan.build import route_names
from ring_flash_attn.verify.oracle import Rules, oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def elapsed(link: Link | Topology, messages: list[Message]) -> float:
    """Seconds of a post and the wait for it, by events of the current stream."""
    device = torch.device("cuda", torch.cuda.current_device())
    transport = EmulatedRanks(device, link, RandomData(device)).transport()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # while the host queues the rest
        begin.record()
        transport.post(messages)
        transport.wait()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return sorted(times)[2]


@pytest.mark.parametrize("name", LINKS)
def test_a_link_is_as_slow_as_it_says(name: str) -> None:
    """256 MiB: 0.3 to 10.7 ms, in which a copy and some launches are hidden."""
    tensor = torch.empty(1 << 17, 1, 8, 128, dtype=torch.bfloat16, device="cuda")
    messages = [Message(tensor, 1, True), Message(tensor, 1, False)]
    expected = LINKS[name].seconds(tensor.nbytes, tensor.nbytes)
    assert 0.99 * expected <= elapsed(LINKS[name], messages) <= 1.1 * expected
    assert tensor.isfinite().all()


def test_both_levels_go_at_the_same_time() -> None:
    """Rank 0 is in a node with rank 1."""
    nodes = Topology("nodes", Link("in", 1e12, 3e-3), Link("out", 1e12, 5e-3), 2)
    near, far = (Message(torch.empty(8, 1, 1, 1, device="cuda"), peer, True) for peer in (1, 2))
    assert 2.97e-3 <= elapsed(nodes, [near]) <= 3.5e-3
    assert 4.95e-3 <= elapsed(nodes, [near, far]) <= 5.6e-3


def test_a_transfer_beside_a_kernel_takes_no_longer_than_the_longer() -> None:
    """Though the kernel has every multiprocessor."""
    from ring_flash_attn.bench.replays.spin import spin_kernel

    device = torch.device("cuda", torch.cuda.current_device())
    transport = EmulatedRanks(device, Link("slow", 1e12, 5e-3), RandomData(device)).transport()
    message = Message(torch.empty(8, 1, 1, 1, device="cuda"), 1, True)
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)
        begin.record()
        transport.post([message])
        spin_kernel[(blocks,)](4_000_000, num_warps=32)  # 4 ms
        transport.wait()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    assert 4.95 <= sorted(times)[2] <= 5.6


def test_many_messages_of_a_post_are_copied_at_once() -> None:
    """One by one they would wait one by one for a GPU that is full."""
    device = torch.device("cuda", torch.cuda.current_device())
    transport = EmulatedRanks(device, LINKS["nvlink4"], RandomData(device)).transport()
    tensors = torch.empty(24, 64, 1, 2, 64, dtype=torch.bfloat16, device=device)
    messages = [Message(tensor, 1, True) for tensor in tensors]
    for _ in range(2):
        transport.post(messages)
        transport.wait()
    tensors.fill_(torch.nan)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        transport.post(messages)
        transport.wait()
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages() for _ in range(event.count)]
    copies = [name for name in names if "copy" in name.lower() or "multi_tensor" in name]
    assert len(copies) == 1, names
    assert tensors.isfinite().all()


@pytest.mark.parametrize("route", route_names())
@pytest.mark.parametrize("link", [None, LINKS["nvlink4"]], ids=["removed", "emulated"])
def test_numbers_are_sane_on_a_gpu(route: str, link: Link | None) -> None:
    changes = {"kernel": "triton", "device": "cuda", "seqlen": 512, "headdim": 64}
    one_rank = ranks(route=route, **changes).rank(1, link)
    for _ in range(3):
        assert all(x.isfinite().all() for x in tensors(one_rank))


def test_everything_at_once_on_a_gpu() -> None:
    changes = {"kernel": "triton", "device": "cuda", "seqlen": 1024, "headdim": 64}
    found = replay(**small(**changes), link="nvlink4", baseline=True, timeline=True)
    assert found.baseline is not None
    for each in (*found.ours.ranks, *found.baseline.ranks):
        assert each.measured.peak is not None
        assert each.measured.peak[BOTH] > 0
        assert each.measured.times[BOTH] > each.measured.times[FORWARD] > 0
    assert Replay.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    for lane in (COMPUTE, TRANSFERS):
        bars = [bar for bar in found.timeline if bar.lane == lane]
        assert all(a.end <= b.start + 1e-3 for a, b in pairwise(bars))
    ElementTree.fromstring(draw_timeline(found))


def test_the_baseline_is_right_on_flash_attention_2() -> None:
    torch.manual_seed(0)
    shapes = [(1, 1024, heads, 64) for heads in (4, 2, 2, 4)]
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    leaves = [x.double().requires_grad_() for x in inputs[:3]]
    expected, _ = oracle(*leaves, Rules(causal=True))
    want = [expected, *torch.autograd.grad(expected, leaves, inputs[3].double())]
    got = baseline_in_threads(inputs[:3], inputs[3], 4, NativeAttention("fa2"), scripted_merge())
    for ours, theirs in zip(got, want, strict=True):
        assert (ours.double() - theirs).abs().max() < 3e-2 * theirs.abs().max()
