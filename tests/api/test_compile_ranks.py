"""torch.compile over a group: distributed functions are operators in a full graph."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calls import (
    FUNCTIONS,
    extra_arguments,
    held_of,
    packed_inputs,
    sample_for,
    shard_of,
)
from ranks import Ranks
from tiny_model import WIDTH, TinyLayer, TinyModel
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ring_flash_attn as rfa
from ring_flash_attn import Balanced, ContextParallel, Mask
from ring_flash_attn.api import families, operators

Pool = Callable[..., Ranks]
DISTRIBUTED = [name for name in FUNCTIONS if families.FUNCTIONS[name].is_distributed]
LENGTHS = (8, 4, 12, 4)  # what every function can take on two ranks


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    torch.compiler.reset()
    counters.clear()
    return torch.compile(function, fullgraph=True, **{"backend": "aot_eager", **options})


def graphs() -> int:
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def outcome(function: Callable[..., Any], inputs: list[Tensor], *rest: Any) -> list[Tensor]:
    """What it returns, and the gradients of its inputs."""
    torch.manual_seed(7)  # of dropout
    outs = function(*inputs, *rest)
    outs = [outs] if isinstance(outs, Tensor) else list(outs)
    loss = sum(out.sin().sum() for out in outs)
    assert isinstance(loss, Tensor)
    return [*outs, *torch.autograd.grad(loss, inputs)]


def equal(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return len(actual) == len(expected) and all(map(torch.equal, actual, expected))


def close(actual: list[Tensor], expected: list[Tensor]) -> bool:
    """But for the order in which gradients are added up."""
    pairs = zip(actual, expected, strict=True)
    return all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in pairs)


def rows(n: int, dtype: torch.dtype = torch.float64, seed: int = 0, nheads: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 10 * dist.get_rank())
    x = torch.randn(n, nheads, 4, generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_()


# Every function.


def call_of(
    name: str, rank: int, n: int, called: str | None = None
) -> tuple[Callable[..., Any], list[Tensor]]:
    """A call of a public function on this rank's shard, and its tensors."""
    family, form = FUNCTIONS[name]
    sample = sample_for(name, causal=True, lengths=LENGTHS)
    where = (family.layout or "zigzag", sample.cu_seqlens_q, sample.q.shape[-3], rank, n)
    inputs = packed_inputs(form, shard_of(sample, held_of(*where)))
    extra = {**extra_arguments(name, sample, rank, n), **sample.options}

    def call(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, probs = getattr(rfa, called or name)(*inputs, **extra, return_attn_probs=True)
        assert probs is None
        return out, lse

    return call, [x.requires_grad_() for x in inputs]


def in_one_graph(rank: int, n: int, names: list[str]) -> dict[str, bool]:
    calls = {name: call_of(name, rank, n) for name in names}

    def all_of_them(inputs: dict[str, list[Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
        return {name: call(*inputs[name]) for name, (call, _) in calls.items()}

    inputs = {name: tensors for name, (_, tensors) in calls.items()}
    flat = [x for tensors in inputs.values() for x in tensors]
    found = []
    for function in (all_of_them, compiled(all_of_them)):
        outs = function(inputs)
        loss = sum(out.sin().sum() + lse.cos().sum() for out, lse in outs.values())
        grads = iter(torch.autograd.grad(loss, flat))
        found.append({name: [*outs[name], *(next(grads) for _ in inputs[name])] for name in inputs})
    assert graphs() == 1
    return {name: equal(found[1][name], found[0][name]) for name in inputs}


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_distributed_functions_in_one_graph(ranks: Pool, every: int) -> None:
    """Nothing breaks it; results, lse and gradients have the bits of eager calls."""
    names = DISTRIBUTED[::every]
    for found in ranks(2).run(in_one_graph, names):
        assert list(found) == names
        assert all(found.values()), found


def traced(rank: int, n: int, names: list[str]) -> list[str]:
    """The operators in a graph with these functions."""
    calls = [
        call_of(name.removeprefix(f"{families.FUNCTIONS[name].prefix}_"), rank, n, name)
        for name in names
    ]
    seen: list[str] = []

    def capture(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        raise KeyboardInterrupt  # nothing here can run kernels for GPUs

    def all_of_them(inputs: list[list[Tensor]]) -> Tensor:
        outs = [call(*each)[0] for (call, _), each in zip(calls, inputs, strict=True)]
        return torch.stack([out.sum() for out in outs]).sum()

    with pytest.raises(KeyboardInterrupt):
        compiled(all_of_them, backend=capture)([inputs for _, inputs in calls])
    return [name for name in seen if "ring_flash_attn" in name]


@pytest.mark.slow
def test_functions_of_other_kernels_are_traced(ranks: Pool) -> None:
    """They differ from those above in the kernel alone: one in four of them."""
    functions = [f for f in families.FUNCTIONS.values() if f.is_distributed and f.prefix][::4]
    (seen,) = ranks(1).run(traced, [function.name for function in functions])
    expected = ["llama3" if f.signature == "llama3" else "ring" for f in functions]
    assert seen == [f"ring_flash_attn.{kind}_attention.default" for kind in expected]


# What a graph keeps, and what it must not keep.


def documents(rank: int, n: int) -> None:
    def run(x: Tensor, cu_seqlens: Any) -> Tensor:
        return rfa.stripe_flash_attn_varlen_func(x, x, x, cu_seqlens, 20, causal=True)

    def offsets(*lengths: int) -> Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)

    x, function = rows(10), compiled(run)
    found = []
    cu_seqlens = offsets(8, 12)
    for lengths in ((8, 12), (14, 6), (2, 18)):
        cu_seqlens.copy_(offsets(*lengths))  # the same tensor
        found.append(outcome(function, [x], cu_seqlens))
        assert close(found[-1], outcome(run, [x], offsets(*lengths)))
    assert graphs() == 1
    for lengths in ((4, 4, 12), (2,) * 10, (20,)):
        found.append(outcome(function, [x], offsets(*lengths)))
        assert close(found[-1], outcome(run, [x], offsets(*lengths)))
    assert graphs() == 2  # any number of documents
    assert not any(close(a, b) for i, a in enumerate(found) for b in found[:i])
    for n in (6, 8):  # tokens of this rank
        assert close(
            outcome(function, [rows(n)], offsets(2 * n)), outcome(run, [rows(n)], [0, 2 * n])
        )
    function = compiled(run)
    for lengths in ((8, 12), (14, 6), (4, 4, 12), (20,)):
        given = offsets(*lengths).tolist()
        assert close(outcome(function, [x], given), outcome(run, [x], given))


def test_new_documents_are_honoured(ranks: Pool) -> None:
    """Values of cu_seqlens are read when the graph runs, not when it is compiled."""
    ranks(2).run(documents)


def written_between(rank: int, n: int) -> None:
    """Two micro-batches through one buffer of offsets, then their backward passes."""

    def run(x: Tensor, cu_seqlens: Tensor) -> Tensor:
        return rfa.stripe_flash_attn_varlen_func(x, x, x, cu_seqlens, 20, causal=True)

    x, cu_seqlens = rows(10), torch.tensor([0, 8, 20])
    out = compiled(run)(x, cu_seqlens)
    cu_seqlens.copy_(torch.tensor([0, 14, 20]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_offsets_are_not_overwritten_before_the_backward_pass(ranks: Pool) -> None:
    ranks(2).run(written_between)


def new_parts(rank: int, n: int) -> None:
    """llama3: limits and slices of every batch are other integers."""

    def run(x: Tensor, q: Tensor, k: Tensor, longest_q: int, longest_k: int, part: slice) -> Tensor:
        return rfa.llama3_flash_attn_varlen_func(
            x, x, x, q, k, longest_q, longest_k, 1, part, causal=True
        )

    x, function = rows(10), compiled(run)
    for lengths in ((8, 12), (14, 6), (4, 4, 12), (7, 11, 2)):
        offsets = torch.tensor([0, *accumulate(lengths)])
        given = rfa.llama3_flash_attn_prepare_cu_seqlens(offsets, True, rank, n)
        assert close(outcome(function, [x], *given), outcome(run, [x], *given))
    assert graphs() <= 4


def test_new_parts_of_llama3(ranks: Pool) -> None:
    ranks(2).run(new_parts)


def groups(rank: int, n: int) -> None:
    alone = [dist.new_group([each]) for each in range(n)][rank]
    mesh = init_device_mesh("cpu", (n, 1), mesh_dim_names=("cp", "tp"))

    def run(x: Tensor, group: Any) -> Tensor:
        return rfa.zigzag_ring_flash_attn_func(x[None], x[None], x[None], group=group)

    x, function, found = rows(10), compiled(run), []
    for group in (None, alone, dist.group.WORLD, mesh["cp"], mesh["tp"]):
        found.append(outcome(function, [x], group))
        assert close(found[-1], outcome(run, [x], group))
    assert close(found[0], found[2])
    assert close(found[0], found[3])
    assert close(found[1], found[4])
    assert not close(found[0], found[1])
    assert graphs() <= 5
    with pytest.raises(Exception, match="DeviceMesh of one axis, not of 2"):
        compiled(run)(x, mesh)

    def over_nodes(x: Tensor, group: Any, size: int | None) -> Tensor:
        return rfa.usp_flash_attn_func(x[None], x[None], x[None], group=group, ranks_per_node=size)

    nodes = init_device_mesh("cpu", (1, n), mesh_dim_names=("out", "in"))
    function = compiled(over_nodes)
    for group, size in ((None, 1), (nodes, None)):
        found.append(outcome(function, [x], group, size))
        assert close(found[-1], outcome(over_nodes, [x], group, size))
        assert close(found[-1], found[0])
    with pytest.raises(Exception, match="inner axis of the DeviceMesh has 2"):
        compiled(over_nodes)(x, nodes, 1)

    def relayed(x: Tensor, group: Any) -> Tensor:
        return rfa.double_ring_flash_attn_func(x[None], x[None], x[None], group=group)

    assert close(outcome(compiled(relayed), [x], nodes), found[0])


def test_groups_and_meshes(ranks: Pool) -> None:
    """A graph is of the group that it was compiled for; another one is compiled anew."""
    ranks(2).run(groups)


def layouts(rank: int, n: int) -> None:
    def run(x: Tensor, layout: Any) -> Tensor:
        return rfa.ring_attention(x, x, x, layout=layout, route="ring", cu_seqlens=[0, 4, 20])

    function = compiled(run)
    window = ((Mask(left=1, right=0), 1),)
    for layout in ("zigzag", Balanced(), Balanced(window), Balanced(window, ranks_per_node=1)):
        assert close(outcome(function, [rows(10)], layout), outcome(run, [rows(10)], layout))

    class Mine:
        name = "mine"

        def held(self, lengths: Any, rank: int, world_size: int, queries: Any = None) -> Any:
            return [(0, range(4 * (1 - rank))), (1, range(10 * rank, 6 + 10 * rank))]

    with pytest.raises(Exception, match=r"layout 'mine': under torch.compile .* by its name"):
        compiled(run)(rows(10), Mine())


@pytest.mark.slow
def test_layouts_that_are_objects(ranks: Pool) -> None:
    ranks(2).run(layouts)


# Features.


def features(rank: int, n: int) -> None:
    def run(x: Tensor, kv: Tensor, sink: Tensor) -> tuple[Tensor, ...]:
        shared: dict[str, Any] = {"layout": "zigzag", "cu_seqlens": torch.tensor([0, 8, 20])}
        k, v = kv.unbind(1)
        slopes = torch.linspace(0.1, 0.4, 4)
        calls: list[dict[str, Any]] = [
            {"route": "ring", "causal": True, "dropout_p": 0.3},
            {"route": "all_gather", "heads_k_stride": 1, "sink": sink},
            {"route": "query_ring", "window_size": (4, 2), "softcap": 2.0, "softmax_scale": 0.3},
            {"route": "ring", "alibi_slopes": slopes, "sources_per_launch": 1, "deterministic": 1},
        ]
        return tuple(rfa.ring_attention(x, k, v, **shared, **each) for each in calls)

    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x, kv = rows(10, dtype, nheads=4), rows(20, dtype).unflatten(0, (10, 2)).detach()
        inputs = [x, kv.requires_grad_(), torch.ones(4, dtype=dtype, requires_grad=True)]
        assert equal(outcome(compiled(run), inputs), outcome(run, inputs)), dtype
        if dtype is torch.float32:
            with torch.autocast("cpu", torch.bfloat16):
                found = outcome(compiled(run), inputs)
                assert found[0].dtype is torch.bfloat16
                assert equal(found, outcome(run, inputs))


@pytest.mark.slow
def test_features(ranks: Pool) -> None:
    ranks(2).run(features)


# Layers of a model, and checkpoints.


class Counted:
    """How often operators compute a forward pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forwards, forward = 0, operators.forward

        def counted(*args: Any) -> Any:
            self.forwards += 1
            return forward(*args)

        monkeypatch.setattr(operators, "forward", counted)


def layer_of(attention: Callable[..., Any]) -> tuple[TinyLayer, Callable[[Tensor], Tensor]]:
    torch.manual_seed(3)
    layer = TinyLayer().double()
    positions = torch.arange(8)

    def run(x: Tensor) -> Tensor:
        return layer(x, positions, attention)

    return layer, run


def kept(rank: int, n: int, example: str) -> None:
    layer, run = layer_of(lambda q, k, v: rfa.zigzag_ring_flash_attn_func(q, k, v, causal=True))
    names: dict[str, Any] = {"torch": torch, "layer": run}
    exec(example, names)
    keeps = names["checkpointed"]

    def recomputes(x: Tensor) -> Tensor:
        return checkpoint(run, x, use_reentrant=False)

    x = torch.randn(2, 8, WIDTH, dtype=torch.float64, requires_grad=True)
    inputs = [x, *layer.parameters()]
    expected = outcome(lambda *_: run(x), inputs)
    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(patch)
        forwards = []
        for function in (run, keeps, compiled(keeps), compiled(recomputes)):
            assert close(outcome(lambda *_, f=function: f(x), inputs), expected)
            forwards.append(counted.forwards)
            counted.forwards = 0
        assert forwards == [0, 1, 1, 2]  # eager: no operator


def test_selective_checkpointing_keeps_outputs(ranks: Pool) -> None:
    """A policy that names the operator computes attention once, in eager mode as in a graph."""
    page = (Path(__file__).parents[2] / "docs" / "usage.md").read_text()
    example = page.split("<!-- checkpoint -->\n```python\n")[1].split("```")[0]
    ranks(2).run(kept, example)


def model_in_inductor(rank: int, n: int) -> None:
    layer, run = layer_of(lambda q, k, v: rfa.zigzag_ring_flash_attn_func(q, k, v, causal=True))
    x = torch.randn(2, 8, WIDTH, dtype=torch.float64, requires_grad=True)
    inputs = [x, *layer.parameters()]
    found = [
        outcome(lambda *_, f=f: f(x), inputs) for f in (compiled(run, backend="inductor"), run)
    ]
    assert graphs() == 1
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_layer_in_inductor(ranks: Pool) -> None:
    ranks(2).run(model_in_inductor)


# ContextParallel.


def packed(cp: ContextParallel, *lengths: int) -> dict[str, Any]:
    total = sum(lengths)
    ids = (torch.arange(total) * 7 % 11)[None]
    return cp.shard({"input_ids": ids, "cu_seqlens": [0, *accumulate(lengths)]})


def with_attention(cp: ContextParallel, model: TinyModel, part: dict[str, Any]) -> Tensor:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return cp.attention(q, k, v, part["documents"], causal=True)

    return model(part["input_ids"], part["position_ids"], attention)


def with_torchs(cp: ContextParallel, model: TinyModel, part: dict[str, Any]) -> Tensor:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(-2, -3) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(-2, -3)

    return model(part["input_ids"], part["position_ids"], attention)


def context_parallel(rank: int, n: int, routed: bool) -> None:
    cp, model = ContextParallel(), TinyModel()
    model.layers = model.layers[:1]  # compiles faster
    function = with_torchs if routed else with_attention
    graph = compiled(function)

    def run(function: Callable[..., Tensor], part: dict[str, Any]) -> Tensor:
        if not routed:
            return function(cp, model, part)
        with cp.scaled_dot_product_attention(part["documents"]):
            return function(cp, model, part)

    parameters = list(model.parameters())
    for lengths in ((8, 12), (6, 4, 14), (2, 9, 3, 20), (40,)):
        part = packed(cp, *lengths)
        found = [
            outcome(lambda *_, f=f, part=part: run(f, part), parameters) for f in (graph, function)
        ]
        assert close(*found)
    assert graphs() == 2  # one for the first documents, then one for all
    if routed:  # out of the context it is torch's again
        alone = [f(cp, model, part) for f in (graph, function)]
        assert close([alone[0]], [alone[1]])
        assert not close([alone[0]], found[0][:1])
        with pytest.raises(Exception, match="looks for a checkpoint"), torch.no_grad():
            run(graph, part)


@pytest.mark.parametrize("routed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_context_parallel(ranks: Pool, routed: bool) -> None:
    """Documents of every batch are honoured, and compiled at most twice."""
    ranks(2).run(context_parallel, routed)


# What is refused.


def refused(rank: int, n: int) -> None:
    x, offsets = rows(10), torch.tensor([0, 8, 20])

    def run(x: Tensor, limit: Any, **options: Any) -> Tensor:
        return rfa.stripe_flash_attn_varlen_func(x, x, x, offsets, limit, **options)

    with pytest.raises(Exception, match="to be in a graph, max_seqlen must be an integer"):
        compiled(run)(x, torch.tensor(12))
    scale = torch.tensor(0.3)
    with pytest.raises(Exception, match="to be in a graph, softmax_scale must be a number"):
        compiled(run)(x, 12, softmax_scale=scale)
    slopes = torch.ones(2, requires_grad=True)
    with pytest.raises(Exception, match="there is no gradient for alibi_slopes"):
        compiled(run)(x, 12, alibi_slopes=slopes)
    broken = torch.compile(run, backend="aot_eager")  # may break the graph there
    assert close(outcome(broken, [x], torch.tensor(12)), outcome(run, [x], 12))
    with pytest.raises(ValueError, match="max_seqlen = 11, but the longest document has 12"):
        compiled(run)(x, 11)
    with pytest.raises(ValueError, match="holds 10 tokens of documents"):
        compiled(run)(rows(8), 12)
    with pytest.raises(ValueError, match="do not make the same call"):
        compiled(run)(x, 12, softcap=1.0 + rank)


def test_what_is_refused(ranks: Pool) -> None:
    """What no operator can take is named; so are wrong values, when the graph runs."""
    ranks(2).run(refused)


def test_operators_of_a_group_are_not_captured() -> None:
    """A CUDA graph would keep the documents of its capture."""
    ops = torch.ops.ring_flash_attn
    for name in ("ring_attention", "llama3_attention"):
        for each in (getattr(ops, name), getattr(ops, f"{name}_backward")):
            assert torch.Tag.cudagraph_unsafe in each.default.tags


def keep_torchs_rules(rank: int, n: int) -> None:
    offsets = torch.tensor([0, 3, 10])
    shared: dict[str, Any] = {
        **{"group": dist.group.WORLD.group_name, "packed": True, "causal": True, "grad": True},
        **{"seed": torch.tensor(5), "dropout_p": 0.2, "sink": torch.ones(2, requires_grad=True)},
        **{"left": -1, "right": -1, "softcap": 0.0, "deterministic": False, "with_lse": True},
        "kernel": "reference",
    }
    ring = {"layout": "stripe", "route": "ring", "equal_shards": False, "cu_seqlens": offsets}
    llama3 = {"layout": "flat_contiguous", "route": "all_gather", "k_start": 0, "k_stop": 10}
    llama3 |= {"cu_seqlens_q_list": [0, 3, 10], "cu_seqlens_k": offsets, "heads_k_stride": 1}
    llama3 |= {"max_seqlen_q": 7, "max_seqlen_k": 7}
    for op, own in ((operators.ring_attention_op, ring), (operators.llama3_attention_op, llama3)):
        given = {**shared, **own}
        inputs = (rows(10), rows(10), rows(10), *(given.get(name) for name in op.names))
        torch.library.opcheck(op.overload, inputs)


@pytest.mark.slow
def test_operators_keep_torchs_rules(ranks: Pool) -> None:
    """Schema, fake results and autograd registration agree with what the operators do."""
    ranks(1).run(keep_torchs_rules)
