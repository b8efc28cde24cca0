"""Gathers the shards of all ranks; the gradients of all copies are summed, or sliced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import comm

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

GRADS = ("sum", "slice")


def check_grad(grad: object) -> None:
    """ValueError unless it is a way for gradients to go back, or None."""
    if grad is not None and not (isinstance(grad, str) and grad in GRADS):
        raise ValueError(f"grad must be {' or '.join(map(repr, GRADS))}, or None, not {grad!r}")


def gather(
    x: Tensor, shapes: Sequence[tuple[int, ...]], group: ProcessGroup, grad: str | None
) -> list[Tensor]:
    """All ranks' shards, of these shapes, on every rank; differentiable once if `grad` says how."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return comm.gather_shards(x.contiguous(), shapes, group)
    assert grad is not None  # refused before
    return list(_GatherFunction.apply(x, shapes, group, grad))


class _GatherFunction(torch.autograd.Function):
    """Every rank has its own copy of all shards, and so gradients for all of them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shapes: Sequence[tuple[int, ...]], group: ProcessGroup, grad: str
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.grad = group, grad
        parts = comm.gather_shards(x.contiguous(), shapes, group, grad)
        rank, _ = comm.rank_and_size(group)
        parts[rank] = x.view_as(x)
        return tuple(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rank, _ = comm.rank_and_size(ctx.group)
        own = grads[rank]
        if ctx.grad == "sum":
            found = comm.exchange_shards([part.contiguous() for part in grads], ctx.group)
            wide = torch.promote_types(own.dtype, torch.float32)
            total = found[0].to(wide, copy=True)
            for part in found[1:]:  # in the order of ranks, whatever arrives first
                total += part
            own = total.to(own.dtype)
        return own, None, None, None
