"""Ring attention for Hugging Face transformers, in the place of its flash attention.

Every rank runs the whole model on its own contiguous slice of one packed sequence; docs/usage.md
shows how. transformers checks that flash_attn is installed when a model is built with
"flash_attention_2", and no longer when `model.config._attn_implementation` is set afterwards.
"ring_attention" needs none.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..api import llama3_flash_attn_varlen_func
from ..api.llama3 import llama3_flash_attn_prepare_cu_seqlens
from ..comm import agree, check_mode, rank_and_size, resolve_group
from ..engine.checks import CuSeqlens, check_flag, check_integer, check_tensor, document_lengths
from ..engine.entry import document_values
from . import hf_documents, hf_forward, hf_models, hf_registry

if TYPE_CHECKING:
    from ..comm import Group

DATA_PARAMS: dict[str, Any] = {}
"""The documents of the next forward pass: `cu_seqlens_q`, `cu_seqlens_k`, `max_seqlen_q`,
`max_seqlen_k`, `local_k_slice`, as `llama3_flash_attn_prepare_cu_seqlens` returns them."""

RING_ATTN_SWITCH = True
"""Whether substituted calls take the ring; set it with `use_ring_attn`."""

_DOCUMENT_KEYS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")

# What functions of ours, which live in transformers, are in the place of; and its own attention
# functions by attn_implementation.
_replaced: WeakKeyDictionary[Callable[..., Any], Callable[..., Any]] = WeakKeyDictionary()
_interfaces: dict[str, Callable[..., Any]] = {}


def check_params(f1: Callable[..., Any], f2: Callable[..., Any]) -> bool:
    """Say whether two functions take the same number of parameters; for those who import it."""
    return len(inspect.signature(f1).parameters) == len(inspect.signature(f2).parameters)


def use_ring_attn(flag: bool) -> None:
    """Turn ring attention on; or off: models compute on one device, as transformers does.

    Models with attn_implementation="ring_attention" then take sdpa or eager attention, those with
    "flash_attention_2" what was there before. `generate` needs no switch: it always runs on one
    device, and says so.

    Args:
        flag: whether models take ring attention.
    """
    global RING_ATTN_SWITCH
    RING_ATTN_SWITCH = check_flag("flag", flag)


def update_ring_flash_attn_params(cu_seqlens: CuSeqlens, process_group: Group | None) -> None:
    """Tell the substituted attention which documents the next forward passes hold.

    A forward pass that has begun keeps its documents, also when checkpointing recomputes it. With
    `RFA_CHECK=values`, ranks that were told different documents raise a ValueError.

    Args:
        cu_seqlens: (documents + 1,), the *global* cumulative lengths of the packed sequence.
        process_group: the ranks that share the sequence, in the order of their slices.
    """
    rank, world_size = rank_and_size(process_group)
    if check_mode() == "values":  # at every update: a rank cannot know whether the others changed
        values = document_values(cu_seqlens=document_lengths(cu_seqlens, fresh=True))
        call = ("call", "update_ring_flash_attn_params")
        agree((call, *values.items()), resolve_group(process_group), part=rank)
    documents = llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, rank, world_size)
    DATA_PARAMS.update(zip(_DOCUMENT_KEYS, documents))


def shift_labels(labels: Tensor, cu_seqlens: CuSeqlens, process_group: Group | None) -> Tensor:
    """Make the targets of this rank's tokens: each has the label of the token after it.

    A model that gets `labels` of a slice shifts them itself, and the last token of the slice loses
    its target, which the next rank holds. Hand it the result as `shift_labels`, and as `labels`,
    without which it computes no loss.

    Args:
        labels: (..., tokens) of the whole packed sequence.
        cu_seqlens: (documents + 1,), its cumulative lengths.
        process_group: the ranks that share the sequence, in the order of their slices.

    Returns:
        (..., tokens of this rank), -100 (no target) at the end of a document.
    """
    rank, world_size = rank_and_size(process_group)
    check_tensor("labels", labels)
    lengths = document_lengths(cu_seqlens, fresh=True)
    total = labels.shape[-1]
    if sum(lengths) != total or total % world_size:
        raise ValueError(
            f"labels has {total} tokens: must be the {sum(lengths)} of cu_seqlens, the whole "
            f"sequence, and divide by {world_size} ranks"
        )
    targets = labels.roll(-1, dims=-1)
    targets[..., [end - 1 for end in accumulate(lengths) if end]] = -100
    size = total // world_size
    return targets[..., rank * size : (rank + 1) * size].contiguous()


def create_ring_flash_attention_forward(
    process_group: Group | None, heads_k_stride: int
) -> list[Callable[..., Tensor]]:
    """Make the candidates to replace transformers' `_flash_attention_forward`.

    `substitute_hf_flash_attn` looks this function up when it is called and takes the first
    candidate that can be called like the original, so a project may assign its own. Ours makes one,
    which takes what the original of the installed version takes.
    """
    heads_k_stride = check_integer("heads_k_stride", heads_k_stride, 1)
    if process_group is not None:
        resolve_group(process_group)

    def ring_forward(
        query_states: Tensor,
        key_states: Tensor,
        value_states: Tensor,
        attention_mask: Tensor | None,
        query_length: int,
        is_causal: bool,
        dropout: float = 0.0,
        position_ids: Tensor | None = None,
        softmax_scale: float | None = None,
        sliding_window: int | None = None,
        use_top_left_mask: bool = False,
        softcap: float | None = None,
        deterministic: bool | None = None,
        **kwargs: Any,
    ) -> Tensor:
        # Without effect here: use_top_left_mask (a repair for flash-attn < 2.1), and the keywords
        # of the model's own forward, all of which transformers hands down to every attention call.
        _check_arguments(query_states, key_states, attention_mask, query_length, is_causal, kwargs)
        missing = [key for key in _DOCUMENT_KEYS if key not in DATA_PARAMS]
        if missing:
            raise ValueError(
                f"DATA_PARAMS lacks {missing}: call update_ring_flash_attn_params(cu_seqlens, "
                "process_group) before the model's forward pass"
            )
        latest = {key: DATA_PARAMS[key] for key in _DOCUMENT_KEYS}
        dtype = kwargs.get("target_dtype")
        out = llama3_flash_attn_varlen_func(
            _cast(query_states, dtype).squeeze(0),
            _cast(key_states, dtype).squeeze(0),
            _cast(value_states, dtype).squeeze(0),
            **hf_forward.documents_of_call(position_ids, query_states, process_group, latest),
            heads_k_stride=heads_k_stride,
            dropout_p=dropout,
            softmax_scale=softmax_scale,
            causal=True,
            window_size=hf_documents.window_size(sliding_window),
            deterministic=hf_documents.is_deterministic(deterministic),
            group=process_group,
            softcap=softcap or 0.0,
            sink=kwargs.get("s_aux"),
        )
        assert isinstance(out, Tensor)  # return_attn_probs is off
        return out.unsqueeze(0)  # (1, seqlen, nheads, headdim)

    candidate: Any = torch.compiler.disable(ring_forward)  # it looks documents up in a global
    original = _original(_flash_utils()._flash_attention_forward)
    candidate.__signature__ = inspect.signature(original)
    _replaced[candidate] = original
    return [candidate]


def _check_arguments(
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    query_length: int,
    is_causal: bool,
    kwargs: Mapping[str, Any],
) -> None:
    """Refuse a batch, a cache, every mask but a causal one, and keywords that change the result.

    Tensors are (batch, seqlen, nheads, headdim). A mask of ones, (batch, seqlen), is none.
    """
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
    if not is_causal:
        raise ValueError("is_causal=False: the substituted attention is causal")
    if attention_mask is not None:  # None where nothing is masked: no device sync
        if attention_mask.ndim != 2:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}: ring attention takes no "
                "mask but its documents'; give those to update_ring_flash_attn_params"
            )
        masked = int((attention_mask == 0).sum())
        if masked:
            raise ValueError(
                f"attention_mask hides {masked} of {attention_mask.numel()} tokens: drop the "
                "padding, or make it a document of its own in update_ring_flash_attn_params"
            )
    hf_documents.check_keywords(kwargs)


def flash_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' models call it: over the documents that came with the call.

    Without any, it goes through whatever is substituted at the time: `query`, `key` and `value` are
    (1, nheads, seqlen, headdim), and the mask is None, or (1, seqlen) without a zero. `s_aux` are
    attention sinks. The output is (batch, seqlen, nheads, headdim_v), and None where others return
    weights.
    """
    config: Any = module.config
    documents = hf_documents.mask_of_call(attention_mask)
    if not RING_ATTN_SWITCH and _interfaces and documents is None:
        kwargs.update(scaling=scaling, sliding_window=sliding_window, softcap=softcap)
        name = config._attn_implementation
        if name not in _interfaces:
            raise ValueError(
                f"use_ring_attn(False) gives transformers' own attention back, and "
                f"attn_implementation={name!r} has none: set one of {sorted(_interfaces)}, or "
                "'sdpa'"
            )
        own = _interfaces[name]
        out, _ = own(module, query, key, value, attention_mask, dropout=dropout, **kwargs)
        return out, None
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None:  # transformers' own check sees only this rank's length
        raise ValueError(f"attention_chunk_size={chunk}: ring attention does not do chunks")
    is_causal = kwargs.pop("is_causal", None)
    target_dtype = _target_dtype(module, query)
    qkv = (_cast(x, target_dtype) for x in (query, key, value))
    query, key, value = (x.transpose(1, 2) for x in qkv)  # (1, seqlen, nheads, headdim)
    if documents is not None:
        kwargs.update(dropout=dropout, sliding_window=sliding_window, softcap=softcap)
        out = hf_documents.attend(query, key, value, documents, softmax_scale=scaling, **kwargs)
        return out, None
    forward = _flash_utils()._flash_attention_forward
    if config._attn_implementation in hf_models.RING_IMPLEMENTATIONS and forward not in _replaced:
        raise ValueError(hf_documents.NO_DOCUMENTS)
    out = forward(
        query,
        key,
        value,
        attention_mask,
        query.shape[1],  # query_length, by whatever name
        module.is_causal if is_causal is None else is_causal,
        dropout=dropout,
        softmax_scale=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        use_top_left_mask=False,
        target_dtype=target_dtype,
        **kwargs,
    )
    return out, None


def _target_dtype(module: Any, query: Tensor) -> torch.dtype | None:
    """Find the dtype that a layer computes in whose inputs something has cast to fp32 (PEFT)."""
    if query.dtype != torch.float32:
        return None
    if torch.is_autocast_enabled(query.device.type):
        return torch.get_autocast_dtype(query.device.type)
    config = module.config
    if hasattr(config, "_pre_quantization_dtype"):  # transformers 4, quantised
        found = config._pre_quantization_dtype
    elif hasattr(config, "_is_quantized"):  # transformers 5, quantised
        found = config.dtype
    else:
        linear = (layer for layer in module.modules() if isinstance(layer, torch.nn.Linear))
        found = next((layer.weight.dtype for layer in linear), None)
    return found if isinstance(found, torch.dtype) else None


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Cast an fp32 tensor, and no other."""
    return tensor if dtype is None or tensor.dtype != torch.float32 else tensor.to(dtype)


def _has_documents(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether documents came with the model's call, which then are not those of the global.

    Layers before 4.53 that receive no mask are recomputed without them, which is refused; those of
    a substituted model are known by positions, or by the backward pass.
    """
    if hf_documents.is_running() or hf_documents.has_documents(args, kwargs):
        return True
    unknown = kwargs.get("position_ids") is None and not hf_forward.is_reached()
    return unknown and hf_documents.has_lost_documents()


def substitute_hf_flash_attn(process_group: Group | None, heads_k_stride: int) -> None:
    """Put ring attention in the place of transformers' flash attention.

    Works on the models that exist and on those built later. A second call replaces the first
    (another group, another stride); `use_ring_attn(False)` gives the original back. Calls of models
    are watched as well: a model that cannot be served, or positions that contradict the documents,
    are refused.

    Args:
        process_group: the ranks that share the sequence.
        heads_k_stride: how many key heads travel at a time; it must divide the model's.
    """
    from transformers import PreTrainedModel

    hf_registry.register(flash_attention_forward, _is_off)
    current = _flash_utils()._flash_attention_forward
    original = _original(current)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [p for p in inspect.signature(original).parameters.values() if p.kind not in variadic]
    required = [p.name for p in named if p.default is p.empty]
    optional = [p.name for p in named if p.default is not p.empty]
    ring = _matching(
        create_ring_flash_attention_forward(process_group, heads_k_stride), required, optional
    )

    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Tensor:
        if not RING_ATTN_SWITCH or _has_documents(args, kwargs):
            return original(*args, **kwargs)
        # by position what a project may have named in its own way
        by_position = [kwargs.pop(name) for name in required[len(args) :] if name in kwargs]
        return ring(*args, *by_position, **kwargs)

    vars(dispatch).pop("takes_documents", None)  # of the function that it wraps
    _replaced[dispatch] = original
    # where it is defined and wherever a model has imported it by name
    name = "_flash_attention_forward"
    for path, module in list(sys.modules.items()):
        theirs = path.partition(".")[0] in ("transformers", "transformers_modules")
        if theirs and getattr(module, "__dict__", {}).get(name) in (original, current):
            setattr(module, name, dispatch)
    _register_interfaces()
    # a project's own function may serve models and slices that ours refuses
    is_ours, call = ring in _replaced, _original(PreTrainedModel.__call__)
    PreTrainedModel.__call__ = hf_forward.watch(
        process_group, lambda: is_ours and RING_ATTN_SWITCH, call
    )
    _replaced[PreTrainedModel.__call__] = call


def _flash_utils() -> Any:
    """Import transformers' flash attention: only here, as the package must load without it."""
    import transformers.modeling_flash_attention_utils

    return transformers.modeling_flash_attention_utils


def _original(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, or what it is in the place of."""
    return _replaced.get(function, function)


def _matching(
    candidates: list[Callable[..., Tensor]], required: list[str], optional: list[str]
) -> Callable[..., Tensor]:
    """Take the first candidate that can be called with all parameters of the original."""
    reasons = []
    for candidate in candidates:
        try:
            inspect.signature(candidate).bind(*required, **dict.fromkeys(optional))
        except TypeError as reason:
            reasons.append(str(reason))
        else:
            return candidate
    import transformers

    raise ValueError(
        f"no candidate of create_ring_flash_attention_forward can be called as transformers "
        f"{transformers.__version__} calls flash attention, with {', '.join(required)} by position "
        f"and {', '.join(optional)} by name: {'; '.join(reasons)}"
    )


def _register_interfaces() -> None:
    """Route every flash `attn_implementation` here."""
    if not hf_models.has_interface():
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in [n for n in ALL_ATTENTION_FUNCTIONS if n.startswith("flash_attention")]:
        if ALL_ATTENTION_FUNCTIONS[name] is not flash_attention_forward:
            _interfaces[name] = ALL_ATTENTION_FUNCTIONS[name]
        ALL_ATTENTION_FUNCTIONS[name] = flash_attention_forward


def _is_off() -> bool:
    return not RING_ATTN_SWITCH


def register_hf_attention() -> None:
    """Make attn_implementation="ring_attention" and "ring_flash_attn" known to transformers.

    For models that are built with the name; `prepare_hf_model` and `substitute_hf_flash_attn` do it
    themselves. `model(**part)` then takes what `ContextParallel.shard` returns.
    """
    hf_registry.register(flash_attention_forward, _is_off)


def prepare_hf_model(model: nn.Module) -> nn.Module:
    """Let a Hugging Face model run on what `ContextParallel.shard` returns: `model(**part)`.

    Sets attn_implementation="ring_attention" of the layers that attend to text, in place, and
    refuses models that ring attention cannot serve. Wrappers (PEFT, DDP) may be around it.

    Args:
        model: a PreTrainedModel, or a module that contains some.

    Returns:
        The same model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch module, not {type(model).__name__}")
    register_hf_attention()
    return hf_registry.prepare(model)
