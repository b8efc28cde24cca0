"""Where ring attention enters transformers: names, masks, calls of models, and generate."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from . import hf_documents, hf_models


def register(attention: Callable[..., Any], is_off: Callable[[], bool]) -> None:
    """Make `attention` known by our names, and let models take documents with their calls.

    May be called again; what is in its place stays there. `is_off` says whether models compute as
    without us.
    """
    from transformers import GenerationMixin, PreTrainedModel

    if not hasattr(PreTrainedModel.__call__, "takes_documents"):
        watched = hf_documents.watch(PreTrainedModel.__call__)
        if not hf_models.has_interface():
            watched = _with_documents(watched)
        PreTrainedModel.__call__ = _switched(watched, is_off)
    if not hasattr(GenerationMixin.generate, "on_one_device"):
        GenerationMixin.generate = _on_one_device(GenerationMixin.generate)
    if hf_models.has_interface():
        _register_names(attention)
    else:
        _replace_flash_attention()


def _register_names(attention: Callable[..., Any]) -> None:
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask
    from transformers.modeling_utils import AttentionInterface

    for name in hf_models.RING_IMPLEMENTATIONS:
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, hf_documents.mask_function(flash_attention_mask))


def _replace_flash_attention() -> None:
    """Before 4.53, layers call a function of flash attention, which is imported by name."""
    name = "_flash_attention_forward"
    import transformers.modeling_flash_attention_utils as utils

    original = inner = getattr(utils, name)
    while inner is not None:
        if hasattr(inner, "takes_documents"):
            return  # it is there, perhaps inside of what substitute_hf_flash_attn put around it
        inner = getattr(inner, "__wrapped__", None)

    @functools.wraps(original)
    def forward(
        query_states: Tensor,
        key_states: Tensor,
        value_states: Tensor,
        attention_mask: Any,
        query_length: int,
        is_causal: bool,
        **kwargs: Any,
    ) -> Any:
        qkv = query_states, key_states, value_states
        mask = hf_documents.mask_of_call(attention_mask)
        if mask is None:
            return original(*qkv, attention_mask, query_length, is_causal, **kwargs)
        return hf_documents.attend(*qkv, mask, **kwargs)

    forward.takes_documents = True  # type: ignore[attr-defined]
    for path, module in list(sys.modules.items()):
        theirs = path.partition(".")[0] in ("transformers", "transformers_modules")
        if theirs and getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, forward)


def _with_documents(call: Callable[..., Any]) -> Callable[..., Any]:
    """A model's call before 4.53: without documents, its layers would know of no other rank."""

    @functools.wraps(call)
    def checked(model: Any, *args: Any, **kwargs: Any) -> Any:
        import transformers.modeling_flash_attention_utils as utils

        forward = utils._flash_attention_forward
        alone = hasattr(forward, "takes_documents") and not hf_documents.is_running()
        if alone and "documents" not in kwargs and hf_models.is_ours(model):
            raise ValueError(hf_documents.NO_DOCUMENTS)
        return call(model, *args, **kwargs)

    return checked


def _switched(call: Callable[..., Any], is_off: Callable[[], bool]) -> Callable[..., Any]:
    """A model's call; while ring attention is off, on one device."""

    @functools.wraps(call)
    def switched(model: Any, *args: Any, **kwargs: Any) -> Any:
        if is_off() and hf_models.is_ours(model):
            if "documents" in kwargs:
                raise ValueError("use_ring_attn(False), but the model got documents")
            with hf_models.on_one_device(model):
                return call(model, *args, **kwargs)
        return call(model, *args, **kwargs)

    return switched


def _on_one_device(generate: Callable[..., Any]) -> Callable[..., Any]:
    """`generate` without other ranks, which says so."""
    from transformers import PreTrainedModel

    @functools.wraps(generate)
    def generated(model: Any, *args: Any, **kwargs: Any) -> Any:
        is_on = getattr(PreTrainedModel.__call__, "is_on", lambda: False)  # substituted
        is_ring = is_on() and hf_models.takes_ring_attention(model)
        if not is_ring and not hf_models.is_ours(model):
            return generate(model, *args, **kwargs)
        if "documents" in kwargs:
            raise ValueError(
                "documents: generate() is not spread over ranks; give it whole prompts, not what "
                "cp.shard returned"
            )
        warnings.warn(
            "generate() is not spread over ranks: this one computes all of it, with attn_"
            f"implementation={hf_models.fallback(model)!r}; give it whole prompts",
            stacklevel=2,
        )
        with hf_models.on_one_device(model):
            return generate(model, *args, **kwargs)

    generated.on_one_device = True  # type: ignore[attr-defined]
    return generated


def prepare(model: nn.Module) -> nn.Module:
    """Set the attention of all models in it."""
    from transformers import PreTrainedModel

    outermost: list[Any] = []
    for module in model.modules():
        inside = any(module is part for outer in outermost for part in outer.modules())
        if isinstance(module, PreTrainedModel) and not inside:
            outermost.append(module)
    if not outermost:
        raise TypeError(f"{type(model).__name__} is no Hugging Face model, and contains none")
    for each in outermost:
        _set_attention(each)
    return model


def _set_attention(model: Any) -> None:
    """Of the layers that attend to text; or say why not."""
    from transformers import PreTrainedModel

    config = hf_models.text_config(model)
    before = config._attn_implementation
    ours = hf_models.RING_IMPLEMENTATIONS[0] if hf_models.has_interface() else "flash_attention_2"
    hf_models.set_implementation(model, config, ours)
    try:
        for part in [p for p in model.modules() if isinstance(p, PreTrainedModel)]:
            if part.config is config:
                hf_models.check_once(part)
            if not hf_models.has_interface():
                hf_models.prepared.add(part)
        hf_documents.watch_forward(type(model))
    except ValueError:
        hf_models.set_implementation(model, config, before)
        raise
