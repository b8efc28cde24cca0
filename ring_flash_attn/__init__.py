"""Exact softmax attention over a sequence that is spread over many GPUs.

Three independent choices make an algorithm: layout (who holds which tokens), route (what travels),
kernel (who does the arithmetic). `ring_attention` takes all three; the other functions are points.

The public names are loaded when one of them is first used, so that what needs no torch (`rfa
--help`, a usage error) does not wait for its import.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .adapters import module_paths

if TYPE_CHECKING:
    from .adapters import prepare_hf_model as prepare_hf_model
    from .adapters import substitute_hf_flash_attn as substitute_hf_flash_attn
    from .adapters import update_ring_flash_attn_params as update_ring_flash_attn_params
    from .adapters import use_ring_attn as use_ring_attn
    from .api import *  # noqa: F403
    from .api.context_parallel import ContextParallel as ContextParallel
    from .api.llama3 import (
        llama3_flash_attn_prepare_cu_seqlens as llama3_flash_attn_prepare_cu_seqlens,
    )
    from .api.preparing import prepare as prepare
    from .api.sharding import position_ids as position_ids
    from .api.sharding import relayout as relayout
    from .api.sharding import shard as shard
    from .api.sharding import unshard as unshard
    from .api.torch_context_parallel import context_parallel as context_parallel
    from .api.torch_context_parallel import context_parallel_unshard as context_parallel_unshard
    from .api.torch_context_parallel import set_rotate_method as set_rotate_method
    from .api.virtual import virtual_ring_attention as virtual_ring_attention
    from .plan.balanced import Balanced as Balanced
    from .plan.tiles import Mask as Mask
    from .simulate.choice import Planner as Planner
    from .simulate.planner import plan_for as plan_for

    __version__: str

module_paths.register()

# Where the public names are that `api` does not have.
_HOMES = {
    "Balanced": ".plan.balanced",
    "ContextParallel": ".api.context_parallel",
    "Mask": ".plan.tiles",
    "Planner": ".simulate.choice",
    "context_parallel": ".api.torch_context_parallel",
    "context_parallel_unshard": ".api.torch_context_parallel",
    "llama3_flash_attn_prepare_cu_seqlens": ".api.llama3",
    "plan_for": ".simulate.planner",
    "position_ids": ".api.sharding",
    "prepare_hf_model": ".adapters",
    "prepare": ".api.preparing",
    "relayout": ".api.sharding",
    "set_rotate_method": ".api.torch_context_parallel",
    "shard": ".api.sharding",
    "substitute_hf_flash_attn": ".adapters",
    "unshard": ".api.sharding",
    "update_ring_flash_attn_params": ".adapters",
    "use_ring_attn": ".adapters",
    "virtual_ring_attention": ".api.virtual",
}


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ring-flash-attn")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0+unknown"


if not TYPE_CHECKING:  # else every name would be Any

    def __getattr__(name: str) -> Any:
        if name == "__all__":
            return [*import_module(".api", __name__).__all__, *_HOMES]
        if name == "__version__":
            return _version()
        if not name.startswith("__"):
            if find_spec(f"{__name__}.{name}") is not None:
                return import_module(f".{name}", __name__)
            home = import_module(_HOMES.get(name, ".api"), __name__)
            if name == "ContextParallel":
                home.before_shard.append(import_module(".adapters", __name__).watch_transformers)
            if name in _HOMES or name in home.__all__:
                globals()[name] = value = getattr(home, name)
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), "__version__", *__getattr__("__all__")})


if "torch" in sys.modules:  # nothing to wait for: the operators are registered, as ever
    import_module(".api", __name__)
