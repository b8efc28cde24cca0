"""Attention on one device as torch operators, so that `torch.compile(fullgraph=True)` traces it.

Outside of torch.compile the public functions do not come here: dispatching an operator costs more
than calling the kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..engine import checks
from ..engine.attention import QKV, PreparedCall, backward, forward, needs_grad, no_autocast
from ..engine.entry import in_autocast_dtype, prepare_single
from ..engine.prepare import Output, draw_seed

_REST = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt? max_seqlen_q, SymInt? max_seqlen_k, "
    "Tensor? alibi_slopes, Tensor? sink, Tensor? seed, float dropout_p, float? softmax_scale, "
    "bool causal, int left, int right, float softcap, bool deterministic, bool with_lse, "
    "str kernel, bool grad"
)
_FORWARD = f"(Tensor q, Tensor k, Tensor v, {_REST}) -> (Tensor, Tensor)"
_BACKWARD = (
    "(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, "
    f"{_REST}) -> (Tensor, Tensor, Tensor, Tensor)"
)
_SINK = 8  # its place among the arguments of the forward
_FLAGS = ("causal", "deterministic", "return_attn_probs")
_PLAIN = (  # the last ones, but for grad
    "dropout_p", "softmax_scale", "causal", "left", "right", "softcap", "deterministic",
    "return_attn_probs", "kernel",
)  # fmt: skip


def traceable(**options: Any) -> bool:
    """Whether an operator can take these; lengths in tensors, and errors, are left to Python."""
    return all(_fits(name, value) for name, value in options.items())


def _fits(name: str, value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if name.startswith("cu_seqlens"):
        return isinstance(value, Tensor)
    if name.startswith("max_seqlen"):
        return number and isinstance(value, int)
    if name in _FLAGS:
        return isinstance(value, int) and value in (0, 1)
    if name in ("softmax_scale", "softcap"):
        return number or value is None
    if name in ("alibi_slopes", "sink"):
        return value is None or isinstance(value, Tensor)
    if name == "window_size":
        return isinstance(value, (tuple, list)) and len(value) == 2
    if name == "block_table":
        return value is None
    return number if name == "dropout_p" else isinstance(value, str)


def traced(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Output:
    """Any of the functions for one device, as one operator; exactly their options."""
    q, k, v = in_autocast_dtype(q, k, v)
    documents = [
        options.get(f"{name}_{side}", options.get(name))
        for name in ("cu_seqlens", "max_seqlen")
        for side in "qk"
    ]
    seed = draw_seed().to(q.device) if options["dropout_p"] else None
    plain = {**options, "softcap": options["softcap"] or 0.0}
    plain |= {name: bool(options[name]) for name in _FLAGS}
    plain["left"], plain["right"] = checks.check_window(options["window_size"])
    rest = [options["alibi_slopes"], options["sink"], seed, *(plain[name] for name in _PLAIN)]
    inputs = (q, k, v) if options["sink"] is None else (q, k, v, options["sink"])
    # Below, in the operator, no tensor says that it requires a gradient.
    out, lse = torch.ops.ring_flash_attn.attention(q, k, v, *documents, *rest, needs_grad(inputs))
    return (out, lse, None) if plain["return_attn_probs"] else out


def _prepared(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[PreparedCall, QKV]:
    """What does the call, and its tensors. They have been cast: autocast must be off."""
    documents, (slopes, sink, seed), (*plain, grad) = rest[:4], rest[4:7], rest[7:]
    options = dict(zip(_PLAIN, plain, strict=True), alibi_slopes=slopes, sink=sink)
    options["window_size"] = options.pop("left"), options.pop("right")
    lengths = None if documents[0] is None else checks.document_pairs(q, *documents)
    prepared, shard = prepare_single(q, k, v, lengths, options, grad)
    if options["dropout_p"]:
        prepared = prepared.changed(seed=seed)
    return prepared, shard


@torch.library.custom_op("ring_flash_attn::attention", mutates_args=(), schema=_FORWARD)
def attention_op(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    """out and lse."""
    with no_autocast(q.device):
        prepared, shard = _prepared(q, k, v, cu_seqlens_q, *rest)
        ((out, lse),) = forward(prepared, [shard], rest[_SINK - 4])
    return (out, lse) if cu_seqlens_q is None else (out[0], lse[0])


@attention_op.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    checks.check_tensors(q, k, v, packed=cu_seqlens_q is not None)
    *outer, length, nheads, _ = q.shape
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    return (
        q.new_empty((*outer, length, nheads, v.shape[-1])),
        q.new_empty((*outer, nheads, length), dtype=dtype),
    )


@torch.library.custom_op("ring_flash_attn::attention_backward", mutates_args=(), schema=_BACKWARD)
def attention_backward_op(
    dout: Tensor | None,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and dsink (empty without a sink)."""
    packed = cu_seqlens_q is not None
    if packed:
        out, lse = out[None], lse[None]
        dout, dlse = (None if x is None else x[None] for x in (dout, dlse))
    with no_autocast(q.device):
        prepared, shard = _prepared(q, k, v, cu_seqlens_q, *rest)
        results = backward(prepared, [shard], rest[_SINK - 4], [(out, lse)], [(dout, dlse)])
    dsink, ((dq, dk, dv),) = results
    dq, dk, dv = (grad.contiguous() for grad in (dq, dk, dv))  # as the fake one says
    if packed:
        dq, dk, dv = dq[0], dk[0], dv[0]
    return dq, dk, dv, q.new_empty(0) if dsink is None else dsink


@attention_backward_op.register_fake
def _(
    dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, *inputs: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in inputs[:3])
    sink = inputs[_SINK]
    return dq, dk, dv, dq.new_empty(0) if sink is None else sink.new_empty(sink.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.where = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
    ctx.inputs = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.save_for_backward(*output, *(inputs[i] for i in ctx.where))
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    out, lse, *tensors = ctx.saved_tensors
    inputs = list(ctx.inputs)
    for i, tensor in zip(ctx.where, tensors, strict=True):
        inputs[i] = tensor
    dq, dk, dv, dsink = torch.ops.ring_flash_attn.attention_backward(dout, dlse, out, lse, *inputs)
    grads: list[Tensor | None] = [dq, dk, dv, *[None] * (len(inputs) - 3)]
    grads[_SINK] = None if inputs[_SINK] is None else dsink
    return tuple(grads)


attention_op.register_autograd(_differentiate, setup_context=_save)
