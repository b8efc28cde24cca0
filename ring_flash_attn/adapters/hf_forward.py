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
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import comm
from . import hf_arguments, hf_models

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Documents = Mapping[str, Any]


@dataclass(slots=True)
class _Forward:
    """A call of a model: what it was given, and the documents from its first attention call on."""

    model: Any
    original: Any  # the position ids that it was given
    position_ids: Any  # a view of them that no other call has
    counts_alone: bool  # nobody gave it positions
    backward: int  # the backward pass that it runs in, -1 outside of any
    has_grad: bool
    documents: Documents | None


class _Running(threading.local):
    def __init__(self) -> None:
        self.forwards: list[_Forward] = []


_running = _Running()
_checked: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # attn_implementation, by model
# By position ids: the documents that they were checked against, and the tensor's version then.
_documents = WeakTensorKeyDictionary()
# Documents of forward passes whose layers receive no position ids, up to the next recomputation.
_unmarked: list[Documents] = []
_recomputed = False


def watch(
    group: ProcessGroup | None, is_on: Callable[[], bool], call: Callable[..., Any]
) -> Callable[..., Any]:
    """Look at calls of transformers' models: refuse what cannot be done, and note their documents.

    Args:
        group: the ranks that share the sequence.
        is_on: whether ring attention is in place; asked at every call.
        call: `PreTrainedModel.__call__`.

    Returns:
        What takes the place of `call`.
    """

    @functools.wraps(call)
    def watched(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_on() or not hf_models.takes_ring_attention(model):
            return call(model, *args, **kwargs)
        _check_model(model)
        given = dict(zip(_parameters(type(model)), args)) | kwargs
        _check_labels(model, given, group)
        original = given.get("position_ids")
        own = original.view_as(original) if isinstance(original, Tensor) else original
        backward = torch._C._current_graph_task_id()
        _running.forwards.append(
            _Forward(
                model,
                original,
                own,
                counts_alone=original is None and given.get("cache_position") is None,
                backward=backward,
                has_grad=torch.is_grad_enabled(),
                # checkpointing of the whole model runs it once more in the backward pass
                documents=None if backward == -1 else _documents_with(original),
            )
        )
        try:
            return call(
                model,
                *(own if value is original else value for value in args),
                **{name: own if value is original else value for name, value in kwargs.items()},
            )
        finally:
            _running.forwards.pop()

    return torch.compiler.disable(watched, recursive=False)


def documents_of_call(
    position_ids: Tensor | None, query: Tensor, group: ProcessGroup | None, latest: Documents
) -> Documents:
    """Find the documents that an attention call is about, and check its positions against them.

    The first call of a forward pass reads the positions, which syncs the device; the others do not.

    Args:
        position_ids: as the layer hands them down; None if it does not.
        query: (1, seqlen, nheads, headdim).
        group: the ranks that share the sequence.
        latest: what `update_ring_flash_attn_params` was told last.
    """
    backward = torch._C._current_graph_task_id()
    forward = _running.forwards[-1] if _running.forwards else None
    if forward is None or forward.backward != backward:
        if backward != -1:
            return _documents_again(position_ids, query, group, latest)
        if position_ids is not None:
            _check_positions(position_ids, query, group, latest)
        return latest
    documents = forward.documents or latest
    if forward.counts_alone:
        position_ids = _positions_of_the_model(forward.model, position_ids, query, group)
    elif position_ids is None:
        position_ids = forward.position_ids
        _keep_unmarked(documents, forward.has_grad)
    if position_ids is not None:
        _check_positions(position_ids, query, group, documents)
    if forward.documents is None:
        forward.documents = documents
        if isinstance(forward.original, Tensor):
            _documents[forward.original] = documents, _version(forward.original)
    return documents


def _documents_again(
    position_ids: Tensor | None, query: Tensor, group: ProcessGroup | None, latest: Documents
) -> Documents:
    """The documents of the forward pass that checkpointing runs a layer of once more."""
    global _recomputed
    if position_ids is not None:
        documents = _documents_with(position_ids)
        if documents is None:
            _check_positions(position_ids, query, group, latest)
        return documents or latest
    _recomputed = True
    if len(_unmarked) > 1:
        raise ValueError(
            "a checkpointed layer that receives no position_ids is recomputed after forward passes "
            f"over {len(_unmarked)} different sets of documents, and cannot tell which are its own:"
            " run backward before update_ring_flash_attn_params is told the next documents (and "
            "what has no backward under torch.no_grad), or turn checkpointing off"
        )
    return _unmarked[0] if _unmarked else latest


def _keep_unmarked(documents: Documents, has_grad: bool) -> None:
    global _recomputed
    if has_grad:
        if _recomputed:  # the passes before have had their backward
            _unmarked.clear()
            _recomputed = False
        if not any(_equal(kept, documents) for kept in _unmarked):
            _unmarked.append(documents)


def _check_model(model: Any) -> None:
    name = model.config._attn_implementation
    if _checked.get(model) != name:
        hf_models.check_model(model)
        _checked[model] = name


def _check_labels(model: Any, given: Mapping[str, Any], group: ProcessGroup | None) -> None:
    """Say that a slice's last token has no target, where the model shifts the labels itself."""
    if given.get("labels") is None or given.get("shift_labels") is not None:
        return
    from transformers.loss.loss_utils import ForCausalLMLoss

    if model.loss_function is ForCausalLMLoss and _world_size(group) > 1:
        warnings.warn(
            "labels= of a slice: the model shifts them by one, so the last token of every rank "
            "loses its target. Pass shift_labels= as well, from ring_flash_attn.adapters."
            "shift_labels(labels, cu_seqlens, process_group) of the whole sequence",
            stacklevel=4,
        )


def _positions_of_the_model(
    model: Any, position_ids: Tensor | None, query: Tensor, group: ProcessGroup | None
) -> Tensor:
    """What a model counts if nobody gives it positions: from 0, whatever the rank."""
    name = type(model).__name__
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        raise ValueError(
            f"{name}.forward takes no position_ids, and counts from 0 on every rank: ring attention"
            " cannot serve it"
        )
    if _world_size(group) > 1:
        raise ValueError(
            f"{name} was called without position_ids, and would count from 0 on every rank: "
            f"{hf_arguments.HOW_TO_PASS_POSITIONS}"
        )
    if position_ids is None:
        return torch.arange(query.shape[1], device=query.device)
    return position_ids


def _check_positions(
    position_ids: Tensor, query: Tensor, group: ProcessGroup | None, documents: Documents
) -> None:
    kept, version = _documents.get(position_ids, (None, -1))
    if kept is not None and version == _version(position_ids) and _equal(kept, documents):
        return
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        return  # nothing can be read now; the same call was made before the capture
    hf_arguments.check_positions(position_ids, query.shape[1], documents, group)
    _documents[position_ids] = documents, _version(position_ids)


def _documents_with(position_ids: Any) -> Documents | None:
    if not isinstance(position_ids, Tensor):
        return None
    found: Documents | None = _documents.get(position_ids, (None, -1))[0]
    return found


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _equal(one: Documents, other: Documents) -> bool:
    """Whether they say the same; the same tensors, as a rule, which are not read."""
    if any(one[key] != other[key] for key in ("max_seqlen_q", "max_seqlen_k", "local_k_slice")):
        return False
    return all(
        one[key] is other[key] or torch.equal(one[key], other[key])
        for key in ("cu_seqlens_q", "cu_seqlens_k")
    )


def _world_size(group: ProcessGroup | None) -> int:
    try:
        return comm.rank_and_size(group)[1]
    except ValueError:  # not initialised: attention will say so, if it is called
        return 1


@functools.cache
def _parameters(model: type) -> tuple[str, ...]:
    """Names of what a model's forward takes, in order, without `self`."""
    return tuple(inspect.signature(model.forward).parameters)[1:]  # type: ignore[attr-defined]
