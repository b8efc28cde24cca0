"""torch's experimental `context_parallel`, replaced: one device's results, and torch's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from tiny_model import TinyModel, expected, gradients, plain_attention, random_documents, stacked
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import experimental
from torch.distributed.tensor.experimental import _attention as theirs
from torch.distributed.tensor.experimental import _context_parallel as their_package
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ring_flash_attn
from ring_flash_attn import context_parallel, context_parallel_unshard, set_rotate_method
from ring_flash_attn.api import torch_context_parallel
from ring_flash_attn.plan.layout import layout_names

TOLERANCE: dict[str, Any] = {"rtol": 0, "atol": 1e-10}
SINGLE: dict[str, Any] = {"rtol": 0, "atol": 2e-6}  # measured: 5e-7


@pytest.mark.parametrize(
    "function",
    [experimental.context_parallel, theirs.context_parallel_unshard, theirs.set_rotate_method],
    ids=lambda function: function.__name__,
)
def test_parameters_are_torchs_and_then_ours(function: Any) -> None:
    parameters = inspect.signature(getattr(ring_flash_attn, function.__name__)).parameters
    known = inspect.signature(function).parameters
    assert list(parameters)[: len(known)] == list(known)
    for name, parameter in known.items():
        assert parameters[name].kind == parameter.kind
        assert parameters[name].default == parameter.default
    for parameter in list(parameters.values())[len(known) :]:
        assert parameter.kind is parameter.KEYWORD_ONLY
        assert parameter.default is not parameter.empty


# A model that calls torch's attention.

LENGTHS = (16, 13)


def step(
    rank: int, world_size: int, batch: dict[str, Tensor], options: dict[str, Any], how: str
) -> dict[str, Any]:
    """Written for torch's context_parallel: labels and positions are buffers as ids are."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    model, attention = TinyModel(), plain_attention()
    ids = batch["input_ids"].clone()
    targets = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    positions = torch.arange(ids.shape[1])
    items, whole = (targets != -100).sum(), ids.clone()
    with context_parallel(
        mesh,
        buffers=[ids, targets, positions],
        buffer_seq_dims=[1, -1, 0],
        no_restore_buffers={targets},
        **options,
    ):
        tokens = ids.shape[1]
        assert targets.shape == ids.shape
        assert torch.equal(ids, whole[:, positions])
        inputs = ids, positions, attention
        if how == "checkpointed":
            logits = checkpoint(model, *inputs, use_reentrant=False)
        else:
            logits = model(*inputs)
        sum_of_targets = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss = sum_of_targets / items
        loss.backward()
    assert torch.equal(ids, whole)
    assert positions.tolist() == list(range(ids.shape[1]))
    assert targets.shape[1] == tokens  # still the shard
    layout = options.get("layout", "zigzag")
    (gathered,) = context_parallel_unshard(mesh, [logits], [1], layout=layout, seqlen=ids.shape[1])
    assert not gathered.requires_grad
    grads = gradients(model)
    loss = loss.detach()
    for x in (*grads.values(), loss):
        dist.all_reduce(x)
    return {"loss": loss, "grads": grads, "logits": gathered}


@pytest.mark.product(3)
@pytest.mark.parametrize("layout", [None, *layout_names()])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_model_is_that_of_one_device(
    world_size: int, length: int, layout: str | None, ranks: Callable[[int], Ranks]
) -> None:
    documents = [(i, j, torch.ones_like(w)) for i, j, w in random_documents((length, length))]
    right = expected(documents)
    how = "checkpointed" if length == 16 else "plain"
    options = {} if layout is None else {"layout": layout, "route": "all_gather"}
    for found in ranks(world_size).run(step, stacked(documents), options, how):
        torch.testing.assert_close(found["loss"], right["loss"], **TOLERANCE)
        torch.testing.assert_close(found["logits"], torch.stack(right["logits"]), **TOLERANCE)
        for name, grad in right["grads"].items():
            torch.testing.assert_close(found["grads"][name], grad, **TOLERANCE)


# The same as torch's.


def beside_torch(rank: int, world_size: int) -> None:
    """Shards, outputs and gradients are torch's.

    Its context does not run on the CPU, because DTensor has no rule for the CPU's attention. But
    its loops over the ranks do, if they are given that attention.
    """
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    implementation: Any = their_package._attention
    aten = torch.ops.aten
    torch.manual_seed(0)
    table = torch.arange(16.0)
    buffers = [*torch.randn(4, 2, 4, 16, 8), table]
    arguments: dict[str, Any] = {"buffers": buffers, "buffer_seq_dims": [2, 2, 2, 2, 0]}
    with experimental.context_parallel(mesh, **arguments):
        shards = [x.clone() for x in buffers]
        q, k, v, dout, _ = shards
        group = mesh.get_group()
        out, lse = implementation._templated_ring_attention(
            group,
            2,
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            query=q,
            key=k,
            value=v,
            is_causal=True,
        )
        grads = implementation._templated_ring_attention_backward(
            group,
            2,
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
            grad_out=dout,
            grad_out_name="grad_out",
            query=q,
            key=k,
            value=v,
            out=out,
            logsumexp=lse,
            is_causal=True,
            dropout_p=0.0,
        )
        (whole,) = theirs.context_parallel_unshard(mesh, [out], [2])
    with context_parallel(mesh, **arguments):
        for mine, shard in zip(buffers, shards, strict=True):
            assert torch.equal(mine, shard)
        inputs = [x.clone().requires_grad_() for x in buffers[:3]]
        mine = F.scaled_dot_product_attention(*inputs, is_causal=True)
        mine.backward(buffers[3])
    torch.testing.assert_close(mine.detach(), out, **SINGLE)
    for x, grad in zip(inputs, grads, strict=True):
        torch.testing.assert_close(x.grad, grad, **SINGLE)
    (gathered,) = context_parallel_unshard(mesh, [mine], [2])
    torch.testing.assert_close(gathered, whole, **SINGLE)
    right = F.scaled_dot_product_attention(*buffers[:3], is_causal=True)
    torch.testing.assert_close(gathered, right, **SINGLE)


def test_shards_outputs_and_gradients_are_torchs(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).run(beside_torch)


# Buffers.


def buffers_in_place(rank: int, world_size: int) -> None:
    tokens = torch.arange(2 * 9).view(2, 9)
    ids, targets = tokens[:, :-1], tokens[:, 1:]  # of one storage, as data loaders cut them
    model = nn.Module()
    model.register_buffer("table", torch.arange(8.0))
    table, before = model.table, F.scaled_dot_product_attention
    assert isinstance(table, Tensor)
    held = [0, 1, 6, 7] if rank == 0 else [2, 3, 4, 5]
    x = torch.randn(1, 1, 4, 8)
    arguments: dict[str, Any] = {"buffers": (ids, targets, table), "buffer_seq_dims": (1, 1, 0)}
    with context_parallel(None, **arguments, layout="zigzag"):
        assert ids[1].tolist() == [9 + n for n in held]
        assert targets[1].tolist() == [10 + n for n in held]
        assert model.table.tolist() == held
        assert tokens.flatten().tolist() == list(range(18))
        F.scaled_dot_product_attention(x, x, x)
    assert (ids.shape, targets.shape) == ((2, 8), (2, 8))
    assert ids.data_ptr() == tokens.data_ptr()  # the same memory as before: nothing was copied
    assert table.tolist() == list(range(8))
    embed = nn.Embedding(20, 4)
    with context_parallel(None, **arguments):
        F.scaled_dot_product_attention(x, x, x)
        out = embed(ids)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()  # torch notices a backward pass after the context
    with pytest.raises(KeyError, match="mine"), context_parallel(None, **arguments):
        raise KeyError("mine")
    with pytest.raises(RuntimeError, match="no call of F"), context_parallel(None, **arguments):
        pass
    assert table.tolist() == list(range(8))
    assert F.scaled_dot_product_attention is before


def test_buffers_are_shards_within_and_whole_afterwards(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).run(buffers_in_place)


def mistakes(rank: int, world_size: int) -> None:
    ids, other = torch.zeros(2, 8), torch.zeros(2, 8)
    weight = torch.zeros(2, 8, requires_grad=True)
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({}, ValueError, "buffers must hold at least one"),
        ({"buffers": [ids]}, ValueError, "buffer_seq_dims must have 1"),
        ({"buffers": [ids], "buffer_seq_dims": [1, 1]}, ValueError, "must have 1 numbers.* not 2"),
        ({"buffers": [ids], "buffer_seq_dims": [2]}, ValueError, r"buffer_seq_dims\[0\] = 2"),
        ({"buffers": [ids, ids], "buffer_seq_dims": [1, 1]}, ValueError, "twice"),
        ({"buffers": [ids, other], "buffer_seq_dims": [1, 0]}, ValueError, r"they have \[2, 8\]"),
        ({"buffers": [weight], "buffer_seq_dims": [1]}, ValueError, "requires a gradient"),
        (
            {"buffers": [ids], "buffer_seq_dims": [1], "no_restore_buffers": {other}},
            ValueError,
            "no_restore_buffers must be among buffers",
        ),
        ({"buffers": [ids], "buffer_seq_dims": [1], "layout": "spiral"}, ValueError, "spiral"),
        ({"buffers": [ids], "buffer_seq_dims": [1], "route": "detour"}, ValueError, "'detour'"),
    ]
    for arguments, error, words in cases:
        with pytest.raises(error, match=words):
            context_parallel(None, **arguments)
    with pytest.raises(ValueError, match="load_balancer must be None"):
        context_parallel_unshard(None, [ids], [1], load_balancer=object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rotate_method must be one of"):
        set_rotate_method("ring")


def test_mistakes_are_refused(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).run(mistakes)


@pytest.mark.parametrize(("method", "route"), [("allgather", "all_gather"), ("alltoall", "ring")])
def test_the_rotate_method_is_a_route(
    method: str, route: str, ranks: Callable[[int], Ranks]
) -> None:
    ranks(1).run(choose_route, method, route)


def choose_route(rank: int, world_size: int, method: str, route: str) -> None:
    ids, taken = torch.zeros(1, 8), []
    original, before = torch_context_parallel.ContextParallel, torch_context_parallel._route
    try:
        torch_context_parallel.ContextParallel = lambda *args: taken.append(args) or original(*args)
        set_rotate_method(method)
        context_parallel(None, buffers=[ids], buffer_seq_dims=[1])
        context_parallel(None, buffers=[ids], buffer_seq_dims=[1], route="query_ring")
    finally:
        torch_context_parallel.ContextParallel = original
        torch_context_parallel._route = before
    assert [args[2] for args in taken] == [route, "query_ring"]
