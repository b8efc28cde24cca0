"""What transformers' attention arguments mean for ring attention, and which of them it refuses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..comm import check_mode, rank_and_size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Keywords of transformers' attention calls that would change the result.
_UNSUPPORTED = {
    "block_indices": "sparse attention is not supported",
    "block_table": "a paged cache is not supported",
    "cache": "a paged cache is not supported",
    "cu_seq_lens_k": "the documents are what update_ring_flash_attn_params was told",
    "cu_seq_lens_q": "the documents are what update_ring_flash_attn_params was told",
    "head_mask": "head masks are not supported",
    "indices": "sparse attention is not supported",
    "k_cache": "a paged cache is not supported",
    "output_attentions": "attention weights are never formed",
    "position_bias": "additive biases are not supported",
    "v_cache": "a paged cache is not supported",
}


HOW_TO_PASS_POSITIONS = (
    "each rank holds a contiguous slice of the packed sequence, so pass position_ids[:, mine], or "
    "ring_flash_attn.position_ids('flat_contiguous', cu_seqlens=cu_seqlens, group=group)[None]"
)


def window_size(sliding_window: int | None) -> tuple[int, int]:
    """Translate transformers' window, which counts the query's own key, to flash-attn's."""
    if sliding_window is None:
        return (-1, -1)
    if sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, not {sliding_window}")
    return (sliding_window - 1, 0)


def deterministic(flag: bool | None) -> bool:
    """Let the environment decide where the caller does not, as transformers does."""
    if flag is None:
        return os.environ.get("FLASH_ATTENTION_DETERMINISTIC", "0") == "1"
    return flag


def check_shapes(query: Tensor, key: Tensor, query_length: int) -> None:
    """Refuse a batch, and keys from a cache; tensors are (batch, seqlen, nheads, headdim)."""
    if query.shape[0] != 1:
        raise ValueError(
            f"ring attention takes one packed sequence, not a batch of {query.shape[0]}: "
            "concatenate the sequences and give their lengths to update_ring_flash_attn_params"
        )
    if not query_length == query.shape[1] == key.shape[1]:
        raise ValueError(
            f"{query.shape[1]} queries (query_length {query_length}) against {key.shape[1]} keys: "
            "ring attention has no KV cache; call use_ring_attn(False) to generate"
        )


def check_mask(attention_mask: Tensor | None, is_causal: bool) -> None:
    """Refuse every mask but a causal one; (batch, seqlen) of ones is no mask."""
    if not is_causal:
        raise ValueError("is_causal=False: the substituted attention is causal")
    if attention_mask is None:  # what transformers sends where nothing is masked: no device sync
        return
    if attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}: ring attention takes no mask "
            "but its documents'; give those to update_ring_flash_attn_params"
        )
    masked = int((attention_mask == 0).sum())
    if masked:
        raise ValueError(
            f"attention_mask hides {masked} of {attention_mask.numel()} tokens: drop the padding, "
            "or make it a document of its own in update_ring_flash_attn_params"
        )


def check_positions(
    position_ids: Tensor, size: int, documents: Mapping[str, Any], group: ProcessGroup | None
) -> None:
    """Refuse positions that contradict the documents; one device sync if they do not.

    Positions in the whole sequence, across documents, are accepted too: rotary embeddings see
    differences alone. `RFA_CHECK=off` accepts all, for those who change positions on purpose. Zeros
    up to the end of the sequence are padding, whether it is part of the last document or one of
    its own.

    Positions are (1, size), or (axes, 1, size) of multimodal models. With several axes only this is
    known: all are 0 at the start of a document, and nowhere else.
    """
    if check_mode() == "off":
        return
    if position_ids.numel() == 0 or position_ids.numel() % size:
        raise ValueError(
            f"position_ids has shape {tuple(position_ids.shape)}, but this rank holds {size} tokens"
        )
    found = position_ids.detach().reshape(-1, size)
    expected = _positions(size, documents, position_ids.device)
    several = len(found) > 1
    found, expected = (found.any(0), expected > 0) if several else (found[0], expected)
    wrong = found != expected
    if not wrong.any():
        return
    first = int(wrong.nonzero()[0])
    if not several:
        end = documents["local_k_slice"].start + int(documents["cu_seqlens_k"][-1])
        if torch.equal(found, torch.arange(end - size, end, device=found.device)):
            return
    if _is_padding(found, first, documents, group):
        return
    if several:
        states = "a document starts at" if expected[first] == 0 else "no document starts at"
        raise ValueError(
            f"position_ids: {states} token {first} of this rank; {HOW_TO_PASS_POSITIONS}"
        )
    raise ValueError(
        f"position_ids: token {first} of this rank has position {int(found[first])}, but is at "
        f"{int(expected[first])} in the documents that update_ring_flash_attn_params was told: "
        f"{HOW_TO_PASS_POSITIONS}"
    )


def _positions(size: int, documents: Mapping[str, Any], device: torch.device) -> Tensor:
    """Where the tokens of a rank are in their documents, without reading from the device."""
    cu_q, cu_k = (
        documents[key].to(device, torch.int64) for key in ("cu_seqlens_q", "cu_seqlens_k")
    )
    tokens = torch.arange(size, device=device)
    document = torch.searchsorted(cu_q[1:-1].contiguous(), tokens, right=True)
    return tokens + (cu_k.diff() - cu_q[1:])[document]  # the last query is at the last key


def _is_padding(
    found: Tensor, first: int, documents: Mapping[str, Any], group: ProcessGroup | None
) -> bool:
    """Whether tokens from `first` on are zeros in the last document, but not all of the sequence.

    The same on all ranks that padding reaches, so that none waits for another that refuses.
    """
    start = int(documents["cu_seqlens_q"][-2])
    if first < start or found[first:].any():
        return False
    return bool(found.any()) or rank_and_size(group)[0] > 0


def check_keywords(kwargs: Mapping[str, Any]) -> None:
    """Refuse the keywords that would change the result, and let the model's own pass."""
    for name, reason in _UNSUPPORTED.items():
        value = kwargs.get(name)
        if value is not None and value is not False:
            shown = tuple(value.shape) if isinstance(value, Tensor) else value
            raise ValueError(f"{name}={shown!r}: {reason} in ring attention")


def check_chunks(module: Any) -> None:
    """Refuse chunked attention: transformers' own check sees only this rank's length."""
    chunk = getattr(module.config, "attention_chunk_size", None)
    if chunk is not None:
        raise ValueError(f"attention_chunk_size={chunk}: ring attention does not do chunks")


def target_dtype(module: Any, query: Tensor) -> torch.dtype | None:
    """Find the dtype that a layer computes in whose inputs something has cast to fp32 (PEFT)."""
    if query.dtype != torch.float32:
        return None
    if torch.is_autocast_enabled(query.device.type):
        return torch.get_autocast_dtype(query.device.type)
    config = module.config
    if hasattr(config, "_pre_quantization_dtype"):  # transformers 4, quantised
        return _dtype(config._pre_quantization_dtype)
    if hasattr(config, "_is_quantized"):  # transformers 5, quantised
        return _dtype(config.dtype)
    linear = (layer for layer in module.modules() if isinstance(layer, torch.nn.Linear))
    return next((layer.weight.dtype for layer in linear), None)


def _dtype(value: Any) -> torch.dtype | None:
    return value if isinstance(value, torch.dtype) else None


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Cast an fp32 tensor, and no other, to a layer's `target_dtype`."""
    return tensor if dtype is None or tensor.dtype != torch.float32 else tensor.to(dtype)
