"""A decoder-only Transformer, written out: RMSNorm, RoPE, SwiGLU, attention by choice, and AdamW.

One layer, with x the residual stream:

    x = x + attention(norm(x))        x = x + SwiGLU(norm(x))

Nothing is tied: the embedding and the last projection are two matrices. Attention is standard (the
matrix of scores in memory) or the library's kernel; both give the same numbers.

Ranges for Nsight and torch.profiler lie around scores, softmax and value product. They cost nothing
unless a profiler asks for them, and torch.compile does not see them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from ...trace import span
from .config import OURS, STANDARD, ModelSize


def named(name: str) -> AbstractContextManager[object]:
    """A range for profilers; nothing while torch.compile looks."""
    return nullcontext() if torch.compiler.is_compiling() else span(name)


class RMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · weight, over the last dimension.

    The mean is taken in fp32: squares of bf16 numbers lose digits, those of fp16 overflow.
    """

    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(d_model)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


class RoPE(nn.Module):
    """Rotary positions: dimensions (2i, 2i+1) of position p turn by the angle p · base^(−2i/d).

    q · k of two turned vectors depends on their distance alone.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, headdim: int, context: int, base: float = 10_000.0) -> None:
        super().__init__()
        speeds = base ** (-torch.arange(0, headdim, 2).float() / headdim)
        angles = torch.arange(context)[:, None] * speeds  # (context, headdim / 2)
        for name, table in (("cos", angles.cos()), ("sin", angles.sin())):
            self.register_buffer(name, table[:, None], persistent=False)  # the same for all heads

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, rows, heads, headdim), from position 0 on."""
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
        return turned.flatten(-2).to(x.dtype)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) ∘ up(x)), with silu(x) = x · sigmoid(x)."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return found


# Attention: causal, tensors (batch, rows, heads, headdim).


def attend_standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Step 3, with heads: every score is written to memory, and read again."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    rows = q.shape[2]
    with named("scores"):
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        hidden = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    with named("softmax"):
        p = scores.softmax(-1)
    with named("value product"):
        return (p @ v).transpose(1, 2)


def attend_ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The library's kernel: scores, softmax and value product in one launch."""
    from ...api import flash_attn_func

    with named("scores, softmax and value product"):
        found: Any = flash_attn_func(q, k, v, causal=True)
    return found


ATTENTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    STANDARD: attend_standard,
    OURS: attend_ours,
}


class CausalSelfAttention(nn.Module):
    """Heads of their own queries, keys and values, positions by RoPE, and a projection."""

    def __init__(self, size: ModelSize, rope: RoPE, attention: str) -> None:
        super().__init__()
        self.qkv = nn.Linear(size.d_model, 3 * size.d_model, bias=False)
        self.out = nn.Linear(size.d_model, size.d_model, bias=False)
        self.heads, self.rope, self.attend = size.heads, rope, ATTENTIONS[attention]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        with named("attention"):
            found = self.attend(self.rope(q), self.rope(k), v)
        out: Tensor = self.out(found.flatten(2))
        return out


class DecoderLayer(nn.Module):
    """Attention, then SwiGLU; each reads a normed stream and adds to it."""

    def __init__(self, size: ModelSize, rope: RoPE, attention: str) -> None:
        super().__init__()
        self.norm_attention, self.norm_ff = RMSNorm(size.d_model), RMSNorm(size.d_model)
        self.attention = CausalSelfAttention(size, rope, attention)
        self.ff = SwiGLU(size.d_model, size.d_ff)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        with named("feed-forward"):
            return x + self.ff(self.norm_ff(x))


class Transformer(nn.Module):
    """Tokens (batch, rows) to logits (batch, rows, vocab)."""

    def __init__(
        self, size: ModelSize, vocab: int, context: int, attention: str = STANDARD
    ) -> None:
        super().__init__()
        rope = RoPE(size.d_model // size.heads, context)
        self.embedding = nn.Embedding(vocab, size.d_model)
        self.layers = nn.ModuleList(DecoderLayer(size, rope, attention) for _ in range(size.layers))
        self.norm = RMSNorm(size.d_model)
        self.logits = nn.Linear(size.d_model, vocab, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.logits(self.norm(x))
        return found


def forward_flops(size: ModelSize, vocab: int, batch: int, context: int) -> float:
    """Of matrix products, two for each weight and token; of the pairs that causal attention sees.

    Backward takes twice as many.
    """
    weights = size.layers * size.d_model * (4 * size.d_model + 3 * size.d_ff)
    pairs = size.layers * context * (context + 1) / 2
    tokens = batch * context
    return 2.0 * tokens * (weights + size.d_model * vocab) + 4.0 * batch * pairs * size.d_model


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay: two numbers for each parameter, m and v.

    m ← β₁ m + (1 − β₁) g        v ← β₂ v + (1 − β₂) g²
    θ ← θ − lr · λ · θ − lr · (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        values = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, values)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        assert closure is None, "gradients come from backward()"
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for x in group["params"]:
                if x.grad is None:
                    continue
                state = self.state[x]
                if not state:
                    state |= {"t": 0, "m": torch.zeros_like(x), "v": torch.zeros_like(x)}
                state["t"] += 1
                m, v, t = state["m"], state["v"], state["t"]
                m.lerp_(x.grad, 1 - beta1)
                v.mul_(beta2).addcmul_(x.grad, x.grad, value=1 - beta2)
                x.mul_(1 - lr * group["weight_decay"])
                root = (v / (1 - beta2**t)).sqrt_().add_(group["eps"])
                x.addcdiv_(m, root, value=-lr / (1 - beta1**t))
