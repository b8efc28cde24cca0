"""Where other projects plug in: Hugging Face transformers, and the historic module paths."""

import sys
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


def watch_transformers() -> None:
    """Let transformers' models refuse documents if they were not prepared for them.

    Else most would hand them down as one more keyword, and compute on this rank's tokens alone.
    Does nothing until models are loaded, and then nothing more.
    """
    if "transformers.modeling_utils" in sys.modules:
        before_shard = import_module("..api.context_parallel", __name__).before_shard
        import_module(".hf_adapter", __name__).register_hf_attention()
        before_shard.remove(watch_transformers)
