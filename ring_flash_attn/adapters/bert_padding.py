"""What projects import from `flash_attn.bert_padding`: padded batches to packed documents and back.

The same names, arguments and results, without flash_attn. `ContextParallel` does this, and more,
for a whole training batch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..engine import checks

__all__ = [
    "get_unpad_data",
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "rearrange",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def get_unpad_data(attention_mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """Find the tokens of a padded batch. It reads values, so the host waits for the device.

    Args:
        attention_mask: (batch, seqlen), 1 at tokens and 0 at padding, wherever it is in a row.

    Returns:
        indices (total,) of the tokens among all batch · seqlen places; cu_seqlens (batch + 1,),
        int32; the longest row's number of tokens.
    """
    _check_rows("attention_mask", attention_mask)
    indices = attention_mask.flatten().nonzero().flatten()
    lengths = attention_mask.sum(-1, dtype=torch.int32)
    cu_seqlens, longest = _cumulated(lengths)
    if int(cu_seqlens[-1]) != len(indices):
        raise ValueError(
            f"attention_mask must hold 0 and 1 alone: {len(indices)} of its entries are not 0, and "
            f"their sum is {int(cu_seqlens[-1])}"
        )
    return indices, cu_seqlens, longest


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the tokens of a padded batch, row after row; differentiable.

    Args:
        hidden_states: (batch, seqlen, …).
        attention_mask: (batch, seqlen), 1 at tokens and 0 at padding.
        unused_mask: (batch, seqlen), 1 at places that are packed too, but are no tokens.

    Returns:
        hidden_states (total, …); indices (total,), as `pad_input` wants them; cu_seqlens
        (batch + 1,), int32; the most that a row has; seqused (batch,), its tokens without unused
        places.
    """
    _check_rows("attention_mask", attention_mask, hidden_states)
    packed = attention_mask
    if unused_mask is not None:
        _check_rows("unused_mask", unused_mask, hidden_states)
        packed = attention_mask.to(torch.int32) + unused_mask.to(torch.int32)
        if bool((packed > 1).any()):
            raise ValueError("attention_mask and unused_mask must not mark the same place")
    indices, cu_seqlens, longest = get_unpad_data(packed)
    used = attention_mask.sum(-1, dtype=torch.int32)
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        cu_seqlens,
        longest,
        used,
    )


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Pack rows that hold several documents each, and padding at the end; differentiable.

    Args:
        hidden_states: (batch, seqlen, …).
        attention_mask_in_length: (batch, seqlen) integers: the lengths of a row's documents, one
            after the other, and zeros.

    Returns:
        hidden_states (total, …); indices (total,); cu_seqlens (documents + 1,), int32; the longest
        document's length.
    """
    _check_rows("attention_mask_in_length", attention_mask_in_length, hidden_states)
    seqlen = attention_mask_in_length.shape[1]
    tokens = attention_mask_in_length.sum(-1)
    if bool(((tokens > seqlen) | (attention_mask_in_length < 0).any(-1)).any()):
        raise ValueError(
            f"attention_mask_in_length has rows of {tokens.tolist()} tokens in all: lengths must "
            f"not be negative, nor their sum over {seqlen}"
        )
    is_token = torch.arange(seqlen, device=tokens.device) < tokens[:, None]
    indices = is_token.flatten().nonzero().flatten()
    lengths = attention_mask_in_length.flatten()
    cu_seqlens, longest = _cumulated(lengths[lengths != 0])
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put packed tokens back into a padded batch, with 0 at its padding; differentiable.

    Args:
        hidden_states: (total, …).
        indices: (total,), from `unpad_input`.
        batch, seqlen: of the padded batch.

    Returns:
        (batch, seqlen, …).
    """
    batch, seqlen = (
        checks.check_integer(name, x, 0) for name, x in (("batch", batch), ("seqlen", seqlen))
    )
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.unflatten(0, (batch, seqlen))


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows `indices` (total,) of `input` (rows, …); differentiable."""
    checks.check_tensor("input", input)
    return input.index_select(0, _rows(indices))


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """`values` (total, …) at the rows `indices` of (first_axis_dim, …), else 0; differentiable."""
    checks.check_tensor("values", values)
    rows = checks.check_integer("first_axis_dim", first_axis_dim, 0)
    return values.new_zeros((rows, *values.shape[1:])).index_copy(0, _rows(indices), values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Rows `indices` of `input`, and all of it for a residual connection; differentiable."""
    return index_first_axis(input, indices), input.view_as(input)


def rearrange(tensor: Any, pattern: str, **axes_lengths: int) -> Any:
    """Call einops' function, which flash_attn's module has among its names; needs einops."""
    try:
        einops = import_module("einops")
    except ModuleNotFoundError as missing:
        raise ImportError("rearrange is that of einops: `pip install einops`") from missing
    return einops.rearrange(tensor, pattern, **axes_lengths)


def _cumulated(lengths: Tensor) -> tuple[Tensor, int]:
    """cu_seqlens, and the largest length."""
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return cu_seqlens, int(lengths.max()) if len(lengths) else 0


def _rows(indices: Tensor) -> Tensor:
    checks.check_tensor("indices", indices)
    if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"indices must be one-dimensional and int32 or int64, not {tuple(indices.shape)} "
            f"{indices.dtype}"
        )
    return indices.to(torch.int64)


def _check_rows(name: str, mask: Tensor, hidden_states: Tensor | None = None) -> None:
    """(batch, seqlen), that of the hidden states."""
    checks.check_tensor(name, mask)
    if hidden_states is not None:
        checks.check_tensor("hidden_states", hidden_states)
    if mask.dim() != 2 or (hidden_states is not None and hidden_states.shape[:2] != mask.shape):
        of = "" if hidden_states is None else f" of hidden_states {tuple(hidden_states.shape)}"
        raise ValueError(f"{name} must be (batch, seqlen){of}, not {tuple(mask.shape)}")
