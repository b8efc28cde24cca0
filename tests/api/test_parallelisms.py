"""Data × context × tensor parallelism: the gradients of one device, with accumulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from documents import block
from ranks import Ranks
from tiny_model import (
    HEADDIM,
    NHEADS,
    NHEADS_K,
    WIDTH,
    Attention,
    TinyLayer,
    TinyModel,
    expected,
    flattened,
    padded,
    random_documents,
    rotate,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

TOLERANCE: dict[str, Any] = {"rtol": 0, "atol": 1e-10}
HEADS = [NHEADS * HEADDIM, NHEADS_K * HEADDIM, NHEADS_K * HEADDIM]  # columns of q, k and v


class SplitLayer(nn.Module):
    """A TinyLayer with a projection each for q, k and v, so that heads can be split."""

    def __init__(self, layer: TinyLayer) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, n).double() for n in HEADS)
        self.out, self.mlp = layer.out, layer.mlp
        with torch.no_grad():
            for own, part in zip(self.weights(), layer.qkv.weight.split(HEADS), strict=True):
                own.copy_(part)
            for own, part in zip(self.biases(), layer.qkv.bias.split(HEADS), strict=True):
                own.copy_(part)

    def weights(self) -> list[Tensor]:
        return [self.q.weight, self.k.weight, self.v.weight]

    def biases(self) -> list[Tensor]:
        return [self.q.bias, self.k.bias, self.v.bias]

    def forward(self, x: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        normed = F.layer_norm(x, (WIDTH,))
        q, k, v = (f(normed).unflatten(-1, (-1, HEADDIM)) for f in (self.q, self.k, self.v))
        x = x + self.out(attention(rotate(q, positions), rotate(k, positions), v).flatten(-2))
        return x + self.mlp(F.layer_norm(x, (WIDTH,)))


def step(
    rank: int,
    world_size: int,
    code: str,
    shape: tuple[int, int, int],
    batches: list[list[dict[str, Any]]],
) -> dict[str, Any]:
    """One optimiser step's gradients, with the page's lines for the model and for the loss."""
    model = TinyModel()
    model.layers = nn.ModuleList(SplitLayer(layer) for layer in model.layers)  # type: ignore[arg-type]
    names: dict[str, Any] = {"shape": shape, "model": model, "batches": batches}
    names["total"] = torch.zeros(()).double()
    exec(code, names)
    assert names["mesh"].shape == shape
    local = model.layers[0].q.weight.to_local()  # type: ignore[union-attr, operator]
    ranks_of_model = shape[2] * names["everyone"].size()
    assert local.numel() == WIDTH * HEADS[0] // ranks_of_model
    grads = {name: whole(p.grad) for name, p in model.named_parameters()}
    total = names["total"]
    dist.all_reduce(total)
    return {"grads": merged(grads), "loss": total / world_size}  # of which tp compute the same


def whole(grad: Any) -> Tensor:
    assert isinstance(grad, DTensor)
    return grad.full_tensor()


def merged(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """With q, k and v as one projection again."""
    found = {}
    for name, grad in grads.items():
        if ".q." in name:
            parts = [grads[name.replace(".q.", f".{x}.")] for x in "qkv"]
            found[name.replace(".q.", ".qkv.")] = torch.cat(parts)
        elif ".k." not in name and ".v." not in name:
            found[name] = grad
    return found


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 1, 2), (2, 2, 1)], ids=str)
def test_gradients_are_those_of_one_device(
    shape: tuple[int, int, int], ranks: Callable[[int], Ranks]
) -> None:
    """Documents of every data-parallel rank, in two micro-batches of different kinds."""
    packs = [random_documents(lengths, n) for n, lengths in enumerate([(5, 1, 9), (4, 7)] * 2)]
    packs = packs[: 2 * shape[0]]
    batches = [[flattened(packs[n]), padded(packs[n + 1])] for n in range(0, len(packs), 2)]
    right = expected([document for pack in packs for document in pack])
    code = block("docs/training.md", "axes")
    for found in ranks(4).run(step, code, shape, batches):
        torch.testing.assert_close(found["loss"], right["loss"], **TOLERANCE)
        assert set(found["grads"]) == set(right["grads"])
        for name, grad in found["grads"].items():
            torch.testing.assert_close(grad, right["grads"][name], **TOLERANCE)
