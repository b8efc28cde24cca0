"""This rank's part of each tensor of a batch, and the targets of its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..engine import checks
from ..plan.layout import Layout, spans
from .batches import DOCUMENTS, IGNORE, Stream

# The dimension of tokens of what every batch may have; and what is not passed on.
_DIMS = {"input_ids": -1, "inputs_embeds": -2, "position_ids": -1, "shift_labels": -1}
CONSUMED = ("attention_mask", "labels", "loss_weights", *DOCUMENTS)


def check_dims(
    batch: Mapping[str, Any], dims: Mapping[str, int | None] | None
) -> dict[str, int | None]:
    """The dimension of tokens of every tensor in the batch that has one."""
    if "documents" in batch:
        raise ValueError("batch has documents: it is sharded already")
    if "labels" in batch and "shift_labels" in batch:
        raise ValueError("batch has labels and shift_labels: give one of them")
    if "loss_weights" in batch and "labels" not in batch:
        raise ValueError("batch has loss_weights without labels to shift them with")
    dims = dict(dims or {})
    for name, dim in dims.items():
        if name not in batch or name in (*_DIMS, *CONSUMED):
            raise ValueError(f"dims names {name!r}, which is no other tensor of the batch")
        checks.check_tensor(name, batch[name])
        dims[name] = None if dim is None else checks.check_integer(f"dims[{name!r}]", dim)
    dims |= {name: dim for name, dim in _DIMS.items() if name in batch}
    unknown = [n for n, x in batch.items() if isinstance(x, Tensor) and n not in (*dims, *CONSUMED)]
    if unknown:
        raise ValueError(
            f"batch has {', '.join(unknown)}: say in dims which dimension holds the tokens, or None"
        )
    return dims


def check_sizes(stream: Stream, layout: Layout, world_size: int, divisor: int) -> None:
    """Every rank's tokens are a multiple of the divisor."""
    sizes = [
        sum(span.length for span in spans(layout, stream.lengths, rank, world_size))
        for rank in range(world_size)
    ]
    if any(size % divisor for size in sizes):
        raise ValueError(
            f"layout {layout.name!r} gives the ranks {sizes} of {sum(sizes)} tokens: it cannot "
            f"keep to divisor = {divisor}"
        )


def take(name: str, x: Tensor, dim: int, index: Tensor, stream: Stream, fill: float) -> Tensor:
    """The tokens at these places; `fill` where there is none (-1)."""
    checks.check_tensor(name, x)
    if name == "position_ids" and x.dim() <= len(stream.shape):
        x = x.expand(stream.shape)
    shape = stream.shape
    dim = dim + x.dim() if dim < 0 else dim
    if dim < len(shape) - 1 or tuple(x.shape[dim - len(shape) + 1 : dim + 1]) != shape:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}: the dimensions up to its {dim} must be the "
            f"tokens' {shape}"
        )
    rows = stream.packed and len(shape) == 2
    if rows:
        x, dim = x.flatten(dim - 1, dim), dim - 1
    padding = (index < 0).to(x.device)
    found = x.index_select(dim, index.clamp(min=0).to(x.device))
    if bool((index < 0).any()):
        found = found.masked_fill(padding.view(-1, *[1] * (found.dim() - dim - 1)), fill)
    return found.unsqueeze(dim) if rows else found


def targets(batch: Mapping[str, Any], stream: Stream, after: Tensor) -> dict[str, Any]:
    """shift_labels, shift_loss_weights and num_items_in_batch; nothing without labels."""
    if "shift_labels" in batch:
        everything = take("shift_labels", batch["shift_labels"], -1, stream.source, stream, IGNORE)
        return {"num_items_in_batch": count(everything, None)}
    if "labels" not in batch:
        return {}
    found, whole = {}, {}
    for name, fill in (("labels", IGNORE), ("loss_weights", 0)):
        if name in batch:
            whole[name] = take(name, batch[name], -1, stream.following, stream, fill)
            found[f"shift_{name}"] = take(name, batch[name], -1, after, stream, fill)
    return {**found, "num_items_in_batch": count(whole["labels"], whole.get("loss_weights"))}


def count(shift_labels: Tensor, weights: Tensor | None) -> Tensor:
    """How many targets there are; or their weight."""
    counted = shift_labels != IGNORE
    if weights is None:
        return counted.sum()
    wide = torch.promote_types(weights.dtype, torch.float32)
    return (weights.to(wide) * counted).sum()
