"""`group=` takes a DeviceMesh of one axis wherever it takes a process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ring_flash_attn import (
    llama3_flash_attn_prepare_cu_seqlens,
    llama3_flash_attn_varlen_func,
    position_ids,
    relayout,
    ring_attention,
    shard,
    unshard,
    update_ring_flash_attn_params,
    zigzag_ring_flash_attn_func,
)
from ring_flash_attn.adapters import hf_adapter
from ring_flash_attn.comm import rank_and_size
from ring_flash_attn.comm.historic import AllGatherComm, RingComm

CU_SEQLENS = [0, 3, 12]


def results(group: Any) -> list[Tensor]:
    """Everything that takes a group, on the ranks of this one."""
    torch.manual_seed(0)
    x = torch.randn(12, 2, 4, dtype=torch.float64)
    cu: dict[str, Any] = {"cu_seqlens": CU_SEQLENS, "group": group}
    mine = shard(x, "zigzag", **cu)
    point: dict[str, Any] = {"layout": "zigzag", "route": "all_gather", "causal": True}
    batch = shard(x[None], "zigzag", group=group)
    moved = relayout(mine, "zigzag", "flat_contiguous", **cu)
    rank, world_size = rank_and_size(group)
    *documents, part = llama3_flash_attn_prepare_cu_seqlens(
        torch.tensor(CU_SEQLENS), True, rank, world_size
    )
    update_ring_flash_attn_params(CU_SEQLENS, group)
    ring, gathered = RingComm(group), torch.empty(world_size)
    passed = ring.send_recv(torch.tensor([float(rank)]))
    ring.commit()
    ring.wait()
    all_gather = AllGatherComm(group)
    all_gather.all_gather(gathered, torch.tensor([float(rank)]))
    all_gather.wait()
    outs = [
        zigzag_ring_flash_attn_func(batch, batch, batch, causal=True, group=group),
        ring_attention(mine, mine, mine, **point, **cu),
        llama3_flash_attn_varlen_func(
            moved, moved, moved, *documents, 1, part, causal=True, group=group
        ),
        unshard(mine, "zigzag", **cu),
        position_ids("zigzag", **cu),
        hf_adapter.shift_labels(torch.arange(12), CU_SEQLENS, group),
        hf_adapter.DATA_PARAMS["cu_seqlens_k"],
    ]
    return [*outs, moved, passed, gathered]


def on_meshes(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    flat = mesh["dp", "cp"]._flatten("dp_cp")
    for group in (mesh["cp"], mesh["dp"], flat, init_device_mesh("cpu", (4,))):
        ours, theirs = results(group), results(group.get_group())
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    outsider = DeviceMesh("cpu", [0, 1])
    for group, words in (
        (mesh, r"DeviceMesh of one axis, not of 2 \(dp, cp\): pass .* mesh\['cp'\]"),
        (init_device_mesh("cpu", (2, 2)), r"not of 2 \(without names\)"),
        (outsider, f"rank {rank} is not on this DeviceMesh"),
    ):
        if group is not outsider or rank > 1:
            with pytest.raises(ValueError, match=words):
                shard(torch.zeros(1, 4), "zigzag", group=group)
            with pytest.raises(ValueError, match=words):
                zigzag_ring_flash_attn_func(*torch.randn(3, 1, 4, 2, 4), group=group)
    dist.barrier()


def test_every_call_takes_a_mesh(ranks: Callable[[int], Ranks]) -> None:
    ranks(4).run(on_meshes)
