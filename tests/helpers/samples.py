"""Random inputs of attention, what the oracle says of them, and how far a result is from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ring_flash_attn.verify.check import difference, dropout_seed
from ring_flash_attn.verify.oracle import Rules, oracle

Results = dict[str, Tensor]  # out, lse, dq, dk, dv, and dsink where there is a sink

_RULES = {rule.name for rule in fields(Rules)}


@dataclass(frozen=True)
class Sample:
    """Global inputs, batch or packed, with the gradients that flow into out and lse.

    Attributes:
        q, k, v: (batch, seqlen, nheads, headdim) or (total, nheads, headdim).
        cu_seqlens_q, cu_seqlens_k: for packed documents.
        dout, dlse: like out, and (batch, nheads, seqlen) or (nheads, total).
        options: arguments of the attention functions, by name.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    cu_seqlens_q: list[int] | None = None
    cu_seqlens_k: list[int] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def packed(self) -> bool:
        """Whether documents are packed."""
        return self.cu_seqlens_q is not None

    def to(self, dtype: torch.dtype) -> Sample:
        """The same numbers, rounded; ALiBi's slopes stay as they are."""
        options = {n: x.to(dtype) if n == "sink" else x for n, x in self.options.items()}
        tensors = (x.to(dtype) for x in (self.q, self.k, self.v, self.dout))
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        cu_seqlens = (self.cu_seqlens_q, self.cu_seqlens_k)
        return Sample(*tensors, self.dlse.to(wide), *cu_seqlens, options)


def make_sample(
    lengths_q: Sequence[int] | None = None,
    lengths_k: Sequence[int] | None = None,
    *,
    batch: int = 2,
    seqlen_q: int = 37,
    seqlen_k: int | None = None,
    nheads: int = 4,
    nheads_k: int = 2,
    headdim: int = 6,
    headdim_v: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Sample:
    """Make packed documents if lengths are given, otherwise a batch."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    headdim_v = headdim if headdim_v is None else headdim_v
    if lengths_q is None:
        rows_q, rows_k = (batch, seqlen_q), (batch, seqlen_q if seqlen_k is None else seqlen_k)
        cu = (None, None)
        dlse = draw(batch, nheads, seqlen_q)
    else:
        lengths_k = lengths_q if lengths_k is None else lengths_k
        rows_q, rows_k = (sum(lengths_q),), (sum(lengths_k),)
        cu = ([0, *accumulate(lengths_q)], [0, *accumulate(lengths_k)])
        dlse = draw(nheads, sum(lengths_q))
    q, k = draw(*rows_q, nheads, headdim), draw(*rows_k, nheads_k, headdim)
    v, dout = draw(*rows_k, nheads_k, headdim_v), draw(*rows_q, nheads, headdim_v)
    return Sample(q, k, v, dout, dlse, *cu, options).to(dtype)


def results_of(
    attend: Callable[..., tuple[Tensor, Tensor]], sample: Sample, sink: Tensor | None = None
) -> Results:
    """Forward and backward of `attend(q, k, v, sink)` → (out, lse); rows without keys weigh 0."""
    leaves = [x.clone().requires_grad_() for x in (sample.q, sample.k, sample.v)]
    leaf = None if sink is None else sink.clone().requires_grad_()
    out, lse = attend(*leaves, leaf)
    finite = torch.where(lse.isfinite(), lse, 0.0)
    loss = (out * sample.dout).sum() + (finite * sample.dlse).sum()
    wanted = [*leaves, *([] if leaf is None else [leaf])]
    grads = torch.autograd.grad(loss, wanted)
    names = ["out", "lse", "dq", "dk", "dv", *([] if leaf is None else ["dsink"])]
    return dict(zip(names, (out.detach(), lse.detach(), *grads)))


def expected_of(sample: Sample, seed: int = 0) -> Results:
    """What the oracle says, in fp64; `seed` is what was given to torch.manual_seed."""
    wide = sample.to(torch.float64)
    rules = {name: x for name, x in wide.options.items() if name in _RULES}
    sink = rules.pop("sink", None)

    def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        asked = Rules(**rules, sink=sink, seed=dropout_seed(seed))
        return oracle(q, k, v, asked, wide.cu_seqlens_q, wide.cu_seqlens_k)

    return results_of(attend, wide, sink)


def error(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """max|a − b| / max(max|b|, floor); −inf must be in the same places, a NaN counts as inf."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} != {tuple(expected.shape)}"
    if not actual.numel():
        return 0.0
    sizes = expected.double().abs().nan_to_num(nan=0.0, posinf=0.0)
    scale = max(float(sizes.max()), floor)
    return float(difference(actual, expected).max()) / (scale or 1.0)


def rms(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference."""
    return float((actual.double() - expected.double()).square().mean().sqrt())


def check(
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerance: float,
    floor: float = 0.0,
) -> None:
    """Assert that every result is there and within the tolerance."""
    assert set(actual) == set(expected)
    errors = {name: error(actual[name], expected[name], floor) for name in expected}
    worst = {name: each for name, each in errors.items() if not each <= tolerance}
    assert not worst, f"errors beyond {tolerance}: {worst}"
