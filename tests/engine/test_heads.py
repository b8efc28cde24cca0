"""Routes that spread heads, or know nodes: any heads on any ranks, any dtype, over a group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from samples import Results, Sample, check, expected_of, make_sample, results_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing import assert_close

import ring_flash_attn
from ring_flash_attn import prepare, ring_attention, shard, virtual_ring_attention
from ring_flash_attn.api.families import FUNCTIONS
from ring_flash_attn.engine import prepare as engine
from ring_flash_attn.plan.build import BY_NODES

DOCUMENTS: dict[str, Any] = {"lengths_q": (13, 0, 26, 5), "headdim": 8}
WAYS: list[dict[str, Any]] = [
    {"route": "all_to_all"},
    {"route": "all_to_all", "heads_k_stride": 1},
    {"route": "mesh", "ranks_per_node": 2},
    {"route": "mesh", "ranks_per_node": 2, "sources_per_launch": 1},
    {"route": "mesh", "ranks_per_node": 2, "sources_per_launch": 9},
    {"route": "mesh", "ranks_per_node": 1},
]
NODES: list[dict[str, Any]] = [
    {"route": "double_ring", "ranks_per_node": 2},
    {"route": "double_ring", "ranks_per_node": 2, "sources_per_launch": 1},
]


def run(sample: Sample, world_size: int, layout: str, way: dict[str, Any]) -> Results:
    """Forward and backward over virtual ranks."""
    options = dict(sample.options)
    sink = options.pop("sink", None)

    def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse, _ = virtual_ring_attention(
            q,
            k,
            v,
            world_size=world_size,
            layout=layout,
            cu_seqlens=sample.cu_seqlens_q,
            cu_seqlens_k=sample.cu_seqlens_k,
            return_attn_probs=True,
            sink=sink,
            **way,
            **options,
        )
        return out, lse

    return results_of(attend, sample, sink)


@pytest.mark.product(6)
@pytest.mark.parametrize("nheads_k", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("layout", ["zigzag", "flat_contiguous", "stripe"])
def test_any_number_of_heads(layout: str, way: dict[str, Any], nheads_k: int) -> None:
    sink = torch.linspace(-1, 1, 2 * nheads_k, dtype=torch.float64)
    sample = make_sample(
        **DOCUMENTS, nheads=2 * nheads_k, nheads_k=nheads_k, causal=True, sink=sink
    )
    right = expected_of(sample)
    for world_size in (2, 4):
        check(run(sample, world_size, layout, way), right, 1e-12)


@pytest.mark.parametrize("way", [*WAYS, *NODES], ids=str)
@pytest.mark.parametrize("nheads_k", [1, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(
    dtype: torch.dtype, nheads_k: int, way: dict[str, Any], nan_memory: None
) -> None:
    """As on one device: outputs and gradients differ by the rounding of a product at most."""
    sample = make_sample(**DOCUMENTS, nheads=nheads_k, nheads_k=nheads_k, causal=True).to(dtype)
    alone = run(sample, 1, "zigzag", {"route": "ring"})
    found = run(sample, 4, "zigzag", way)
    for name, tensor in alone.items():
        assert found[name].dtype is tensor.dtype
        assert_close(found[name], tensor, rtol=0.02, atol=0.02)


# Real processes.


def over_group(
    rank: int, world_size: int, sample: Sample, layout: str, way: dict[str, Any], axes: bool
) -> tuple[Tensor, ...]:
    """This rank's output and gradients; with axes over a DeviceMesh of nodes of two."""
    cu_seqlens, way = sample.cu_seqlens_q, dict(way)
    where = {"rank": rank, "world_size": world_size}
    tensors = (sample.q, sample.k, sample.v)
    q, k, v = (
        shard(x, layout, cu_seqlens=cu_seqlens, **where).detach().requires_grad_() for x in tensors
    )
    if axes:
        way.pop("ranks_per_node", None)
        way["group"] = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("out", "in"))
    out = ring_attention(q, k, v, layout=layout, cu_seqlens=cu_seqlens, **way, **sample.options)
    out.backward(shard(sample.dout, layout, cu_seqlens=cu_seqlens, **where))
    return out.detach(), q.grad, k.grad, v.grad


@pytest.mark.parametrize("axes", [False, True], ids=["ranks_per_node", "DeviceMesh"])
@pytest.mark.parametrize("way", [*WAYS[:4], *NODES], ids=str)
def test_on_real_processes(way: dict[str, Any], axes: bool, ranks: Callable[[int], Ranks]) -> None:
    if axes and way["route"] not in BY_NODES:
        pytest.skip("one axis")
    sample = make_sample(**DOCUMENTS, nheads=6, nheads_k=3, causal=True)
    sample = replace(sample, dlse=torch.zeros_like(sample.dlse))
    right = expected_of(sample)
    results = ranks(4).run(over_group, sample, "zigzag", way, axes)
    for rank, found in enumerate(results):
        for name, tensor in zip(("out", "dq", "dk", "dv"), found):
            where = {"rank": rank, "world_size": 4}
            whole = shard(right[name], "zigzag", cu_seqlens=sample.cu_seqlens_q, **where)
            assert_close(tensor, whole, rtol=1e-12, atol=1e-12)


def wrong_mesh(rank: int, world_size: int) -> list[str]:
    q = torch.randn(1, 4, 2, 8)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("out", "in"))
    unnamed = init_device_mesh("cpu", (2, 2))
    across = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("out", "in"))
    found = []
    for given in (
        {"route": "mesh", "group": mesh, "ranks_per_node": 4},
        {"route": "mesh", "group": unnamed},
        {"route": "mesh", "group": across},
        {"route": "all_to_all", "group": mesh},
        {"route": "mesh", "ranks_per_node": 3},
        {"route": "ring", "ranks_per_node": 2},
    ):
        with pytest.raises(ValueError) as error:
            ring_attention(q, q, q, layout="zigzag", **given)
        found.append(str(error.value))
    return found


def test_wrong_nodes_are_refused(ranks: Callable[[int], Ranks]) -> None:
    for found in ranks(4).run(wrong_mesh):
        words = ("inner axis", "mesh_dim_names", r"[0, 2, 1, 3]", "one axis", "must divide")
        words += ("only routes 'double",)
        assert all(word in message for word, message in zip(words, found, strict=True))


def prepared_by_some(rank: int, world_size: int) -> tuple[int, int]:
    """How many groups `prepare` makes, which only some ranks call, and what a call plans then."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "out", "in"))["out", "in"]
    engine._plans.clear()  # a full one drops as many as it takes
    groups, point = dist.get_pg_count(), {"layout": "zigzag", "route": "mesh", "group": mesh}
    if rank < 2:
        prepare([0, 10, 32], nheads_k=2, **point)
    groups = dist.get_pg_count() - groups
    x, plans = torch.randn(16, 2, 8), len(engine._plans)
    ring_attention(x, x, x, cu_seqlens=[0, 10, 32], **point)
    return groups, len(engine._plans) - plans


def test_a_rank_prepares_for_a_mesh_by_itself(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(4).run(prepared_by_some) == [(0, 0), (0, 0), (0, 1), (0, 1)]


_ROUTES = {"ulysses_": "all_to_all", "usp_": "mesh", "double_ring_": "double_ring"}


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n.startswith(tuple(_ROUTES))])
def test_public_functions_have_their_point(name: str) -> None:
    (route,) = (route for prefix, route in _ROUTES.items() if name.startswith(prefix))
    assert FUNCTIONS[name].family.route == route
    assert callable(getattr(ring_flash_attn, name))
