"""Where other projects plug in: Hugging Face transformers, and the historic module paths."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .hf_adapter import (
        prepare_hf_model,
        register_hf_attention,
        shift_labels,
        substitute_hf_flash_attn,
        update_ring_flash_attn_params,
        use_ring_attn,
    )

__all__ = [
    "prepare_hf_model",
    "register_hf_attention",
    "shift_labels",
    "substitute_hf_flash_attn",
    "update_ring_flash_attn_params",
    "use_ring_attn",
]


def __getattr__(name: str) -> Any:
    """Import the adapter, and torch with it, when it is first used."""
    if name not in (*__all__, "hf_adapter"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    adapter = import_module(".hf_adapter", __name__)
    return adapter if name == "hf_adapter" else getattr(adapter, name)
