"""Wrong arguments fail loudly, before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from calls import FUNCTIONS, extra_arguments, packed_inputs, sample_for

import ring_flash_attn
from ring_flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    llama3_flash_attn_prepare_cu_seqlens,
    llama3_flash_attn_varlen_func,
    ring_attention,
    ring_flash_attn_func,
    ring_flash_attn_varlen_func,
    stripe_flash_attn_func,
    stripe_flash_attn_varlen_func,
    virtual_ring_attention,
    zigzag_llama3_flash_attn_varlen_func,
    zigzag_ring_flash_attn_func,
)
from ring_flash_attn.comm import agreement, distributed
from ring_flash_attn.engine import prepare
from ring_flash_attn.plan.build import route_names
from ring_flash_attn.plan.layout import layout_names

Q, K, V = torch.randn(2, 8, 4, 6), torch.randn(2, 8, 2, 6), torch.randn(2, 8, 2, 6)
PQ, PK = torch.randn(12, 4, 6), torch.randn(12, 2, 6)
CU = torch.tensor([0, 5, 12], dtype=torch.int32)


def attend(**changes: Any) -> Any:
    """`flash_attn_func` on good arguments, but for `changes`."""
    return flash_attn_func(**{"q": Q, "k": K, "v": V, **changes})


def attend_packed(**changes: Any) -> Any:
    """`flash_attn_varlen_func` on good arguments, but for `changes`."""
    lengths = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 7, "max_seqlen_k": 7}
    return flash_attn_varlen_func(**{"q": PQ, "k": PK, "v": PK, **lengths, **changes})


def test_the_arguments_that_are_spoilt_below_are_good() -> None:
    assert attend().shape == Q.shape
    assert attend_packed().shape == PQ.shape


META = torch.device("meta")
# what is wrong: (changed arguments, words of the message)
TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "q of three dimensions": ({"q": Q[0]}, r"q must be \(batch.*\(8, 4, 6\)"),
    "v of five dimensions": ({"v": V[None]}, r"v must be.*\(1, 2, 8, 2, 6\)"),
    "integers": ({"q": Q.int(), "k": K.int(), "v": V.int()}, "floating point.*int32"),
    "fp8": ({x: y.to(torch.float8_e4m3fn) for x, y in zip("qkv", (Q, K, V))}, "q.*float8_e4m3fn"),
    "complex": ({"q": Q.cfloat(), "k": K.cfloat(), "v": V.cfloat()}, "complex64"),
    "two dtypes": ({"k": K.double()}, "one dtype.*float32.*float64"),
    "k elsewhere": ({"k": K.to(META)}, "one device.*cpu.*meta"),
    "q elsewhere": ({"q": Q.to(META)}, "one device.*meta.*cpu"),
    "k and v of two lengths": ({"v": V[:, :5]}, r"k and v.*\(2, 5, 2, 6\)"),
    "k and v of two head counts": ({"v": V[:, :, :1]}, r"k and v.*\(2, 8, 1, 6\)"),
    "two batch sizes": ({"q": Q[:1]}, r"batch.*\(1, 8, 4, 6\)"),
    "two head dimensions": ({"q": Q[..., :5]}, r"head dimension.*\(2, 8, 4, 5\)"),
    "head counts": ({"q": Q[:, :, :3]}, "multiple.*3.*2"),
    "fewer query heads": ({"q": Q[:, :, :1]}, "multiple.*1.*2"),
    "no heads": ({"q": Q[:, :, :0]}, r"must not be 0.*\(2, 8, 0, 6\)"),
    "no head dimension": ({"q": Q[..., :0], "k": K[..., :0]}, "must not be 0"),
    "no batch": ({"q": Q[:0], "k": K[:0], "v": V[:0]}, "must not be 0"),
    "dropout_p of 1": ({"dropout_p": 1.0}, "dropout_p.*1.0"),
    "dropout_p below 0": ({"dropout_p": -0.1}, "dropout_p.*-0.1"),
    "dropout_p is no number": ({"dropout_p": float("nan")}, "dropout_p.*nan"),
    "one-sided window": ({"window_size": (3,)}, r"window_size.*\(3,\)"),
    "window as a number": ({"window_size": 3}, "window_size.*3"),
    "window below -1": ({"window_size": (-2, 0)}, r"window_size.*\(-2, 0\)"),
    "window of floats": ({"window_size": (1.5, 2)}, "window_size.*1.5"),
    "softcap below 0": ({"softcap": -1.0}, "softcap.*-1.0"),
    "softcap is no number": ({"softcap": float("nan")}, "softcap.*nan"),
    "endless softcap": ({"softcap": float("inf")}, "softcap.*inf"),
    "scale is no number": ({"softmax_scale": float("nan")}, "softmax_scale.*nan"),
    "endless scale": ({"softmax_scale": float("inf")}, "softmax_scale.*inf"),
    "alibi of other heads": ({"alibi_slopes": torch.rand(3)}, r"alibi_slopes.*\(3,\)"),
    "alibi of other batch": ({"alibi_slopes": torch.rand(3, 4)}, r"alibi_slopes.*\(3, 4\)"),
    "alibi elsewhere": ({"alibi_slopes": torch.rand(4, device=META)}, "alibi_slopes.*meta"),
    "alibi with gradient": ({"alibi_slopes": torch.rand(4).requires_grad_()}, "alibi_slopes"),
    "sink of other heads": ({"sink": torch.rand(2)}, r"sink.*\(2,\)"),
    "sink of integers": ({"sink": torch.ones(4).int()}, "sink.*int32"),
    "sink elsewhere": ({"sink": torch.rand(4, device=META)}, "sink.*meta"),
    "unknown kernel": ({"kernel": "abacus"}, "kernel 'abacus'.*reference"),
}
DOCUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "does not start at 0": ({"cu_seqlens_q": CU + 1}, "cu_seqlens_q must start at 0.*1"),
    "decreases": ({"cu_seqlens_k": torch.tensor([0, 9, 5, 12])}, "cu_seqlens_k.*9 to 5"),
    "wrong total of q": ({"q": PQ[:11]}, "cu_seqlens_q ends at 12.*11"),
    "wrong total of k": ({"k": PK[:10], "v": PK[:10]}, "cu_seqlens_k ends at 12.*10"),
    "floats": ({"cu_seqlens_q": CU.float()}, "cu_seqlens_q.*float32"),
    "int16": ({"cu_seqlens_q": CU.short()}, "cu_seqlens_q.*int16"),
    "two dimensions": ({"cu_seqlens_q": CU[None]}, r"cu_seqlens_q.*\(1, 3\)"),
    "one entry": ({"cu_seqlens_q": CU[:1]}, r"cu_seqlens_q.*\[0\]"),
    "on another device": ({"cu_seqlens_q": CU.to(META)}, "cu_seqlens_q is on meta.*cpu"),
    "k's on another device": ({"cu_seqlens_k": CU.to(META)}, "cu_seqlens_k is on meta.*cpu"),
    "other number": ({"cu_seqlens_k": torch.tensor([0, 3, 5, 12])}, "2 documents.*3"),
    "max_seqlen_q too small": ({"max_seqlen_q": 6}, "max_seqlen_q = 6.*7"),
    "max_seqlen_k too small": ({"max_seqlen_k": 6}, "max_seqlen_k = 6.*7"),
    "a batch": ({"q": Q}, r"q must be \(total.*\(2, 8, 4, 6\)"),
    "alibi of more": ({"alibi_slopes": torch.rand(3, 4)}, r"alibi.*or \(2, 4\), not \(3, 4\)"),
}


@pytest.mark.parametrize("what", TENSORS)
def test_wrong_arguments(what: str) -> None:
    changes, words = TENSORS[what]
    with pytest.raises(ValueError, match=words):
        attend(**changes)


@pytest.mark.parametrize("what", DOCUMENTS)
def test_wrong_documents(what: str) -> None:
    changes, words = DOCUMENTS[what]
    with pytest.raises(ValueError, match=words):
        attend_packed(**changes)


@pytest.mark.parametrize("name", ["q", "k", "v", "alibi_slopes", "sink"])
@pytest.mark.parametrize("autocast", [False, True])
def test_what_is_not_a_tensor(name: str, autocast: bool) -> None:
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        pytest.raises(TypeError, match=f"{name} must be a tensor, not list"),
    ):
        attend(**{name: [1.0]})


def test_packed_tensors_of_other_shapes() -> None:
    with pytest.raises(ValueError, match=r"kv must be.*2, nheads.*\(2, 8, 3, 2, 6\)"):
        flash_attn_kvpacked_func(Q, torch.randn(2, 8, 3, 2, 6))
    with pytest.raises(ValueError, match=r"qkv must be.*3, nheads.*\(2, 8, 4, 6\)"):
        flash_attn_qkvpacked_func(Q)
    with pytest.raises(ValueError, match=r"qkv must be \(total, 3.*\(2, 8, 3, 4, 6\)"):
        flash_attn_varlen_qkvpacked_func(torch.randn(2, 8, 3, 4, 6), CU, 7)
    with pytest.raises(TypeError, match="qkv must be a tensor, not NoneType"):
        flash_attn_qkvpacked_func(None)


def test_block_table_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"block_table: .*\(total_k, nheads_k, headdim\)"):
        attend_packed(block_table=torch.zeros(1, 1, dtype=torch.int32))


VIRTUAL: dict[str, tuple[dict[str, Any], str]] = {
    "unknown layout": ({"layout": "spiral"}, "layout 'spiral'.*" + ".*".join(layout_names())),
    "unknown route": ({"route": "pigeon"}, "route 'pigeon'.*" + ".*".join(route_names())),
    "stride that does not divide": (
        {"route": "all_gather", "heads_k_stride": 3},
        "heads_k_stride = 3 must divide the 2 KV heads",
    ),
    "stride of 0": ({"route": "all_gather", "heads_k_stride": 0}, "heads_k_stride = 0"),
    "stride on another route": ({"heads_k_stride": 1}, "heads_k_stride = 1.*'ring'"),
    "no sources": ({"sources_per_launch": 0}, "sources_per_launch.*positive.*0"),
    "half a source": ({"sources_per_launch": 1.5}, "sources_per_launch.*positive.*1.5"),
    "sources when all keys are gathered": (
        {"route": "all_gather", "sources_per_launch": 1},
        "sources_per_launch = 1.*'ring'.*'all_gather'",
    ),
    "sources when queries travel": (
        {"route": "query_ring", "sources_per_launch": 2},
        "sources_per_launch = 2.*'ring'.*'query_ring'",
    ),
    "no ranks": ({"world_size": 0}, "world_size.*0"),
    "half a rank": ({"world_size": 1.5}, "world_size.*1.5"),
}


@pytest.mark.parametrize("what", VIRTUAL)
def test_wrong_points(what: str) -> None:
    changes, words = VIRTUAL[what]
    with pytest.raises((TypeError, ValueError), match=words):
        virtual_ring_attention(
            Q, K, V, **{"world_size": 2, "layout": "zigzag", "route": "ring", **changes}
        )


@pytest.mark.parametrize(
    "name", [name for name in FUNCTIONS if "ring_" in name or "llama3" in name]
)
def test_without_torch_distributed(name: str) -> None:
    sample = sample_for(name)
    inputs = packed_inputs(FUNCTIONS[name][1], sample)
    with pytest.raises(ValueError, match=r"not initialised.*flash_attn_func"):
        getattr(ring_flash_attn, name)(*inputs, **extra_arguments(name, sample, 0, 1))


def test_prepare_cu_seqlens() -> None:
    for cu, rank, world_size, words in (
        (CU, 0, 5, "ends at 12.*5 ranks"),
        (CU, 4, 4, "rank = 4"),
        (CU, -1, 4, "rank = -1"),
        (CU + 1, 0, 4, "start at 0"),
        (torch.tensor([0, 0]), 0, 2, "ends at 0"),
        (CU.float(), 0, 4, "float32"),
    ):
        with pytest.raises(ValueError, match=words):
            llama3_flash_attn_prepare_cu_seqlens(cu, True, rank, world_size)


# On a group: nothing is sent before the error.


@contextmanager
def nothing_sent() -> Iterator[None]:
    """AssertionError where anything is posted to the store or sent to another rank."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was sent")

    places = [
        (agreement, "_exchange"),
        (distributed.DistributedTransport, "post"),
        (distributed.dist, "broadcast"),
    ]
    before = [getattr(*place) for place in places]
    for place in places:
        setattr(*place, refuse)
    try:
        yield
    finally:
        for place, original in zip(places, before):
            setattr(*place, original)


def wrong_on_a_group(rank: int, n: int) -> list[str]:
    """Make every wrong call on every rank; return what did not go as it should."""
    q, k, v, p, pk = (x.clone() for x in (Q, K, V, PQ, PK))
    cu = torch.tensor([0, 4 * n, 12 * n], dtype=torch.int32)
    prepared = llama3_flash_attn_prepare_cu_seqlens(cu, True, rank, n)
    cu_q, cu_k, max_q, max_k, at = prepared
    outsider = dist.new_group([0, 1])
    point: dict[str, Any] = {"layout": "zigzag", "route": "ring"}
    llama3: Callable[..., Any] = llama3_flash_attn_varlen_func
    calls: list[tuple[str, Callable[[], Any], str]] = [
        ("shape", lambda: ring_flash_attn_func(q[0], k, v), "q must be"),
        ("dtype", lambda: zigzag_ring_flash_attn_func(q, k.half(), v), "one dtype.*float16"),
        ("heads", lambda: stripe_flash_attn_func(q[:, :, :3], k, v), "multiple.*3.*2"),
        ("device", lambda: ring_flash_attn_func(q, k.to("meta"), v), "one device.*meta"),
        ("dropout", lambda: ring_flash_attn_func(q, k, v, 1.5), "dropout_p.*1.5"),
        ("sink", lambda: ring_flash_attn_func(q, k, v, sink=torch.rand(3)), r"sink.*\(3,\)"),
        ("kernel", lambda: ring_flash_attn_func(q, k, v, kernel="abacus"), "kernel 'abacus'"),
        ("layout", lambda: ring_attention(q, k, v, layout="x", route="ring"), "layout 'x'"),
        ("route", lambda: ring_attention(q, k, v, layout="zigzag", route="x"), "route 'x'"),
        (
            "total of the shard",
            lambda: ring_flash_attn_varlen_func(p, pk, pk, torch.tensor([0, 5, 11]), 6),
            "cu_seqlens ends at 11.*12",
        ),
        (
            "max_seqlen",
            lambda: ring_flash_attn_varlen_func(p, pk, pk, CU, 6),
            "max_seqlen = 6.*7",
        ),
        (
            "decreasing",
            lambda: ring_flash_attn_varlen_func(p, pk, pk, torch.tensor([0, 7, 5, 12]), 7),
            "7 to 5",
        ),
        (
            "more keys",
            lambda: ring_flash_attn_varlen_func(p, torch.cat([pk, pk]), torch.cat([pk, pk]), CU, 7),
            "cu_seqlens ends at 12.*24",
        ),
        (
            "size of the shard",
            lambda: stripe_flash_attn_varlen_func(p[:-1], pk, pk, cu, 8 * n),
            rf"rank {rank} of {n} holds 12 tokens.*'stripe'.*q has 11",
        ),
        (
            "size of the shard's keys",
            lambda: ring_attention(p, pk[:-1], pk[:-1], cu_seqlens=cu, **point),
            rf"rank {rank} of {n} holds 12 tokens.*'zigzag'.*k has 11",
        ),
        (
            "size of the shard of a batch",
            lambda: ring_attention(q, k, v, seqlen=8 * n + 6 * n, **point),
            rf"rank {rank} of {n} holds 14 tokens.*q has 8",
        ),
        (
            "global max_seqlen",
            lambda: stripe_flash_attn_varlen_func(p, pk, pk, cu, 8 * n - 1),
            f"max_seqlen = {8 * n - 1}.*{8 * n}",
        ),
        (
            "stride",
            lambda: zigzag_llama3_flash_attn_varlen_func(p, pk, pk, cu, 3),
            "heads_k_stride = 3",
        ),
        ("stride of llama3", lambda: llama3(p, pk, pk, *prepared[:4], 3, at), "heads_k_stride = 3"),
        (
            "slice of another size",
            lambda: llama3(p, pk, pk, cu_q, cu_k, max_q, max_k, 1, slice(at.start, at.stop - 1)),
            "local_k_slice.*cu_seqlens_k ends at",
        ),
        (
            "slice with steps",
            lambda: llama3(p, pk, pk, cu_q, cu_k, max_q, max_k, 1, slice(None, None, 2)),
            "local_k_slice.*steps of 2",
        ),
        (
            "max_seqlen_q",
            lambda: llama3(p, pk, pk, cu_q, cu_k, 1, max_k, 1, at),
            "max_seqlen_q = 1",
        ),
        (
            "cu_seqlens_q",
            lambda: llama3(p[1:], pk, pk, *prepared[:4], 1, at),
            "cu_seqlens_q ends at 12.*11",
        ),
        (
            "cu_seqlens_k alone",
            lambda: ring_attention(q, k, v, cu_seqlens_k=cu, **point),
            "cu_seqlens_k",
        ),
        (
            "seqlen of documents",
            lambda: ring_attention(p, pk, pk, cu_seqlens=cu, seqlen=12, **point),
            "seqlen",
        ),
        ("group", lambda: ring_flash_attn_func(q, k, v, group="world"), "ProcessGroup.*str"),
    ]
    if rank == 2:
        calls.append(
            ("outsider", lambda: ring_flash_attn_func(q, k, v, group=outsider), "rank 2 is not")
        )
    with nothing_sent():
        return [problem for each in calls for problem in [what_went_wrong(*each)] if problem]


def what_went_wrong(what: str, call: Callable[[], Any], words: str) -> str | None:
    """None if the call raises a ValueError with these words."""
    try:
        call()
    except ValueError as error:
        return None if re.search(words, str(error)) else f"{what}: {error}"
    except Exception as error:
        return f"{what}: {type(error).__name__}: {error}"
    return f"{what}: no error"


def test_wrong_calls_on_a_group_send_nothing(ranks: Any) -> None:
    for problems in ranks(3).run(wrong_on_a_group):
        assert not problems, "\n".join(problems)


def captured_on_a_group(rank: int, world_size: int) -> list[str]:
    """What a call says while a graph is captured: on gloo, and with dropout on any other group."""
    shard = Q[:1]
    said = []
    with mock.patch.object(prepare, "capturing", return_value=True):
        for gloo, options in ((True, {}), (False, {"dropout_p": 0.25})):
            with (
                mock.patch.object(prepare.comm, "is_gloo", return_value=gloo),
                pytest.raises(RuntimeError, match="CUDA graph") as raised,
            ):
                zigzag_ring_flash_attn_func(shard, shard, shard, causal=True, **options)
            said.append(str(raised.value))
    zigzag_ring_flash_attn_func(shard, shard, shard, causal=True)  # nothing was sent
    return said


def test_what_cannot_be_captured_in_a_graph_is_refused(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for on_gloo, with_dropout in ranks(2).run(captured_on_a_group):
        assert "gloo's messages go through the host" in on_gloo
        assert "dropout_p=0.25" in with_dropout
    monkeypatch.setattr(prepare, "capturing", lambda device: True)
    flash_attn_func(Q, K, V)
    with pytest.raises(RuntimeError, match=r"dropout_p=0\.25 cannot be captured in a CUDA graph"):
        flash_attn_func(Q, K, V, dropout_p=0.25)
