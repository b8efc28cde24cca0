"""Guards around what kernels read and write: NaN before and behind each tensor.

A load beyond a tensor brings NaN; a store beyond it overwrites NaN, and is seen afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .setting import Mistake

MISTAKES = {
    "outside": Mistake(
        "no mask at a load or store",
        "a kernel reads or writes beyond the end of a tensor",
        "The last tile reaches beyond the tensor. Mask every load (with other=0.0) and every "
        "store, rows and columns.",
    ),
}

_GUARD = 8192  # numbers on either side
_FACTORIES = {
    f"aten::{how}{what}" for what in ("empty", "zeros", "ones", "full") for how in ("", "new_")
} | {f"aten::{what}_like" for what in ("empty", "zeros", "ones", "full")}


class WroteOutside(RuntimeError):
    """A kernel has written beyond a tensor."""


def guarded(x: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """A copy with the same strides, between guards; and the whole buffer."""
    span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride()))
    buffer = torch.full((span + 2 * _GUARD,), float("nan"), dtype=x.dtype, device=device)
    buffer[_GUARD:-_GUARD] = x.detach().as_strided((span,), (1,), x.storage_offset())
    return buffer.as_strided(x.shape, x.stride(), _GUARD), buffer


class _Allocations(TorchDispatchMode):
    """Puts guards around what is allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Tensor, Tensor]] = []  # tensor, buffer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name not in _FACTORIES or not found.is_floating_point() or not found.numel():
            return found
        self.made.append(guarded(found, found.device))
        return self.made[-1][0]


@contextmanager
def watched() -> Iterator[None]:
    """Look for stores beyond what is allocated inside.

    Raises:
        WroteOutside: there was one.
    """
    with _Allocations() as allocations:
        yield
    for x, buffer in allocations.made:
        for where, part in (("before", buffer[:_GUARD]), ("behind", buffer[-_GUARD:])):
            count = int((~part.isnan()).sum())
            if count:
                shape = tuple(x.shape)
                raise WroteOutside(f"{count} numbers are written {where} a tensor of shape {shape}")
