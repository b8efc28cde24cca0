"""yunchang's names: the calls of its own tests, on real processes, against one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor
from torch.testing import assert_close

from ring_flash_attn import flash_attn_func
from ring_flash_attn.adapters import yunchang
from ring_flash_attn.adapters.yunchang import (
    EXTRACT_FUNC_DICT,
    AttnType,
    LongContextAttention,
    LongContextAttentionQKVPacked,
    UlyssesAttention,
    set_seq_parallel_pg,
)

SEQLEN = 48
CALL: dict[str, Any] = {
    "dropout_p": 0,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": True,
}


def inputs(nheads: int) -> list[Tensor]:
    """The same q, k, v and dout on every rank."""
    generator = torch.Generator().manual_seed(3)
    shape = (2, SEQLEN, nheads, 8)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(4)]


def whole(nheads: int, causal: bool) -> list[Tensor]:
    """Output and gradients on one device."""
    *leaves, dout = (x.requires_grad_() for x in inputs(nheads))
    out = flash_attn_func(*leaves, causal=causal)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.detach())]


def extract(kind: str, x: Tensor, rank: int, rd: int, ud: int) -> Tensor:
    """A rank's tokens, written down a second time: of its node, then of the rank."""
    node, place = divmod(rank, ud)
    tokens = torch.arange(SEQLEN)
    if kind == "zigzag":
        half = SEQLEN // (2 * rd)
        low, high = node * half, (2 * rd - 1 - node) * half
        held = torch.cat([tokens[low : low + half], tokens[high : high + half]])
    elif kind == "strip":
        held = tokens[node::rd]
    else:
        held = tokens[node * (SEQLEN // rd) : (node + 1) * (SEQLEN // rd)]
    part = len(held) // ud
    return x[:, held[place * part : (place + 1) * part]]


def hybrid(
    rank: int, world_size: int, ud: int, kind: str, nheads: int, causal: bool, packed: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """As in test_hybrid_attn.py and test_hybrid_qkvpacked_attn.py: what came out; the shards."""
    rd = world_size // ud
    set_seq_parallel_pg(ud, rd, rank, world_size)

    def local(x: Tensor) -> Tensor:
        found = EXTRACT_FUNC_DICT[kind](x, rank, world_size=world_size, rd=rd, ud=ud)
        return found.detach().clone()

    q, k, v, dout = inputs(nheads)
    if packed:
        qkv = local(torch.stack([q, k, v], 2)).requires_grad_()
        module = LongContextAttentionQKVPacked(ring_impl_type=kind, attn_type=AttnType.FA)
        out = module(qkv, causal=causal, **CALL)
        out.backward(local(dout))
        return [out.detach(), *qkv.grad.unbind(2)], [local(x) for x in (q, k, v)]
    shards = [local(x).requires_grad_() for x in (q, k, v)]
    usp_attn = LongContextAttention(ring_impl_type=kind, attn_type=AttnType.TORCH_MATH)
    out = usp_attn(*shards, causal=causal, **CALL)
    out.backward(local(dout))
    grads = [x.grad for x in shards if x.grad is not None]
    return [out.detach(), *grads], [x.detach() for x in shards]


@pytest.mark.parametrize("packed", [False, True], ids=["q, k, v", "qkv"])
@pytest.mark.parametrize("kind", ["basic", "zigzag", "strip"])
@pytest.mark.parametrize(("ud", "nheads", "causal"), [(2, 8, True), (4, 3, True), (1, 2, False)])
def test_hybrid(
    ud: int, nheads: int, causal: bool, kind: str, packed: bool, ranks: Callable[[int], Ranks]
) -> None:
    right = whole(nheads, causal)
    results = ranks(4).run(hybrid, ud, kind, nheads, causal, packed)
    for rank, (found, shards) in enumerate(results):
        for got, want in zip(shards, inputs(nheads)[:3], strict=True):
            assert torch.equal(got, extract(kind, want, rank, 4 // ud, ud))
        for got, want in zip(found, right, strict=True):
            assert_close(got, extract(kind, want, rank, 4 // ud, ud), rtol=1e-10, atol=1e-10)


def ulysses(rank: int, world_size: int, nheads: int) -> list[Tensor]:
    """As in test_ulysses_attn.py."""
    local = [x.chunk(world_size, dim=1)[rank].detach().clone() for x in inputs(nheads)]
    shards = [x.requires_grad_() for x in local[:3]]
    dist_attn = UlyssesAttention(None, attn_type=AttnType.FA)
    out = dist_attn(*shards, causal=True, **CALL)
    out.backward(local[3])
    return [out.detach(), *(x.grad for x in shards if x.grad is not None)]


@pytest.mark.parametrize("nheads", [8, 3])
def test_ulysses(nheads: int, ranks: Callable[[int], Ranks]) -> None:
    right = whole(nheads, causal=True)
    for rank, found in enumerate(ranks(4).run(ulysses, nheads)):
        for got, want in zip(found, right, strict=True):
            assert_close(got, want.chunk(4, dim=1)[rank], rtol=1e-10, atol=1e-10)


def two_meshes(rank: int, world_size: int) -> bool:
    """Data parallelism over two meshes of two."""
    set_seq_parallel_pg(2, 1, rank, world_size)
    x = torch.randn(
        1, 6, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(rank // 2)
    )
    shard = x.chunk(2, dim=1)[rank % 2]
    out = LongContextAttention()(shard, shard, shard)
    return torch.allclose(out, flash_attn_func(x, x, x).chunk(2, dim=1)[rank % 2])


def test_several_meshes_at_once(ranks: Callable[[int], Ranks]) -> None:
    assert all(ranks(4).run(two_meshes))


def compiled(rank: int, world_size: int) -> bool:
    """In one graph: its layout is found by its name."""
    set_seq_parallel_pg(1, 2, rank, world_size)
    q = inputs(2)[0].chunk(2, dim=1)[rank].contiguous().requires_grad_()
    module = LongContextAttention(ring_impl_type="zigzag")
    graph = torch.compile(module, backend="eager", fullgraph=True)
    (expected,), (found,) = (
        torch.autograd.grad(each(q, q, q, causal=True).sum(), [q]) for each in (module, graph)
    )
    return torch.equal(found, expected)


def test_under_compile(ranks: Callable[[int], Ranks]) -> None:
    assert all(ranks(2).run(compiled))


def refusals(rank: int, world_size: int) -> list[str]:
    found = []
    q = torch.randn(1, 4, 2, 8)
    set_seq_parallel_pg(1, 2, rank, world_size)
    for error, call in (
        (NotImplementedError, lambda: LongContextAttention(attn_type=AttnType.SAGE_FP8)),
        (NotImplementedError, lambda: LongContextAttention(attn_processor=torch.nn.Identity())),
        (ValueError, lambda: LongContextAttention(ring_impl_type="basic_flashinfer")),
        (ValueError, lambda: LongContextAttention(scatter_idx=1, gather_idx=2)),
        (NotImplementedError, lambda: UlyssesAttention(attn_type=AttnType.NPU)),
        (
            TypeError,
            lambda: UlyssesAttention()(q, q, q, 0.0, None, True, (-1, -1), 0.0, *[None] * 5),
        ),
        (NotImplementedError, lambda: set_seq_parallel_pg(2, 1, rank, world_size, False)),
        (ValueError, lambda: set_seq_parallel_pg(2, 1, rank, 8)),
        (ValueError, lambda: set_seq_parallel_pg(3, 1, rank, world_size)),
        (ValueError, lambda: EXTRACT_FUNC_DICT["zigzag"](q, 0, world_size=2, rd=2, ud=2)),
    ):
        with pytest.raises(error) as caught:
            call()
        found.append(str(caught.value))
    return found


def test_what_cannot_be_done_is_refused(ranks: Callable[[int], Ranks]) -> None:
    words = (
        "AttnType.SAGE_FP8",
        "attn_processor",
        "'basic_flashinfer'",
        "scatter_idx = 1",
        "AttnType.NPU",
        "more arguments",
        "use_ulysses_low",
        "world_size = 8",
        "do not divide",
        "must be world_size",
    )
    for found in ranks(2).run(refusals):
        assert all(word in message for word, message in zip(words, found, strict=True))


def test_groups_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yunchang, "PROCESS_GROUP", yunchang._ProcessGroups())
    with pytest.raises(ValueError, match="set_seq_parallel_pg first"):
        LongContextAttention()
