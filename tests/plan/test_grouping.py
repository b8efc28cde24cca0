"""Several sources in one launch of the ring: results on virtual and real ranks, and transports."""

from __future__ import annotations

import sys
import types
from functools import cache
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from calls import held_of, whole
from plain_library import PlainLibrary
from samples import Results, Sample, check, expected_of, make_sample, results_of
from torch import Tensor

from ring_flash_attn import ring_attention, virtual_ring_attention
from ring_flash_attn.comm import distributed
from ring_flash_attn.engine.entry import Options, make_problem
from ring_flash_attn.engine.executor import Field
from ring_flash_attn.kernels import base
from ring_flash_attn.kernels.native.blocks import LibraryKernel
from ring_flash_attn.plan import layout as layouts
from ring_flash_attn.plan.layout import layout_names, register_layout

pytestmark = pytest.mark.usefixtures("nan_memory")

SOURCES = (1, 2, 3, 8)
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window_size": (7, 2)},
    "short window": {"causal": True, "window_size": (2, 0)},
}
FORMS: dict[str, dict[str, Any]] = {
    "batch": {"batch": 2, "seqlen_q": 43},
    "packed": {"lengths_q": (17, 0, 3, 26), "lengths_k": (17, 2, 5, 21), "headdim_v": 3},
    # more than `MOST_PIECES` of them
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
def test_groups_agree_with_the_oracle(layout: str, form: str, mask: str, sources: int) -> None:
    for world_size in (1, 2, 5, 8):
        actual = run(sample_of(form, mask), layout, world_size, sources_per_launch=sources)
        check(actual, oracle_of(form, mask), 1e-12)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", layout_names())
def test_many_documents_are_gathered(layout: str, mask: str) -> None:
    """Buffers of several shards that stay whole."""
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


@pytest.mark.parametrize("sources", [1, 2, 4])
def test_keys_are_copied_once_if_at_all(sources: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a batch do not lie behind each other; of a window only what it reaches is copied."""
    copied = []
    rows_first = Field.rows_first

    def spy(field: Field, tensor: Tensor) -> Tensor:
        found = rows_first(field, tensor)
        copied.append(found.numel() if found.data_ptr() != tensor.data_ptr() else 0)
        return found

    monkeypatch.setattr(Field, "rows_first", spy)
    for batch, window, rows in ((2, -1, 8), (1, -1, 0), (2, 3, 3 if sources > 1 else 8)):
        q, k, v = torch.randn(3, batch, 40, 2, 4)
        copied.clear()
        virtual_ring_attention(
            *(q, k, v),
            world_size=5,
            layout="contiguous",
            route="ring",
            sources_per_launch=sources,
            window_size=(window, 0) if window >= 0 else (-1, -1),
        )
        senders = 5 if window < 0 else 4
        assert sum(copied) == 2 * senders * rows * batch * 2 * 4


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
    """Over gloo: several sources, and shards in pieces."""
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
        mock.patch.object(distributed, "_is_gloo", return_value=False),
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
    ("route", "world_size", "tokens", "sources"),
    [
        ("ring", 8, 8192, 4),
        ("ring", 8, 8193, 2),
        ("ring", 16, 100, 4),
        ("ring", 16, 10**6, 2),
        ("ring", 17, 100, 1),
        ("all_gather", 8, 100, 1),
    ],
)
def test_how_many_by_default(route: str, world_size: int, tokens: int, sources: int) -> None:
    """Few tokens make small launches, and many ranks too many connections."""
    lengths = (tokens * world_size - 1, 1)
    problem = make_problem("zigzag", route, lengths, lengths, world_size, Options(causal=True), 2)
    assert problem.sources_per_launch == sources
