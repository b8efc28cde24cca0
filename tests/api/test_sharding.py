"""shard, unshard and position_ids: what users otherwise write by hand."""

from __future__ import annotations

import functools
import re
import time
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calls import held_of
from hypothesis import given, settings
from strategies import document_lengths, world_sizes
from torch._subclasses import FakeTensorMode

from ring_flash_attn import Balanced, Mask, position_ids, ring_attention, shard, unshard
from ring_flash_attn.engine import tokens
from ring_flash_attn.plan.layout import layout_names
from ring_flash_attn.verify.oracle import Rules, oracle

CU_SEQLENS = [0, 7, 7, 8, 21]


@pytest.mark.parametrize("layout", layout_names())
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_shards_are_what_slicing_gives(layout: str, world_size: int) -> None:
    batch, packed = torch.randn(2, 13, 3), torch.randn(21, 2, 4)
    for rank in range(world_size):
        who: dict[str, int] = {"rank": rank, "world_size": world_size}
        tokens = held_of(layout, None, 13, rank, world_size)
        assert torch.equal(shard(batch, layout, **who), batch[:, tokens])
        tokens = held_of(layout, CU_SEQLENS, 21, rank, world_size)
        for cu_seqlens in (CU_SEQLENS, torch.tensor(CU_SEQLENS)):
            assert torch.equal(shard(packed, layout, cu_seqlens=cu_seqlens, **who), packed[tokens])


@pytest.mark.parametrize("layout", layout_names())
@given(lengths=document_lengths, world_size=world_sizes)
@settings(max_examples=30, deadline=None)
def test_unshard_is_the_inverse(layout: str, lengths: tuple[int, ...], world_size: int) -> None:
    """Packed along the first dimension, a batch along the second, any dtype."""
    cu_seqlens, total = [0, *accumulate(lengths)], sum(lengths)
    labels = torch.arange(total)
    everyone = [{"rank": rank, "world_size": world_size} for rank in range(world_size)]
    parts = [shard(labels, layout, cu_seqlens=cu_seqlens, **who) for who in everyone]
    assert sum(len(part) for part in parts) == total
    assert torch.equal(unshard(parts, layout, cu_seqlens=cu_seqlens), labels)
    weights = torch.randn(2, total, 3)
    parts = [shard(weights, layout, **who) for who in everyone]
    assert torch.equal(unshard(parts, layout), weights)


@pytest.mark.parametrize("layout", layout_names())
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_any_dimension(layout: str, dim: int) -> None:
    x = torch.randn(11, 11, 11)
    parts = [shard(x, layout, dim=dim, rank=rank, world_size=4) for rank in range(4)]
    for rank, part in enumerate(parts):
        assert torch.equal(part, x.index_select(dim, held_of(layout, None, 11, rank, 4)))
    assert torch.equal(unshard(parts, layout, dim=dim), x)


def test_labels_of_one_dimension() -> None:
    labels = torch.tensor([5, 6, 7, 8, 9])
    assert shard(labels, "stripe", dim=0, rank=1, world_size=2).tolist() == [6, 8]
    assert shard(labels, "zigzag", cu_seqlens=[0, 5], rank=0, world_size=2).tolist() == [5, 8, 9]


def test_zigzag_positions_by_hand() -> None:
    """16 tokens on 2 ranks: parts 0 and 3, and parts 1 and 2, of four."""
    expected = [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]
    for rank in range(2):
        found = position_ids("zigzag", seqlen=16, rank=rank, world_size=2)
        assert found.dtype is torch.int64
        assert found.tolist() == expected[rank]


def test_packed_positions_by_hand() -> None:
    """Documents of 4 and 8 tokens: positions start again in every document."""
    cu_seqlens = torch.tensor([0, 4, 12], dtype=torch.int32)
    expected = {
        "zigzag": [[0, 3, 0, 1, 6, 7], [1, 2, 2, 3, 4, 5]],
        "stripe": [[0, 2, 0, 2, 4, 6], [1, 3, 1, 3, 5, 7]],
        "contiguous": [[0, 1, 0, 1, 2, 3], [2, 3, 4, 5, 6, 7]],
        "flat_contiguous": [[0, 1, 2, 3, 0, 1], [2, 3, 4, 5, 6, 7]],
        "flat_stripe": [[0, 2, 0, 2, 4, 6], [1, 3, 1, 3, 5, 7]],
        "flat_zigzag": [[0, 1, 2, 5, 6, 7], [3, 0, 1, 2, 3, 4]],
    }
    for layout, of_ranks in expected.items():
        for rank, positions in enumerate(of_ranks):
            found = position_ids(layout, cu_seqlens=cu_seqlens, rank=rank, world_size=2)
            assert found.tolist() == positions, layout


@pytest.mark.parametrize("layout", layout_names())
@pytest.mark.parametrize("world_size", [1, 3, 5])
def test_rotating_shards_is_sharding_the_rotated(layout: str, world_size: int) -> None:
    """RoPE with position_ids on a shard is the shard of RoPE on the whole."""
    x = torch.randn(21, 2, 8, dtype=torch.float64)
    whole = torch.cat([torch.arange(b - a) for a, b in pairwise(CU_SEQLENS)])

    def rope(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None, None] * 100.0 ** -torch.arange(0, 1, 0.25, dtype=x.dtype)
        a, b = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

    for rank in range(world_size):
        who: dict[str, Any] = {"cu_seqlens": CU_SEQLENS, "rank": rank, "world_size": world_size}
        rotated = rope(shard(x, layout, **who), position_ids(layout, **who))
        assert torch.equal(rotated, shard(rope(x, whole), layout, **who))


BALANCED = Balanced(masks=((Mask(right=0), 1), (Mask(left=4, right=0), 3)), ranks_per_node=2)
CU_SEQLENS_K = [0, 3, 5, 5, 30]


def balanced_on_a_group(rank: int, n: int) -> list[torch.Tensor]:
    """As a user would: the same object everywhere, and other keys than queries."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(m, 2, 4, dtype=torch.float64) for m in (21, 30, 30))
    cu: dict[str, Any] = {"cu_seqlens": CU_SEQLENS}
    cu_k: dict[str, Any] = {"cu_seqlens": CU_SEQLENS_K, "cu_seqlens_q": CU_SEQLENS}
    mine = [shard(q, BALANCED, **cu), shard(k, BALANCED, **cu_k), shard(v, BALANCED, **cu_k)]
    leaves = [x.requires_grad_() for x in mine]
    out = ring_attention(
        *leaves, layout=BALANCED, route="ring", **cu, cu_seqlens_k=CU_SEQLENS_K, causal=True
    )
    grads = torch.autograd.grad(out.sin().sum(), leaves)
    assert torch.equal(unshard(shard(k, BALANCED, **cu_k), BALANCED, **cu_k), k)
    dq, dk, dv = (
        unshard(x, BALANCED, **own) for x, own in zip(grads, (cu, cu_k, cu_k), strict=True)
    )
    return [unshard(out.detach(), BALANCED, **cu), dq, dk, dv]


def test_balanced_on_a_group(ranks: Any) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(m, 2, 4, dtype=torch.float64) for m in (21, 30, 30)]
    leaves = [x.requires_grad_() for x in leaves]
    out, _ = oracle(*leaves, Rules(causal=True), CU_SEQLENS, CU_SEQLENS_K)
    expected = [out, *torch.autograd.grad(out.sin().sum(), leaves)]
    for found in ranks(3).run(balanced_on_a_group):
        for ours, right in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, right, rtol=0, atol=1e-12)


def test_keys_without_their_queries_are_noticed() -> None:
    """Shards of keys cut by their own lengths have other sizes; documents must be as many."""
    k, who = torch.randn(30, 2), {"rank": 0, "world_size": 3}
    alone = shard(k, "balanced", cu_seqlens=CU_SEQLENS_K, **who)
    ours = shard(k, "balanced", cu_seqlens=CU_SEQLENS_K, cu_seqlens_q=CU_SEQLENS, **who)
    assert len(alone) != len(ours)
    with pytest.raises(ValueError, match="cu_seqlens_q is given without cu_seqlens"):
        shard(k, "balanced", cu_seqlens_q=CU_SEQLENS, dim=0, **who)
    with pytest.raises(ValueError, match="cu_seqlens_q delimits 1 documents, cu_seqlens 4"):
        shard(k, "balanced", cu_seqlens=CU_SEQLENS_K, cu_seqlens_q=[0, 21], **who)


def test_gradients_flow_through_shard_and_unshard() -> None:
    x = torch.randn(2, 13, requires_grad=True)
    parts = [shard(x, "zigzag", rank=rank, world_size=3) for rank in range(3)]
    weights = torch.randn(2, 13)
    (unshard(parts, "zigzag") * weights).sum().backward()
    assert torch.equal(x.grad, weights)


def test_indices_of_a_pack_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all tensors of a batch; on each device, and for each kind. Results are the user's."""
    made, make = list[int](), tokens.numbers_of

    def count(rows: Any) -> torch.Tensor:
        made.append(len(rows))
        return make(rows)

    monkeypatch.setattr(tokens, "numbers_of", count)
    cu_seqlens, who = [0, 11, 25, 29], {"rank": 1, "world_size": 2}
    labels = torch.arange(29)
    expected = held_of("zigzag", cu_seqlens, 29, 1, 2)
    for _ in range(3):
        part = shard(labels, "zigzag", cu_seqlens=cu_seqlens, **who)
        assert torch.equal(part, labels[expected])
        part.zero_()
    assert len(made) == 1
    for _ in range(2):
        found = position_ids("zigzag", cu_seqlens=cu_seqlens, **who)
        starts = torch.tensor([0] * 11 + [11] * 14 + [25] * 4)
        assert torch.equal(found, expected - starts[expected])
        found.zero_()
    assert len(made) == 2
    meta = shard(labels.to("meta"), "zigzag", cu_seqlens=cu_seqlens, **who)
    assert (meta.device.type, len(meta), len(made)) == ("meta", len(expected), 3)
    parts = [shard(labels, "zigzag", cu_seqlens=cu_seqlens, rank=r, world_size=2) for r in (0, 1)]
    for _ in range(3):
        assert torch.equal(unshard(parts, "zigzag", cu_seqlens=cu_seqlens), labels)
    assert len(made) == 5


def test_indices_serve_autograd_whatever_made_them() -> None:
    x = torch.randn(23, requires_grad=True)
    part = {"cu_seqlens": [0, 4, 23], "rank": 0, "world_size": 2}
    with torch.inference_mode():
        shard(torch.zeros(23), "zigzag", **part)
    with FakeTensorMode() as mode:
        fake = shard(mode.from_tensor(x), "zigzag", **part)
        again = shard(mode.from_tensor(x), "stripe", **part)
    assert (len(fake), len(again)) == tuple(
        len(held_of(layout, [0, 4, 23], 23, 0, 2)) for layout in ("zigzag", "stripe")
    )
    for layout in ("zigzag", "stripe"):
        shard(x, layout, **part).sum().backward()
    counts = [len(held_of(layout, [0, 4, 23], 23, 0, 2)) for layout in ("zigzag", "stripe")]
    assert x.grad is not None
    assert x.grad.sum() == sum(counts)


def test_it_compiles_as_one_graph() -> None:
    """What is cached is not traced."""
    part = {"cu_seqlens": [0, 6, 22], "world_size": 2}

    def both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = [shard(x, "zigzag", rank=rank, **part) for rank in range(2)]
        positions = position_ids("zigzag", rank=1, **part)
        return *parts, positions, unshard(parts, "zigzag", cu_seqlens=[0, 6, 22])

    x = torch.randn(22)
    compiled = torch.compile(both, backend="eager", fullgraph=True)
    for found, expected in zip(compiled(x), both(x), strict=True):
        assert torch.equal(found, expected)


def test_a_million_tokens_are_quick_after_the_first() -> None:
    """Some milliseconds; written out number by number they took a tenth of a second."""
    cu_seqlens = torch.arange(0, (1 << 20) + 1, 1 << 12)
    x = torch.zeros(1 << 20, dtype=torch.int32)
    taken = []
    for _ in range(6):
        started = time.process_time()
        shard(x, "zigzag", cu_seqlens=cu_seqlens, rank=1, world_size=8)
        position_ids("zigzag", cu_seqlens=cu_seqlens, rank=1, world_size=8)
        taken.append(time.process_time() - started)
    assert min(taken[1:]) < 0.02


def test_a_shard_is_a_new_tensor() -> None:
    x = torch.zeros(1, 8)
    shard(x, "contiguous", rank=0, world_size=1).add_(1)
    assert not x.any()


def over_a_group(rank: int, n: int) -> None:
    """By default this rank of the group; sub-groups, uneven shards, every dtype, strided parts."""
    torch.manual_seed(0)
    batch, packed = torch.randn(2, 12, 3), torch.randn(21, 4)
    pairs, _ = dist.new_subgroups_by_enumeration([[0, 1], [2]])
    for layout in layout_names():
        assert torch.equal(unshard(shard(batch, layout), layout), batch)
        ours = shard(packed, layout, cu_seqlens=CU_SEQLENS)
        assert torch.equal(ours, packed[held_of(layout, CU_SEQLENS, 21, rank, n)])
        assert torch.equal(unshard(ours, layout, cu_seqlens=CU_SEQLENS), packed)
        uneven = shard(packed[None], layout)
        assert torch.equal(unshard(uneven, layout, seqlen=21)[0], packed)
        for labels in (torch.arange(21), torch.arange(21) % 2 == 0, packed[:, 0].bfloat16()):
            ours = shard(labels, layout, cu_seqlens=CU_SEQLENS)
            assert torch.equal(unshard(ours, layout, cu_seqlens=CU_SEQLENS), labels)
        ours = shard(packed.T, layout, dim=1)
        assert torch.equal(unshard(ours.T.contiguous().T, layout, seqlen=21), packed.T)
        ours = shard(packed, layout, cu_seqlens=CU_SEQLENS, group=pairs)
        members = dist.get_world_size(pairs)
        tokens = held_of(layout, CU_SEQLENS, 21, dist.get_rank(pairs), members)
        assert torch.equal(ours, packed[tokens])
        assert torch.equal(unshard(ours, layout, cu_seqlens=CU_SEQLENS, group=pairs), packed)
        found = position_ids(layout, seqlen=21, group=pairs)
        assert found.tolist() == held_of(layout, None, 21, dist.get_rank(pairs), members).tolist()
    with pytest.raises(ValueError, match="gradient"):
        unshard(torch.zeros(1, 4, requires_grad=True), "zigzag")
    with torch.no_grad():
        assert unshard(torch.zeros(1, 4, requires_grad=True), "zigzag").shape == (1, 12)


def test_over_a_group(ranks: Any) -> None:
    ranks(3).run(over_a_group)


def gathered_with_gradients(rank: int, n: int, layout: str) -> list[torch.Tensor]:
    """Every rank weights all tokens in its own way, then all in the same."""
    found = []
    for grad in ("sum", "slice"):
        torch.manual_seed(0)
        x = torch.randn(21, 4, dtype=torch.float64)
        weights = torch.randn(n, 21, 4, dtype=torch.float64)
        mine = shard(x, layout, cu_seqlens=CU_SEQLENS).requires_grad_()
        whole = unshard(mine.T.contiguous().T, layout, cu_seqlens=CU_SEQLENS, grad=grad)
        assert torch.equal(whole, x)
        (whole.sin() * (weights[rank] if grad == "sum" else weights[0])).sum().backward()
        found.append(unshard(mine.grad, layout, cu_seqlens=CU_SEQLENS))
    half = shard(x, layout, cu_seqlens=CU_SEQLENS).bfloat16().requires_grad_()
    unshard(half, layout, cu_seqlens=CU_SEQLENS, grad="sum").backward(weights[rank].bfloat16())
    return [*found, unshard(half.grad, layout, cu_seqlens=CU_SEQLENS)]


@pytest.mark.parametrize("layout", layout_names())
def test_gradients_of_a_gathered_tensor(layout: str, ranks: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(21, 4, dtype=torch.float64)
    weights = torch.randn(3, 21, 4, dtype=torch.float64)
    rounded = weights.bfloat16().float()
    for summed, sliced, half in ranks(3).run(gathered_with_gradients, layout):
        torch.testing.assert_close(summed, x.cos() * weights.sum(0), rtol=0, atol=1e-14)
        assert torch.equal(sliced, x.cos() * weights[0])
        assert torch.equal(half, (rounded[0] + rounded[1] + rounded[2]).bfloat16())  # rounded once


def gradients_on_some_ranks(rank: int, n: int) -> str:
    mine = torch.zeros(1, 4, 7, requires_grad=rank == 0)  # of a shape that is new to the ranks
    with pytest.raises(ValueError, match="do not make the same call") as error:
        unshard(mine, "zigzag", grad="sum")
    return str(error.value)


def unused_on_a_rank(rank: int, n: int) -> str:
    """The loss of rank 1 does not depend on what was gathered, and it goes on to its next call."""
    group = dist.new_group()
    mine = torch.zeros(1, 4, requires_grad=True)
    whole = unshard(mine, "zigzag", group=group, grad="sum")
    go_on = functools.partial(unshard, torch.zeros(1, 5), "zigzag", group=group)
    with pytest.raises(ValueError, match="do not make the same call") as error:
        go_on() if rank == 1 else whole.sum().backward()
    return str(error.value)


def test_a_rank_that_does_not_use_what_was_gathered_is_named(ranks: Any) -> None:
    for message in ranks(3).run(unused_on_a_rank):
        assert re.search(r"call = .*0 \* gathered.sum\(\).* on ranks 0, 2\n", message)
        assert 'gathered = "torch.float32" on rank 1' in message


def test_all_ranks_or_none_want_gradients(ranks: Any) -> None:
    for message in ranks(3).run(gradients_on_some_ranks):
        assert 'grad = "sum" on rank 0' in message
        assert "grad = null on ranks 1, 2" in message


WRONG: list[tuple[str, Any, str]] = [
    ("grad", lambda: unshard(torch.zeros(1, 4), "zigzag", grad="mean"), "grad must be.*'mean'"),
    ("grad of a list", lambda: unshard([torch.zeros(1, 4)], "zigzag", grad="sum"), "as it is"),
    ("unknown layout", lambda: shard(torch.zeros(1, 4), "spiral", rank=0, world_size=1), "spiral"),
    ("rank", lambda: shard(torch.zeros(1, 4), "zigzag", rank=2, world_size=2), "rank = 2"),
    ("negative rank", lambda: shard(torch.zeros(1, 4), "zigzag", rank=-1, world_size=2), "-1"),
    ("rank alone", lambda: shard(torch.zeros(1, 4), "zigzag", rank=0), "world_size = None"),
    (
        "cu_seqlens too short",
        lambda: shard(torch.zeros(9), "zigzag", cu_seqlens=[0, 8], rank=0, world_size=2),
        "ends at 8.*9",
    ),
    (
        "shards of other sizes",
        lambda: unshard([torch.zeros(1, 4), torch.zeros(1, 3)], "contiguous"),
        r"rank 0 of 2 holds 3 tokens.*4",
    ),
    (
        "seqlen that the shards contradict",
        lambda: unshard([torch.zeros(1, 4), torch.zeros(1, 4)], "zigzag", seqlen=9),
        "9",
    ),
    ("no shards", lambda: unshard([], "zigzag"), "shard"),
    (
        "neither length",
        lambda: position_ids("zigzag", rank=0, world_size=1),
        "cu_seqlens or seqlen",
    ),
    ("negative", lambda: position_ids("zigzag", seqlen=-5, rank=0, world_size=1), "-5"),
    (
        "both lengths",
        lambda: position_ids("zigzag", cu_seqlens=[0, 8], seqlen=9, rank=0, world_size=1),
        "8.*9",
    ),
    ("a flat tensor", lambda: shard(torch.zeros(4), "zigzag", rank=0, world_size=1), "dim"),
    ("no group", lambda: shard(torch.zeros(1, 4), "zigzag"), "not initialised"),
]


@pytest.mark.parametrize(("call", "match"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_mistakes_are_named(call: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call()
