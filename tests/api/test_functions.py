"""Every public function over real processes, against the oracle; and how calls may be made."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calls import (
    EACH,
    FUNCTIONS,
    extra_arguments,
    held,
    held_of,
    packed_inputs,
    sample_for,
    shard_of,
    whole,
)
from samples import Results, Sample, check, error, expected_of, make_sample
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ring_flash_attn
from ring_flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    ring_attention,
    ring_flash_attn_func,
    stripe_flash_attn_func,
    virtual_ring_attention,
    zigzag_llama3_flash_attn_varlen_func,
    zigzag_ring_flash_attn_func,
)
from ring_flash_attn.verify.oracle import Rules, oracle

WORLD_SIZE = 3
SEED = 5  # of the group's first rank; the others have their own
DISTRIBUTED = [name for name in FUNCTIONS if not name.startswith("flash_attn")]
SINGLE = [name for name in FUNCTIONS if name.startswith("flash_attn")]
VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window_size": (5, 3), "softmax_scale": 0.4},
    "slopes": {"window_size": (9, 2), "alibi_slopes": EACH},
    "everything": {
        "causal": True,
        "window_size": (9, -1),
        "dropout_p": 0.25,
        "softcap": 2.0,
        "alibi_slopes": torch.tensor([0.3, 0.0, 0.9, 0.1]),
        "sink": torch.tensor([0.2, -0.5, 1.0, 0.0], dtype=torch.float64),
        "deterministic": True,
    },
}


def call(
    function: Callable[..., Any], form: str, shard: Sample, **arguments: Any
) -> tuple[Results, Tensor]:
    """Forward and backward of one function on a shard; also what it returns by default."""
    leaves = [x.clone().requires_grad_() for x in packed_inputs(form, shard)]
    options = {**shard.options, **arguments}
    sink = options.get("sink")
    if sink is not None:
        options["sink"] = sink = sink.clone().requires_grad_()
    torch.manual_seed(SEED + (dist.get_rank() if dist.is_initialized() else 0))
    out, lse, nothing = function(*leaves, **options, return_attn_probs=True)
    assert nothing is None
    ((out * shard.dout).sum() + (lse * shard.dlse).sum()).backward()
    grads = [part for leaf in leaves for part in parts_of(leaf.grad, shard.q.dim())]
    results = dict(zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *grads)))
    if sink is not None:
        results["dsink"] = sink.grad
    torch.manual_seed(SEED + (dist.get_rank() if dist.is_initialized() else 0))
    return results, function(*leaves, **options).detach()


def parts_of(grad: Tensor | None, dim: int) -> tuple[Tensor, ...]:
    """Gradients of q, k, v of a gradient of (part of) them packed."""
    assert grad is not None
    return grad.unbind(-3) if grad.dim() > dim else (grad,)


def run_function(rank: int, n: int, name: str, variant: str, layout: str) -> Results:
    """On one rank: cut the shard, call the function."""
    _, form = FUNCTIONS[name]
    sample = sample_for(name, **VARIANTS[variant])
    tokens = held_of(layout, sample.cu_seqlens_q, sample.q.shape[-3], rank, n)
    arguments = extra_arguments(name, sample, rank, n)
    shard = shard_of(sample, tokens)
    results, alone = call(getattr(ring_flash_attn, name), form, shard, **arguments)
    assert torch.equal(alone, results["out"])
    return results


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", DISTRIBUTED)
def test_a_function_agrees_with_the_oracle(ranks: Any, name: str, variant: str) -> None:
    layout = FUNCTIONS[name][0].layout or "zigzag"
    sample = sample_for(name, **VARIANTS[variant])
    total = sample.q.shape[-3]
    tokens = [held_of(layout, sample.cu_seqlens_q, total, r, WORLD_SIZE) for r in range(WORLD_SIZE)]
    parts = ranks(WORLD_SIZE).run(run_function, name, variant, layout)
    check(whole(parts, tokens), expected_of(sample, SEED), 1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", SINGLE)
def test_a_single_device_function_agrees_with_the_oracle(name: str, variant: str) -> None:
    sample = sample_for(name, **VARIANTS[variant])
    arguments = extra_arguments(name, sample, 0, 1)
    function, form = getattr(ring_flash_attn, name), FUNCTIONS[name][1]
    results, alone = call(function, form, sample, **arguments)
    check(results, expected_of(sample, SEED), 1e-12)
    assert torch.equal(alone, results["out"])


def run_uneven(rank: int, n: int) -> list[Results]:
    """`ring_attention` on shards that differ in size, queries and keys of different number."""
    found = []
    for sample, layout, route in uneven_cases():
        cu_q, cu_k = sample.cu_seqlens_q, sample.cu_seqlens_k
        tokens_q = held_of(layout, cu_q, sample.q.shape[-3], rank, n)
        tokens_k = held_of(layout, cu_k, sample.k.shape[-3], rank, n, cu_q)
        shard = shard_of(sample, tokens_q)
        k, v = (x.index_select(-3, tokens_k) for x in (sample.k, sample.v))
        shard = Sample(shard.q, k, v, shard.dout, shard.dlse, options=shard.options)
        arguments: dict[str, Any] = {"layout": layout, "route": route}
        if cu_q is None:
            arguments |= {"seqlen": sample.q.shape[1], "seqlen_k": sample.k.shape[1]}
        else:
            arguments |= {"cu_seqlens": torch.tensor(cu_q), "cu_seqlens_k": cu_k}
        found.append(call(ring_attention, "", shard, **arguments)[0])
    return found


def uneven_cases() -> list[tuple[Sample, str, str]]:
    """Every layout and every route; each row sees at least one key."""
    packed: dict[str, Any] = {"lengths_q": (7, 1, 10), "lengths_k": (9, 4, 10), "headdim_v": 4}
    batch: dict[str, Any] = {"batch": 1, "seqlen_q": 5, "seqlen_k": 16}
    return [
        (make_sample(**packed, causal=True), "contiguous", "ring"),
        (make_sample(**packed, window_size=(3, 1)), "zigzag", "query_ring"),
        (make_sample(**packed, causal=True), "stripe", "all_gather"),
        (make_sample(**batch, causal=True), "flat_zigzag", "ring"),
        (make_sample(**batch, window_size=(5, 0)), "flat_stripe", "query_ring"),
        (make_sample(**packed), "flat_contiguous", "all_gather"),
        (make_sample(**packed, causal=True), "balanced", "ring"),
        (make_sample(**packed, window_size=(3, 1)), "balanced", "all_gather"),
        (make_sample(**batch, causal=True), "balanced", "query_ring"),
        (make_sample(batch=2, seqlen_q=2, seqlen_k=2, causal=True), "zigzag", "ring"),
    ]


def test_uneven_shards_and_empty_ranks(ranks: Any) -> None:
    found = ranks(WORLD_SIZE).run(run_uneven)
    for number, (sample, layout, _) in enumerate(uneven_cases()):
        tokens = [
            [
                held_of(layout, cu, x.shape[-3], rank, WORLD_SIZE, sample.cu_seqlens_q)
                for rank in range(WORLD_SIZE)
            ]
            for x, cu in ((sample.q, sample.cu_seqlens_q), (sample.k, sample.cu_seqlens_k))
        ]
        parts = [of_rank[number] for of_rank in found]
        results = whole([{n: p[n] for n in ("out", "lse", "dq")} for p in parts], tokens[0])
        results |= whole([{n: p[n] for n in ("dk", "dv")} for p in parts], tokens[1])
        check(results, expected_of(sample), 1e-12)


def run_groups(rank: int, n: int) -> list[Results]:
    """A 2 × 2 mesh: on each rank a row and a column group, both under way at once, then alone."""
    rows, columns = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    row, column, alone = (
        dist.new_subgroups_by_enumeration(members)[0]
        for members in (rows, columns, [[r] for r in range(n)])
    )
    calls = []
    for function, layout, group, seed in (
        (zigzag_ring_flash_attn_func, "zigzag", row, rank // 2),
        (stripe_flash_attn_func, "stripe", column, 10 + rank % 2),
        (ring_flash_attn_func, "contiguous", alone, 20 + rank),
    ):
        sample = group_sample(seed)
        tokens = held(layout, 16, dist.get_rank(group), dist.get_world_size(group))
        shard = shard_of(sample, tokens)
        leaves = [x.clone().requires_grad_() for x in (shard.q, shard.k, shard.v)]
        torch.manual_seed(100 + rank)
        out, lse, _ = function(*leaves, **sample.options, return_attn_probs=True, group=group)
        calls.append((leaves, out, lse, shard))
    loss = sum((out * s.dout).sum() + (lse * s.dlse).sum() for _, out, lse, s in calls)
    assert isinstance(loss, Tensor)
    loss.backward()
    names = ("out", "lse", "dq", "dk", "dv")
    return [
        dict(zip(names, (out.detach(), lse.detach(), *(x.grad for x in leaves))))
        for leaves, out, lse, _ in calls
    ]


def group_sample(seed: int) -> Sample:
    """Every group has its own."""
    return make_sample(batch=1, seqlen_q=16, seed=seed, causal=True, dropout_p=0.2)


def test_sub_groups_at_once(ranks: Any) -> None:
    """Each group attends by itself, and draws its dropout from its own first rank."""
    found = ranks(4).run(run_groups)
    for number, layout, seed, members in (
        (0, "zigzag", 0, [0, 1]),
        (0, "zigzag", 1, [2, 3]),
        (1, "stripe", 10, [0, 2]),
        (1, "stripe", 11, [1, 3]),
        *((2, "contiguous", 20 + rank, [rank]) for rank in range(4)),
    ):
        tokens = [held(layout, 16, i, len(members)) for i in range(len(members))]
        results = whole([found[rank][number] for rank in members], tokens)
        check(results, expected_of(group_sample(seed), 100 + members[0]), 1e-12)


def plain(seqlen: int = 12, **options: Any) -> Sample:
    """One sequence for two ranks, causal."""
    return make_sample(batch=2, seqlen_q=seqlen, headdim=5, causal=True, **options)


def run_strided(rank: int, n: int) -> Results:
    """Non-contiguous q, k, v, and the gradient of a plain sum, which has strides 0."""
    shard = shard_of(plain(), held("zigzag", 12, rank, n))
    heads_first = shard.q.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.cat([shard.k, shard.k], dim=-1)[..., :5]
    every_second = torch.stack([shard.v, shard.v], dim=2).flatten(1, 2)[:, ::2]
    leaves = [x.detach().requires_grad_() for x in (heads_first, wide, every_second)]
    assert not any(x.is_contiguous() for x in leaves)
    out = zigzag_ring_flash_attn_func(*leaves, causal=True)
    out.sum().backward()
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), (x.grad for x in leaves)))}


def test_strided_inputs_and_gradients(ranks: Any) -> None:
    sample = plain()
    ones, zeros = torch.ones_like(sample.dout), torch.zeros_like(sample.dlse)
    expected = expected_of(
        Sample(sample.q, sample.k, sample.v, ones, zeros, options=sample.options)
    )
    del expected["lse"]
    tokens = [held("zigzag", 12, rank, 2) for rank in range(2)]
    check(whole(ranks(2).run(run_strided), tokens), expected, 1e-12)


def run_without_gradients(rank: int, n: int) -> list[Results]:
    """no_grad, inference_mode, and a call in which only some inputs want a gradient."""
    shard = shard_of(plain(), held("zigzag", 12, rank, n))
    q, k, v = shard.q, shard.k, shard.v
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            leaf = q.clone().requires_grad_()
            out = zigzag_ring_flash_attn_func(leaf, k, v, causal=True)
            assert not out.requires_grad
            found.append({"out": out.clone()})
    for wanted in range(3):
        leaves = [x.clone().requires_grad_(i == wanted) for i, x in enumerate((q, k, v))]
        out, lse, _ = zigzag_ring_flash_attn_func(*leaves, causal=True, return_attn_probs=True)
        ((out * shard.dout).sum() + (lse * shard.dlse).sum()).backward()
        assert [x.grad is not None for x in leaves] == [i == wanted for i in range(3)]
        found.append({("dq", "dk", "dv")[wanted]: leaves[wanted].grad})
    return found


def test_without_gradients(ranks: Any) -> None:
    found = ranks(2).run(run_without_gradients)
    expected = expected_of(plain())
    tokens = [held("zigzag", 12, rank, 2) for rank in range(2)]
    for number, name in enumerate(("out", "out", "dq", "dk", "dv")):
        actual = whole([of_rank[number] for of_rank in found], tokens)
        check(actual, {name: expected[name]}, 1e-12)


def run_lse_only(rank: int, n: int) -> Results:
    """A loss that uses lse and not out."""
    shard = shard_of(plain(), held("zigzag", 12, rank, n))
    leaves = [x.clone().requires_grad_() for x in (shard.q, shard.k, shard.v)]
    _, lse, _ = zigzag_ring_flash_attn_func(*leaves, causal=True, return_attn_probs=True)
    (lse * shard.dlse).sum().backward()
    return dict(zip(("dq", "dk", "dv"), (x.grad for x in leaves)))


def test_gradient_through_lse_alone(ranks: Any) -> None:
    sample = plain()
    no_dout = Sample(
        sample.q,
        sample.k,
        sample.v,
        torch.zeros_like(sample.dout),
        sample.dlse,
        options=sample.options,
    )
    expected = expected_of(no_dout)
    assert torch.equal(expected["dv"], torch.zeros_like(expected["dv"]))
    tokens = [held("zigzag", 12, rank, 2) for rank in range(2)]
    wanted = {name: expected[name] for name in ("dq", "dk", "dv")}
    check(whole(ranks(2).run(run_lse_only), tokens), wanted, 1e-12)


def run_autocast(rank: int, n: int) -> None:
    """Under autocast, fp32 inputs give what bf16 inputs give, and fp32 gradients."""
    shard = shard_of(plain(), held("zigzag", 12, rank, n))
    found = []
    for dtype, enabled in ((torch.float32, True), (torch.bfloat16, False)):
        leaves = [x.to(torch.bfloat16).to(dtype) for x in (shard.q, shard.k, shard.v)]
        leaves = [x.requires_grad_() for x in leaves]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out, lse, _ = zigzag_ring_flash_attn_func(*leaves, causal=True, return_attn_probs=True)
            assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
            out.backward(shard.dout.to(torch.bfloat16))  # backward inside autocast, too
        assert [x.grad.dtype for x in leaves] == [dtype] * 3
        found.append([out, lse, *(x.grad for x in leaves)])
    for a, b in zip(*found):
        assert torch.equal(a.float(), b.float())
    whole = plain(dtype=torch.bfloat16).to(torch.float64)
    expected = expected_of(whole)["lse"][..., held("zigzag", 12, rank, n)]
    assert error(found[0][1].detach(), expected) < 1e-6, "in fp32 inside, whatever autocast says"


def test_autocast(ranks: Any) -> None:
    ranks(2).run(run_autocast)


def run_checkpoint(rank: int, n: int, use_reentrant: bool | None) -> Results:
    """Two layers with dropout, plain or checkpointed."""
    shard = shard_of(plain(), held("zigzag", 12, rank, n))
    leaves = [x.clone().requires_grad_() for x in (shard.q, shard.k, shard.v)]
    k, v = leaves[1:]

    def layer(x: Tensor) -> Tensor:
        return zigzag_ring_flash_attn_func(x, k, v, dropout_p=0.4, causal=True)

    torch.manual_seed(rank)
    x = leaves[0]
    for _ in range(2):
        if use_reentrant is None:
            x = layer(x)
        else:
            x = checkpoint(layer, x, use_reentrant=use_reentrant)
    torch.randn(17)  # whatever moves the generator on before the backward pass
    (x * shard.dout).sum().backward()
    return dict(zip(("out", "dq", "dk", "dv"), (x.detach(), *(leaf.grad for leaf in leaves))))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_redraws_the_same_dropout(ranks: Any, use_reentrant: bool) -> None:
    plain_run = ranks(2).run(run_checkpoint, None)
    checkpointed = ranks(2).run(run_checkpoint, use_reentrant)
    for expected, actual in zip(plain_run, checkpointed):
        for name, tensor in expected.items():
            assert torch.equal(actual[name], tensor), name
    tokens = [held("zigzag", 12, rank, 2) for rank in range(2)]
    sample = plain()
    draws = torch.Generator().manual_seed(0)  # of rank 0, one for each layer
    x = sample.q
    for _ in range(2):
        seed = int(torch.randint(1 << 62, (), generator=draws))
        x, _ = oracle(x, sample.k, sample.v, Rules(causal=True, dropout_p=0.4, seed=seed))
    check({"out": whole(plain_run, tokens)["out"]}, {"out": x}, 1e-12)


def with_dropout(sample: Sample) -> Sample:
    """The same with dropout_p = 0.4."""
    options = {**sample.options, "dropout_p": 0.4}
    return Sample(sample.q, sample.k, sample.v, sample.dout, sample.dlse, options=options)


def run_dropout(rank: int, n: int) -> list[Tensor]:
    """Twice with one seed, once with another; the ranks' own generators always differ."""
    shard = shard_of(plain(), held("zigzag", 12, rank, n))
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed + 50 * rank)
        found.append(zigzag_ring_flash_attn_func(shard.q, shard.k, shard.v, 0.4, causal=True))
    found.append(zigzag_ring_flash_attn_func(shard.q, shard.k, shard.v, 0.4, causal=True))
    return found


def test_dropout_repeats_with_the_seed(ranks: Any) -> None:
    parts = ranks(2).run(run_dropout)
    tokens = [held("zigzag", 12, rank, 2) for rank in range(2)]
    first, again, other, unseeded = (
        whole([{"out": of_rank[i]} for of_rank in parts], tokens)["out"] for i in range(4)
    )
    assert torch.equal(first, again)
    for different in (other, unseeded):
        assert error(different, first) > 0.1
    check({"out": first}, {"out": expected_of(with_dropout(plain()), 1)["out"]}, 1e-12)


def run_deterministic(rank: int, n: int) -> None:
    """The same bits, forward and backward, in fp32."""
    shard = shard_of(plain(dtype=torch.float32), held("zigzag", 12, rank, n))
    first, again = (
        call(zigzag_ring_flash_attn_func, "func", shard, deterministic=True)[0] for _ in range(2)
    )
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name


def test_deterministic_runs_have_the_same_bits(ranks: Any) -> None:
    ranks(2).run(run_deterministic)


def run_dtypes(rank: int, n: int) -> None:
    """out and gradients come in the dtype of the inputs, lse in fp32 (fp64 for fp64)."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        shard = shard_of(plain(dtype=dtype), held("zigzag", 12, rank, n))
        results, _ = call(zigzag_ring_flash_attn_func, "func", shard)
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        for name, tensor in results.items():
            assert tensor.dtype is (wide if name == "lse" else dtype), (name, dtype)
            assert torch.isfinite(tensor).all()


def test_dtypes(ranks: Any) -> None:
    ranks(2).run(run_dtypes)


def run_many_documents(rank: int, n: int) -> Results:
    """New documents at every call, old ones again, and a cu_seqlens that is changed in place."""
    cu_seqlens = torch.tensor([0, 4, 12], dtype=torch.int32)
    found = {}
    for number, middle in enumerate((4, 9, 9, 4)):
        cu_seqlens[1] = middle
        sample = make_sample((middle, 12 - middle), seed=1, causal=True)
        tokens = held_of("zigzag", sample.cu_seqlens_q, 12, rank, n)
        shard = shard_of(sample, tokens)
        out = zigzag_llama3_flash_attn_varlen_func(
            shard.q, shard.k, shard.v, cu_seqlens, 1, causal=True
        )
        found[str(number)] = out
    return found


def test_documents_that_change(ranks: Any) -> None:
    parts = ranks(2).run(run_many_documents)
    for number, middle in enumerate((4, 9, 9, 4)):
        sample = make_sample((middle, 12 - middle), seed=1, causal=True)
        tokens = [held_of("zigzag", sample.cu_seqlens_q, 12, rank, 2) for rank in range(2)]
        actual = whole([{"out": part[str(number)]} for part in parts], tokens)
        check(actual, {"out": expected_of(sample)["out"]}, 1e-12)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_cu_seqlens_changed_in_place_is_noticed(dtype: torch.dtype) -> None:
    sample = make_sample((4, 8), causal=True)
    cu_seqlens = torch.tensor([0, 3, 12], dtype=dtype)
    for middle in (3, 4):
        cu_seqlens[1] = middle
        out = flash_attn_varlen_func(
            sample.q, sample.k, sample.v, cu_seqlens, cu_seqlens, 12, 12, causal=True
        )
    check({"out": out}, {"out": expected_of(sample)["out"]}, 1e-12)


def test_out_may_not_be_changed_before_backward() -> None:
    """The backward pass needs out: autograd must notice, rather than give a wrong gradient."""
    sample = plain()
    out = flash_attn_func(sample.q.requires_grad_(), sample.k, sample.v, causal=True)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_inputs_are_left_alone() -> None:
    sample = plain()
    before = [x.clone() for x in (sample.q, sample.k, sample.v, sample.dout)]
    leaves = [x.requires_grad_() for x in (sample.q, sample.k, sample.v)]
    flash_attn_func(*leaves, causal=True, softcap=1.0, dropout_p=0.1).backward(sample.dout)
    for x, y in zip((sample.q, sample.k, sample.v, sample.dout), before):
        assert torch.equal(x, y)


def test_second_derivatives_are_refused() -> None:
    """At the first derivative: one without a graph would drop a gradient penalty silently."""
    sample = plain()
    q = sample.q.requires_grad_()
    for loss in (torch.sum, lambda out: out.square().sum()):
        out = flash_attn_func(q, sample.k, sample.v)
        with pytest.raises(NotImplementedError, match="create_graph=True"):
            torch.autograd.grad(loss(out), q, create_graph=True)
    out = flash_attn_func(q, sample.k, sample.v)
    torch.autograd.grad(out.sum(), q, retain_graph=True)
    out.sum().backward()


def test_alibi_slopes_changed_before_backward_are_noticed() -> None:
    sample = plain()
    slopes = torch.rand(sample.q.shape[2])
    q = sample.q.requires_grad_()
    out = flash_attn_func(q, sample.k, sample.v, alibi_slopes=slopes)
    slopes.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_the_default_device_does_not_matter() -> None:
    """What we need on the host is made there, whatever torch.set_default_device says."""
    sample = plain()
    inputs = [x.requires_grad_() for x in (sample.q, sample.k, sample.v)]

    def run() -> list[torch.Tensor]:
        found = []
        for layout in ("contiguous", "zigzag"):
            torch.manual_seed(0)
            out = virtual_ring_attention(
                *inputs, world_size=2, layout=layout, route="ring", causal=True, dropout_p=0.5
            )
            found += [out, *torch.autograd.grad(out.sum(), inputs)]
        found.append(flash_attn_func(*inputs, causal=True))
        return found

    want = run()
    with torch.device("meta"):
        got = run()
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_threads_may_share_the_caches() -> None:
    """More different packs than any cache holds, in several threads at once."""
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        random = Random(seed)
        try:
            for _ in range(150):
                total = random.randint(2, 400)
                cu = torch.tensor([0, random.randint(1, total - 1), total])
                x = torch.randn(total, 1, 2)
                out = flash_attn_varlen_func(x, x, x, cu, cu, total, total, causal=True)
                first = torch.ones(1, 1, 1) * x[0]
                assert torch.allclose(out[cu[1]], x[cu[1]], atol=1e-5), "sees itself alone"
                assert torch.allclose(out[:1], first, atol=1e-5)
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors, errors
