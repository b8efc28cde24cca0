"""The right answers: inputs from a seed, and what the oracle says in fp64 and in their dtype."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from .measure import difference, largest, magnitude
from .oracle import Rules, oracle
from .questions import Question

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Inputs:
    """Whole tensors, the same on every rank.

    Attributes:
        q, k, v, dout: in the question's dtype.
        dlse, sink: fp32, fp64 for fp64; dlse is None where the loss does not depend on lse.
        slopes: fp32, (nheads,) for packed documents and (batch, nheads) for a batch.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None
    sink: Tensor | None
    slopes: Tensor | None


@dataclass(frozen=True)
class Answer:
    """The oracle's tensors, and what is needed to judge others.

    Attributes:
        tensors: out, lse, dq, dk, dv and, with a sink, dsink; fp64.
        plain_errors: of each, the largest error of the naive formula in the question's dtype.
        largest: of each, the largest absolute value.
        scales: of each, the largest absolute value of the tensor or of a part that it is the sum
            of. The derivative of a softmax is a difference, P·dP − P·delta, of which less may be
            left than the rounding of either part; with a single key nothing at all. That of a
            sink is a sum over delta's products.
    """

    tensors: dict[str, Tensor]
    plain_errors: dict[str, float]
    largest: dict[str, float]
    scales: dict[str, float]


def torch_dtype(name: str) -> torch.dtype:
    """float64 and so on."""
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def dropout_seed(seed: int) -> int:
    """The seed that the library draws after `torch.manual_seed(seed)`."""
    generator = torch.Generator().manual_seed(seed)
    return int(torch.randint(1 << 62, (), dtype=torch.int64, generator=generator))


@lru_cache(maxsize=4)
def make_inputs(question: Question, device: torch.device) -> Inputs:
    """Normally distributed inputs, drawn on the CPU so that every device gets the same ones."""
    generator = torch.Generator().manual_seed(question.seed)
    dtype = torch_dtype(question.dtype)
    exact = torch.float64 if dtype is torch.float64 else torch.float32
    lead = () if question.batch is None else (question.batch,)
    total_q, total_k = sum(question.lengths_q), sum(question.lengths_k)
    nheads, nheads_k = question.nheads, question.nheads_k

    def normal(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    slopes = 2.0 ** -torch.arange(1, nheads + 1, dtype=torch.float32, device=device)
    if question.batch is not None:
        slopes = slopes / torch.arange(1, question.batch + 1, device=device)[:, None]
    return Inputs(
        q=normal(*lead, total_q, nheads, question.headdim, dtype=dtype),
        k=normal(*lead, total_k, nheads_k, question.headdim, dtype=dtype),
        v=normal(*lead, total_k, nheads_k, question.headdim_v, dtype=dtype),
        dout=normal(*lead, total_q, nheads, question.headdim_v, dtype=dtype),
        dlse=normal(*lead, nheads, total_q, dtype=exact) if question.lse_grad else None,
        sink=normal(nheads, dtype=exact) if question.sink else None,
        slopes=slopes if question.alibi else None,
    )


@lru_cache(maxsize=16)
def answer(question: Question, device: torch.device, rows: tuple[int, ...] | None = None) -> Answer:
    """What the oracle says.

    Args:
        question: the problem.
        device: where to compute.
        rows: queries whose outputs the loss depends on; all if None.
    """
    inputs = make_inputs(question, device)
    right, parts = _attend(question, inputs, torch.float64, rows)
    plain, _ = _attend(question, inputs, torch_dtype(question.dtype), rows)
    values = {name: magnitude(x) for name, x in right.items()}
    return Answer(
        tensors=right,
        plain_errors={name: largest(difference(plain[name], x)) for name, x in right.items()},
        largest=values,
        scales={n: max(x, magnitude(parts[n])) if n in parts else x for n, x in values.items()},
    )


def _attend(
    question: Question, inputs: Inputs, dtype: torch.dtype, rows: tuple[int, ...] | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The naive formula in one dtype: out, lse and gradients; and what dq, dk and dsink sum up."""
    leaves = {n: getattr(inputs, n).to(dtype).requires_grad_() for n in ("q", "k", "v")}
    sink = inputs.sink
    if sink is not None:
        sink = leaves["sink"] = sink.to(dtype).detach().requires_grad_()
    out, lse = oracle(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        _rules(question, inputs, sink),
        *(_offsets(question, side) for side in ("lengths_q", "lengths_k")),
    )
    outputs, grads = [out], [_only(inputs.dout.to(dtype), rows, -3)]
    if inputs.dlse is not None:
        outputs.append(lse)
        grads.append(_only(inputs.dlse.to(dtype), rows, -1))
    found = torch.autograd.grad(outputs, list(leaves.values()), grads, retain_graph=True)
    named = {f"d{name}": grad for name, grad in zip(leaves, found, strict=True)}
    delta = (out.detach() * grads[0]).sum(-1).transpose(-1, -2)
    part = torch.autograd.grad(lse, [leaves["q"], leaves["k"]], delta)
    parts = dict(zip(("dq", "dk"), part, strict=True))
    if sink is not None:
        terms = (out * grads[0]).detach().abs().sum(-1).transpose(-1, -2)
        weighted = terms * (sink[:, None] - lse).detach().exp()
        parts["dsink"] = weighted.transpose(-1, -2).flatten(0, -2).sum(0)
    return {"out": out.detach(), "lse": lse.detach(), **named}, parts


def _rules(question: Question, inputs: Inputs, sink: Tensor | None) -> Rules:
    return Rules(
        causal=question.causal,
        window_size=question.window_size,
        softmax_scale=question.softmax_scale,
        softcap=question.softcap,
        alibi_slopes=inputs.slopes,
        sink=sink,
        dropout_p=question.dropout_p,
        seed=dropout_seed(question.seed) if question.dropout_p else 0,
    )


def _offsets(question: Question, side: str) -> list[int] | None:
    if question.batch is not None:
        return None
    return [0, *accumulate(getattr(question, side))]


def _only(grad: Tensor, rows: tuple[int, ...] | None, dim: int) -> Tensor:
    """The gradient with zeros everywhere but in the rows."""
    if rows is None:
        return grad
    index = torch.tensor(rows, dtype=torch.int64, device=grad.device)
    return torch.zeros_like(grad).index_copy_(dim, index, grad.index_select(dim, index))
