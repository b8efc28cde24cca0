"""Groups of query heads in parts: the Hopper backward where there are few pieces of work."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import Ranks
from test_hopper import CASES, _counted, _unless_told
from test_triton import DTYPES, _errors, _poisoned_memory

import ring_flash_attn as rfa
from ring_flash_attn.kernels.base import Call
from ring_flash_attn.plan.layout import Span
from ring_flash_attn.plan.tiles import Mask, Tile

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

SPLIT = {
    "mqa": CASES["mqa"],
    "steps": replace(CASES["steps"], lengths=(400, 130)),
    "documents": replace(CASES["documents"], lengths=(260, 129, 64)),
    "sources": replace(CASES["sources"], lengths=(600, 130)),
    "query_ring": CASES["query_ring"],
    "ordered": replace(CASES["ordered"], lengths=(260, 129)),
    "headdim_256": replace(CASES["headdim_256"], lengths=(140,)),
}


def _with_groups_split(rank: int, world_size: int, name: str) -> tuple[dict[str, float], list[Any]]:
    """Errors where there are more processors than pieces of work, and parts of each launch."""
    with _poisoned_memory(), _counted() as launches:
        from ring_flash_attn.kernels import scheduler
        from ring_flash_attn.kernels.triton.hopper import host

        with (
            mock.patch.object(host, "in_order", _unless_told),
            mock.patch.object(scheduler, "processors", return_value=99),
            mock.patch.object(host, "free_processors", return_value=99),
        ):
            errors = _errors(SPLIT[name])
    return errors, [call.args[6].get("parts") for call in launches.call_args_list]


@pytest.mark.product(7)
@pytest.mark.parametrize("name", SPLIT)
def test_groups_of_heads_are_split_where_there_is_too_little_to_do(pool: Ranks, name: str) -> None:
    """On one rank and in rings, also where steps add to the same dK and dV; in one order or not."""
    ((errors, parts),) = pool.run(_with_groups_split, name)
    _, tolerance = DTYPES[SPLIT[name].dtype]
    assert all(error < tolerance for error in errors.values()), errors
    most = SPLIT[name].nheads // SPLIT[name].nheads_k
    assert most > 1
    assert set(parts) == {None, most}


def _with_keys_that_nobody_sees(rank: int, world_size: int) -> tuple[list[float], list[Any]]:
    """Largest gradients of the keys of a document without queries."""
    with _poisoned_memory(), _counted() as launches:
        from ring_flash_attn.kernels import scheduler
        from ring_flash_attn.kernels.triton.hopper import host

        with (
            mock.patch.object(scheduler, "processors", return_value=99),
            mock.patch.object(host, "free_processors", return_value=99),
        ):
            q, k, v = (
                torch.randn(rows, heads, 64).half().requires_grad_()
                for rows, heads in ((90, 4), (120, 2), (120, 2))
            )
            lengths = torch.tensor([0, 40, 40, 90]), torch.tensor([0, 40, 70, 120])
            out = rfa.triton_flash_attn_varlen_func(q, k, v, *lengths, 50, 50, causal=True)
            _, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    unseen = [x[40:70].abs().max().item() for x in (dk, dv)]
    return unseen, [call.args[6].get("parts") for call in launches.call_args_list]


def test_keys_that_nobody_sees_have_no_gradient(pool: Ranks) -> None:
    """Parts of dK and dV are added up for all rows, those that no tile names, too."""
    ((unseen, parts),) = pool.run(_with_keys_that_nobody_sees)
    assert 2 in parts
    assert unseen == [0.0, 0.0]


def _with_processors_left_to_others(rank: int, world_size: int) -> tuple[bool, list[Any]]:
    """Whether gradients are the same to the bit, and parts of each launch."""
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(1, 300, heads, 64, generator=generator).half().requires_grad_()
        for heads in (4, 2, 2)
    ]
    found = []
    with _counted() as launches:
        from ring_flash_attn.kernels import scheduler
        from ring_flash_attn.kernels.triton.hopper import host

        for free in (99, 2):
            with (
                mock.patch.object(scheduler, "processors", return_value=99),
                mock.patch.object(host, "free_processors", return_value=free),
            ):
                out = rfa.triton_flash_attn_func(*leaves, causal=True, deterministic=True)
                found.append(torch.autograd.grad(out.sum(), leaves))
    same = all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    return same, [call.args[6].get("parts") for call in launches.call_args_list]


def test_processors_left_to_others_change_no_bit(pool: Ranks) -> None:
    for same, parts in pool.run(_with_processors_left_to_others):
        assert same
        assert parts == [None, 2, None] * 2


@pytest.mark.parametrize(
    ("causal", "nheads_k", "seqlen", "parts"),
    [
        (True, 8, 8192, 1),
        (True, 8, 4096, 2),
        (True, 8, 2048, 2),  # 2.1 programs' shares: four parts would take more memory and longer
        (True, 8, 1024, 4),
        (True, 1, 8192, 8),
        (True, 32, 512, 1),
        (False, 8, 8192, 1),
        (False, 8, 4224, 1),  # two waves of 132 programs
        (False, 8, 4352, 4),  # eight pieces more would be a third
        (False, 4, 5000, 4),
    ],
)
def test_into_how_many_parts(
    causal: bool, nheads_k: int, seqlen: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 query heads on an H200."""
    from ring_flash_attn.kernels import scheduler
    from ring_flash_attn.kernels.tables import table

    monkeypatch.setattr(scheduler, "processors", lambda device: 132)
    cpu, span = torch.device("cpu"), Span(0, seqlen, 0, 1, 0, 0)
    high = 0 if causal else seqlen
    work = table((Tile(span, span, -seqlen, high, True, True),), 128, 64, True, cpu)
    assert work.level is not causal or seqlen == 512
    call = Call(cpu, torch.bfloat16, 32, nheads_k, 128, 128, 0.1, Mask(right=0))
    assert [scheduler.split(work, 1, call) for _ in range(2)] == [parts] * 2
