"""What other projects import from `ring_flash_attn.utils` and `ring_flash_attn.triton_utils`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["flatten_varlen_lse", "get_default_args", "unflatten_varlen_lse", "update_out_and_lse"]


def get_default_args(func: Callable[..., Any]) -> dict[str, Any]:
    """Look up the default of each positional argument of a function or a torch custom operator.

    None where there is none, 0.0 for `softcap`.
    """
    parameters = inspect.signature(getattr(func, "_init_fn", func)).parameters.values()
    defaults = {
        p.name: None if p.default is p.empty else p.default
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    }
    if "softcap" in defaults:
        defaults["softcap"] = 0.0
    return defaults


def update_out_and_lse(
    out: Tensor | None,
    lse: Tensor | None,
    block_out: Tensor,
    block_lse: Tensor,
    slice_: Any = None,
) -> tuple[Tensor, Tensor]:
    """Merge attention over one block of keys into attention over the blocks before it.

    Rows that saw no key have lse −inf (+inf, as FlashAttention-2 writes it, in a block is read
    as −inf), and a merge of two of them is again one, without a NaN.

    Args:
        out, lse: (..., seqlen, nheads, headdim or 1) in fp32; None for the first block.
        block_out, block_lse: (..., seqlen, nheads, headdim), any dtype; (..., nheads, seqlen).
        slice_: an index of the rows of `out` and `lse` the block is for, which are then written in
            place; None for all, in new tensors.
    """
    block_lse = block_lse.to(torch.float32).transpose(-2, -1).unsqueeze(-1)
    block_lse = block_lse.masked_fill(block_lse == torch.inf, -torch.inf)
    if out is None or lse is None:
        if slice_ is not None:
            raise ValueError(f"slice_={slice_!r} of a first block: out and lse are None")
        return block_out.to(torch.float32, copy=True), block_lse  # ours to write a slice into
    rows = ... if slice_ is None else slice_
    old_out, old_lse = out[rows], lse[rows]
    new_lse = torch.logaddexp(old_lse, block_lse)
    reference = new_lse.masked_fill(new_lse == -torch.inf, 0.0)  # −inf − 0: weight 0, not NaN
    weight = (block_lse - reference).exp()
    new_out = old_out - weight * (old_out - block_out.to(torch.float32))
    if slice_ is None:
        return new_out, new_lse
    out[rows], lse[rows] = new_out, new_lse
    return out, lse


def flatten_varlen_lse(lse: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Pack a padded lse: (documents, nheads, max_seqlen) becomes (nheads, total)."""
    rows = _rows_in_use(cu_seqlens, lse.shape[-1], lse.device)
    return lse.transpose(0, 1)[:, rows]


def unflatten_varlen_lse(lse: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Pad a packed lse with 0: (total, nheads[, 1]) becomes (documents, nheads, max_seqlen)."""
    rows = _rows_in_use(cu_seqlens, max_seqlen, lse.device)
    padded = lse.new_zeros(*rows.shape, lse.shape[1])
    padded[rows] = lse.reshape(lse.shape[:2])
    return padded.transpose(1, 2).contiguous()


def _rows_in_use(cu_seqlens: Tensor, max_seqlen: int, device: torch.device) -> Tensor:
    """Mark what is not padding: (documents, max_seqlen), bool."""
    lengths = cu_seqlens.diff().to(device)
    return torch.arange(max_seqlen, device=device) < lengths[:, None]
