"""One call in fp64, how exercises lay out its tensors, and a mistake in words."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

INF = float("inf")
LN2 = math.log(2.0)
TILES = (8, 16, 24, 32, 40, 48, 64, 96, 128)

# The key of a mistake, and results after it. NaN stands for "anything": rows that it leaves open.
Suspect = tuple[str, dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Mistake:
    """Its name, how one sees it, and what helps, short of the solution."""

    name: str
    says: str
    hint: str


@dataclass(frozen=True, slots=True)
class Setting:
    """One call, in fp64: q (batch, heads, rows, d); k and v with heads_k heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    sinks: Tensor | None = None
    documents: tuple[int, ...] | None = None
    tiles: tuple[tuple[int, int], ...] = ()  # (rows, keys) that the learner was told, if any
    world_size: int = 1
    out: Tensor | None = None  # backward: what was handed in
    lse: Tensor | None = None
    dout: Tensor | None = None

    @property
    def rows(self) -> int:
        """Queries."""
        return self.q.shape[2]

    @property
    def keys(self) -> int:
        """Keys."""
        return self.k.shape[2]

    @property
    def scale(self) -> float:
        """1/√d."""
        return float(self.q.shape[-1] ** -0.5)

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def masked(self) -> bool:
        """Some key may be hidden; so a row may see nothing, at first or at all."""
        return self.causal or self.window != (-1, -1) or self.documents is not None

    @property
    def key_tiles(self) -> tuple[int, ...]:
        """Widths that the learner's tiles may have."""
        told = tuple(keys for _, keys in self.tiles)
        return tuple(n for n in dict.fromkeys(told or TILES) if n <= 2 * self.keys)

    @property
    def all_tiles(self) -> tuple[tuple[int, int], ...]:
        """Tiles that the learner may have."""
        sizes = (8, 16, 32, 64, 128)
        return self.tiles or tuple((a, b) for a in sizes for b in sizes)

    def describe(self, *more: str) -> str:
        """The call in words."""
        words = ["causal" if self.causal else "full"]
        words.append(f"{self.rows} queries × {self.keys} keys, d {self.q.shape[-1]}")
        if self.window != (-1, -1):
            words.append(f"window {self.window}")
        if self.group > 1:
            words.append(f"{self.q.shape[1]} heads, {self.k.shape[1]} KV heads")
        return ", ".join([*words, *more])


def expand(x: Tensor, group: int, interleave: bool = True) -> Tensor:
    """KV heads for all query heads."""
    return x.repeat_interleave(group, 1) if interleave else x.repeat(1, group, 1, 1)


def scores_of(setting: Setting, counts: Tensor, interleave: bool = True) -> Tensor:
    """Scaled scores; a pair that counts twice has log 2 more, a hidden one −inf."""
    k = expand(setting.k, setting.group, interleave)
    return setting.q @ k.transpose(-1, -2) * setting.scale + counts.log().to(setting.q)


@dataclass(frozen=True, slots=True)
class Form:
    """How an exercise lays out (batch, heads, rows, d) and (batch, heads, rows), and back."""

    wide: Callable[[Tensor], Tensor]
    narrow: Callable[[Tensor], Tensor]
    wide_back: Callable[[Tensor], Tensor]
    narrow_back: Callable[[Tensor], Tensor]

    def learner(self, name: str, x: Tensor) -> Tensor:
        """As the learner returns it."""
        return (self.narrow if name in ("lse", "m", "total") else self.wide)(x)

    def ours(self, name: str, x: Tensor) -> Tensor:
        """As a setting and suspects have it."""
        return (self.narrow_back if name in ("lse", "m", "total") else self.wide_back)(x)

    def setting(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Setting:
        """Of the learner's arguments."""
        q, k, v = (self.ours("out", x.double()) for x in (q, k, v))
        return Setting(q, k, v, **options)


def same(x: Tensor) -> Tensor:
    """Unchanged."""
    return x


PLAIN = Form(lambda x: x[:, 0], lambda x: x[:, 0], lambda x: x[:, None], lambda x: x[:, None])
HEADS = Form(lambda x: x.transpose(1, 2), same, lambda x: x.transpose(1, 2), same)
PACKED = Form(
    lambda x: x[0].transpose(0, 1),
    lambda x: x[0],
    lambda x: x.transpose(0, 1)[None],
    lambda x: x[None],
)
FLAT = Form(lambda x: x[0, 0], lambda x: x[0, 0], lambda x: x[None, None], lambda x: x[None, None])


def random(*shape: int, seed: int = 0) -> Tensor:
    """fp32, always the same."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
