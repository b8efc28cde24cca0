"""The llama3 functions' own arguments: what the original library's helper returns, and means."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import Results, Sample, check, expected_of, make_sample
from torch import Tensor

from ring_flash_attn import (
    flash_attn_varlen_func,
    llama3_flash_attn_prepare_cu_seqlens,
    llama3_flash_attn_varlen_func,
)


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[int], int]:
    """Documents, empty ones too, whose sum divides by the world size."""
    world_size = draw(st.integers(1, 8))
    lengths = draw(st.lists(st.integers(0, 20), min_size=1, max_size=6))
    lengths[-1] += -sum(lengths) % world_size or (0 if sum(lengths) else world_size)
    return lengths, world_size


@given(stream=streams(), causal=st.booleans(), data=st.data())
@settings(max_examples=300, deadline=None)
def test_every_query_sees_its_document(
    stream: tuple[list[int], int], causal: bool, data: st.DataObject
) -> None:
    """Token by token: the document of each local query, and its keys in the gathered stream."""
    lengths, world_size = stream
    total = sum(lengths)
    rank = data.draw(st.integers(0, world_size - 1))
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    cu_q, cu_k, max_q, max_k, k_slice = llama3_flash_attn_prepare_cu_seqlens(
        cu_seqlens, causal, rank, world_size
    )
    assert (cu_q.dtype, cu_k.dtype) == (torch.int32, torch.int32)
    assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    assert isinstance(max_q, int)
    document_of = [number for number, length in enumerate(lengths) for _ in range(length)]
    size = total // world_size
    queries, keys = range(rank * size, (rank + 1) * size), range(total)[k_slice]
    assert cu_q[-1] == size
    assert cu_k[-1] == len(keys)
    for part in range(len(cu_q) - 1):
        ours = queries[cu_q[part] : cu_q[part + 1]]
        theirs = keys[cu_k[part] : cu_k[part + 1]]
        for query in ours:
            document = [token for token in keys if document_of[token] == document_of[query]]
            assert list(theirs) == document
            visible = range(total) if not causal else range(query + 1)
            wanted = [t for t in visible if document_of[t] == document_of[query]]
            assert set(wanted) <= set(document), "no key is missing"
    assert not causal or len(keys) <= queries[-1] + 1, "no keys of the future"


@pytest.mark.parametrize(
    ("cu_seqlens", "rank", "causal", "expected"),
    [
        # by the original library
        ([0, 7, 14, 16], 0, True, ([0, 4], [0, 4], 4, 4, slice(0, 4))),
        ([0, 7, 14, 16], 1, True, ([0, 3, 4], [0, 7, 8], 3, 7, slice(0, 8))),
        ([0, 7, 14, 16], 2, True, ([0, 4], [0, 5], 4, 5, slice(7, 12))),
        ([0, 7, 14, 16], 3, True, ([0, 2, 4], [0, 7, 9], 2, 7, slice(7, 16))),
        ([0, 7, 14, 16], 1, False, ([0, 3, 4], [0, 7, 14], 3, 7, slice(0, 14))),
        ([0, 8, 16], 1, False, ([0, 4], [0, 8], 4, 8, slice(0, 8))),
        ([0, 8, 16], 2, True, ([0, 4], [0, 4], 4, 4, slice(8, 12))),
    ],
)
def test_by_hand(cu_seqlens: list[int], rank: int, causal: bool, expected: Any) -> None:
    found = llama3_flash_attn_prepare_cu_seqlens(torch.tensor(cu_seqlens), causal, rank, 4)
    cu_q, cu_k, *rest = found
    assert (cu_q.tolist(), cu_k.tolist(), *rest) == expected


def sample(causal: bool, window_size: tuple[int, int]) -> Sample:
    """Documents that no shard boundary respects."""
    return make_sample((11, 1, 20, 7), causal=causal, window_size=window_size)


def run(rank: int, n: int, causal: bool, window_size: tuple[int, int]) -> list[Tensor]:
    """The function, and what the original does: gather, cut, one varlen kernel."""
    whole = sample(causal, window_size)
    q, k, v = (x.chunk(n)[rank] for x in (whole.q, whole.k, whole.v))
    cu_seqlens = torch.tensor(whole.cu_seqlens_q)
    cu_q, cu_k, max_q, max_k, at = llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, causal, rank, n)
    lengths = (cu_q, cu_k, max_q, max_k)
    options: dict[str, Any] = {"causal": causal, "window_size": window_size}
    ours = llama3_flash_attn_varlen_func(q, k, v, *lengths, 1, at, **options)
    original = flash_attn_varlen_func(q, whole.k[at], whole.v[at], *lengths, **options)
    return [ours, original]


@pytest.mark.parametrize(
    ("causal", "window_size"), [(True, (-1, -1)), (True, (4, -1)), (False, (-1, -1))]
)
def test_agrees_with_the_original_recipe(
    ranks: Any, causal: bool, window_size: tuple[int, int]
) -> None:
    for ours, original in ranks(3).run(run, causal, window_size):
        check({"out": ours}, {"out": original}, 1e-12)


def test_a_window_that_looks_ahead_is_right(ranks: Any) -> None:
    """The original counts positions from the end of the keys that it has cut, and is wrong."""
    window_size = (4, 3)
    parts = ranks(3).run(run, False, window_size)
    out = torch.cat([ours for ours, _ in parts])
    check({"out": out}, {"out": expected_of(sample(False, window_size))["out"]}, 1e-12)


def no_keys_at_all(rank: int, n: int) -> Results:
    """Every shard of the keys is empty."""
    q, k = torch.randn(4, 2, 8), torch.randn(0, 2, 8)
    out = llama3_flash_attn_varlen_func(
        *(q, k, k),
        cu_seqlens_q=torch.tensor([0, 4], dtype=torch.int32),
        cu_seqlens_k=torch.tensor([0, 0], dtype=torch.int32),
        max_seqlen_q=4,
        max_seqlen_k=0,
        heads_k_stride=1,
        local_k_slice=slice(0, 0),
    )
    return {"out": out}


def test_no_keys_at_all(ranks: Any) -> None:
    for found in ranks(2).run(no_keys_at_all):
        assert not found["out"].any()


def without_keys(rank: int, n: int) -> list[bool]:
    """Whether dq, dk, dv are numbers, where the queries of rank 0 see no key at all."""
    torch.manual_seed(rank)
    leaves = [torch.randn(8, 2, 8, requires_grad=True) for _ in range(3)]
    keys = slice(0, 0) if rank == 0 else slice(8, 16)
    length = keys.stop - keys.start
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN
    try:
        out = llama3_flash_attn_varlen_func(
            *leaves,
            cu_seqlens_q=torch.tensor([0, 8], dtype=torch.int32),
            cu_seqlens_k=torch.tensor([0, length], dtype=torch.int32),
            max_seqlen_q=8,
            max_seqlen_k=length,
            heads_k_stride=1,
            local_k_slice=keys,
            causal=True,
        )
        grads = torch.autograd.grad(out.sum(), leaves)
    finally:
        torch.use_deterministic_algorithms(False)
    return [bool(grad.isfinite().all()) for grad in grads]


def test_a_rank_without_keys_sends_no_garbage(ranks: Any) -> None:
    """Its gradients of the others' keys are 0, though nobody computes them."""
    assert ranks(2).run(without_keys) == [[True] * 3] * 2
