"""What TMA asks of tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def fit(x: Tensor) -> Tensor:
    """The tensor, or a copy if TMA cannot read it."""
    size, aligned = x.element_size(), x.data_ptr() % 16 == 0
    if aligned and x.is_contiguous() and x.shape[-1] * size % 16 == 0:  # the usual case, sooner
        return x
    fits = aligned and x.stride(-1) == 1
    for length, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        fits = fits and (length == 1 or (stride > 0 and stride * size % 16 == 0))
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def tma_strides(x: Tensor) -> tuple[int, ...]:
    """Of all dimensions but the last: those of length 1 may have any, but all are checked."""
    pairs = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    return tuple(stride if length > 1 else 64 for length, stride in pairs)
