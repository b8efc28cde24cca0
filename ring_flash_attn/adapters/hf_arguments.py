"""What transformers' attention arguments mean for ring attention, and which of them it refuses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

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
