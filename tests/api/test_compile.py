"""torch.compile: the functions for one device are one operator in a full graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from plain_library import register_plain
from torch import Tensor

import ring_flash_attn as rfa

CU_SEQLENS = torch.tensor([0, 9, 9, 30], dtype=torch.int32)


def _inputs(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def _batch(**options: Any) -> tuple[Any, list[Tensor]]:
    inputs = _inputs((2, 20, 4, 8), (2, 25, 2, 8), (2, 25, 2, 12))
    return lambda q, k, v: rfa.flash_attn_func(q, k, v, **options), inputs


def _sink() -> tuple[Any, list[Tensor]]:
    def run(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        return rfa.flash_attn_func(q, k, v, causal=True, sink=sink)

    return run, [*_batch()[1], *_inputs((4,))]


def _varlen(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    cu_seqlens = CU_SEQLENS, CU_SEQLENS
    return rfa.flash_attn_varlen_func(q, k, v, *cu_seqlens, 21, 21, causal=True, **options)


def _varlen_kv(q: Tensor, kv: Tensor) -> Tensor:
    return rfa.flash_attn_varlen_kvpacked_func(q, kv, CU_SEQLENS, CU_SEQLENS, 21, 21)


CASES = {
    "batch": _batch(causal=True),
    "window_softcap": _batch(window_size=(5, 3), softcap=2.0, softmax_scale=0.3),
    "alibi": _batch(causal=True, alibi_slopes=torch.linspace(0.1, 0.4, 4)),
    "dropout": _batch(causal=True, dropout_p=0.3),
    "sink": _sink(),
    "qkvpacked": (lambda x: rfa.flash_attn_qkvpacked_func(x), _inputs((2, 20, 3, 4, 8))),
    "kvpacked": (rfa.flash_attn_kvpacked_func, _inputs((1, 20, 4, 8), (1, 20, 2, 2, 8))),
    "varlen": (_varlen, _inputs((30, 4, 8), (30, 2, 8), (30, 2, 8))),
    "varlen_slopes": (
        lambda q, k, v: _varlen(q, k, v, alibi_slopes=torch.linspace(0.1, 1.2, 12).view(3, 4)),
        _inputs((30, 4, 8), (30, 2, 8), (30, 2, 8)),
    ),
    "varlen_kvpacked": (_varlen_kv, _inputs((30, 4, 8), (30, 2, 4, 8))),
    "varlen_qkvpacked": (
        lambda x: rfa.flash_attn_varlen_qkvpacked_func(x, CU_SEQLENS, 21, causal=True),
        _inputs((30, 3, 4, 8)),
    ),
}


def _results(function: Any, inputs: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(7)  # of dropout
    out = function(*inputs)
    return [out, *torch.autograd.grad(out.sin().sum(), inputs)]


@pytest.mark.parametrize("name", CASES)
def test_full_graph(name: str) -> None:
    """Nothing breaks the graph, and results and gradients have the same bits."""
    function, inputs = CASES[name]
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for a, b in zip(_results(function, inputs), _results(compiled, inputs), strict=True):
        assert torch.equal(a, b)


def test_gradient_of_lse() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse, probs = rfa.flash_attn_func(q, k, v, return_attn_probs=True)
        assert probs is None
        return out.sum() + lse.square().sum()

    inputs = _batch()[1]
    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for a, b in zip(_results(run, inputs), _results(compiled, inputs), strict=True):
        assert torch.equal(a, b)


def test_lse_of_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Detached it can be used; a graph that returns it as it is hands back a gradient of zeros."""
    register_plain(monkeypatch)

    def run(q: Tensor, k: Tensor, v: Tensor, detach: bool) -> tuple[Tensor, Tensor]:
        out, lse, _ = rfa.flash_attn_func(q, k, v, return_attn_probs=True, kernel="plain")
        return out.sin(), (lse.detach() if detach else lse).exp()

    inputs = _batch()[1]
    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    results = []
    for function, detach in ((run, False), (compiled, True)):
        out, lse = function(*inputs, detach)
        results.append([out, lse, *torch.autograd.grad(out.sum(), inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    with pytest.raises(NotImplementedError, match="or detach lse"):
        compiled(*inputs, False)[0].sum().backward()


def test_any_length_in_one_graph() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(rfa.flash_attn_func, fullgraph=True, backend=backend, dynamic=True)
    for length in (7, 12, 31):
        q, k, v = _inputs(*((1, length, 2, 8),) * 3)
        assert torch.equal(compiled(q, k, v), rfa.flash_attn_func(q, k, v))
    assert len(graphs) == 1


def test_autocast() -> None:
    function, inputs = _batch(causal=True)
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        out = compiled(*inputs)
        assert out.dtype is torch.bfloat16
        assert torch.equal(out, function(*inputs))


def test_wrong_shapes_are_refused_while_tracing() -> None:
    q, k, v = _inputs((1, 8, 3, 8), (1, 8, 2, 8), (1, 8, 2, 8))
    torch.compiler.reset()
    compiled = torch.compile(rfa.flash_attn_func, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="must be a multiple of the number of KV heads"):
        compiled(q, k, v)


def test_backward_does_not_ask_for_autocast() -> None:
    """Gradients of a forward in fp32 are fp32's, even if autocast is on when they are computed."""
    function, inputs = _batch(causal=True)
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for run in (function, compiled):
        out = run(*inputs)
        with torch.autocast("cpu", torch.bfloat16):
            results.append(torch.autograd.grad(out, inputs, torch.ones_like(out)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


LIMITS = {
    "tensor": lambda: torch.tensor(21),
    "number of NumPy": lambda: np.int64(21),
    "number of a tensor": lambda: CU_SEQLENS.diff().max().item(),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_what_an_operator_cannot_take_breaks_the_graph(limit: str) -> None:
    """It still works, as in Python."""
    (qkv,) = _inputs((30, 3, 4, 8))

    def run(qkv: Tensor) -> Tensor:
        return rfa.flash_attn_varlen_qkvpacked_func(qkv, CU_SEQLENS, LIMITS[limit](), causal=True)

    torch.compiler.reset()
    assert torch.equal(torch.compile(run, backend="aot_eager")(qkv), run(qkv))


@pytest.mark.parametrize(
    ("name", "value"),
    [("causal", "False"), ("dropout_p", None), ("softcap", True), ("window_size", (1.5, 2))],
)
def test_wrong_options_are_named(name: str, value: Any) -> None:
    q, k, v = _inputs((1, 9, 2, 8), (1, 9, 2, 8), (1, 9, 2, 8))
    torch.compiler.reset()
    compiled = torch.compile(rfa.flash_attn_func, backend="aot_eager")
    with pytest.raises((TypeError, ValueError), match=name):
        compiled(q, k, v, **{name: value})


def test_a_tensor_for_a_number_breaks_the_graph() -> None:
    q, k, v = _inputs((1, 9, 2, 8), (1, 9, 2, 8), (1, 9, 2, 8))
    scale = torch.tensor(0.3)
    torch.compiler.reset()
    compiled = torch.compile(rfa.flash_attn_func, backend="aot_eager")
    out = compiled(q, k, v, softmax_scale=scale)
    assert torch.equal(out, rfa.flash_attn_func(q, k, v, softmax_scale=0.3))


@pytest.mark.parametrize("packed", [False, True])
def test_operators_keep_torchs_rules(packed: bool) -> None:
    """Schema, fake results and autograd registration agree with what the operators do."""
    shapes = (
        ((30, 4, 8), (30, 2, 8), (30, 2, 8)) if packed else ((2, 9, 4, 8), *((2, 9, 2, 8),) * 2)
    )
    q, k, v = _inputs(*shapes)
    cu_seqlens = (CU_SEQLENS, CU_SEQLENS, 21, 21) if packed else (None,) * 4
    (sink,) = _inputs((4,))
    rest = (
        None,
        sink,
        torch.tensor(5),
        0.2,
        None,
        True,
        -1,
        -1,
        0.0,
        False,
        True,
        "reference",
        True,
    )
    inputs = (q, k, v, *cu_seqlens, *rest)
    ops = torch.ops.ring_flash_attn
    torch.library.opcheck(ops.attention.default, inputs)
    with torch.no_grad():
        out, lse = ops.attention(*inputs)
        given = (torch.randn_like(out), torch.randn_like(lse), out, lse)
        torch.library.opcheck(ops.attention_backward.default, (*given, *inputs))
