"""cu_seqlens that is written to behind PyTorch's back is read anew, or an error says so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_flash_attn import (
    flash_attn_varlen_func,
    llama3_flash_attn_prepare_cu_seqlens,
    position_ids,
    ring_attention,
    shard,
)
from ring_flash_attn.engine import host_copy
from ring_flash_attn.engine.checks import document_lengths

BEFORE, AFTER = [0, 8, 12], [0, 4, 12]


def through_data(buffer: Tensor) -> None:
    """Write through `.data`."""
    buffer.data.copy_(torch.tensor(AFTER))


def through_numpy(buffer: Tensor) -> None:
    """Write through an array of the same memory."""
    buffer.numpy()[:] = AFTER


def through_dlpack(buffer: Tensor) -> None:
    """Write through another tensor of the same memory."""
    torch.from_dlpack(buffer).copy_(torch.tensor(AFTER))


WRITES: list[Callable[[Tensor], None]] = [through_data, through_numpy, through_dlpack]


@pytest.mark.parametrize("write", WRITES)
def test_a_cpu_tensor_is_read_at_every_call(write: Callable[[Tensor], None]) -> None:
    q = torch.randn(12, 2, 8, dtype=torch.float64)

    def attend(cu_seqlens: Any) -> Any:
        return flash_attn_varlen_func(q, q, q, cu_seqlens, cu_seqlens, 12, 12, causal=True)

    buffer = torch.tensor(BEFORE)
    assert torch.equal(attend(buffer), attend(BEFORE))
    version = buffer._version
    write(buffer)
    assert buffer._version == version
    assert torch.equal(attend(buffer), attend(AFTER))


def broadcast_documents(rank: int, n: int) -> float:
    """A buffer of cu_seqlens that is broadcast at every step: the largest error."""
    buffer = torch.zeros(3, dtype=torch.int32)
    worst = 0.0
    for step, cu in enumerate((BEFORE, AFTER)):
        if rank == 0:
            buffer.copy_(torch.tensor(cu))
        dist.broadcast(buffer, 0)
        generator = torch.Generator().manual_seed(step)
        q = torch.randn(12, 2, 8, generator=generator, dtype=torch.float64)
        whole = flash_attn_varlen_func(q, q, q, cu, cu, 12, 12, causal=True)
        mine, expected = (shard(x, "zigzag", cu_seqlens=cu) for x in (q, whole))
        point = {"layout": "zigzag", "route": "ring"}
        out = ring_attention(mine, mine, mine, cu_seqlens=buffer, causal=True, **point)
        worst = max(worst, float((out - expected).abs().max()))
    return worst


def test_a_buffer_that_is_broadcast(ranks: Any) -> None:
    assert max(ranks(2).run(broadcast_documents)) < 1e-12


class Device:
    """A GPU that is as far behind as a test wants; its tensors are on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queue: list[Callable[[], object]] = []
        self.reads = 0
        monkeypatch.setattr(host_copy, "_copies", {})
        monkeypatch.setattr(host_copy, "_INTERVAL", 0.0)
        monkeypatch.setattr(host_copy, "_is_far", lambda tensor: True)
        monkeypatch.setattr(host_copy, "_start_copy", self.start_copy)
        monkeypatch.setattr(host_copy, "_read", self.read)
        host_copy._checks.clear()

    def read(self, tensor: Tensor) -> tuple[int, ...]:
        self.reads += 1
        self.catch_up()
        return tuple(tensor.tolist())

    def start_copy(self, tensor: Tensor) -> tuple[Tensor, Callable[[], bool]]:
        host, done = torch.full_like(tensor, -1), []

        def copy(source: Tensor = tensor) -> None:
            host.copy_(source)
            done.append(True)

        self.queue.append(copy)
        return host, lambda: bool(done)

    def catch_up(self) -> None:
        for work in self.queue:
            work()
        self.queue.clear()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A GPU in the place of the CPU."""
    return Device(monkeypatch)


def test_layers_wait_for_the_device_once(device: Device) -> None:
    buffer = torch.tensor(BEFORE)
    for _ in range(32):
        assert document_lengths(buffer) == (8, 4)
    assert device.reads == 1
    assert len(device.queue) == 1  # nobody has waited for it
    device.catch_up()
    assert document_lengths(buffer) == (8, 4)
    assert len(host_copy._checks) == 1  # the last one
    host_copy._checks.clear()


def test_a_new_version_is_read(device: Device) -> None:
    buffer = torch.tensor(BEFORE)
    assert document_lengths(buffer) == (8, 4)
    buffer.copy_(torch.tensor(AFTER))
    assert document_lengths(buffer) == (4, 8)
    assert device.reads == 2


def test_other_memory_is_read(device: Device) -> None:
    buffer = torch.tensor(BEFORE)
    assert document_lengths(buffer) == (8, 4)
    buffer.data = torch.tensor(AFTER)
    assert document_lengths(buffer) == (4, 8)


def test_another_tensor_at_the_same_place_is_read(device: Device) -> None:
    for cu, lengths in ((BEFORE, (8, 4)), (AFTER, (4, 8))) * 4:
        assert document_lengths(torch.tensor(cu)) == lengths
    assert not host_copy._copies


@pytest.mark.parametrize("write", WRITES)
def test_a_stale_copy_is_an_error_of_a_later_call(
    device: Device, write: Callable[[Tensor], None]
) -> None:
    buffer = torch.tensor(BEFORE)
    document_lengths(buffer, name="cu_seqlens_q")
    device.queue.append(lambda: write(buffer))  # a collective, on the device
    assert document_lengths(buffer, name="cu_seqlens_q") == (8, 4)  # nobody can know yet
    device.catch_up()
    other = torch.tensor(BEFORE)
    words = r"cu_seqlens_q for \[0, 8, 12\], but it held \[0, 4, 12\].*CPU tensor"
    with pytest.raises(RuntimeError, match=words):
        document_lengths(other)
    assert document_lengths(buffer) == (4, 8)  # who catches the error goes on with what is there


def test_what_is_called_once_for_a_batch_reads_afresh(device: Device) -> None:
    """And what is called in every layer takes what was read then."""
    buffer = torch.tensor(BEFORE)
    for cu in (BEFORE, AFTER):
        device.queue.append(partial(buffer.data.copy_, torch.tensor(cu)))
        _, cu_k, *_ = llama3_flash_attn_prepare_cu_seqlens(buffer, True, 0, 1)
        assert cu_k.tolist() == cu
        assert position_ids("stripe", cu_seqlens=buffer, rank=0, world_size=1)[cu[1]] == 0
        assert document_lengths(buffer) == (cu[1], 12 - cu[1])
    device.catch_up()
    host_copy.raise_if_stale()


def test_a_stale_copy_is_an_error_of_the_backward_pass(device: Device) -> None:
    """Before its gradients reach the optimizer."""
    x = torch.randn(12, 2, 8, requires_grad=True)
    buffer = torch.tensor(BEFORE)
    document_lengths(buffer)
    device.queue.append(lambda: through_data(buffer))
    out = flash_attn_varlen_func(x, x, x, buffer, buffer, 12, 12, causal=True)
    device.catch_up()
    with pytest.raises(RuntimeError, match=r"held \[0, 4, 12\]"):
        out.sum().backward()


def test_a_stale_copy_is_found_though_the_tensor_is_gone(device: Device) -> None:
    buffer = torch.tensor(BEFORE)
    document_lengths(buffer)
    device.queue.append(lambda held=buffer: through_data(held))  # type: ignore[misc]
    document_lengths(buffer)
    device.catch_up()
    del buffer
    with pytest.raises(RuntimeError, match=r"held \[0, 4, 12\]"):
        document_lengths(torch.tensor(BEFORE))


def test_inference_tensors_are_read_at_every_call(device: Device) -> None:
    with torch.inference_mode():
        buffer = torch.tensor(BEFORE)
        assert document_lengths(buffer) == (8, 4)
        buffer.copy_(torch.tensor(AFTER))
        assert document_lengths(buffer) == (4, 8)
    assert not host_copy._copies
