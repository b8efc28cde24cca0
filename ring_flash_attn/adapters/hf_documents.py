"""Hugging Face models on what `ContextParallel.shard` returns: documents travel with the call.

`model(**part)` takes `documents` out of the arguments, and they take the place of the attention
mask that the model makes. So every layer receives them with its arguments, and receives the same
when checkpointing computes it again, whatever other micro-batches are under way.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..api.batches import BatchDocuments
from ..engine.checks import check_integer
from . import hf_models

NO_DOCUMENTS = (
    "ring attention was not told which documents there are: call the model with what "
    "cp.shard(batch) returns, model(**part), where cp is a ContextParallel"
)


@dataclass(frozen=True, slots=True, eq=False)
class DocumentsMask:
    """What layers receive as attention_mask: causal within documents, and perhaps a window.

    `window` counts a query's own key; it is None if the mask has none, and unknown (0) where the
    model makes its mask without transformers' masking_utils: then the layers know of it.
    """

    documents: BatchDocuments
    window: int | None

    # For models that cut keys to the length of the mask, or cut or move the mask.
    @property
    def shape(self) -> tuple[int, int]:
        return 1, self.documents.size or 1

    def __getitem__(self, _: object) -> DocumentsMask:
        return self

    def to(self, *_: object, **__: object) -> DocumentsMask:
        return self


class _Current(threading.local):
    documents: BatchDocuments | None = None


_current = _Current()
_unmasked = False  # whether a layer did not receive its documents with its arguments


def is_running() -> bool:
    """Whether a model runs on documents that came with its call."""
    return _current.documents is not None


# The call of a model.


def watch(call: Callable[..., Any]) -> Callable[..., Any]:
    """Make what takes the place of `PreTrainedModel.__call__`: it looks for documents."""
    uncompiled = torch.compiler.disable(_run, recursive=False)

    @functools.wraps(call)
    def watched(model: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("documents"), BatchDocuments):
            return uncompiled(call, model, args, kwargs)
        if hf_models.takes_ring_attention(model) and is_running():  # a model inside of another
            _check_model(model)
        return call(model, *args, **kwargs)

    watched.takes_documents = True  # type: ignore[attr-defined]
    return watched


def watch_forward(kind: Any) -> None:
    """Let a class's `forward` take documents as well: releases of PEFT call it past `__call__`."""
    forward = kind.forward
    if hasattr(forward, "takes_documents"):
        return
    uncompiled = torch.compiler.disable(_run, recursive=False)

    @functools.wraps(forward)
    def watched(model: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("documents"), BatchDocuments):
            return uncompiled(forward, model, args, kwargs)
        return forward(model, *args, **kwargs)

    watched.takes_documents = True  # type: ignore[attr-defined]
    kind.forward = watched


def _run(
    call: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a model on the tokens of this rank; its loss is `ContextParallel.loss`."""
    documents = kwargs.pop("documents")
    names = _parameters(type(model).forward)
    kwargs = {**dict(zip(names, args)), **kwargs}
    loss = _take_targets(model, kwargs, "labels" in names)
    _check_call(model, kwargs, documents)
    documents.cp._compare_first(documents)
    if "use_cache" in names:
        kwargs["use_cache"] = False
    if not documents.size:
        kwargs = {name: _one_token(name, value) for name, value in kwargs.items()}
    outer, _current.documents = _current.documents, documents
    try:
        output = call(model, **kwargs)
    finally:
        _current.documents = outer
    if not documents.size:
        output = tree_map(_no_token, output)
    return output if loss is None else _with_loss(output, documents, *loss)


@functools.cache
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Names of what a model's forward takes, in order, without `self`."""
    return tuple(inspect.signature(forward).parameters)[1:]


_MEDIA = ("pixel_values", "pixel_values_videos", "image_embeds", "input_features", "input_values")


def _check_call(model: Any, given: Mapping[str, Any], documents: BatchDocuments) -> None:
    """Refuse what does not fit a rank's part of a batch."""
    name, kind = hf_models.text_config(model)._attn_implementation, type(model).__name__
    if not hf_models.serves_documents(name):
        raise ValueError(
            f"{kind} got documents, but has attn_implementation={name!r}: call "
            "prepare_hf_model(model) first"
        )
    _check_model(model)
    if model.config.is_encoder_decoder:
        raise ValueError(f"{kind} has an encoder: ring attention serves decoders alone")
    for unwanted, reason in {
        "attention_mask": "padding and documents are those that cp.shard was told",
        "past_key_values": "ring attention has no KV cache",
        **dict.fromkeys(_MEDIA, "shard inputs_embeds into which they were put already"),
    }.items():
        if given.get(unwanted) is not None:
            raise ValueError(f"{unwanted} beside documents: {reason}")
    for name in ("logits_to_keep", "num_logits_to_keep"):
        if isinstance(given.get(name), int) and given[name]:
            raise ValueError(
                f"{name}={given[name]} beside documents: the last tokens of a rank are not those "
                "of the batch; take them from cp.gather(logits, documents)"
            )
    for flag in ("use_cache", "output_attentions"):
        if given.get(flag):
            raise ValueError(f"{flag}=True beside documents: ring attention has nothing to return")
    check_keywords(given)
    shape = (1 if documents.packed else documents.shape[0], documents.size)
    for tokens in ("input_ids", "inputs_embeds"):
        if given.get(tokens) is not None and tuple(given[tokens].shape[:2]) != shape:
            raise ValueError(
                f"{tokens} has shape {tuple(given[tokens].shape)}, but documents has {shape}: pass "
                "the part that cp.shard returned with them, of a batch of shape (batch, seqlen)"
            )
    positions = given.get("position_ids")
    if positions is None or positions.shape[-1] != documents.size:
        found = None if positions is None else tuple(positions.shape)
        raise ValueError(
            f"position_ids ({found}) must be those of this rank's {documents.size} tokens, as "
            "cp.shard returns them: a model counts from 0 on every rank"
        )


def _check_model(model: Any) -> None:
    """Refuse a model that cannot be served; a mask that it makes by itself becomes documents."""
    hf_models.check_once(model)
    for kind in type(model).__mro__:
        make = vars(kind).get("_update_causal_mask")
        if make is not None and not hasattr(make, "takes_documents"):
            kind._update_causal_mask = _own_mask(make)  # type: ignore[attr-defined]


def _one_token(name: str, value: Any) -> Any:
    """Of a rank without tokens: one that nobody sees, since few models can do without any."""
    if name in ("input_ids", "position_ids", "inputs_embeds") and isinstance(value, Tensor):
        dim = value.dim() - (2 if name == "inputs_embeds" else 1)
        return value.new_zeros((*value.shape[:dim], 1, *value.shape[dim + 1 :]))
    return value


def _no_token(value: Any) -> Any:
    is_token = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == 1
    return value.narrow(1, 0, 0) if is_token else value


# The loss.


def _take_targets(
    model: Any, given: dict[str, Any], computes_loss: bool
) -> tuple[Tensor, Any] | None:
    """Take the targets, and how many all ranks have, out of the arguments of a model.

    transformers' own loss is the same, but before 4.50 it shifts shift_labels once more.
    """
    labels, targets = (given.pop(name, None) for name in ("labels", "shift_labels"))
    if labels is not None and labels is not targets:
        raise ValueError(
            "labels beside documents: the model would shift them within this rank's tokens; give "
            "labels to cp.shard, and pass the shift_labels that it returns"
        )
    count, weights = (
        given.pop(name, None) for name in ("num_items_in_batch", "shift_loss_weights")
    )
    if targets is None or not computes_loss:
        return None
    if weights is not None:
        raise ValueError(
            "shift_loss_weights: a model's loss has none; take cp.loss(logits, shift_labels, "
            "weights=shift_loss_weights), and call the model without them"
        )
    own = given.get("output_router_logits")
    text = hf_models.text_config(model)
    if own or (own is None and getattr(text, "output_router_logits", False)):
        raise ValueError(
            "output_router_logits=True adds a loss of this rank's tokens alone: take cp.loss("
            "logits, shift_labels), call the model without shift_labels, and add yours"
        )
    from transformers.loss.loss_utils import ForCausalLMLoss

    if model.loss_function is not ForCausalLMLoss:
        raise ValueError(
            f"{type(model).__name__} has a loss of its own ({model.loss_function!r}): call it "
            "without shift_labels, and compute that loss from its outputs"
        )
    return targets, count


def _with_loss(output: Any, documents: BatchDocuments, targets: Tensor, count: Any) -> Any:
    """Put the loss first, as a model does that computes it."""
    logits = output[0] if isinstance(output, tuple) else output.logits
    loss = documents.cp.loss(logits, targets, num_items=count)
    if isinstance(output, tuple):
        return (loss, *output)
    return type(output)(**{"loss": loss, **{k: v for k, v in output.items() if k != "loss"}})


# The mask.

# Functions of transformers.masking_utils that make or combine masks, of which documents do all.
_CAUSAL = {
    "and_masks", "causal_mask_function", "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence", "sliding_window_overlay",
}  # fmt: skip


def mask_function(without: Callable[..., Any]) -> Callable[..., Any]:
    """Make the function that transformers calls for a mask; `without` documents, another."""

    @functools.wraps(without)
    def make(*args: Any, **kwargs: Any) -> Any:
        if _current.documents is None:
            return without(*args, **kwargs)
        for function in _parts(kwargs.get("mask_function")):
            if function.__qualname__.partition(".")[0] not in _CAUSAL:
                raise ValueError(
                    f"the model asks for a mask by {function.__qualname__}: ring attention does "
                    "causal masks and sliding windows alone"
                )
        return DocumentsMask(_current.documents, kwargs.get("local_size"))

    return make


def _parts(function: Any) -> list[Callable[..., Any]]:
    """A mask function, and those that it combines."""
    found: list[Callable[..., Any]] = [function] if inspect.isfunction(function) else []
    for part in found:
        for content in inspect.getclosurevars(part).nonlocals.values():
            several = content if isinstance(content, tuple | list) else (content,)
            found += [each for each in several if inspect.isfunction(each)]
    return found


def _own_mask(without: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a model's `_update_causal_mask`, of versions and models that have one."""

    @functools.wraps(without)
    def make(*args: Any, **kwargs: Any) -> Any:
        if _current.documents is None:
            return without(*args, **kwargs)
        return DocumentsMask(_current.documents, 0)

    make.takes_documents = True  # type: ignore[attr-defined]
    return make


def mask_of_call(attention_mask: Any) -> DocumentsMask | None:
    """The documents of an attention call; None if its model was not given any.

    A layer whose model hands down no mask gets those of the forward pass that runs; there is none
    when checkpointing computes the layer again.
    """
    global _unmasked
    if isinstance(attention_mask, DocumentsMask):
        return attention_mask
    if _current.documents is None:
        if has_lost_documents():
            raise ValueError(
                "checkpointing computes a layer again that does not receive its documents with its "
                "arguments: this model cannot have it, in this version of transformers"
            )
        return None
    if attention_mask is not None:
        raise ValueError(
            "the model made an attention mask by itself: with documents, ring attention serves "
            "models that leave it to transformers.masking_utils"
        )
    _unmasked = True
    return DocumentsMask(_current.documents, 0)


def has_lost_documents() -> bool:
    """Whether a layer may be computed again that had documents, and did not receive them."""
    return _unmasked and _current.documents is None and torch._C._current_graph_task_id() != -1


def has_documents(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether one of the arguments of an attention call is documents."""
    return any(isinstance(value, DocumentsMask) for value in (*args, *kwargs.values()))


# Attention.

_PAGED, _SPARSE = "a paged cache is not supported", "sparse attention is not supported"
_TOLD = "the documents are those that ring attention was told"
# Keywords of transformers' attention calls that would change the result.
_UNSUPPORTED = {
    "block_indices": _SPARSE,
    "block_table": _PAGED,
    "cache": _PAGED,
    "cu_seq_lens_k": _TOLD,
    "cu_seq_lens_q": _TOLD,
    "head_mask": "head masks are not supported",
    "indices": _SPARSE,
    "k_cache": _PAGED,
    "output_attentions": "attention weights are never formed",
    "position_bias": "additive biases are not supported",
    "v_cache": _PAGED,
}


def check_keywords(kwargs: Mapping[str, Any]) -> None:
    """Refuse keywords of an attention call that would change its result."""
    for name, reason in _UNSUPPORTED.items():
        value = kwargs.get(name)
        if value is not None and value is not False:
            shown = tuple(value.shape) if isinstance(value, Tensor) else value
            raise ValueError(f"{name}={shown!r}: {reason} in ring attention")


def window_size(sliding_window: int | None) -> tuple[int, int]:
    """The window that flash-attn knows; transformers' counts the query's own key."""
    if sliding_window is None:
        return -1, -1
    return check_integer("sliding_window", sliding_window, 1) - 1, 0


def is_deterministic(flag: bool | None) -> bool:
    """The environment decides if the call does not, as in transformers."""
    return os.environ.get("FLASH_ATTENTION_DETERMINISTIC", "0") == "1" if flag is None else flag


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: DocumentsMask,
    *,
    dropout: float = 0.0,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    **kwargs: Any,
) -> Tensor:
    """Attention over the documents of a batch; tensors are (batch, tokens, nheads, headdim).

    The mask is what its documents and its window say: `is_causal` is for calls without one.
    """
    check_keywords(kwargs)
    documents, size = mask.documents, mask.documents.size
    if not query.shape[1] == key.shape[1] == (size or 1):
        raise ValueError(
            f"{query.shape[1]} queries against {key.shape[1]} keys, but this rank holds {size} "
            "tokens: ring attention has no KV cache, and no cross-attention"
        )
    window = sliding_window if mask.window == 0 else mask.window
    if sliding_window is not None and window != sliding_window:
        raise ValueError(
            f"sliding_window={sliding_window}, but the model's mask has the window {window}"
        )
    out = documents.cp.attention(
        query[:, :size],
        key[:, :size],
        value[:, :size],
        documents,
        causal=True,
        dropout_p=dropout,
        softmax_scale=softmax_scale,
        window_size=window_size(window),
        softcap=softcap or 0.0,
        sink=kwargs.get("s_aux"),
        deterministic=is_deterministic(deterministic),
    )
    assert isinstance(out, Tensor)  # return_attn_probs is off
    if size:
        return out
    return torch.cat([out, out.new_zeros((out.shape[0], 1, *out.shape[2:]))], dim=1)
