"""Errors of a tensor against the oracle's, and the rule that says how large they may be."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FACTOR = 2.0  # how much worse than plain torch
ROUNDINGS = 2.0  # width of the rounding band, in eps of the dtype,
SUMMATION = 8.0  # and in eps of fp32, in which long sums are taken, each kernel in its own order
FP64_BAND = 1e-12  # relative
_HALF = (torch.bfloat16, torch.float16)
_OUTPUTS = ("out", "lse")
ACCEPTED_OUTPUT, ACCEPTED_GRADIENT = 1e-2, 5e-2  # relative, for half precision
_ZERO = 1e-9  # a tensor this much smaller than the terms it is the sum of is zero


@dataclass(frozen=True, slots=True)
class Error:
    """How far one tensor of one rank is from the oracle's.

    Attributes:
        tensor: out, lse, dq, dk, dv or dsink.
        rank: whose.
        max, mean, rmse: of the absolute difference.
        relative: largest difference over the size of the whole tensor, on all ranks; see `size_of`.
        plain: largest difference of plain torch in the same dtype, over the whole tensor.
        limit: what `max` may be.
    """

    tensor: str
    rank: int
    max: float
    mean: float
    rmse: float
    relative: float
    plain: float
    limit: float

    @property
    def passed(self) -> bool:
        """Within the limit; a NaN is not."""
        return self.max <= self.limit


def difference(got: Tensor, want: Tensor) -> Tensor:
    """Absolute difference in fp64; infinities that agree differ by 0, a NaN by infinity."""
    got, want = got.double(), want.double()
    apart = torch.where(got == want, 0.0, (got - want).abs())
    return torch.nan_to_num(apart, nan=torch.inf, posinf=torch.inf)


def largest(x: Tensor) -> float:
    """The largest entry; 0 if there is none."""
    return float(x.max()) if x.numel() else 0.0


def magnitude(x: Tensor) -> float:
    """The largest finite absolute value; 0 if there is none."""
    return largest(x.double().abs().nan_to_num(nan=0.0, posinf=0.0))


def is_output(tensor: str) -> bool:
    """Whether it is a result of the forward pass rather than a gradient."""
    return tensor in _OUTPUTS


def accepted_relative(tensor: str, dtype: torch.dtype) -> float | None:
    """The relative error that has always been accepted here; None but for bf16 and fp16."""
    if dtype not in _HALF:
        return None
    return ACCEPTED_OUTPUT if is_output(tensor) else ACCEPTED_GRADIENT


def _band(dtype: torch.dtype) -> float:
    """What rounding may cost, in parts of the terms that are rounded."""
    return ROUNDINGS * torch.finfo(dtype).eps + SUMMATION * torch.finfo(torch.float32).eps


def size_of(dtype: torch.dtype, largest_value: float, scale: float) -> float:
    """What errors of a tensor are relative to: its largest value, as in the original documents.

    Where the terms of a gradient cancel, as they do with a few tokens, less may be left than their
    rounding. Then it is so much that the rounding band is what is accepted; in fp32 and fp64, for
    which no relative error was ever set, the scale of the terms if nothing is left.
    """
    if dtype in _HALF:
        return max(largest_value, _band(dtype) / ACCEPTED_GRADIENT * scale)
    return largest_value if largest_value > _ZERO * scale else scale


def limit_of(
    tensor: str, dtype: torch.dtype, plain: float, largest_value: float, scale: float
) -> float:
    """The largest error that passes.

    Twice the error of plain torch and a rounding band; in half precision never more than what is
    accepted; in fp64, where plain torch is the oracle itself, a fixed band.

    Args:
        tensor: its name.
        dtype: of the inputs.
        plain: error of plain torch.
        largest_value: of the whole tensor.
        scale: of the terms that the tensor is the sum of.
    """
    if dtype is torch.float64:
        return FP64_BAND * scale
    limit = FACTOR * plain + _band(dtype) * scale
    accepted = accepted_relative(tensor, dtype)
    if accepted is None:
        return limit
    return min(limit, accepted * size_of(dtype, largest_value, scale))


def compare(
    tensor: str,
    rank: int,
    got: Tensor,
    want: Tensor,
    *,
    dtype: torch.dtype,
    plain: float,
    largest_value: float,
    scale: float,
) -> Error:
    """The error of one rank's tensor.

    Args:
        tensor: its name.
        rank: whose it is.
        got, want: what was computed, and the rank's part of the oracle's tensor.
        dtype: of the inputs.
        plain: error of plain torch.
        largest_value: of the whole tensor.
        scale: of the terms that the tensor is the sum of.
    """
    if got.shape != want.shape:
        raise ValueError(f"{tensor} has shape {tuple(got.shape)}, not {tuple(want.shape)}")
    apart = difference(got, want)
    count = max(1, apart.numel())
    worst = largest(apart)
    return Error(
        tensor,
        rank,
        max=worst,
        mean=float(apart.sum()) / count,
        rmse=float(apart.square().sum() / count) ** 0.5,
        relative=worst / (size_of(dtype, largest_value, scale) or 1.0),
        plain=plain,
        limit=limit_of(tensor, dtype, plain, largest_value, scale),
    )
