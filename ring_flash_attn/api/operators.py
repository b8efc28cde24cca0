"""Attention as torch operators, so that `torch.compile(fullgraph=True)` traces every function.

Three operators, each with its backward: `attention` on one device, `ring_attention` and
`llama3_attention` on a group. Outside of torch.compile the public functions do not come here:
dispatching an operator costs more than calling the kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    is_in_torch_dispatch_mode,
)

from .. import comm
from ..engine import checks
from ..engine.attention import QKV, PreparedCall, backward, forward, needs_grad, no_autocast
from ..engine.entry import (
    in_autocast_dtype,
    llama3_call,
    prepare_single,
    ring_call,
    run_llama3,
    run_ring,
    run_single,
)
from ..engine.prepare import (
    GroupCall,
    Options,
    Output,
    draw_seed,
    prepare_on_group,
    with_shared_seed,
)
from ..plan.build import BY_NODES
from ..plan.layout import get_layout

_OPTIONS = (
    "Tensor? alibi_slopes, Tensor? sink, Tensor? seed, float dropout_p, float? softmax_scale, "
    "bool causal, int left, int right, float softcap, bool deterministic, bool with_lse, "
    "str kernel, bool grad"
)
_PAIRS = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt? max_seqlen_q, SymInt? max_seqlen_k, "
_GROUP = "str group, str layout, str route, bool? packed, "
_RING = (
    "bool equal_shards, Tensor? cu_seqlens, SymInt[]? cu_seqlens_list, Tensor? cu_seqlens_k, "
    "SymInt[]? cu_seqlens_k_list, SymInt? max_seqlen, SymInt? seqlen, SymInt? seqlen_k, "
    "int? heads_k_stride, int? sources_per_launch, int? ranks_per_node, "
)
_LLAMA3 = (
    "Tensor? cu_seqlens_q, SymInt[]? cu_seqlens_q_list, Tensor? cu_seqlens_k, "
    "SymInt[]? cu_seqlens_k_list, SymInt? max_seqlen_q, SymInt? max_seqlen_k, int? heads_k_stride, "
    "SymInt? k_start, SymInt? k_stop, SymInt? k_step, "
)
_FLAGS = ("causal", "deterministic", "return_attn_probs")
_LIST = "_list"  # ends the name of an argument that takes offsets as integers

Arguments = dict[str, Any]  # of an operator after q, k and v, by name
Prepare = Callable[[QKV, Arguments, bool], tuple[PreparedCall, QKV]]


class Operator:
    """An operator that computes attention, that of its backward pass, and how autograd joins them.

    Args:
        name: in `torch.ops.ring_flash_attn`.
        arguments: those after q, k and v, as in a schema.
        prepare: makes of (q, k, v), the arguments and whether this is the backward pass what does
            the call, and its tensors.
        packed: whether tensors are (total, …) rather than (batch, seqlen, …).
        tags: of torch.
    """

    def __init__(
        self,
        name: str,
        arguments: str,
        prepare: Prepare,
        packed: Callable[[Arguments], bool],
        tags: tuple[torch.Tag, ...] = (),
    ) -> None:
        self.names = tuple(each.split()[-1] for each in arguments.split(", "))
        self._prepare, self._packed = prepare, packed
        inputs = f"Tensor q, Tensor k, Tensor v, {arguments}"
        self.forward = torch.library.custom_op(
            f"ring_flash_attn::{name}",
            self._forward,
            mutates_args=(),
            schema=f"({inputs}) -> (Tensor, Tensor)",
            tags=tags,
        )
        self.backward = torch.library.custom_op(
            f"ring_flash_attn::{name}_backward",
            self._backward,
            mutates_args=(),
            schema=f"(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, {inputs}) -> "
            "(Tensor, Tensor, Tensor, Tensor)",
            tags=tags,
        )
        self.forward.register_fake(self._fake_forward)
        self.backward.register_fake(self._fake_backward)
        self.forward.register_autograd(self._differentiate, setup_context=_save)
        self.overload = getattr(torch.ops.ring_flash_attn, name).default
        self._backward_overload = getattr(torch.ops.ring_flash_attn, f"{name}_backward").default

    def _named(self, rest: tuple[Any, ...]) -> Arguments:
        return dict(zip(self.names, rest, strict=True))

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        """out and lse."""
        given = self._named(rest)
        with no_autocast(q.device):  # they have been cast
            prepared, shard = self._prepare((q, k, v), given, False)
            ((out, lse),) = forward(prepared, [shard], given["sink"])
        return (out[0], lse[0]) if self._packed(given) else (out, lse)

    def _fake_forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        given = self._named(rest)
        checks.check_tensors(q, k, v, self._packed(given))
        if "layout" in given:
            _check_name(given["layout"])
        *outer, length, nheads, _ = q.shape
        dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
        return (
            q.new_empty((*outer, length, nheads, v.shape[-1])),
            q.new_empty((*outer, nheads, length), dtype=dtype),
        )

    def _backward(
        self,
        dout: Tensor | None,
        dlse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *rest: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dq, dk, dv and dsink (empty without a sink)."""
        given = self._named(rest)
        packed = self._packed(given)
        if packed:
            out, lse = out[None], lse[None]
            dout, dlse = (None if x is None else x[None] for x in (dout, dlse))
        with no_autocast(q.device):
            prepared, shard = self._prepare((q, k, v), given, True)
            results = backward(prepared, [shard], given["sink"], [(out, lse)], [(dout, dlse)])
        dsink, ((dq, dk, dv),) = results
        dq, dk, dv = (grad.contiguous() for grad in (dq, dk, dv))  # as the fake one says
        if packed:
            dq, dk, dv = dq[0], dk[0], dv[0]
        return dq, dk, dv, q.new_empty(0) if dsink is None else dsink

    def _fake_backward(
        self,
        dout: Tensor | None,
        dlse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *rest: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sink = self._named(rest)["sink"]
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        return dq, dk, dv, dq.new_empty(0) if sink is None else sink.new_empty(sink.shape)

    def _differentiate(
        self, ctx: Any, dout: Tensor | None, dlse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        out, lse, *tensors = ctx.saved_tensors
        inputs = list(ctx.inputs)
        for i, tensor in zip(ctx.where, tensors, strict=True):
            inputs[i] = tensor
        dq, dk, dv, dsink = self._backward_overload(dout, dlse, out, lse, *inputs)
        grads: list[Tensor | None] = [dq, dk, dv, *[None] * len(self.names)]
        if inputs[3 + self.names.index("sink")] is not None:
            grads[3 + self.names.index("sink")] = dsink
        return tuple(grads)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.where = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
    ctx.inputs = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.save_for_backward(*output, *(inputs[i] for i in ctx.where))
    ctx.set_materialize_grads(False)


def _check_name(layout: str) -> None:
    """NotImplementedError unless the operator will find the layout."""
    try:
        get_layout(layout)
    except ValueError:
        raise NotImplementedError(
            f"layout {layout!r}: under torch.compile a layout is found by its name, and there is "
            "none of this name. Register it with ring_flash_attn.plan.layout.add_layout"
        ) from None


# What the operators do with their arguments.


def _options(given: Arguments) -> dict[str, Any]:
    """What all functions share."""
    names = (
        "alibi_slopes", "sink", "dropout_p", "softmax_scale", "causal", "softcap", "deterministic",
        "kernel",
    )  # fmt: skip
    options = {name: given[name] for name in names}
    options["window_size"] = given["left"], given["right"]
    return {**options, "return_attn_probs": given["with_lse"]}


def _prepare_single(qkv: QKV, given: Arguments, _: bool) -> tuple[PreparedCall, QKV]:
    q, k, v = qkv
    lengths = None
    if given["cu_seqlens_q"] is not None:
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        lengths = checks.document_pairs(q, *(given[name] for name in names))
    prepared, shard = prepare_single(q, k, v, lengths, _options(given), given["grad"])
    if given["dropout_p"]:
        prepared = prepared.changed(seed=given["seed"])
    return prepared, shard


def _prepare_on_group(
    call: Callable[..., GroupCall], names: tuple[str, ...], qkv: QKV, given: Arguments, agreed: bool
) -> tuple[PreparedCall, QKV]:
    """Ranks agree on the forward pass, as they do outside of torch.compile."""
    where = {name: given[name] for name in (*names, "layout", "route", "packed")}
    for name in names:
        if where[name] is None and given.get(name + _LIST) is not None:
            where[name] = given[name + _LIST]
    if "k_start" in given:
        where["local_k_slice"] = slice(given["k_start"], given["k_stop"], given["k_step"])
    group = comm.group_called(given["group"])
    asked = call(*qkv, **where, group=group, **_options(given))
    prepared = prepare_on_group(asked, given["grad"], agreed)
    if given["dropout_p"]:
        prepared = with_shared_seed(prepared, given["seed"].clone(), group)
    return prepared, asked.shard


def _is_packed(given: Arguments) -> bool:
    """`packed` says; if it does not, that there are offsets does."""
    if given["packed"] is not None:
        return bool(given["packed"])
    return any(given[name] is not None for name in ("cu_seqlens", "cu_seqlens" + _LIST))


_NOT_CAPTURED = (torch.Tag.cudagraph_unsafe,)  # a CUDA graph would keep its documents
_RING_NAMES = (
    "equal_shards", "cu_seqlens", "cu_seqlens_k", "max_seqlen", "seqlen", "seqlen_k",
    "heads_k_stride", "sources_per_launch", "ranks_per_node",
)  # fmt: skip
_LLAMA3_NAMES = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "heads_k_stride")

attention_op = Operator(
    "attention",
    _PAIRS + _OPTIONS,
    _prepare_single,
    lambda given: given["cu_seqlens_q"] is not None,
)
ring_attention_op = Operator(
    "ring_attention",
    _GROUP + _RING + _OPTIONS,
    functools.partial(_prepare_on_group, ring_call, _RING_NAMES),
    _is_packed,
    _NOT_CAPTURED,
)
llama3_attention_op = Operator(
    "llama3_attention",
    _GROUP + _LLAMA3 + _OPTIONS,
    functools.partial(_prepare_on_group, llama3_call, _LLAMA3_NAMES),
    _is_packed,
    _NOT_CAPTURED,
)


# What torch.compile traces.


def compilable(function: Callable[..., Output]) -> Callable[..., Output]:
    """`run_single`, `run_ring` or `run_llama3`, which torch.compile traces as one operator.

    What an operator cannot take breaks the graph, with a reason. Selective activation checkpointing
    sees the operator, too.
    """
    traced = _TRACED[function]

    @functools.wraps(function)
    def run(q: Any, k: Any, v: Any, **options: Any) -> Output:
        if not (torch.compiler.is_compiling() or _is_checkpointed()):
            return function(q, k, v, **options)
        reason = _reason(options)
        if reason is None:
            return traced(q, k, v, options)
        if not torch.compiler.is_compiling():
            return function(q, k, v, **options)
        break_graph(reason)
        return torch.compiler.disable(function)(q, k, v, **options)

    return run


def _is_checkpointed() -> bool:
    """Whether a policy of selective activation checkpointing is asked of every operator."""
    return is_in_torch_dispatch_mode() and any(
        type(mode).__module__ == checkpoint.__name__ for mode in _get_current_dispatch_mode_stack()
    )


def break_graph(reason: str) -> None:
    """While torch.compile traces; with fullgraph=True this is an error that gives the reason."""
    torch._dynamo.graph_break(msg=f"ring_flash_attn: {reason}")


_KINDS = {
    **dict.fromkeys(_FLAGS, "True or False"),
    **dict.fromkeys(("softmax_scale", "softcap"), "a number or None"),
    **dict.fromkeys(("alibi_slopes", "sink"), "a tensor or None"),
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"), "offsets"),
    **dict.fromkeys(
        ("max_seqlen", "max_seqlen_q", "max_seqlen_k", "seqlen", "seqlen_k"), "an integer"
    ),
    **dict.fromkeys(("heads_k_stride", "sources_per_launch", "ranks_per_node"), "an integer"),
    **dict.fromkeys(("route", "kernel"), "a name"),
    **dict.fromkeys(("packed", "equal_shards", "group"), ""),  # ours; checked when it is resolved
    "dropout_p": "a number",
    "window_size": "two integers",
    "local_k_slice": "a slice",
    "layout": "a layout or its name",
    "block_table": "None",
}


def _reason(options: dict[str, Any]) -> str | None:
    """Why no operator can take these; lengths in tensors, and errors, are left to Python."""
    for name, value in options.items():
        if name not in _KINDS:
            return f"there is no argument {name}"
        kind = _KINDS[name]
        if kind == "offsets":
            kind = "a tensor or a list of integers" if "layout" in options else "a tensor"
        if not _fits(kind, value):
            return f"to be in a graph, {name} must be {kind}"
        if name == "alibi_slopes" and value is not None and value.requires_grad:
            return "there is no gradient for alibi_slopes"  # which the operator could not say
    return None


def _fits(kind: str, value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind == "an integer":
        return value is None or (number and isinstance(value, int))
    if kind.startswith("a number"):
        return number or (value is None and kind.endswith("None"))
    if kind.startswith("a tensor"):
        offsets = kind.endswith("integers") and isinstance(value, (list, tuple))
        none = value is None and kind != "a tensor"
        return isinstance(value, Tensor) or none or (offsets and _are_integers(value))
    if kind == "True or False":
        return isinstance(value, int) and value in (0, 1)
    if kind == "two integers":
        return isinstance(value, (tuple, list)) and len(value) == 2
    if kind == "a layout or its name":
        return isinstance(value, str) or isinstance(getattr(value, "name", None), str)
    if kind == "a name":
        return isinstance(value, str)
    if kind == "a slice":
        return isinstance(value, slice)
    return value is None or not kind


def _are_integers(values: Any) -> bool:
    return all(isinstance(each, int) and not isinstance(each, bool) for each in values)


def _traced_single(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Output:
    where = {
        f"{name}_{side}": options.get(f"{name}_{side}", options.get(name))
        for name in ("cu_seqlens", "max_seqlen")
        for side in "qk"
    }
    return _traced(attention_op, q, k, v, {**options, **where})


def _traced_ring(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Output:
    where = _on_group(options, "cu_seqlens", "cu_seqlens_k")
    where["equal_shards"] = options.get("equal_shards", False)
    return _traced(ring_attention_op, q, k, v, {**options, **where})


def _traced_llama3(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Output:
    where = _on_group(options, "cu_seqlens_q", "cu_seqlens_k")
    part = options["local_k_slice"]
    where |= {"k_start": part.start, "k_stop": part.stop, "k_step": part.step}
    return _traced(llama3_attention_op, q, k, v, {**options, **where})


def _on_group(options: dict[str, Any], *offsets: str) -> dict[str, Any]:
    """The group and the layout by name; offsets in tensors apart from those in lists."""
    layout, group = options["layout"], options.get("group")
    found: dict[str, Any] = {"layout": layout if isinstance(layout, str) else layout.name}
    if options["route"] in BY_NODES:
        nodes = options.get("ranks_per_node")
        group, found["ranks_per_node"] = comm.group_and_node(group, nodes)
    found["group"] = comm.resolve_group(group).group_name
    for name in offsets:
        value = options.get(name)
        if isinstance(value, (list, tuple)):
            found |= {name: None, name + _LIST: list(value)}
    return found


def _traced(op: Operator, q: Tensor, k: Tensor, v: Tensor, given: Arguments) -> Output:
    """The operator in a graph."""
    q, k, v = in_autocast_dtype(q, k, v)
    given = {**_DEFAULTS, **given}
    given["left"], given["right"] = checks.check_window(given["window_size"])
    given["softcap"] = given["softcap"] or 0.0
    for name in _FLAGS:
        given[name] = bool(given[name])
    given["with_lse"] = given["return_attn_probs"]
    if given["dropout_p"]:
        given["seed"] = draw_seed() if "group" in given else draw_seed().to(q.device)
    # Below, in the operator, no tensor says that it requires a gradient.
    inputs = (q, k, v) if given["sink"] is None else (q, k, v, given["sink"])
    given["grad"] = needs_grad(inputs)
    out, lse = op.overload(q, k, v, *[given.get(name) for name in op.names])
    return (out, lse, None) if given["with_lse"] else out


_DEFAULTS = {each.name: each.default for each in fields(Options)}
_TRACED: dict[Callable[..., Output], Callable[..., Output]] = {
    run_single: _traced_single,
    run_ring: _traced_ring,
    run_llama3: _traced_llama3,
}
