"""The Triton kernel through Triton's interpreter on the CPU, every feature against the oracle.

The interpreter has to be chosen before triton is imported, so the cases run in a process of their
own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import maxima
import pytest
import torch
from merging import fused_and_plain
from moving_rows import SHAPES, added, copied
from ranks import Ranks

import ring_flash_attn as rfa
from ring_flash_attn.verify.oracle import Rules, oracle

pytestmark = [
    pytest.mark.usefixtures("nan_memory"),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
]

DTYPES = {
    "fp32": (torch.float32, 2e-5),
    "fp16": (torch.float16, 4e-3),
    "bf16": (torch.bfloat16, 2e-2),
}


@dataclass(frozen=True)
class Case:
    """One call on virtual ranks; lengths of packed documents, or (batch, seqlen_q, seqlen_k)."""

    lengths: tuple[int, ...] = (37, 0, 1, 50)
    batch: tuple[int, int, int] | None = None
    world_size: int = 2
    layout: str = "zigzag"
    route: str = "ring"
    nheads: int = 4
    nheads_k: int = 2
    headdim: int = 16
    headdim_v: int = 16
    dtype: str = "fp32"
    sink: bool = False
    alibi: str = ""  # "heads": slopes (nheads,); "each": of each sequence or document
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "causal": Case(options={"causal": True}),
    "full": Case(),
    "window": Case(options={"causal": True, "window_size": (9, 0)}),
    "window_both_sides": Case(layout="contiguous", options={"window_size": (7, 5)}),
    "softcap": Case(options={"causal": True, "softcap": 2.0}),
    "alibi": Case(options={"causal": True}, alibi="each"),
    "sink": Case(options={"causal": True}, sink=True),
    "dropout": Case(options={"causal": True, "dropout_p": 0.3}),
    "everything": Case(
        alibi="heads", sink=True, options={"causal": True, "window_size": (20, 0), "softcap": 3.0}
    ),
    "stripe": Case(layout="stripe", world_size=3, options={"causal": True}, alibi="heads"),
    "query_ring": Case(route="query_ring", options={"causal": True}),
    "all_gather": Case(
        route="all_gather",
        layout="flat_zigzag",
        options={"causal": True, "heads_k_stride": 1},
        alibi="each",
    ),
    "all_to_all": Case(route="all_to_all", options={"causal": True}, sink=True, dtype="bf16"),
    "all_to_all_shared_heads": Case(
        route="all_to_all", world_size=3, layout="flat_zigzag", alibi=True, dtype="fp16"
    ),
    "mesh": Case(
        lengths=(20, 13),
        nheads=2,
        route="mesh",
        world_size=4,
        options={"causal": True, "ranks_per_node": 2, "sources_per_launch": 1, "dropout_p": 0.2},
        sink=True,
        dtype="bf16",
    ),
    "two_sources_a_launch": Case(
        world_size=4, options={"causal": True, "sources_per_launch": 2}, alibi="each"
    ),
    "all_sources_in_one_launch": Case(
        lengths=(40, 0, 57),
        world_size=4,
        layout="flat_zigzag",
        options={"window_size": (25, 3), "dropout_p": 0.2, "sources_per_launch": 3},
    ),
    "own_documents_only": Case(lengths=(20, 20), layout="flat_contiguous"),  # nothing is sent
    "one_rank": Case(world_size=1, options={"causal": True}),
    "mha": Case(nheads=2, options={"causal": True}),
    "mqa": Case(nheads_k=1, options={"causal": True}),
    "headdim_40": Case(headdim=40, headdim_v=40, options={"causal": True}),
    "headdim_59_v_24": Case(headdim=59, headdim_v=24, options={"causal": True}),
    "headdim_128": Case(lengths=(70,), headdim=128, headdim_v=128, options={"causal": True}),
    "more_keys": Case(batch=(2, 20, 45), options={"causal": True}),
    "more_queries": Case(batch=(2, 45, 20), options={"causal": True}),
    "batch": Case(batch=(2, 64, 64), layout="stripe", options={"causal": True}, alibi="each"),
    "long_and_ragged": Case(lengths=(70, 45, 33), world_size=1, options={"causal": True}),
    "long_and_ragged_window": Case(
        lengths=(97, 45), world_size=1, options={"window_size": (30, 11), "dropout_p": 0.2}
    ),
    "long_ragged_steps": Case(lengths=(167,), layout="stripe", options={"causal": True}),
    "whole_blocks": Case(batch=(1, 128, 128), layout="contiguous"),
    "fp16": Case(dtype="fp16", options={"causal": True}),
    "bf16": Case(dtype="bf16", options={"causal": True}),
}


def _inputs(case: Case) -> tuple[list[torch.Tensor], list[int] | None]:
    generator = torch.Generator().manual_seed(0)
    dtype, _ = DTYPES[case.dtype]
    if case.batch is None:
        cu_seqlens = [0, *torch.tensor(case.lengths).cumsum(0).tolist()]
        rows_q = rows_k = (sum(case.lengths),)
    else:
        cu_seqlens = None
        rows_q, rows_k = case.batch[:2], (case.batch[0], case.batch[2])
    shapes = (
        (*rows_q, case.nheads, case.headdim),
        (*rows_k, case.nheads_k, case.headdim),
        (*rows_k, case.nheads_k, case.headdim_v),
        (*rows_q, case.nheads, case.headdim_v),
    )
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes], cu_seqlens


def _errors(case: Case) -> dict[str, float]:
    """Relative errors of out, lse and all gradients against the oracle."""
    (q, k, v, dout), cu_seqlens = _inputs(case)
    sink = torch.linspace(-1, 1, case.nheads) if case.sink else None
    slopes = None
    if case.alibi:
        rows = len(case.lengths) if case.batch is None else case.batch[0]
        slopes = torch.linspace(0.1, 1.3, rows * case.nheads).view(rows, -1)
        slopes = slopes if case.alibi == "each" else slopes[0]
    leaves = [x.clone().requires_grad_() for x in (q, k, v, *([sink] if case.sink else []))]
    torch.manual_seed(3)
    out, lse, _ = rfa.virtual_ring_attention(
        *leaves[:3],
        world_size=case.world_size,
        layout=case.layout,
        route=case.route,
        cu_seqlens=cu_seqlens,
        kernel="triton",
        sink=leaves[3] if case.sink else None,
        alibi_slopes=slopes,
        return_attn_probs=True,
        **case.options,
    )
    grads = torch.autograd.grad(out, leaves, dout)
    exact = [x.double().clone().requires_grad_() for x in leaves]
    torch.manual_seed(3)
    seed = int(torch.randint(1 << 62, (), dtype=torch.int64))
    ways = ("heads_k_stride", "sources_per_launch", "ranks_per_node", "deterministic")
    options = {name: x for name, x in case.options.items() if name not in ways}
    rules = Rules(sink=exact[3] if case.sink else None, alibi_slopes=slopes, seed=seed, **options)
    want, want_lse = oracle(*exact[:3], rules, cu_seqlens, cu_seqlens)
    want_grads = torch.autograd.grad(want, exact, dout.double())
    assert torch.equal(lse.isneginf(), want_lse.isneginf())
    finite = ~want_lse.isneginf()
    pairs = {"out": (out, want), "lse": (lse[finite], want_lse[finite])}
    pairs |= {n: p for n, *p in zip(("dq", "dk", "dv", "dsink"), grads, want_grads, strict=False)}
    return {n: float((a.double() - b).abs().max() / b.abs().max()) for n, (a, b) in pairs.items()}


def _run(rank: int, world_size: int, name: str) -> dict[str, float]:
    with _poisoned_memory():
        return _errors(CASES[name])


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Fresh memory is NaN, so that what nobody writes is noticed."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.product(5)
@pytest.mark.parametrize("name", CASES)
def test_interpreted(pool: Ranks, name: str) -> None:
    (errors,) = pool.run(_run, name)
    _, tolerance = DTYPES[CASES[name].dtype]
    assert all(error < tolerance for error in errors.values()), errors


def _nan(rank: int, world_size: int) -> tuple[int, int, int]:
    return maxima.nans(300, 64, "cpu")


def _nan_in_a_ring(rank: int, world_size: int) -> tuple[int, int]:
    return maxima.nans_in_a_ring("cpu")


def test_nan_is_not_hidden(pool: Ranks) -> None:
    for found in pool.run(_nan):
        assert found == (0, 150, 0)
    for found in pool.run(_nan_in_a_ring):
        assert found == (51, 51)


def _merge(rank: int, world_size: int) -> None:
    for ours, expected in fused_and_plain("cpu"):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_the_fused_merge_interpreted(pool: Ranks) -> None:
    pool.run(_merge)


def _moved_rows(rank: int, world_size: int) -> int:
    """Sums in the same order are the same to the bit."""
    found = [pair for shape in SHAPES for pair in (*added("cpu", shape), *copied("cpu", shape))]
    return sum(not torch.equal(ours, expected) for ours, expected in found)


def test_rows_are_moved_and_added_interpreted(pool: Ranks) -> None:
    assert pool.run(_moved_rows) == [0] * pool.world_size


def _with_nan(rank: int, world_size: int) -> list[int]:
    """NaNs in the results of one document when its neighbour is all NaN, for several windows."""
    counts = []
    for length in (64, 75, 20):
        for causal, window in [(True, (7, 0)), (False, (7, 5)), (False, (-1, 5)), (True, (-1, -1))]:
            leaves = [torch.randn(128, 2, 16) for _ in range(3)]
            dout = torch.randn(128, 2, 16)
            for x in (*leaves, dout):
                x[length:] = torch.nan
            leaves = [x.requires_grad_() for x in leaves]
            cu_seqlens = torch.tensor([0, length, 128], dtype=torch.int32)
            out = rfa.triton_flash_attn_varlen_func(
                *leaves, cu_seqlens, cu_seqlens, 128, 128, causal=causal, window_size=window
            )
            grads = torch.autograd.grad(out, leaves, dout)
            counts += [int(x[:length].isnan().sum()) for x in (out, *grads)]
    return counts


def test_documents_do_not_leak(pool: Ranks) -> None:
    """Blocks would reach into the next document where they do not divide this one."""
    for counts in pool.run(_with_nan):
        assert counts == [0] * 48


def _without_keys(rank: int, world_size: int) -> bool:
    """Whether the middle document's queries, which see nothing, are right on one device."""
    q, k, v, dout = (torch.randn(n, 2, 16) for n in (50, 45, 45, 50))
    of_q, of_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 10, 15, 50], [0, 10, 10, 45]))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with _poisoned_memory():
        out, lse, _ = rfa.triton_flash_attn_varlen_func(
            *leaves, of_q, of_k, 35, 35, return_attn_probs=True
        )
        grads = torch.autograd.grad(out, leaves, dout)
    empty = (not out[10:15].any()) and bool(lse[:, 10:15].isneginf().all())
    return empty and (not grads[0][10:15].any()) and all(bool(x.isfinite().all()) for x in grads)


def test_documents_without_keys(pool: Ranks) -> None:
    assert all(pool.run(_without_keys))


def _packs(rank: int, world_size: int) -> list[float]:
    """Errors against the reference: two packs of one shape in turns, then one edited in place."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(60, 2, 16, generator=generator) for _ in range(4))
    packs = [torch.tensor(x, dtype=torch.int32) for x in ([0, 7, 33, 60], [0, 20, 21, 60])]

    def results(cu_seqlens: torch.Tensor, kernel: str) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = rfa.flash_attn_varlen_func(
            *leaves, cu_seqlens, cu_seqlens, 60, 60, causal=True, kernel=kernel
        )
        return [out, *torch.autograd.grad(out, leaves, dout)]

    wanted = [results(pack, "reference") for pack in packs]
    assert not torch.allclose(wanted[0][0], wanted[1][0], atol=1e-2)
    found = [(results(packs[number], "triton"), wanted[number]) for number in (0, 1, 0, 1)]
    packs[0].copy_(packs[1])
    found.append((results(packs[0], "triton"), wanted[1]))
    return [float((a - b).abs().max()) for got, want in found for a, b in zip(got, want)]


def test_packs_of_one_shape(pool: Ranks) -> None:
    for errors in pool.run(_packs):
        assert all(error < 1e-5 for error in errors), errors
