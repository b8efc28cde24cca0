"""How each public function is called with the shards of a case, and what comes back."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .. import api
from ..bench.ranks.arguments import own_arguments
from ..bench.workload import Placement, Workload
from ..engine.entry import run_virtual
from .answers import Inputs, make_inputs
from .cases import Case
from .cut import cut
from .questions import Question

Tensors = dict[str, Tensor]  # by name: out, lse, dq, dk, dv, dsink


def tokens(case: Case, side: str, rank: int, world_size: int) -> list[int]:
    """Places in the stream of a rank's queries ("q") or keys ("k"), in local order."""
    lengths = case.question.lengths_q if side == "q" else case.question.lengths_k
    if not case.layout:  # every rank does everything
        return list(range(sum(lengths)))
    return cut(case.layout, lengths, rank, world_size)


def take(x: Tensor, places: Sequence[int], dim: int = -3) -> Tensor:
    """Some tokens of a whole tensor."""
    return x.index_select(dim, torch.tensor(places, dtype=torch.int64, device=x.device))


def part(case: Case, name: str, whole: Tensor, rank: int, world_size: int) -> Tensor:
    """A rank's rows of a whole tensor: out, lse, dq, dk or dv."""
    side = "k" if name in ("dk", "dv") else "q"
    return take(whole, tokens(case, side, rank, world_size), -1 if name == "lse" else -3)


def call_on_rank(case: Case, inputs: Inputs, rank: int, world_size: int) -> Tensors:
    """Call the function as this rank of the default group, and differentiate."""
    q, k, v = _shard(case, inputs, rank, world_size)
    leaves = {
        "kvpacked_func": lambda: {"q": q, "kv": torch.stack([k, v], -3)},
        "qkvpacked_func": lambda: {"qkv": torch.stack([q, k, v], -3)},
        "qkvpacked_func_v2": lambda: {"qkv": torch.stack([q, k, v], -3)},
    }.get(case.form, lambda: {"q": q, "k": k, "v": v})()
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
    options = _options(case, inputs)
    function = getattr(api, case.function)
    if "kernel" not in inspect.signature(function).parameters:
        del options["kernel"]  # the name says it
    own = own_arguments(
        case.signature, _workload(case.question), _placement(case, world_size), rank, q.device
    )
    out, lse, _ = function(**leaves, **own, **options)
    if options["sink"] is not None:
        leaves["sink"] = options["sink"]
    grads = _differentiate(
        [out], [lse], list(leaves.values()), [_douts(case, inputs, rank, world_size)]
    )
    named = dict(zip(leaves, grads, strict=True))
    return {"out": out.detach(), "lse": lse.detach(), **_unpacked(named)}


def call_on_one_device(question: Question, kernel: str, device: torch.device) -> Tensors:
    """Compute the whole of a question on one device, and differentiate."""
    packed = question.batch is None
    function = "flash_attn_varlen_func" if packed else "flash_attn_func"
    signature = "single_documents" if packed else "single"
    case = Case(function, signature, "func", "", "", kernel, "", question)
    torch.manual_seed(question.seed)
    return call_on_rank(case, make_inputs(question, device), 0, 1)


def call_virtual(case: Case, inputs: Inputs, world_size: int) -> list[Tensors]:
    """Run all ranks of the function's point in this process; dsink comes whole, with rank 0."""
    ranks = range(world_size)
    shards = [_shard(case, inputs, rank, world_size) for rank in ranks]
    options = _options(case, inputs)
    results = run_virtual(
        case.layout,
        case.route,
        shards,
        case.question.lengths_q,
        case.question.lengths_k,
        packed=case.question.batch is None,
        heads_k_stride=_placement(case, world_size).heads_k_stride,
        **options,
    )
    leaves = [x for shard in shards for x in shard]
    if options["sink"] is not None:
        leaves.append(options["sink"])
    outs, lses = [result[0] for result in results], [result[1] for result in results]
    douts = [_douts(case, inputs, rank, world_size) for rank in ranks]
    grads = _differentiate(outs, lses, leaves, douts)
    found = [
        {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}
        for out, lse, dq, dk, dv in zip(
            outs, lses, grads[0::3], grads[1::3], grads[2::3], strict=False
        )
    ]
    if options["sink"] is not None:
        found[0]["dsink"] = grads[-1]
    return found


def _placement(case: Case, world_size: int) -> Placement:
    stride = 1 if case.signature in ("gathered_documents", "llama3") else None
    return Placement(world_size, case.layout, case.route, case.kernel, stride)


def _workload(question: Question) -> Workload:
    packed = question.batch is None
    q, k = question.lengths_q, question.lengths_k
    return Workload(
        batch=question.batch or 1,
        seqlen=q[0],
        seqlen_k=k[0],
        nheads=question.nheads,
        nheads_k=question.nheads_k,
        headdim=question.headdim,
        causal=question.causal,
        cu_seqlens=tuple(accumulate(q, initial=0)) if packed else None,
        cu_seqlens_k=tuple(accumulate(k, initial=0)) if packed else None,
    )


def _shard(case: Case, inputs: Inputs, rank: int, world_size: int) -> tuple[Tensor, Tensor, Tensor]:
    queries = tokens(case, "q", rank, world_size)
    keys = tokens(case, "k", rank, world_size)
    q, k, v = take(inputs.q, queries), take(inputs.k, keys), take(inputs.v, keys)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def _options(case: Case, inputs: Inputs) -> dict[str, Any]:
    """Arguments that all functions share."""
    question = case.question
    sink = inputs.sink
    return {
        "dropout_p": question.dropout_p,
        "softmax_scale": question.softmax_scale,
        "causal": question.causal,
        "window_size": question.window_size,
        "alibi_slopes": inputs.slopes,
        "return_attn_probs": True,
        "softcap": question.softcap,
        "sink": None if sink is None else sink.detach().clone().requires_grad_(),
        "kernel": case.kernel,
    }


def _douts(case: Case, inputs: Inputs, rank: int, world_size: int) -> tuple[Tensor, Tensor | None]:
    """The rank's part of dout and dlse."""
    queries = tokens(case, "q", rank, world_size)
    dlse = None if inputs.dlse is None else take(inputs.dlse, queries, -1)
    return take(inputs.dout, queries), dlse


def _differentiate(
    outs: list[Tensor],
    lses: list[Tensor],
    leaves: list[Tensor],
    douts: list[tuple[Tensor, Tensor | None]],
) -> tuple[Tensor, ...]:
    outputs = [
        *outs,
        *(lse for lse, (_, dlse) in zip(lses, douts, strict=True) if dlse is not None),
    ]
    grads = [dout for dout, _ in douts] + [dlse for _, dlse in douts if dlse is not None]
    return torch.autograd.grad(outputs, leaves, grads)


def _unpacked(grads: Tensors) -> Tensors:
    """Gradients by tensor, whatever form the inputs had."""
    named: Tensors = {}
    for name, grad in grads.items():
        parts = list(name) if name in ("qkv", "kv") else [name]
        views = grad.unbind(-3) if len(parts) > 1 else [grad]
        named |= {f"d{part}": view for part, view in zip(parts, views, strict=True)}
    return named
