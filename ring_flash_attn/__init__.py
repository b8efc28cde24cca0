"""Exact softmax attention over a sequence that is spread over many GPUs.

Three independent choices make an algorithm: layout (who holds which tokens), route (what travels),
kernel (who does the arithmetic). `ring_attention` takes all three; the other functions are points.
"""

from importlib.metadata import PackageNotFoundError, version

from . import api
from .adapters import module_paths, substitute_hf_flash_attn, update_ring_flash_attn_params
from .api import *  # noqa: F403
from .llama3 import llama3_flash_attn_prepare_cu_seqlens
from .sharding import position_ids, shard, unshard
from .virtual import virtual_ring_attention

try:
    __version__ = version("ring-flash-attn")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"

module_paths.register()

__all__ = [
    *api.__all__,
    "llama3_flash_attn_prepare_cu_seqlens",
    "position_ids",
    "shard",
    "substitute_hf_flash_attn",
    "unshard",
    "update_ring_flash_attn_params",
    "virtual_ring_attention",
]
