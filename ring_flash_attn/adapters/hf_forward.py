"""A Hugging Face model's forward pass while it runs: its documents and its positions.

`update_ring_flash_attn_params` says what the next forward passes hold, but layers may run later:
checkpointing recomputes them in the backward pass, when the next documents may already be set. So
a forward pass takes its documents once, and they are kept by the tensor of position ids that its
layers receive, which the recomputation hands to them again.
"""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from ..comm import check_mode, rank_and_size
from . import hf_documents, hf_models

if TYPE_CHECKING:
    from ..comm import Group

Documents = Mapping[str, Any]
HOW_TO_PASS_POSITIONS = (
    "each rank holds a contiguous slice of the packed sequence, so pass position_ids[:, mine], or "
    "ring_flash_attn.position_ids('flat_contiguous', cu_seqlens=cu_seqlens, group=group)[None]"
)


@dataclass(slots=True)
class _Forward:
    """A call of a model: its arguments, and the documents from its first attention call on."""

    model: Any
    position_ids: Any  # None if it counts by itself
    backward: int  # the backward pass that it runs in, -1 outside of any
    documents: Documents | None = None
    is_unmarked: bool = False  # its layers receive no position ids


class _Running(threading.local):
    forward: _Forward | None = None  # the innermost


_running = _Running()
# By position ids: the documents that they were checked against, and the tensor's version then.
_documents = WeakTensorKeyDictionary()
# By backward pass: documents of the forward passes that it has reached, of models whose layers
# receive no position ids.
_reached: dict[int, list[Documents]] = {}
_BACKWARDS = 16  # that may be under way at once


def watch(
    group: Group | None, is_on: Callable[[], bool], call: Callable[..., Any]
) -> Callable[..., Any]:
    """Make what takes the place of `call`, which is `PreTrainedModel.__call__`.

    While ring attention `is_on`, it refuses what cannot be done, and notes the models' documents.
    """
    uncompiled = torch.compiler.disable  # which imports torch's compiler: not before it is needed
    begin, note_backward = uncompiled(_begin), uncompiled(_note_backward)

    def checked(model: Any, *args: Any, **kwargs: Any) -> Any:
        forward, args, kwargs = begin(model, args, kwargs, group)
        outer, _running.forward = _running.forward, forward
        try:
            output = call(model, *args, **kwargs)
        finally:
            _running.forward = outer
        if forward.is_unmarked and forward.documents is not None:
            note_backward(output, forward.documents)
        return output

    checked = uncompiled(checked, recursive=False)

    @functools.wraps(call)
    def watched(model: Any, *args: Any, **kwargs: Any) -> Any:
        is_ring = is_on() and hf_models.takes_ring_attention(model)
        is_ring = is_ring and "documents" not in kwargs and not hf_documents.is_running()
        return (checked if is_ring else call)(model, *args, **kwargs)  # others may be compiled

    watched.is_on = is_on  # type: ignore[attr-defined]
    return watched


def _begin(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], group: Group | None
) -> tuple[_Forward, tuple[Any, ...], dict[str, Any]]:
    """Check the model and its labels; position ids become a tensor that no other call has."""
    hf_models.check_once(model)
    given = dict(zip(_parameters(type(model).forward), args)) | kwargs
    if given.get("labels") is not None:
        _check_loss(model, given.get("shift_labels") is not None, group)
    positions = given.get("position_ids")
    if isinstance(positions, Tensor):
        own = positions.view_as(positions)
        args = tuple(own if value is positions else value for value in args)
        kwargs = {name: own if value is positions else value for name, value in kwargs.items()}
        positions = own
    elif positions is None:
        positions = given.get("cache_position")
    return _Forward(model, positions, torch._C._current_graph_task_id()), args, kwargs


def _check_loss(model: Any, is_shifted: bool, group: Group | None) -> None:
    """Say that a slice's last token has no target, where the model shifts the labels itself."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    if model.loss_function is not ForCausalLMLoss:
        return
    if is_shifted:
        if "shift_labels" not in inspect.signature(ForCausalLMLoss).parameters:
            raise ValueError(
                "shift_labels: this version of transformers shifts them once more; compute the "
                "loss from the logits"
            )
    elif _world_size(group) > 1:
        warnings.warn(
            "labels= of a slice: the model shifts them by one, so the last token of every rank "
            "loses its target. Pass shift_labels= as well, from ring_flash_attn.adapters."
            "shift_labels(labels, cu_seqlens, process_group) of the whole sequence",
            stacklevel=5,
        )


def documents_of_call(
    position_ids: Tensor | None, query: Tensor, group: Group | None, latest: Documents
) -> Documents:
    """Find the documents that an attention call is about, and check its positions against them.

    The first call of a forward pass reads the positions, which syncs the device; the others do not.
    `position_ids` are what the layer hands down, None if it does not; `latest` are the documents
    of the last `update_ring_flash_attn_params`.
    """
    backward = torch._C._current_graph_task_id()
    forward = _running.forward
    if forward is None or forward.backward != backward:  # not in a model, or checkpointing
        if position_ids is None:
            return _documents_reached(backward) or latest
        kept: Documents | None = _documents.get(position_ids, (None, -1))[0]
        if backward != -1 and kept is not None:
            return kept
        _check_once(position_ids, query, group, latest)
        return latest
    if forward.documents is None:
        forward.documents = latest
    if forward.position_ids is None:
        forward.position_ids = _count(forward.model, query, group)
    if position_ids is None:
        position_ids = forward.position_ids
        forward.is_unmarked = True
    _check_once(position_ids, query, group, forward.documents)
    return forward.documents


def _documents_reached(backward: int) -> Documents | None:
    """The documents of the forward pass of which checkpointing runs a layer without positions."""
    candidates = _reached.get(backward, [])
    if len(candidates) > 1:
        raise ValueError(
            "checkpointing recomputes a layer that receives no position_ids in a backward pass "
            f"through forward passes over {len(candidates)} different sets of documents, and it "
            "cannot tell which are its own: run backward of each loss by itself"
        )
    return candidates[0] if candidates else None


def is_reached() -> bool:
    """Whether this backward pass goes through a model whose layers receive no position ids."""
    return torch._C._current_graph_task_id() in _reached


def _note_backward(output: Any, documents: Documents) -> None:
    """Note the documents when a backward pass comes back to the model, before its layers run."""

    def reached(_: Tensor) -> None:
        found = _reached.setdefault(torch._C._current_graph_task_id(), [])
        if not any(_equal(documents, other) for other in found):
            found.append(documents)
        for old in list(_reached)[:-_BACKWARDS]:
            del _reached[old]

    for value in tree_leaves(output):
        if isinstance(value, Tensor) and value.grad_fn is not None:
            value.register_hook(reached)


def _equal(one: Documents, other: Documents) -> bool:
    """Whether they say the same; the same tensors, as a rule, which are not read."""
    pairs = [(one[key], other[key]) for key in reversed(list(one))]  # numbers before tensors
    return all(a is b or (torch.equal(a, b) if isinstance(a, Tensor) else a == b) for a, b in pairs)


def _world_size(group: Group | None) -> int:
    try:
        return rank_and_size(group)[1]
    except ValueError:  # not initialised: attention will say so, if it is called
        return 1


@functools.cache
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Names of what a model's forward takes, in order, without `self`."""
    return tuple(inspect.signature(forward).parameters)[1:]


# Positions.


def _count(model: Any, query: Tensor, group: Group | None) -> Tensor:
    """Make the positions that a model counts by itself: from 0, which is right on one rank only."""
    if _world_size(group) > 1:
        name = type(model).__name__
        if "position_ids" not in _parameters(type(model).forward):
            raise ValueError(
                f"{name}.forward takes no position_ids, and counts from 0 on every rank: ring "
                "attention cannot serve it"
            )
        raise ValueError(
            f"{name} was called without position_ids, and would count from 0 on every rank: "
            f"{HOW_TO_PASS_POSITIONS}"
        )
    return torch.arange(query.shape[1], device=query.device)


def _check_once(
    position_ids: Tensor, query: Tensor, group: Group | None, documents: Documents
) -> None:
    """Check positions, unless this tensor was checked against these documents."""
    now = -1 if position_ids.is_inference() else position_ids._version
    kept, version = _documents.get(position_ids, (None, -1))
    if kept is not None and version == now and _equal(kept, documents):
        return
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        return  # nothing can be read now; the same call was made before the capture
    try:
        check_positions(position_ids, query.shape[1], documents, group)
    except ValueError as error:
        if torch._C._current_graph_task_id() == -1:
            raise
        raise ValueError(
            "checkpointing recomputes a forward pass, and other documents have been given to "
            f"update_ring_flash_attn_params since: {error}"
        ) from None
    _documents[position_ids] = documents, now


def check_positions(
    position_ids: Tensor, size: int, documents: Documents, group: Group | None
) -> None:
    """Refuse positions that contradict the documents; one device sync if they do not.

    Positions in the whole sequence, across documents, are accepted too: rotary embeddings see
    differences alone. Zeros up to the end of the sequence are padding, in the last document or as
    one of its own. Of (axes, 1, size) in multimodal models only this is known: all axes are 0 at
    the start of a document, and nowhere else.
    """
    if check_mode() == "off":
        return
    if position_ids.numel() == 0 or position_ids.numel() % size:
        raise ValueError(
            f"position_ids has shape {tuple(position_ids.shape)}, but this rank holds {size} tokens"
        )
    found = position_ids.detach().reshape(-1, size)
    cu_q, cu_k = (
        documents[key].to(found.device, torch.int64) for key in ("cu_seqlens_q", "cu_seqlens_k")
    )
    tokens = torch.arange(size, device=found.device)
    document = torch.searchsorted(cu_q[1:-1].contiguous(), tokens, right=True)
    expected = tokens + (cu_k.diff() - cu_q[1:])[document]  # the last query is at the last key
    several = len(found) > 1
    found, expected = (found.any(0), expected > 0) if several else (found[0], expected)
    wrong = found != expected
    if not wrong.any():
        return
    first = int(wrong.nonzero()[0])
    end = documents["local_k_slice"].start + int(cu_k[-1])
    if not several and torch.equal(found, tokens + end - size):
        return
    # The same on all ranks that padding reaches, so that none waits for another that refuses.
    padded = first >= int(cu_q[-2]) and not found[first:].any()
    if padded and (found.any() or rank_and_size(group)[0] > 0):  # not all of the sequence
        return
    if several:
        states = "a document starts at" if expected[first] == 0 else "no document starts at"
        raise ValueError(
            f"position_ids: {states} token {first} of this rank; {HOW_TO_PASS_POSITIONS}"
        )
    raise ValueError(
        f"position_ids: token {first} of this rank has position {int(found[first])}, but is at "
        f"{int(expected[first])} in the documents that update_ring_flash_attn_params was told: "
        f"{HOW_TO_PASS_POSITIONS}"
    )
