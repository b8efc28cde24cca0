"""Expected results: inputs from a seed, what the oracle says of them, and how far others may be."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..bench.workload import Workload
from .catalogue import Error
from .oracle import Rules, oracle

Tensors = dict[str, Tensor]  # by name: q, k, v, out, lse, sink or the gradient of one

FACTOR = 2.0  # how much worse than plain torch
ROUNDINGS = 2.0  # width of the rounding band, in eps of the dtype,
SUMMATION = 8.0  # and in eps of fp32, in which long sums are taken, each kernel in its own order
FP64_BAND = 1e-12  # relative
ACCEPTED = {"outputs": 1e-2, "gradients": 5e-2}  # relative, for half precision
_HALF = (torch.bfloat16, torch.float16)
_ZERO = 1e-9  # a tensor this much smaller than the terms it is the sum of is zero


@dataclass(frozen=True)
class Expected:
    """A tensor, or a rank's part of it, and what is needed to judge others.

    Attributes:
        tensor: out, lse, dq, dk, dv or dsink in fp64.
        dtype: of the inputs.
        plain: of the whole tensor, the largest error of the naive formula in that dtype.
        largest: of the whole tensor, the largest absolute value.
        scale: the largest absolute value of the whole tensor or of a part that it is the sum of.
            The derivative of a softmax is a difference, P·dP − P·delta, of which less may be left
            than the rounding of either part; with a single key nothing at all. That of a sink is
            a sum over delta's products.
    """

    tensor: Tensor
    dtype: torch.dtype
    plain: float
    largest: float
    scale: float

    @property
    def size(self) -> float:
        """What errors are relative to: the largest value, as in the original documents.

        Where the terms of a gradient cancel, as they do with a few tokens, less may be left than
        their rounding. Then it is so much that the rounding band is what is accepted; in fp32 and
        fp64, for which no relative error was ever set, the scale of the terms if nothing is left.
        """
        if self.dtype in _HALF:
            return max(self.largest, self._band / ACCEPTED["gradients"] * self.scale)
        return self.largest if self.largest > _ZERO * self.scale else self.scale

    @property
    def _band(self) -> float:
        """What rounding may cost, in parts of the terms that are rounded."""
        return ROUNDINGS * torch.finfo(self.dtype).eps + SUMMATION * torch.finfo(torch.float32).eps

    def limit(self, name: str) -> float:
        """The largest error of the tensor of this name that passes.

        Twice the error of plain torch and a rounding band; in half precision never more than what
        is accepted; in fp64, where plain torch is the oracle itself, a fixed band.
        """
        if self.dtype is torch.float64:
            return FP64_BAND * self.scale
        limit = FACTOR * self.plain + self._band * self.scale
        accepted = accepted_error(name, self.dtype)
        return limit if accepted is None else min(limit, accepted * self.size)

    def compare(self, name: str, rank: int, got: Tensor, other: Tensor | None = None) -> Error:
        """The error of what a rank computed; or its difference from another result of the same.

        That may be as far from the right one as this: limits double.
        """
        want, factor = (self.tensor, 1) if other is None else (other, 2)
        if got.shape != want.shape:
            raise ValueError(f"{name} has shape {tuple(got.shape)}, not {tuple(want.shape)}")
        apart = difference(got, want)
        count = max(1, apart.numel())
        worst = _largest(apart)
        return Error(
            name,
            rank,
            max=worst,
            mean=float(apart.sum()) / count,
            rmse=float(apart.square().sum() / count) ** 0.5,
            relative=worst / (self.size or 1.0),
            plain=factor * self.plain,
            limit=factor * self.limit(name),
        )


def kind_of(name: str) -> str:
    """Of a tensor: what the forward pass returns, or a gradient."""
    return "outputs" if name in ("out", "lse") else "gradients"


def accepted_error(name: str, dtype: torch.dtype) -> float | None:
    """The relative error that has always been accepted here; None but for bf16 and fp16."""
    return ACCEPTED[kind_of(name)] if dtype in _HALF else None


def difference(got: Tensor, want: Tensor) -> Tensor:
    """Absolute difference in fp64; infinities that agree differ by 0, a NaN by infinity."""
    got, want = got.double(), want.double()
    apart = torch.where(got == want, 0.0, (got - want).abs())
    return torch.nan_to_num(apart, nan=torch.inf, posinf=torch.inf)


def _largest(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0


def _magnitude(x: Tensor) -> float:
    """The largest finite absolute value; 0 if there is none."""
    return _largest(x.double().abs().nan_to_num(nan=0.0, posinf=0.0))


def dropout_seed(seed: int) -> int:
    """The seed that the library draws after `torch.manual_seed(seed)`."""
    generator = torch.Generator().manual_seed(seed)
    return int(torch.randint(1 << 62, (), dtype=torch.int64, generator=generator))


@lru_cache(maxsize=4)
def make_inputs(workload: Workload, seed: int, device: torch.device) -> Tensors:
    """Normally distributed inputs, drawn on the CPU so that every device gets the same ones.

    Returns:
        Whole tensors, the same on every rank: q, k, v and dout in the workload's dtype; where it
        has them dlse and sink, in fp32 (fp64 for fp64), and slopes, in fp32, (nheads,) for packed
        documents and (batch, nheads) for a batch.
    """
    generator = torch.Generator().manual_seed(seed)
    lead = () if workload.packed else (workload.batch,)
    total_q, total_k = workload.seqlen, sum(workload.lengths_k)
    nheads, nheads_k = workload.nheads, workload.nheads_k
    dim, dim_v = workload.headdim, workload.headdim_v or workload.headdim
    shapes = {
        "q": (*lead, total_q, nheads, dim),
        "k": (*lead, total_k, nheads_k, dim),
        "v": (*lead, total_k, nheads_k, dim_v),
        "dout": (*lead, total_q, nheads, dim_v),
    }
    if workload.lse_grad:
        shapes["dlse"] = (*lead, nheads, total_q)
    if workload.sink:
        shapes["sink"] = (nheads,)
    inputs = {}
    for name, shape in shapes.items():
        dtype = workload.torch_dtype
        if name in ("dlse", "sink") and dtype is not torch.float64:
            dtype = torch.float32
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        inputs[name] = drawn.to(device, dtype)
    if workload.alibi:
        slopes = 2.0 ** -torch.arange(1, nheads + 1, dtype=torch.float32, device=device)
        numbers = torch.arange(1, workload.batch + 1, device=device)
        inputs["slopes"] = slopes if workload.packed else slopes / numbers[:, None]
    return inputs


@lru_cache(maxsize=16)
def expected(
    workload: Workload, seed: int, device: torch.device, rows: tuple[int, ...] | None = None
) -> dict[str, Expected]:
    """What the oracle says: out, lse, dq, dk, dv and, with a sink, dsink.

    With `rows`, the loss depends on the outputs of these queries only.
    """
    right, parts = _attend(workload, seed, device, torch.float64, rows)
    plain, _ = _attend(workload, seed, device, workload.torch_dtype, rows)
    return {
        name: Expected(
            x,
            workload.torch_dtype,
            plain=_largest(difference(plain[name], x)),
            largest=_magnitude(x),
            scale=max(_magnitude(x), _magnitude(parts[name]) if name in parts else 0.0),
        )
        for name, x in right.items()
    }


def _attend(
    workload: Workload,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    rows: tuple[int, ...] | None,
) -> tuple[Tensors, Tensors]:
    """The naive formula in one dtype: out, lse and gradients; and what dq, dk and dsink sum up."""
    inputs = make_inputs(workload, seed, device)
    wanted = [name for name in ("q", "k", "v", "sink") if name in inputs]
    leaves = {name: inputs[name].to(dtype).detach().requires_grad_() for name in wanted}
    sink = leaves.get("sink")
    drawn = dropout_seed(seed) if workload.dropout_p else 0
    rules = Rules(**workload.options, alibi_slopes=inputs.get("slopes"), sink=sink, seed=drawn)
    cu_seqlens = workload.cu_seqlens, workload.cu_seqlens_k or workload.cu_seqlens
    out, lse = oracle(leaves["q"], leaves["k"], leaves["v"], rules, *cu_seqlens)
    outputs, grads = [out], [_only(inputs["dout"].to(dtype), rows, -3)]
    if "dlse" in inputs:
        outputs.append(lse)
        grads.append(_only(inputs["dlse"].to(dtype), rows, -1))
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


def _only(grad: Tensor, rows: tuple[int, ...] | None, dim: int) -> Tensor:
    """The gradient with zeros everywhere but in the rows."""
    if rows is None:
        return grad
    index = torch.tensor(rows, dtype=torch.int64, device=grad.device)
    return torch.zeros_like(grad).index_copy_(dim, index, grad.index_select(dim, index))
