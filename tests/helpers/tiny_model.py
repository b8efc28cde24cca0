"""A tiny language model with GQA and RoPE, in which attention can be replaced; and batches for it.

`expected` runs it document by document with torch's own attention: no code of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, NHEADS, NHEADS_K, HEADDIM = 11, 16, 4, 2, 4
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class TinyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (NHEADS + 2 * NHEADS_K) * HEADDIM)
        self.out = nn.Linear(NHEADS * HEADDIM, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

    def forward(self, x: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        qkv = self.qkv(F.layer_norm(x, (WIDTH,))).unflatten(-1, (-1, HEADDIM))
        q, k, v = qkv.split((NHEADS, NHEADS_K, NHEADS_K), dim=-2)
        x = x + self.out(attention(rotate(q, positions), rotate(k, positions), v).flatten(-2))
        return x + self.mlp(F.layer_norm(x, (WIDTH,)))


class TinyModel(nn.Module):
    """Tensors of tokens are (…, tokens); attention gets (…, tokens, nheads, headdim)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(TinyLayer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(self, input_ids: Tensor, position_ids: Tensor, attention: Attention) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, position_ids, attention)
        logits: Tensor = self.head(F.layer_norm(x, (WIDTH,)))
        return logits


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE; positions are (…, tokens)."""
    half = HEADDIM // 2
    angles = positions[..., None, None] * 10.0 ** -torch.arange(half, dtype=x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat(
        [a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1
    )


def plain_attention(causal: bool = True) -> Attention:
    """torch's own; (batch, tokens, nheads, headdim)."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(-2, -3) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return out.transpose(-2, -3)

    return run


Document = tuple[Tensor, Tensor, Tensor]  # ids, labels (not shifted), weights


def expected(
    documents: Sequence[Document], causal: bool = True, model: TinyModel | None = None
) -> dict[str, Any]:
    """Loss, gradients by name, and logits of every document, on one device."""
    model = model or TinyModel()
    total, items, logits = torch.zeros((), dtype=torch.float64), 0.0, []
    for ids, labels, weights in documents:
        found = model(ids[None], torch.arange(len(ids))[None], plain_attention(causal))[0]
        logits.append(found.detach())
        each = F.cross_entropy(found[:-1], labels[1:], reduction="none")
        total = total + (each * weights[1:]).sum()
        items += ((labels[1:] != -100) * weights[1:]).sum().item()
    loss = total / items
    loss.backward()
    return {"loss": loss.detach(), "grads": gradients(model), "logits": logits}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }


def random_documents(lengths: Sequence[int], seed: int = 0) -> list[Document]:
    """Some labels are -100, and weights differ."""
    torch.manual_seed(seed)
    found = []
    for length in lengths:
        ids = torch.randint(VOCABULARY, (length,))
        labels = ids.masked_fill(torch.rand(length) < 0.2, -100)
        found.append((ids, labels, torch.rand(length, dtype=torch.float64) + 0.5))
    return found


def without_weights(documents: Sequence[Document]) -> list[Document]:
    return [(ids, labels, torch.ones_like(weights)) for ids, labels, weights in documents]


def stacked(documents: Sequence[Document]) -> dict[str, Tensor]:
    """A batch of equal sequences."""
    ids, labels, _ = (torch.stack(part) for part in zip(*documents, strict=True))
    return {"input_ids": ids, "labels": labels}


def flattened(documents: Sequence[Document]) -> dict[str, Any]:
    """One row, documents one after the other, with cu_seqlens."""
    ids, labels, weights = (torch.cat(part)[None] for part in zip(*documents, strict=True))
    lengths = torch.tensor([0, *(len(each[0]) for each in documents)])
    cu_seqlens = lengths.cumsum(0)
    return {"input_ids": ids, "labels": labels, "loss_weights": weights, "cu_seqlens": cu_seqlens}


def padded(documents: Sequence[Document], left: bool = False) -> dict[str, Tensor]:
    """A row for each document, with padding, of which attention_mask tells."""
    longest = max(len(each[0]) for each in documents) + 1
    kinds = [*zip(*documents, strict=True), [torch.ones_like(each[0]) for each in documents]]
    names = zip(("input_ids", "labels", "loss_weights", "attention_mask"), (3, -100, 5.0, 0))
    found = {}
    for (name, fill), parts in zip(names, kinds, strict=True):
        rows = []
        for part in parts:
            rest = longest - len(part)
            rows.append(F.pad(part, (rest, 0) if left else (0, rest), value=fill))
        found[name] = torch.stack(rows)
    return found
