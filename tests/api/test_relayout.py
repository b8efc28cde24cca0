"""relayout: shards of one layout become those of another, on virtual ranks and over groups."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import accumulate, product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from calls import held_of
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks
from strategies import document_lengths, world_sizes
from torch import Tensor

from ring_flash_attn import relayout, ring_attention, shard, unshard
from ring_flash_attn.comm import DistributedTransport, Message
from ring_flash_attn.engine import relayout as engine
from ring_flash_attn.plan.layout import layout_names
from ring_flash_attn.trace import tracing

CU_SEQLENS = [0, 7, 7, 8, 21]
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.uint16,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
names = st.sampled_from(layout_names())


def shards_of(
    x: Tensor, layout: str, world_size: int, cu_seqlens: list[int] | None = None, dim: int = 0
) -> list[Tensor]:
    """The shards of all ranks, cut by slicing."""
    total = x.shape[dim]
    held = (held_of(layout, cu_seqlens, total, rank, world_size) for rank in range(world_size))
    return [x.index_select(dim, tokens) for tokens in held]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether all are, bit for bit, and contiguous."""
    assert len(found) == len(expected)
    return all(
        a.dtype == b.dtype and a.is_contiguous() and torch.equal(a, b)
        for a, b in zip(found, expected)
    )


@given(before=names, after=names, lengths=document_lengths, world_size=world_sizes)
@settings(max_examples=150, deadline=None)
def test_packed_documents(
    before: str, after: str, lengths: tuple[int, ...], world_size: int
) -> None:
    """Any documents, more or fewer tokens than ranks."""
    cu_seqlens = [0, *accumulate(lengths)]
    x = torch.randn(sum(lengths), 2, 3)
    old, new = (shards_of(x, layout, world_size, cu_seqlens) for layout in (before, after))
    assert same(relayout(old, before, after, cu_seqlens=cu_seqlens), new)


@given(before=names, after=names, seqlen=st.integers(0, 40), world_size=world_sizes)
@settings(max_examples=100, deadline=None)
def test_a_batch(before: str, after: str, seqlen: int, world_size: int) -> None:
    x = torch.randn(3, seqlen, 2)
    old, new = (shards_of(x, layout, world_size, dim=1) for layout in (before, after))
    assert same(relayout(old, before, after), new)
    assert same(relayout(old, before, after, seqlen=seqlen), new)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_any_dimension_of_any_strides(dim: int) -> None:
    x = torch.randn(11, 11, 11)
    old, new = (shards_of(x, layout, 4, dim=dim) for layout in ("zigzag", "stripe"))
    assert same(relayout(old, "zigzag", "stripe", dim=dim), new)
    strided = [part.permute(2, 0, 1).contiguous().permute(1, 2, 0) for part in old]
    assert not any(part.is_contiguous() for part in strided)
    assert same(relayout(strided, "zigzag", "stripe", dim=dim), new)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype(dtype: torch.dtype) -> None:
    """As bits: no dtype is computed with."""
    size = torch.empty(0, dtype=dtype).element_size()
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (21, 3 * size), dtype=torch.uint8)
    old, new = (shards_of(bits, layout, 4, CU_SEQLENS) for layout in ("zigzag", "flat_stripe"))
    parts = [part.view(dtype) for part in old]
    found = relayout(parts, "zigzag", "flat_stripe", cu_seqlens=CU_SEQLENS)
    assert {part.dtype for part in found} == {dtype}
    assert same([part.view(torch.uint8) for part in found], new)


def test_lazy_conjugates_and_negatives() -> None:
    """What is only marked as conjugate or negative, as torch does, is so in the new layout."""
    x = torch.randn(2, 8, dtype=torch.complex64)
    for view in (x.conj(), x.conj().imag):
        old, new = (shards_of(view, layout, 2, dim=1) for layout in ("stripe", "contiguous"))
        lazy = [(x if view.is_complex() else x.conj())[:, rank::2] for rank in range(2)]
        lazy = [part.conj() if view.is_complex() else part.imag for part in lazy]
        assert all(part.is_conj() or part.is_neg() for part in lazy)
        assert same([part.resolve_conj().resolve_neg().contiguous() for part in lazy], old)
        assert same(relayout(lazy, "stripe", "contiguous"), new)


@pytest.mark.parametrize("shape", [(8,), (8, 0), (0, 4), (8, 1, 1)])
def test_other_shapes(shape: tuple[int, ...]) -> None:
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    old, new = (shards_of(x, layout, 3) for layout in ("zigzag", "stripe"))
    assert same(relayout(old, "zigzag", "stripe", dim=0), new)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_single_numbers_travel(world_size: int) -> None:
    """Position ids of one row, of which a peer gets one: an element that may have any stride."""
    x = torch.arange(2 * world_size)[None]
    for before, after in product(layout_names(), repeat=2):
        old, new = (shards_of(x, layout, world_size, dim=1) for layout in (before, after))
        assert same(relayout(old, before, after, dim=1), new)


@pytest.mark.parametrize("layout", layout_names())
def test_the_same_layout_is_a_copy(layout: str) -> None:
    old = shards_of(torch.randn(21), layout, 2, CU_SEQLENS)
    found = relayout(old, layout, layout, cu_seqlens=CU_SEQLENS)
    assert same(found, old)
    found[0].zero_()
    assert old[0].any()


@pytest.mark.parametrize("after", layout_names())
@pytest.mark.parametrize("before", layout_names())
def test_gradients_on_virtual_ranks(before: str, after: str) -> None:
    """They are moved as plain indexing would, also where only some outputs are used."""
    lengths = {"cu_seqlens": [0, 2, 7, 12]}
    sizes = [len(held_of(before, lengths["cu_seqlens"], 12, rank, 3)) for rank in range(3)]
    x = [torch.randn(size, 5, dtype=torch.float64, requires_grad=True) for size in sizes]
    assert torch.autograd.gradcheck(lambda *x: tuple(relayout(x, before, after, **lengths)), x)
    found = torch.autograd.grad(relayout(x, before, after, **lengths)[1].sum(), x)
    held = [held_of(before, lengths["cu_seqlens"], 12, rank, 3).tolist() for rank in range(3)]
    used = held_of(after, lengths["cu_seqlens"], 12, 1, 3).tolist()
    for tokens, grad in zip(held, found):
        assert grad.tolist() == [[float(token in used)] * 5 for token in tokens]


def test_it_is_differentiable_once_and_says_so() -> None:
    x = [torch.randn(1, 4, requires_grad=True) for _ in range(2)]
    out = relayout(x, "zigzag", "contiguous")[0]
    (grad,) = torch.autograd.grad((out**2).sum(), x[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_nothing_is_kept_for_the_backward_pass() -> None:
    x = [torch.randn(2, 8, 64, requires_grad=True) * 1 for _ in range(2)]
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = relayout(x, "zigzag", "stripe")
    assert out[0].requires_grad
    assert saved == []


def test_inference() -> None:
    old = [part.requires_grad_() for part in shards_of(torch.randn(12), "zigzag", 3)]
    with torch.no_grad():
        assert not any(part.requires_grad for part in relayout(old, "zigzag", "stripe", dim=0))
    with torch.inference_mode():
        assert relayout(old, "zigzag", "stripe", dim=0)[0].is_inference()


def test_memory_that_is_new_is_all_written(nan_memory: None) -> None:
    for before, after in product(layout_names(), repeat=2):
        old = shards_of(torch.zeros(21, 2), before, 4, CU_SEQLENS)
        assert not any(x.any() for x in relayout(old, before, after, cu_seqlens=CU_SEQLENS))


def test_plans_are_made_once() -> None:
    """For a layer and its backward pass, and for all that follow."""
    engine._planned.cache_clear()
    x = [part.requires_grad_() for part in shards_of(torch.randn(30), "zigzag", 2, [0, 30])]
    for _ in range(3):
        out = relayout(x, "zigzag", "stripe", cu_seqlens=torch.tensor([0, 30]))
        torch.autograd.grad([part.sum() for part in out], x)
    assert engine._planned.cache_info().misses == 2


def test_it_compiles() -> None:
    """torch.compile breaks the graph there."""
    x = torch.randn(2, 12)
    old, new = (shards_of(x, layout, 3, dim=1) for layout in ("zigzag", "stripe"))

    def model(*x: Tensor) -> list[Tensor]:
        return [2 * part for part in relayout([part + 1 for part in x], "zigzag", "stripe")]

    found = torch.compile(model, backend="eager")(*old)
    assert all(torch.equal(a, 2 * (b + 1)) for a, b in zip(found, new))


def test_profilers_see_it() -> None:
    old = shards_of(torch.randn(12), "zigzag", 3)
    with tracing(), torch.profiler.profile() as profile:
        relayout(old, "zigzag", "stripe", dim=0)
    assert "relayout: zigzag to stripe" in {event.key for event in profile.key_averages()}


# Over groups.


def over_a_group(rank: int, n: int) -> None:
    """Sub-groups, uneven and empty shards, batches, dtypes, strided shards; with gradients."""
    torch.manual_seed(0)
    packed, batch = torch.randn(21, 3, dtype=torch.float64), torch.randn(2, 12, 3)
    few = torch.randn(2, 5)
    groups = dist.new_subgroups_by_enumeration([[0, 2], [1], [3]])[0], None
    all_names = layout_names()
    for before, after in zip(2 * all_names, all_names[1:] + all_names[:1] + all_names[::-1]):
        for group in groups:
            me, members = dist.get_rank(group), dist.get_world_size(group)

            def held(layout: str, cu_seqlens: list[int] | None, total: int) -> Tensor:
                return held_of(layout, cu_seqlens, total, me, members)  # noqa: B023

            options: dict[str, Any] = {"cu_seqlens": CU_SEQLENS, "group": group}
            ours = packed[held(before, CU_SEQLENS, 21)].requires_grad_()
            found = relayout(ours, before, after, **options)
            assert torch.equal(found, packed[held(after, CU_SEQLENS, 21)])
            dout = packed.cos()[held(after, CU_SEQLENS, 21)]
            (grad,) = torch.autograd.grad(found, ours, dout)
            assert torch.equal(grad, packed.cos()[held(before, CU_SEQLENS, 21)])
            (grad,) = torch.autograd.grad(relayout(ours, before, after, **options).sum(), ours)
            assert torch.equal(grad, torch.ones_like(ours))
            with torch.no_grad():
                assert not relayout(ours, before, after, **options).requires_grad
            everything = unshard(found.detach(), after, **options)
            assert torch.equal(everything, packed)

            options = {"group": group}
            found = relayout(shard(batch, before, group=group), before, after, **options)
            assert torch.equal(found, shard(batch, after, group=group))
            strided = shard(few, before, group=group).T.contiguous().T
            found = relayout(strided, before, after, seqlen=5, **options)
            assert torch.equal(found, few[:, held(after, None, 5)])
    for dtype in DTYPES:
        size = torch.empty(0, dtype=dtype).element_size()
        bits = torch.arange(21 * size).view(21, size).to(torch.uint8) % 2
        ours = shard(bits, "zigzag", cu_seqlens=CU_SEQLENS).view(dtype)
        found = relayout(ours, "zigzag", "stripe", cu_seqlens=CU_SEQLENS)
        assert torch.equal(found.view(torch.uint8), shard(bits, "stripe", cu_seqlens=CU_SEQLENS))


def test_over_a_group(ranks: Any) -> None:
    ranks(4).run(over_a_group)


def fewer_tokens_than_ranks(rank: int, n: int) -> None:
    """Ranks without a token before or after take part, with gradients."""
    for cu_seqlens in ([0, 2], [0, 0, 1], [0, 0], [0, 1, 2, 3]):
        x = torch.arange(cu_seqlens[-1], dtype=torch.float64)
        for before, after in product(layout_names(), repeat=2):
            ours = shard(x, before, cu_seqlens=cu_seqlens).requires_grad_()
            found = relayout(ours, before, after, cu_seqlens=cu_seqlens)
            assert torch.equal(found, shard(x, after, cu_seqlens=cu_seqlens))
            (grad,) = torch.autograd.grad((found * found).sum(), ours)
            assert torch.equal(grad, 2 * ours)


def test_fewer_tokens_than_ranks(ranks: Any) -> None:
    ranks(4).run(fewer_tokens_than_ranks)


def what_is_sent(rank: int, n: int, before: str, after: str) -> None:
    """One message to each rank that needs something, of exactly the rows that it needs."""
    old, new = (
        [{*held_of(layout, CU_SEQLENS, 21, each, n).tolist()} for each in range(n)]
        for layout in (before, after)
    )
    posted: list[list[tuple[int, int]]] = []
    post = DistributedTransport.post

    def spy(self: DistributedTransport, messages: list[Message]) -> None:
        posted.append(sorted((m.peer, m.tensor.nbytes) for m in messages if not m.receive))
        post(self, messages)

    x = torch.randn(21, 5, dtype=torch.float16)
    ours = shard(x, before, cu_seqlens=CU_SEQLENS).requires_grad_()
    with mock.patch.object(DistributedTransport, "post", spy):
        out = relayout(ours, before, after, cu_seqlens=CU_SEQLENS)
        out.sum().backward()
    size = 5 * 2  # bytes of a row
    moved = [
        [(peer, size * len(ours[rank] & theirs[peer])) for peer in range(n) if peer != rank]
        for ours, theirs in ((old, new), (new, old))
    ]
    assert posted == [[(peer, count) for peer, count in each if count] for each in moved]


@pytest.mark.parametrize("before", ["zigzag", "flat_stripe"])
@pytest.mark.parametrize("after", ["flat_contiguous", "stripe"])
def test_only_rows_that_change_rank_are_sent(ranks: Any, before: str, after: str) -> None:
    ranks(4).run(what_is_sent, before, after)


def mixed_model(rank: int, n: int) -> None:
    """Attention over zigzag shards, all other layers over contiguous ones; with gradients."""
    torch.manual_seed(0)
    x, w = torch.randn(21, 2, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    options: dict[str, Any] = {"cu_seqlens": CU_SEQLENS}
    attention = partial(ring_attention, layout="zigzag", route="ring", causal=True, **options)
    alone, _ = dist.new_subgroups(1)

    def model(x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.sin(attend(torch.tanh(x @ w))) @ w

    def attend(x: Tensor) -> Tensor:
        x = relayout(x, "flat_contiguous", "zigzag", **options)
        return relayout(attention(x, x, x), "zigzag", "flat_contiguous", **options)

    whole = x.requires_grad_()
    ours = shard(x.detach(), "flat_contiguous", **options).requires_grad_()
    expected = model(whole, lambda x: attention(x, x, x, group=alone))
    found = model(ours, attend)
    (grad,) = torch.autograd.grad(found.square().sum(), ours)
    (whole_grad,) = torch.autograd.grad(expected.square().sum(), whole)
    for mine, all_of_it in ((found, expected), (grad, whole_grad)):
        theirs = shard(all_of_it, "flat_contiguous", **options)
        assert (mine - theirs).abs().max() < 1e-12 * all_of_it.abs().max()


def test_attention_in_a_model_of_contiguous_layers(ranks: Any) -> None:
    ranks(3).run(mixed_model)


# Mistakes.


def error_of(call: Callable[[], Any]) -> str:
    """The message of a ValueError; AssertionError otherwise."""
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("no error")


def disagree(rank: int, n: int) -> dict[str, str]:
    """Rank 1 does something else, one thing at a time; then everybody does the same."""
    odd = rank == 1
    x = torch.randn(2, 4, 3)
    group = dist.new_group(list(range(n)))

    def move(x: Tensor, *layouts: str, **options: Any) -> Callable[[], Tensor]:
        before, after = layouts or ("zigzag", "stripe")
        return lambda: relayout(x, before, after, group=group, **options)

    calls = {
        "from_layout": move(x, "contiguous" if odd else "zigzag", "stripe"),
        "to_layout": move(x, "zigzag", "contiguous" if odd else "stripe"),
        "dtype": move(x.double() if odd else x),
        "shape": move(x[..., :2] if odd else x),
        "seqlen": move(x[:, :2] if odd else x),
        "gradients": move(x.clone().requires_grad_(odd)),
        "dim": move(x.transpose(0, 1) if odd else x, dim=0 if odd else 1),
        "form": move(x[0], cu_seqlens=[0, 3, 12]) if odd else move(x),
        "documents": move(x[0], cu_seqlens=[0, 3, 3, 12] if odd else [0, 3, 12]),
        "call": (lambda: unshard(x, "zigzag", group=group)) if odd else move(x),
    }
    said = {what: error_of(call) for what, call in calls.items()}
    relayout(x, "zigzag", "stripe", group=group)
    return said


def test_ranks_that_disagree_all_get_an_error(ranks: Any) -> None:
    started = time.perf_counter()
    said = ranks(3).run(disagree)
    assert time.perf_counter() - started < 40, "nobody waits for a timeout"
    assert said[0] == said[1] == said[2], "the same words everywhere"
    words = {
        "from_layout": ['["zigzag", "stripe"] on ranks 0, 2', '["contiguous", "stripe"] on rank 1'],
        "to_layout": ['["zigzag", "stripe"] on ranks 0, 2', '["zigzag", "contiguous"] on rank 1'],
        "dtype": ['dtype = "torch.float32" on ranks 0, 2', 'dtype = "torch.float64" on rank 1'],
        "shape": ["shape without dim = [2, 3] on ranks 0, 2", "[2, 2] on rank 1"],
        "seqlen": ["seqlen = 12 on ranks 0, 2", "seqlen = 6 on rank 1"],
        "gradients": ["needs gradients = false on ranks 0, 2", "gradients = true on rank 1"],
        "dim": ["dim = 1 on ranks 0, 2", "dim = 0 on rank 1"],
        "form": ["seqlen = 12 on ranks 0, 2", "tokens = 12 on rank 1"],
        "documents": ["documents = 2 on ranks 0, 2", "documents = 3 on rank 1"],
        "call": ['call = "relayout" on ranks 0, 2', "call = null on rank 1"],
    }
    assert {*words} == {*said[0]}
    for what, each in words.items():
        for text in each:
            assert text in said[0][what], said[0][what]


def other_values(rank: int, n: int) -> str:
    """RFA_CHECK=values finds documents of other lengths."""
    x, cu_seqlens = torch.randn(4), [0, 2 + rank, 8]
    with mock.patch.dict("os.environ", RFA_CHECK="values"):
        return error_of(
            lambda: relayout(x, "flat_contiguous", "flat_stripe", cu_seqlens=cu_seqlens)
        )


def test_documents_of_other_lengths_are_found(ranks: Any) -> None:
    for said in ranks(2).run(other_values):
        assert "cu_seqlens" in said
        assert "(2, 6)" in said
        assert "(3, 5)" in said


@pytest.fixture
def doomed() -> Iterator[Ranks]:
    """Ranks of a test's own: where a connection breaks, gloo's threads spin until they end."""
    pool = Ranks(2)
    yield pool
    pool.stop()


def fails(rank: int, n: int, where: str) -> list[str]:
    """Rank 1 runs out of memory, say, before or after it has posted; then both call again."""
    group = dist.new_group(list(range(n)), timeout=timedelta(seconds=4))
    x = torch.randn(2, 4)

    def outcome() -> str:
        try:
            relayout(x, "zigzag", "stripe", group=group)
        except (ValueError, RuntimeError) as error:
            return str(error)
        return "done"

    assert outcome() == "done"
    failure = mock.patch.object(engine._Mover, where, side_effect=RuntimeError("out of memory"))
    with failure if rank == 1 else nullcontext():
        first = outcome()
    return [first, outcome()]


def test_a_call_that_fails_after_it_has_posted_is_drained(doomed: Ranks) -> None:
    assert doomed.run(fails, "copy") == [["done", "done"], ["out of memory", "done"]]


def test_a_call_that_fails_before_it_has_posted_is_remembered(doomed: Ranks) -> None:
    """The next one in the group raises instead of taking its messages for those of the last."""
    (_, first), (memory, second) = doomed.run(fails, "messages")
    assert memory == "out of memory"
    for said in (first, second):
        assert "make a new process group" in said


WRONG: list[tuple[str, Any, str]] = [
    ("old layout", lambda: relayout([torch.zeros(1, 4)], "spiral", "zigzag"), "'spiral'"),
    ("new layout", lambda: relayout([torch.zeros(1, 4)], "zigzag", "spiral"), "'spiral'"),
    (
        "shards of another layout",
        lambda: relayout([torch.zeros(1, 4), torch.zeros(1, 3)], "contiguous", "zigzag"),
        r"rank 0 of 2 holds 3 tokens in layout 'contiguous'.*4",
    ),
    (
        "cu_seqlens of another pack",
        lambda: relayout([torch.zeros(4), torch.zeros(4)], "zigzag", "stripe", cu_seqlens=[0, 9]),
        "ends at 9.*8",
    ),
    ("seqlen", lambda: relayout([torch.zeros(1, 4)], "zigzag", "stripe", seqlen=5), "5.*4"),
    ("no shards", lambda: relayout([], "zigzag", "stripe"), "at least one shard"),
    ("no dimension", lambda: relayout([torch.zeros(4)], "zigzag", "stripe"), "dimension 1"),
    ("two devices", lambda: relayout([torch.zeros(1, 4), META], "zigzag", "stripe"), "meta"),
    ("no group", lambda: relayout(torch.zeros(1, 4), "zigzag", "stripe"), "not initialised"),
]
META = torch.zeros(1, 4, device="meta")


@pytest.mark.parametrize(("call", "match"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_mistakes_are_named(call: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call()


def wrong_on_a_group(rank: int, n: int) -> None:
    """On every rank, before anything is sent."""
    with mock.patch.object(DistributedTransport, "post", side_effect=AssertionError("sent")):
        with pytest.raises(ValueError, match=r"holds 5 tokens in layout 'zigzag'.*has 4"):
            relayout(torch.zeros(1, 4), "zigzag", "stripe", seqlen=10)
        with pytest.raises(ValueError, match="x is on meta"):
            relayout(torch.zeros(1, 4, device="meta"), "zigzag", "stripe")
        with pytest.raises(ValueError, match="takes no group"):
            relayout([torch.zeros(1, 4)], "zigzag", "stripe", group=dist.group.WORLD)


def test_mistakes_on_a_group(ranks: Any) -> None:
    ranks(2).run(wrong_on_a_group)
