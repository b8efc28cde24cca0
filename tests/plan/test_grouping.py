"""Several sources in one launch of the ring: results on virtual and real ranks, and transports."""

from __future__ import annotations

import sys
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, product
from typing import Any
from unittest import mock

import pytest
import torch
from calls import held_of, whole
from plain_library import PlainLibrary
from samples import Results, Sample, check, expected_of, make_sample, results_of
from strategies import order_of_buffers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ring_flash_attn import ring_attention, virtual_ring_attention
from ring_flash_attn.comm import distributed
from ring_flash_attn.comm.base import Message, VirtualTransport
from ring_flash_attn.engine import attention, executor
from ring_flash_attn.engine.entry import Options, make_problem
from ring_flash_attn.engine.prepare import _plans, prepare
from ring_flash_attn.kernels import base
from ring_flash_attn.kernels.native.blocks import LibraryKernel
from ring_flash_attn.plan import build
from ring_flash_attn.plan import layout as layouts
from ring_flash_attn.plan.build import make_plan
from ring_flash_attn.plan.layout import get_layout, layout_names, register_layout
from ring_flash_attn.plan.problem import Problem
from ring_flash_attn.plan.tiles import Mask

pytestmark = pytest.mark.usefixtures("nan_memory")

SOURCES = (1, 2, 3, 8, None)
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window_size": (7, 2)},
    "short window": {"causal": True, "window_size": (2, 0)},
}
FORMS: dict[str, dict[str, Any]] = {
    "batch": {"batch": 2, "seqlen_q": 43},
    "packed": {"lengths_q": (17, 0, 3, 26), "lengths_k": (17, 2, 5, 21), "headdim_v": 3},
    "many documents": {"lengths_q": (3, 1, 9, 2) * 5, "nheads_k": 1},
}


@cache
def sample_of(form: str, mask: str) -> Sample:
    """Make global inputs in fp64."""
    return make_sample(seed=2, **FORMS[form], **MASKS[mask])


@cache
def oracle_of(form: str, mask: str) -> Results:
    """Ask the oracle, once for all layouts."""
    return expected_of(sample_of(form, mask))


def run(sample: Sample, layout: str, world_size: int, route: str = "ring", **more: Any) -> Results:
    """Forward and backward over virtual ranks."""

    def attend(q: Tensor, k: Tensor, v: Tensor, _: None) -> tuple[Tensor, Tensor]:
        out, lse, _ = virtual_ring_attention(
            q,
            k,
            v,
            world_size=world_size,
            layout=layout,
            route=route,
            kernel="reference",
            cu_seqlens=sample.cu_seqlens_q,
            cu_seqlens_k=sample.cu_seqlens_k,
            return_attn_probs=True,
            **sample.options,
            **more,
        )
        return out, lse

    return results_of(attend, sample)


@pytest.mark.product(6)
@pytest.mark.parametrize("sources", SOURCES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", layout_names())
def test_groups_agree_with_the_oracle(
    layout: str, form: str, mask: str, sources: int | None, fresh_plans: None
) -> None:
    for world_size, by_document in ((1, False), (2, True), (5, True), (8, False)):
        with order_of_buffers(by_document):
            actual = run(sample_of(form, mask), layout, world_size, sources_per_launch=sources)
        check(actual, oracle_of(form, mask), 1e-12)


@pytest.mark.parametrize("sources", [2, None])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ["balanced", "zigzag", "stripe", "flat_contiguous"])
def test_own_keys_first_and_last_agree_with_the_oracle(
    layout: str,
    form: str,
    mask: str,
    sources: int | None,
    fresh_plans: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Work as little as this is split only here: any work, into blocks of 4 rows."""
    monkeypatch.setattr(build, "_SPLIT_PAIRS", 1)
    monkeypatch.setattr(build, "BLOCK", 4)
    for world_size in (2, 5):
        actual = run(sample_of(form, mask), layout, world_size, sources_per_launch=sources)
        check(actual, oracle_of(form, mask), 1e-12)


@pytest.mark.parametrize("world_size", [33, 64, 70])
@pytest.mark.parametrize("layout", ["balanced", "zigzag"])
def test_many_ranks_agree_with_the_oracle(layout: str, world_size: int) -> None:
    """As many sources a launch as their sizes allow; on 70 ranks of zigzag, one."""
    actual = run(sample_of("many documents", "causal"), layout, world_size)
    check(actual, oracle_of("many documents", "causal"), 1e-12)


@pytest.fixture
def fresh_plans() -> Iterator[None]:
    """Plans of other tests have another order of rows, maybe, and so have ours for them."""
    _plans.clear()
    yield
    _plans.clear()


@pytest.mark.parametrize("by_document", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", layout_names())
def test_many_documents_are_gathered(
    layout: str, mask: str, by_document: bool, fresh_plans: None
) -> None:
    """Our own rows are copied into the buffer of all, wherever they belong there."""
    with order_of_buffers(by_document):
        actual = run(sample_of("many documents", mask), layout, 4, "all_gather")
    check(actual, oracle_of("many documents", mask), 1e-12)


@pytest.mark.parametrize(("route", "sources"), [("ring", 2), ("ring", 8), ("all_gather", None)])
@pytest.mark.parametrize("layout", ["late_first", "flat_late_first"])
def test_shards_need_not_be_in_order(
    layout: str, route: str, sources: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layout whose rows do not go up: alone a shard lies as it is, with others in order."""
    monkeypatch.setattr(layouts, "_LAYOUTS", dict(layouts._LAYOUTS))

    @register_layout("late_first")
    def late_first(length: int, rank: int, world_size: int) -> list[range]:
        return layouts.zigzag(length, rank, world_size)[::-1]

    for form in ("batch", "packed"):
        actual = run(sample_of(form, "causal"), layout, 4, route, sources_per_launch=sources)
        check(actual, oracle_of(form, "causal"), 1e-12)


def test_whole_shards_are_copied_only_if_they_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """From neighbour to neighbour; rows of a batch do not lie behind each other."""
    copied = []
    rows_first = executor.rows_first

    def spy(tensor: Tensor) -> Tensor:
        found = rows_first(tensor)
        copied.append(found.numel() if found.data_ptr() != tensor.data_ptr() else 0)
        return found

    monkeypatch.setattr(executor, "rows_first", spy)
    for batch, rows in ((2, 8), (1, 0)):
        q, k, v = torch.randn(3, batch, 40, 2, 4)
        copied.clear()
        where = {"world_size": 5, "layout": "contiguous", "route": "ring"}
        virtual_ring_attention(q, k, v, **where, sources_per_launch=1)
        assert sum(copied) == 2 * 5 * rows * batch * 2 * 4


class Posts:
    """What virtual ranks send, post by post: (rank, peer, tensor)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[list[tuple[int, int, Tensor]]] = []
        post = VirtualTransport.post

        def spy(transport: VirtualTransport, messages: Sequence[Message]) -> None:
            sent = [m for m in messages if not m.receive]
            rank = transport._rank
            self.found.append([(rank, m.peer, m.tensor) for m in sent])
            post(transport, messages)

        monkeypatch.setattr(VirtualTransport, "post", spy)


@pytest.mark.parametrize("by_document", [False, True])
@pytest.mark.parametrize("route", ["ring", "all_gather"])
@pytest.mark.parametrize("layout", ["zigzag", "balanced", "flat_stripe"])
def test_one_message_for_each_peer_and_post(
    layout: str, route: str, by_document: bool, monkeypatch: pytest.MonkeyPatch, fresh_plans: None
) -> None:
    """k and v of all documents together, and so dk and dv; not a row too many."""
    posts = Posts(monkeypatch)
    lengths, world_size, width = (17, 3, 40, 9, 1, 26), 4, 2 * (8 + 4)
    cu_seqlens = [0, *accumulate(lengths)]
    q, k, v = (torch.randn(96, n, d, requires_grad=True) for n, d in ((4, 8), (2, 8), (2, 4)))
    with order_of_buffers(by_document):
        out = virtual_ring_attention(
            *(q, k, v),
            world_size=world_size,
            layout=layout,
            route=route,
            cu_seqlens=cu_seqlens,
            causal=True,
        )
        forward = len(posts.found)
        out.sum().backward()
    problem = Problem(get_layout(layout), lengths, lengths, world_size, Mask(right=0))
    pairs = [(o, u) for o, u in product(range(world_size), repeat=2) if o != u]
    rows = {(o, u): sum(map(len, problem.sent(o, u))) for o, u in pairs if problem.needed(u, o)}
    for number, found in ((0, posts.found[:forward]), (1, posts.found[forward:])):
        sent = Counter[tuple[int, int]]()
        for rank, peer, tensor in (each for post in found for each in post):
            sent[rank, peer] += tensor.numel()
        expected = Counter({pair: count * width for pair, count in rows.items()})
        if number:
            expected.update({(u, o): count * width for (o, u), count in rows.items()})
        assert sent == expected
        assert sum(map(len, found)) == (1 + number) * len(rows)


def test_packed_kv_is_sent_from_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows have k and v side by side already; others are copied."""
    posts = Posts(monkeypatch)
    q, kv = torch.randn(40, 2, 8), torch.randn(40, 2, 2, 8)
    problem = Problem(get_layout("flat_contiguous"), (40,), (40,), 2, Mask(right=0), 2, 2, None)
    for packed in (True, False):
        shards = {}
        for rank in range(2):
            rows = slice(20 * rank, 20 * rank + 20)
            k, v = kv[rows].unsqueeze(0).unbind(2)
            key = (k, v) if packed else (k.clone(), v.clone())
            shards[rank] = (q[rows].unsqueeze(0), *key)
        posts.found.clear()
        prepared = prepare("ring", problem, shards, Options(causal=True, kernel="reference"))
        attention.forward(prepared, list(shards.values()), None)
        ((_, _, sent),) = [each for post in posts.found for each in post]
        assert (sent.data_ptr() == kv.data_ptr()) is packed
        assert torch.equal(sent.flatten(), kv[:20].flatten())


class Launches(TorchDispatchMode):
    """Notes operations that compute, until the first post; packing messages is none of them."""

    FREE = frozenset({"empty", "empty_strided", "index_select", "arange", "copy_", "clone"})

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.posts = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if not self.posts and not func.is_view and name not in self.FREE:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("route", ["ring", "all_gather"])
def test_the_first_post_leaves_before_any_launch(
    route: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither states nor accumulators nor delta are there yet; backward as well."""
    run(sample_of(form, "causal"), "zigzag", 4, route)  # tables of row numbers are made
    noted: list[Launches] = []
    post = VirtualTransport.post

    def spy(self: VirtualTransport, messages: Any) -> None:
        if messages:
            noted[-1].posts += 1
        post(self, messages)

    monkeypatch.setattr(VirtualTransport, "post", spy)
    for name in ("forward", "backward"):
        original = getattr(attention, name)

        def watched(*args: Any, original: Any = original) -> Any:
            noted.append(Launches())
            with noted[-1]:
                return original(*args)

        monkeypatch.setattr(attention, name, watched)
    check(run(sample_of(form, "causal"), "zigzag", 4, route), oracle_of(form, "causal"), 1e-12)
    assert len(noted) == 2
    for each in noted:
        assert each.posts
        assert not each.found


def test_groups_give_the_same_bits_every_time() -> None:
    sample = make_sample(seqlen_q=33, dtype=torch.float32, causal=True, deterministic=True)
    first, second = (run(sample, "zigzag", 5, sources_per_launch=3) for _ in range(2))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


REAL = list(product(("zigzag", "flat_contiguous", "balanced"), MASKS, (2, 3)))


def run_real(rank: int, n: int) -> list[Results]:
    """`ring_attention` on one rank of a group, forward and backward."""
    return [
        run_shard(sample_of("packed", mask), layout, rank, n, sources)
        for layout, mask, sources in REAL
    ]


def run_shard(sample: Sample, layout: str, rank: int, n: int, sources: int) -> Results:
    """One call on one rank."""
    cu_q, cu_k = sample.cu_seqlens_q, sample.cu_seqlens_k
    queries = held_of(layout, cu_q, sample.q.shape[0], rank, n)
    keys = held_of(layout, cu_k, sample.k.shape[0], rank, n, cu_q)
    shard = sample.q[queries], sample.k[keys], sample.v[keys]
    leaves = [x.clone().requires_grad_() for x in shard]
    out, lse, _ = ring_attention(
        *leaves,
        layout=layout,
        route="ring",
        cu_seqlens=cu_q,
        cu_seqlens_k=cu_k,
        return_attn_probs=True,
        sources_per_launch=sources,
        **sample.options,
    )
    finite = torch.where(lse.isfinite(), lse, 0.0)
    loss = (out * sample.dout[queries]).sum() + (finite * sample.dlse[:, queries]).sum()
    grads = torch.autograd.grad(loss, leaves)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *grads)))


def test_groups_on_real_ranks(ranks: Any) -> None:
    """Over gloo: several sources, and rows of shards that lie apart."""
    world_size = 4
    found = ranks(world_size).run(run_real)
    for number, (layout, mask, _) in enumerate(REAL):
        sample = sample_of("packed", mask)
        tokens_q, tokens_k = (
            [
                held_of(layout, cu, x.shape[0], rank, world_size, sample.cu_seqlens_q)
                for rank in range(world_size)
            ]
            for x, cu in ((sample.q, sample.cu_seqlens_q), (sample.k, sample.cu_seqlens_k))
        )
        parts = [of_rank[number] for of_rank in found]
        results = whole([{n: p[n] for n in ("out", "lse", "dq")} for p in parts], tokens_q)
        results |= whole([{n: p[n] for n in ("dk", "dv")} for p in parts], tokens_k)
        check(results, oracle_of("packed", mask), 1e-12)


def with_a_set_up(rank: int, n: int) -> Results:
    """As over NCCL, whose groups need an operation of all ranks before the first message."""
    module = types.ModuleType("plain_kernel")
    module.KERNEL = LibraryKernel(PlainLibrary(True, False))  # type: ignore[attr-defined]
    entries = dict(base._ENTRIES)
    with (
        mock.patch.object(distributed, "is_gloo", return_value=False),
        mock.patch.object(base, "_ENTRIES", entries),
        mock.patch.dict(sys.modules, plain_kernel=module),
    ):
        base.register_kernel("plain", "plain_kernel")
        q, k, v = torch.randn(3, 8, 2, 8)
        out = ring_attention(
            q,
            k,
            v,
            layout="flat_contiguous",
            route="ring",
            cu_seqlens=torch.tensor([0, 8, 24]),
            causal=True,  # otherwise keys would pass through rank 0
            kernel="plain",
        )
    distributed._connected.clear()
    base.load_kernel.cache_clear()
    return {"out": out}


def test_a_rank_that_sends_nothing_takes_part_in_the_set_up(ranks: Any) -> None:
    """The document of rank 0 lies on it alone."""
    for found in ranks(3).run(with_a_set_up):
        assert found["out"].isfinite().all()


@pytest.mark.parametrize(
    ("world_size", "tokens", "forward", "backward"),
    [
        (8, 8192, [1, 3, 4], [1, 3, 4, 1]),
        (8, 8193, [1, 2, 3, 2], [1, 2, 3, 2, 1]),
        (16, 100, [1, 7, 8], [1, 3, 4, 4, 4]),
        (64, 8192, [1] + [9] * 7, [1, 8] + [11] * 5 + [1]),
        (64, 65536, [1, 3] + [2] * 30, [1, 3] + [2] * 30 + [1]),
        (66, 100, [1] * 66, [1] * 66),
    ],
)
def test_how_many_by_default(
    world_size: int, tokens: int, forward: list[int], backward: list[int]
) -> None:
    """Few tokens make small launches; many ranks many, and at last too many connections.

    Backward, our own keys come first and last, unless that is little work.
    """
    lengths = (tokens * world_size,)
    problem = make_problem("zigzag", "ring", lengths, lengths, world_size, Options(causal=True), 2)
    for direction, expected in ((False, forward), (True, backward)):
        plan = make_plan("ring", problem, 3, direction)
        assert [len(work.keys) for step in plan.steps for work in step.work] == expected
