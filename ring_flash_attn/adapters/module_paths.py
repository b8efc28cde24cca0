"""The module paths of the original library and of flash_attn that existing projects import."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_PACKAGE = __name__.split(".", maxsplit=1)[0]
_LSE = dict.fromkeys(("flatten_varlen_lse", "unflatten_varlen_lse"), ".adapters.historic")

# module: {name: where it lives now}
MODULE_PATHS: dict[str, dict[str, str]] = {
    **{
        stem: {f"{stem}_{form}": ".api" for form in ("func", "kvpacked_func", "qkvpacked_func")}
        for stem in (
            "ring_flash_attn",
            "ring_flash_attn_varlen",
            "zigzag_ring_flash_attn",
            "zigzag_ring_flash_attn_varlen",
            "stripe_flash_attn",
            "llama3_flash_attn_varlen",
        )
    },
    "utils": {
        **_LSE,
        "get_default_args": ".adapters.historic",
        "update_out_and_lse": ".adapters.historic",
        "AllGatherComm": ".comm.historic",
        "RingComm": ".comm.historic",
    },
    "triton_utils": _LSE,
    "bert_padding": dict.fromkeys(
        (
            "get_unpad_data",
            "index_first_axis",
            "index_first_axis_residual",
            "index_put_first_axis",
            "pad_input",
            "rearrange",
            "unpad_input",
            "unpad_input_for_concatenated_sequences",
        ),
        ".adapters.bert_padding",
    ),
    "layout": dict.fromkeys(("get_layout", "layout_names", "register_layout"), ".plan.layout"),
}
MODULE_PATHS["llama3_flash_attn_varlen"]["llama3_flash_attn_prepare_cu_seqlens"] = ".api.llama3"


def register() -> None:
    """Make every historic path importable. What is behind a name loads when it is first used."""
    package = sys.modules[_PACKAGE]
    for name, sources in MODULE_PATHS.items():
        module = _module(f"{_PACKAGE}.{name}", sources)
        sys.modules[module.__name__] = module
        setattr(package, name, module)


def _module(path: str, sources: dict[str, str]) -> ModuleType:
    module = ModuleType(path, f"A historic path: {', '.join(sources)}.")
    module.__spec__ = ModuleSpec(path, loader=None)
    module.__package__ = _PACKAGE

    def load(name: str) -> Any:
        if name not in sources:
            raise AttributeError(f"module {path!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(sources[name], _PACKAGE), name)
        setattr(module, name, value)
        return value

    vars(module).update(__all__=list(sources), __getattr__=load, __dir__=lambda: list(sources))
    return module
