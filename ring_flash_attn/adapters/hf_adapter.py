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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..api import llama3_flash_attn_varlen_func
from ..comm import rank_and_size
from ..llama3 import llama3_flash_attn_prepare_cu_seqlens
from . import hf_arguments

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

RING_IMPLEMENTATION = "ring_attention"

DATA_PARAMS: dict[str, Any] = {}
"""The documents of this forward pass: `cu_seqlens_q`, `cu_seqlens_k`, `max_seqlen_q`,
`max_seqlen_k`, `local_k_slice`, as `llama3_flash_attn_prepare_cu_seqlens` returns them."""

RING_ATTN_SWITCH = True
"""Whether substituted calls take the ring; set it with `use_ring_attn`."""

_DOCUMENT_KEYS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")

# What transformers called before the substitution: its forward, by the one in its place (one entry,
# or none), and its attention functions, by attn_implementation.
_dispatches: dict[Callable[..., Tensor], Callable[..., Tensor]] = {}
_interfaces: dict[str, Callable[..., Any]] = {}


def check_params(f1: Callable[..., Any], f2: Callable[..., Any]) -> bool:
    """Say whether two functions take the same number of parameters."""
    return len(inspect.signature(f1).parameters) == len(inspect.signature(f2).parameters)


def use_ring_attn(flag: bool) -> None:
    """Turn the substituted attention on, or back to what transformers had before.

    Args:
        flag: True for the ring, False for transformers' own path (for example to generate).
    """
    global RING_ATTN_SWITCH
    RING_ATTN_SWITCH = flag


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: ProcessGroup | None) -> None:
    """Tell the substituted attention which documents the next forward passes hold.

    Args:
        cu_seqlens: (documents + 1,), the *global* cumulative lengths of the packed sequence.
        process_group: the ranks that share the sequence, in the order of their slices.
    """
    rank, world_size = rank_and_size(process_group)
    documents = llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, rank, world_size)
    DATA_PARAMS.update(zip(_DOCUMENT_KEYS, documents))


def create_ring_flash_attention_forward(
    process_group: ProcessGroup | None, heads_k_stride: int
) -> list[Callable[..., Tensor]]:
    """Make the candidates to replace transformers' `_flash_attention_forward`.

    `substitute_hf_flash_attn` looks this function up when it is called and takes the first
    candidate with as many parameters as the original, so a project may assign its own.

    Args:
        process_group: the ranks that share the sequence.
        heads_k_stride: how many key heads travel at a time.

    Returns:
        One function, which takes what the original of the installed version takes.
    """

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
        # Without effect here: position_ids (the rotary embedding has used them, and documents come
        # from DATA_PARAMS), use_top_left_mask (a repair for flash-attn < 2.1), and the keywords of
        # the model's own forward, all of which transformers hands down to every attention call.
        hf_arguments.check_shapes(query_states, key_states, query_length)
        hf_arguments.check_mask(attention_mask, is_causal)
        hf_arguments.check_keywords(kwargs)
        dtype = kwargs.get("target_dtype")
        out = llama3_flash_attn_varlen_func(
            hf_arguments.cast(query_states, dtype).squeeze(0),
            hf_arguments.cast(key_states, dtype).squeeze(0),
            hf_arguments.cast(value_states, dtype).squeeze(0),
            **_documents(),
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

    signature = inspect.signature(_original_forward())
    ring_forward.__signature__ = signature  # type: ignore[attr-defined]
    return [ring_forward]


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
        query_length=query.shape[1],
        is_causal=module.is_causal if is_causal is None else is_causal,
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
    (another group, another stride); `use_ring_attn(False)` gives the original back.

    Args:
        process_group: the ranks that share the sequence.
        heads_k_stride: how many key heads travel at a time; it must divide the model's.

    Raises:
        ValueError: the installed transformers takes other parameters than every candidate.
    """
    original = _original_forward()
    candidates = create_ring_flash_attention_forward(process_group, heads_k_stride)
    dispatch = _dispatch(_matching(candidates, original), original)
    _rebind(dispatch, replaced=(original, *_dispatches))
    _dispatches.clear()
    _dispatches[dispatch] = original
    _register_interfaces()


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
    for candidate in candidates:
        if check_params(original, candidate):
            return candidate
    import transformers

    raise ValueError(
        f"transformers {transformers.__version__} calls flash attention with "
        f"{len(inspect.signature(original).parameters)} parameters, and no candidate of "
        "create_ring_flash_attention_forward takes as many"
    )


def _dispatch(
    ring: Callable[..., Tensor], original: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def flash_or_ring(*args: Any, **kwargs: Any) -> Tensor:
        return ring(*args, **kwargs) if RING_ATTN_SWITCH else original(*args, **kwargs)

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


def _documents() -> dict[str, Any]:
    missing = [key for key in _DOCUMENT_KEYS if key not in DATA_PARAMS]
    if missing:
        raise ValueError(
            f"DATA_PARAMS lacks {missing}: call update_ring_flash_attn_params(cu_seqlens, "
            "process_group) before the model's forward pass"
        )
    return {key: DATA_PARAMS[key] for key in _DOCUMENT_KEYS}
