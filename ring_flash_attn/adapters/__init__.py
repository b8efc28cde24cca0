"""Where other projects plug in: Hugging Face transformers, and the historic module paths."""

from .hf_adapter import shift_labels, substitute_hf_flash_attn, update_ring_flash_attn_params

__all__ = ["shift_labels", "substitute_hf_flash_attn", "update_ring_flash_attn_params"]
