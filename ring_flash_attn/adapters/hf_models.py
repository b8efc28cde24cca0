"""Which Hugging Face models ring attention can serve: those whose tokens meet in it alone.

A layer that hands tokens on by itself (a recurrence, a convolution, attention of its own) would
see this rank's slice only. Such a model is refused before its first forward pass.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from ..api import __all__ as _PUBLIC

RING_IMPLEMENTATIONS = ("ring_attention", "ring_flash_attn")

# An attention layer names one of these: transformers' way to its attention functions, or a function
# of ours that knows of ranks.
_ATTENTION = {
    "ALL_ATTENTION_FUNCTIONS",
    "_flash_attention_forward",
    "DATA_PARAMS",
    *(name for name in _PUBLIC if re.search("ring|stripe|llama3", name)),
}
_STATE_SPACE = {"A_log", "dt_bias"}  # parameters of recurrences without a convolution
# Values of config.layer_types: causal attention, with a window or without, and layers without any.
_LAYER_TYPES = {
    "attention", "full_attention", "sliding_attention", "dense", "mlp", "moe", "sparse",
}  # fmt: skip

_NO_ATTENTION = "does not call transformers' attention interface"


_checked: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # attn_implementation, by model
prepared: WeakSet[Any] = WeakSet()  # models that we prepared, before 4.53


@functools.cache
def has_interface() -> bool:
    """Whether transformers asks for masks and for attention by a name that we can add (4.53)."""
    return find_spec("transformers.masking_utils") is not None


def text_config(model: Any) -> Any:
    """The configuration of the layers that attend to text; not that of a vision tower."""
    return model.config.get_text_config(decoder=True)


def takes_ring_attention(model: Any) -> bool:
    """Whether the model is told to call what we substitute."""
    return _is_ring(getattr(model.config, "_attn_implementation", None))


def is_ours(model: Any) -> bool:
    """Whether layers that attend to text compute ring attention, and have nothing else to go to."""
    name = text_config(model)._attn_implementation
    return name in RING_IMPLEMENTATIONS or (name == "flash_attention_2" and model in prepared)


def _is_ring(name: str | None) -> bool:
    return name in RING_IMPLEMENTATIONS or str(name).startswith("flash_attention")


def serves_documents(name: str | None) -> bool:
    """Whether layers with this attn_implementation take documents that came with the call."""
    if name in RING_IMPLEMENTATIONS:
        return True
    return name == "flash_attention_2" and not has_interface()


def fallback(model: Any) -> str:
    """An attn_implementation of transformers that computes on one device what ours does."""
    config = text_config(model)
    plain = getattr(config, "attn_logit_softcapping", None) is None  # which sdpa leaves out
    layers = [m for m in model.modules() if _is_model(m) and text_config(m) is config]
    return "sdpa" if plain and all(m._supports_sdpa for m in layers) else "eager"


@contextmanager
def on_one_device(model: Any) -> Iterator[None]:
    """The model computes attention as transformers does, without other ranks."""
    name, configs = fallback(model), [text_config(model), model.config]
    configs = [config for config in configs if _is_ring(config._attn_implementation)]
    before = [config._attn_implementation for config in configs]
    for config in configs:
        set_implementation(model, config, name)
    try:
        yield
    finally:
        for config, old in zip(configs, before):
            set_implementation(model, config, old)


def set_implementation(model: Any, config: Any, name: str) -> None:
    """Set the attn_implementation of the layers that have this configuration.

    Unlike transformers' own way, it leaves the towers of other configurations alone.
    """
    config._attn_implementation_internal = name
    if has_interface():
        return
    for part in model.modules():  # before 4.48, each implementation is a class
        if getattr(part, "config", None) is config:
            tables = vars(sys.modules[type(part).__module__])
            for table in [x for key, x in tables.items() if key.endswith("_ATTENTION_CLASSES")]:
                if type(part) in table.values() and name in table:
                    part.__class__ = table[name]
                    part._flash_attn_uses_top_left_mask = False
                    _supply(tables)


def _supply(names: dict[str, Any]) -> None:
    """What a module of models before 4.48 has only with flash_attn installed, or asks of it."""
    from transformers.modeling_flash_attention_utils import _flash_attention_forward

    names.setdefault("_flash_attention_forward", _flash_attention_forward)
    if "is_flash_attn_greater_or_equal" in names:  # Gemma 2, before it passes its softcap
        names["is_flash_attn_greater_or_equal"] = lambda version: True


def check_once(model: Any) -> None:
    """`check_model`, when it is called for the first time with its attn_implementation."""
    name = model.config._attn_implementation
    if _checked.get(model) != name:
        check_model(model)
        _checked[model] = name


def check_model(model: Any) -> None:
    """Refuse a model with a layer that mixes tokens by itself, naming the first.

    Modules of other projects are not judged unless the model asks for "ring_attention" by name:
    projects that substitute "flash_attention_2" bring layers that know of their ranks. A model
    inside of this one is judged when it is called.
    """
    of_all = model.config._attn_implementation in RING_IMPLEMENTATIONS
    for name, module, why in _faults(model):
        home = _forward(module).__module__.partition(".")[0]
        if of_all or home in ("torch", "transformers", "transformers_modules"):
            raise ValueError(
                f"{type(model).__name__}: {name} ({type(module).__name__}) {why}, so on a slice of "
                "the sequence it would not see what the other ranks hold. Ring attention serves "
                "models of causal attention layers that call ALL_ATTENTION_FUNCTIONS"
            )


def _faults(model: Any) -> Iterator[tuple[str, Any, str]]:
    """Modules that mix tokens by themselves: name, module, and what is wrong with it."""
    known: dict[type, bool] = {}  # whether modules of a class call the attention interface

    def attends(module: nn.Module) -> bool:
        return any(_calls_attention(part, known) for part in module.modules())

    lists = [(path, x) for path, x in _own_modules(model) if isinstance(x, nn.ModuleList)]
    attending = [(path, layers) for path, layers in lists if attends(layers)]
    for path, layers in attending:
        with_attention = [layer for layer in layers if attends(layer)]
        familiar = {type(part) for layer in with_attention for part in layer.modules()}
        for index, layer in enumerate(layers):
            for name, part in layer.named_modules(prefix=f"{path}.{index}"):
                if _is_recurrent(part):
                    yield name, part, "carries a state from token to token"
                # a layer without attention has the other layers' parts only, or one in its place
                is_own = part is not layer and type(part) not in familiar
                if is_own and layer not in with_attention:
                    yield name, part, _NO_ATTENTION
        kinds = getattr(model.config, "layer_types", None) or ()
        for index, (layer, kind) in enumerate(zip(layers, kinds)):
            if kind not in _LAYER_TYPES:
                yield f"{path}.{index}", layer, f"is of type {kind!r}"
    if not attending and not attends(model) and not any(map(_is_model, model.children())):
        first = [(f"{path}.0", layers[0]) for path, layers in lists if len(layers)]
        name, module = (*first, ("it", model))[0]
        yield name, module, _NO_ATTENTION


def _calls_attention(module: nn.Module, known: dict[type, bool]) -> bool:
    kind = type(module)
    if "forward" in vars(module):  # assigned to this one; the class has other methods
        if not inspect.isfunction(_forward(module)):
            return True  # its code cannot be seen: whoever assigned it answers for it
        methods = [_forward(module), *_methods(kind, but="forward")]
        return any(_names(method) & _ATTENTION for method in methods)
    if kind not in known:
        known[kind] = any(_names(method) & _ATTENTION for method in _methods(kind))
    return known[kind]


def _own_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if not _is_model(child):
            yield prefix + name, child
            yield from _own_modules(child, f"{prefix}{name}.")


def _is_model(module: object) -> bool:
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel)


def _is_recurrent(module: nn.Module) -> bool:
    """Whether it owns a convolution over tokens, a recurrent network, or a state space."""
    if _STATE_SPACE & {name for name, _ in module.named_parameters(recurse=False)}:
        return True
    return any(
        isinstance(child, nn.RNNBase)
        or (isinstance(child, nn.Conv1d) and child.kernel_size != (1,))
        for child in module.children()
    )


def _forward(module: Any) -> Callable[..., Any]:
    """The function behind a module's forward: the class's, or one that was assigned to it."""
    forward = inspect.unwrap(module.forward)
    while isinstance(forward, functools.partial):
        forward = inspect.unwrap(forward.func)
    return getattr(forward, "__func__", forward)


def _methods(kind: type, but: str = "") -> Iterator[Callable[..., Any]]:
    """Yield what a class defines and inherits, without what it overrides and does not call."""
    from transformers import PreTrainedModel

    overridden = {but}
    for base in kind.__mro__:
        for name, value in vars(base).items() if base not in PreTrainedModel.__mro__ else ():
            if inspect.isfunction(value) and name not in overridden:
                method = inspect.unwrap(value)
                yield method
                if "super" not in _names(method):
                    overridden.add(name)


def _names(function: Callable[..., Any]) -> set[str]:
    """Every name that a function's code mentions, with that of the functions inside of it."""
    found: set[str] = set()
    codes = [function.__code__] if inspect.isfunction(function) else []
    while codes:
        code = codes.pop()
        found.update(code.co_names, code.co_freevars)
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return found
