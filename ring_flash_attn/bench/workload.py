"""Workloads: one attention call on one device, in numbers; and those that have a name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..engine.attention import QKV
from ..engine.checks import check_tensors
from ..plan.tiles import Mask
from . import names
from .names import DTYPES

BACKWARD_FLOPS = 2.5  # times those of the forward pass
_SEED = 0


def find_dtype(name: str) -> torch.dtype:
    """By its long or short name; ValueError if there is none."""
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; choose one of {', '.join(DTYPES)}")
    found: torch.dtype = getattr(torch, DTYPES[name])
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """As in files: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Workload:
    """A call on (batch, seqlen, nheads, headdim).

    Attributes:
        batch, seqlen, nheads, nheads_k, headdim, dtype: of q, k and v; queries as many as keys.
        causal: queries see no later keys.
        window: keys to the left and to the right that a query sees; -1: all.
    """

    batch: int = 2
    seqlen: int = 1024
    nheads: int = 8
    nheads_k: int = 8
    headdim: int = 64
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        for name in ("batch", "seqlen", "nheads", "nheads_k", "headdim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if min(self.window) < -1:
            raise ValueError(f"window {self.window}: sides are -1 (all keys) or more")
        heads = (self.nheads, self.nheads_k, self.nheads_k)
        shapes = [(self.batch, 1, each, self.headdim) for each in heads]
        q, k, v = (torch.empty(shape, dtype=self.dtype, device="meta") for shape in shapes)
        check_tensors(q, k, v, packed=False)

    def __str__(self) -> str:
        heads = f"{self.nheads}/{self.nheads_k}" if self.nheads_k != self.nheads else self.nheads
        seen = "causal" if self.causal else "full"
        if self.window != (-1, -1):
            seen += f", window {self.window[0]},{self.window[1]}"
        return (
            f"batch {self.batch}, seqlen {self.seqlen}, heads {heads}, headdim {self.headdim}, "
            f"{seen}, {dtype_name(self.dtype)}"
        )

    @property
    def mask(self) -> Mask:
        """What queries see."""
        return Mask.of(causal=self.causal, window_size=self.window)

    @cached_property
    def pairs(self) -> int:
        """Allowed (query, key) pairs of one sequence and head."""
        rows = torch.arange(self.seqlen)
        left, right = self.mask.left, self.mask.right
        first = torch.zeros_like(rows) if left is None else (rows - left).clamp(min=0)
        last = rows.new_full(rows.shape, self.seqlen - 1)
        if right is not None:
            last = torch.minimum(last, rows + right)
        return int((last - first + 1).clamp(min=0).sum())

    @property
    def flops(self) -> int:
        """Of the forward pass."""
        return 4 * self.batch * self.nheads * self.pairs * self.headdim

    def tensors(self, device: torch.device) -> tuple[QKV, Tensor]:
        """Random (q, k, v), and dout."""
        generator = torch.Generator(device).manual_seed(_SEED)

        def make(nheads: int) -> Tensor:
            shape = (self.batch, self.seqlen, nheads, self.headdim)
            return torch.randn(shape, generator=generator, dtype=self.dtype, device=device)

        qkv = make(self.nheads), make(self.nheads_k), make(self.nheads_k)
        return qkv, make(self.nheads)

    def to_dict(self) -> dict[str, object]:
        """Plain values."""
        return {
            "batch": self.batch,
            "seqlen": self.seqlen,
            "nheads": self.nheads,
            "nheads_k": self.nheads_k,
            "headdim": self.headdim,
            "causal": self.causal,
            "window": list(self.window),
            "dtype": dtype_name(self.dtype),
        }


PRESETS: Mapping[str, Workload] = {
    name: Workload(**preset._asdict()) for name, preset in names.PRESETS.items()
}
