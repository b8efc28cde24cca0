"""Ring attention for Hugging Face transformers, in the place of its flash attention.

The model is replicated and every rank runs it on its own contiguous slice of one packed
sequence, batch size 1, with `position_ids` of the slice::

    substitute_hf_flash_attn(group, heads_k_stride=1)
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="ring_attention")
    for input_ids, position_ids, cu_seqlens in batches:         # global; rank r holds slice r
        update_ring_flash_attn_params(cu_seqlens, group)
        model(input_ids[:, mine], position_ids=position_ids[:, mine])

`"ring_attention"` needs no flash_attn. `"flash_attention_2"` (3, 4) is substituted as well:
transformers checks that flash_attn is installed when a model is built with it, and no longer
when `model.config._attn_implementation = "flash_attention_2"` is set afterwards.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor

from ..api import llama3_flash_attn_varlen_func
from ..api.llama3 import llama3_flash_attn_prepare_cu_seqlens
from ..comm import agree, check_mode, rank_and_size, resolve_group
from ..engine.checks import CuSeqlens, check_integer, check_tensor, document_lengths
from ..engine.entry import document_values
from . import hf_arguments, hf_forward
from .hf_models import RING_IMPLEMENTATION

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DATA_PARAMS: dict[str, Any] = {}
"""The documents of the next forward pass: `cu_seqlens_q`, `cu_seqlens_k`, `max_seqlen_q`,
`max_seqlen_k`, `local_k_slice`, as `llama3_flash_attn_prepare_cu_seqlens` returns them."""

RING_ATTN_SWITCH = True
"""Whether substituted calls take the ring; set it with `use_ring_attn`."""

_DOCUMENT_KEYS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")

# What transformers called before the substitution: its forward, by the one in its place (one entry,
# or none), and its attention functions, by attn_implementation.
_dispatches: dict[Callable[..., Tensor], Callable[..., Tensor]] = {}
_interfaces: dict[str, Callable[..., Any]] = {}
_model_calls: list[Callable[..., Any]] = []  # PreTrainedModel.__call__ as it was, or none

_ring_forwards: WeakSet[Callable[..., Tensor]] = WeakSet()  # candidates of ours


def check_params(f1: Callable[..., Any], f2: Callable[..., Any]) -> bool:
    """Say whether two functions take the same number of parameters; for those who import it."""
    return len(inspect.signature(f1).parameters) == len(inspect.signature(f2).parameters)


def use_ring_attn(flag: bool) -> None:
    """Turn the substituted attention on, or back to what transformers had before.

    Args:
        flag: True for the ring, False for transformers' own path (for example to generate).
    """
    global RING_ATTN_SWITCH
    RING_ATTN_SWITCH = flag


def update_ring_flash_attn_params(
    cu_seqlens: CuSeqlens, process_group: ProcessGroup | None
) -> None:
    """Tell the substituted attention which documents the next forward passes hold.

    A forward pass that has begun keeps its documents, also when checkpointing recomputes it.

    Args:
        cu_seqlens: (documents + 1,), the *global* cumulative lengths of the packed sequence.
        process_group: the ranks that share the sequence, in the order of their slices.

    Raises:
        ValueError: with `RFA_CHECK=values`, on every rank, if they were told different documents.
    """
    rank, world_size = rank_and_size(process_group)
    if check_mode() == "values":  # at every update: a rank cannot know whether the others changed
        values = document_values(cu_seqlens=document_lengths(cu_seqlens, fresh=True))
        call = ("call", "update_ring_flash_attn_params")
        agree((call, *values.items()), resolve_group(process_group), part=rank)
    documents = llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, rank, world_size)
    DATA_PARAMS.update(zip(_DOCUMENT_KEYS, documents))


def shift_labels(
    labels: Tensor, cu_seqlens: CuSeqlens, process_group: ProcessGroup | None
) -> Tensor:
    """Make the targets of this rank's tokens: each has the label of the token after it.

    A model that gets `labels` of a slice shifts them itself, and the last token of the slice loses
    its target, which the next rank holds. Hand it the result as `shift_labels` (and as `labels`,
    without which it computes no loss)::

        targets = shift_labels(labels, cu_seqlens, group)
        model(..., labels=targets, shift_labels=targets, num_items_in_batch=targets_of_all_ranks)

    With `num_items_in_batch` the losses of the ranks add up to the loss of the whole sequence.

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
    process_group: ProcessGroup | None, heads_k_stride: int
) -> list[Callable[..., Tensor]]:
    """Make the candidates to replace transformers' `_flash_attention_forward`.

    `substitute_hf_flash_attn` looks this function up when it is called and takes the first
    candidate that can be called like the original, so a project may assign its own.

    Args:
        process_group: the ranks that share the sequence.
        heads_k_stride: how many key heads travel at a time.

    Returns:
        One function, which takes what the original of the installed version takes.
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
        hf_arguments.check_shapes(query_states, key_states, query_length)
        hf_arguments.check_mask(attention_mask, is_causal)
        hf_arguments.check_keywords(kwargs)
        documents = hf_forward.documents_of_call(
            position_ids, query_states, process_group, _latest_documents()
        )
        dtype = kwargs.get("target_dtype")
        out = llama3_flash_attn_varlen_func(
            hf_arguments.cast(query_states, dtype).squeeze(0),
            hf_arguments.cast(key_states, dtype).squeeze(0),
            hf_arguments.cast(value_states, dtype).squeeze(0),
            **documents,
            heads_k_stride=heads_k_stride,
            dropout_p=dropout,
            softmax_scale=softmax_scale,
            causal=True,
            window_size=hf_arguments.window_size(sliding_window),
            deterministic=hf_arguments.deterministic(deterministic),
            group=process_group,
            softcap=softcap or 0.0,
            sink=kwargs.get("s_aux"),
        )
        assert isinstance(out, Tensor)  # return_attn_probs is off
        return out.unsqueeze(0)  # (1, seqlen, nheads, headdim)

    candidate: Any = torch.compiler.disable(ring_forward)  # attention breaks the graph anyway
    candidate.__signature__ = inspect.signature(_original_forward())
    _ring_forwards.add(candidate)
    return [candidate]


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
    """Attention as transformers' models call it, through whatever is substituted at the time.

    Args:
        module: the attention layer, with `config` and `is_causal`.
        query: (1, nheads, seqlen, headdim).
        key: (1, nheads_k, seqlen, headdim).
        value: (1, nheads_k, seqlen, headdim_v).
        attention_mask: None, or (1, seqlen) without a zero.
        dropout: probability of dropping an attention weight.
        scaling: of the scores; None for 1/√headdim.
        sliding_window: how many keys a query sees, itself included; None for all.
        softcap: bound of the scores; None for none.
        **kwargs: `is_causal`, `s_aux` (attention sinks, (nheads,)), and the model's own keywords.

    Returns:
        (1, seqlen, nheads, headdim_v), and None where others return weights.
    """
    if not RING_ATTN_SWITCH and _interfaces:
        kwargs.update(scaling=scaling, sliding_window=sliding_window, softcap=softcap)
        own = _own_interface(module)
        out, _ = own(module, query, key, value, attention_mask, dropout=dropout, **kwargs)
        return out, None
    hf_arguments.check_chunks(module)
    is_causal = kwargs.pop("is_causal", None)
    target_dtype = hf_arguments.target_dtype(module, query)
    qkv = (hf_arguments.cast(x, target_dtype) for x in (query, key, value))
    query, key, value = (x.transpose(1, 2) for x in qkv)  # (1, seqlen, nheads, headdim)
    out = _flash_utils()._flash_attention_forward(
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


def substitute_hf_flash_attn(process_group: ProcessGroup | None, heads_k_stride: int) -> None:
    """Put ring attention in the place of transformers' flash attention.

    Works on the models that exist and on those built later. A second call replaces the first
    (another group, another stride); `use_ring_attn(False)` gives the original back. Calls of models
    are watched as well: a model that cannot be served, or positions that contradict the documents,
    are refused.

    Args:
        process_group: the ranks that share the sequence.
        heads_k_stride: how many key heads travel at a time; it must divide the model's.

    Raises:
        ValueError: no candidate takes the parameters of the installed transformers.
    """
    original = _original_forward()
    candidates = create_ring_flash_attention_forward(process_group, heads_k_stride)
    ring = _matching(candidates, original)
    dispatch = _dispatch(ring, original)
    _rebind(dispatch, replaced=(original, *_dispatches))
    _dispatches.clear()
    _dispatches[dispatch] = original
    _register_interfaces()
    _watch_models(process_group, is_ours=ring in _ring_forwards)


def _watch_models(process_group: ProcessGroup | None, is_ours: bool) -> None:
    """Look at calls of models, unless a project's own function does the attention."""
    from transformers import PreTrainedModel

    if not _model_calls:
        _model_calls.append(PreTrainedModel.__call__)
    PreTrainedModel.__call__ = hf_forward.watch(
        process_group, lambda: is_ours and RING_ATTN_SWITCH, _model_calls[0]
    )


def _flash_utils() -> Any:
    """Import transformers' flash attention: only here, as the package must load without it."""
    import transformers.modeling_flash_attention_utils

    return transformers.modeling_flash_attention_utils


def _original_forward() -> Callable[..., Tensor]:
    """Find the `_flash_attention_forward` under any substitution of ours."""
    current: Callable[..., Tensor] = _flash_utils()._flash_attention_forward
    return _dispatches.get(current, current)


def _matching(
    candidates: Iterable[Callable[..., Tensor]], original: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Take the first candidate that binds a call with every parameter of the original."""
    required, optional = _parameters(original)
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


def _parameters(function: Callable[..., Any]) -> tuple[list[str], list[str]]:
    """Names of the required and of the optional parameters."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [p for p in inspect.signature(function).parameters.values() if p.kind not in variadic]
    required = [p.name for p in named if p.default is p.empty]
    return required, [p.name for p in named if p.default is not p.empty]


def _dispatch(
    ring: Callable[..., Tensor], original: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    required, _ = _parameters(original)

    @functools.wraps(original)
    def flash_or_ring(*args: Any, **kwargs: Any) -> Tensor:
        if not RING_ATTN_SWITCH:
            return original(*args, **kwargs)
        # by position what a project may have named in its own way
        by_position = [kwargs.pop(name) for name in required[len(args) :] if name in kwargs]
        return ring(*args, *by_position, **kwargs)

    return flash_or_ring


def _rebind(dispatch: Callable[..., Tensor], replaced: Iterable[Callable[..., Tensor]]) -> None:
    """Replace the function where it is defined and wherever a model has imported it by name."""
    name, old = "_flash_attention_forward", {id(function) for function in replaced}
    for path, module in list(sys.modules.items()):
        ours = path.partition(".")[0] in ("transformers", "transformers_modules")
        if ours and id(getattr(module, "__dict__", {}).get(name)) in old:
            setattr(module, name, dispatch)


def _register_interfaces() -> None:
    """Route every flash `attn_implementation` here, and add one that needs no flash_attn."""
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    for name in [n for n in ALL_ATTENTION_FUNCTIONS if n.startswith("flash_attention")]:
        if ALL_ATTENTION_FUNCTIONS[name] is not flash_attention_forward:
            _interfaces[name] = ALL_ATTENTION_FUNCTIONS[name]
        ALL_ATTENTION_FUNCTIONS[name] = flash_attention_forward
    AttentionInterface.register(RING_IMPLEMENTATION, flash_attention_forward)
    AttentionMaskInterface.register(RING_IMPLEMENTATION, flash_attention_mask)


def _own_interface(module: Any) -> Callable[..., Any]:
    name = module.config._attn_implementation
    if name not in _interfaces:
        raise ValueError(
            f"use_ring_attn(False) gives transformers' own attention back, and "
            f"attn_implementation={name!r} has none: set one of {sorted(_interfaces)}, or 'sdpa'"
        )
    return _interfaces[name]


def _latest_documents() -> dict[str, Any]:
    missing = [key for key in _DOCUMENT_KEYS if key not in DATA_PARAMS]
    if missing:
        raise ValueError(
            f"DATA_PARAMS lacks {missing}: call update_ring_flash_attn_params(cu_seqlens, "
            "process_group) before the model's forward pass"
        )
    return {key: DATA_PARAMS[key] for key in _DOCUMENT_KEYS}
