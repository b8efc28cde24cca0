"""torch's experimental `context_parallel` and its two companions, with attention computed here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import comm
from ..engine import checks
from ..plan.layout import Layout, get_layout
from .batches import BatchDocuments, Stream
from .context_parallel import BatchPlacement, ContextParallel
from .sdpa import routed
from .sharding import unshard

if TYPE_CHECKING:
    from ..comm import Group

_ROUTES = {"allgather": "all_gather", "alltoall": "ring"}  # torch's rotate methods
_route = "ring"  # where the user names none


def context_parallel(
    mesh: Group | None,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Collection[Tensor] | None = None,
    layout: str | Layout = "zigzag",
    route: str | None = None,
    kernel: str = "auto",
) -> AbstractContextManager[None]:
    """Within it, buffers are this rank's shards, and torch's attention goes over the ranks of mesh.

    A drop-in for `torch.distributed.tensor.experimental.context_parallel`. Sequences may have any
    length; layout, route and kernel are ours. F.scaled_dot_product_attention is that of
    `ContextParallel.scaled_dot_product_attention`. The backward pass belongs inside.

    Args:
        mesh: the ranks that share a sequence: a DeviceMesh of one axis, or a process group.
        buffers: tensors with all tokens, the same on every rank: ids, labels, RoPE tables, … They
            become the shards in place, and are what they were afterwards. None may require a
            gradient.
        buffer_seq_dims: for each of them, its dimension of tokens.
        no_restore_buffers: those that stay shards afterwards.
        layout: as in `ring_attention`; "zigzag" is what torch has with load balancing.
        route: as in `ring_attention`; if None, what `set_rotate_method` chose, "ring" at first.
        kernel: as in `ring_attention`.
    """
    tensors, dims = _checked("buffers", buffers, "buffer_seq_dims", buffer_seq_dims)
    kept = _checked_subset(no_restore_buffers, tensors)
    for number, x in enumerate(tensors):
        if isinstance(x, torch.nn.Parameter) or x.requires_grad:
            raise ValueError(f"buffers[{number}] requires a gradient: it cannot be cut in place")
    lengths = {x.shape[dim] for x, dim in zip(tensors, dims)}
    if len(lengths) > 1:
        raise ValueError(
            f"buffers must have as many tokens in buffer_seq_dims, but they have {sorted(lengths)}"
        )
    cp = ContextParallel(mesh, layout, _route if route is None else route, kernel)
    (seqlen,) = lengths
    stream = Stream((1, seqlen), False, (seqlen,), torch.arange(seqlen))
    choice = BatchPlacement(get_layout(layout), cp.route, {})
    documents, held = stream.spread(choice, *comm.rank_and_size(mesh), cp, None)
    return _sharded(cp.attention, documents, [*zip(tensors, dims)], held, kept)


@contextmanager
def _sharded(
    attention: Callable[..., Any],
    documents: BatchDocuments,
    buffers: Sequence[tuple[Tensor, int]],
    held: Tensor,
    kept: set[int],
) -> Iterator[None]:
    """Storages are exchanged, not written: views of a buffer, or of what it is one, stay whole."""
    with routed(attention, documents):
        whole = [x.detach() for x, _ in buffers]
        with torch.no_grad():
            shards = [x.index_select(dim, held.to(x.device)) for x, dim in buffers]
        try:
            _exchange(buffers, shards)
            yield
        finally:
            back = [(buffer, x) for buffer, x in zip(buffers, whole) if id(buffer[0]) not in kept]
            _exchange([buffer for buffer, _ in back], [x for _, x in back])


def _exchange(buffers: Sequence[tuple[Tensor, int]], contents: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for (buffer, _), content in zip(buffers, contents, strict=True):
            buffer.set_(content)  # type: ignore[call-overload]


def context_parallel_unshard(
    mesh: Group | None,
    buffers: Sequence[Tensor],
    seq_dims: Sequence[int],
    load_balancer: None = None,
    *,
    layout: str | Layout = "zigzag",
    seqlen: int | None = None,
) -> list[Tensor]:
    """All tokens on every rank, from what was computed within `context_parallel`; no gradients.

    A drop-in for `torch.distributed.tensor.experimental._attention.context_parallel_unshard`.

    Args:
        mesh: as in `context_parallel`.
        buffers: this rank's shards: outputs, logits, …
        seq_dims: for each of them, its dimension of tokens.
        load_balancer: None; the layout says where tokens are.
        layout: as in `context_parallel`.
        seqlen: tokens of the whole sequence; by default all shards are equal.
    """
    if load_balancer is not None:
        raise ValueError("load_balancer must be None: layout says which rank holds which tokens")
    tensors, dims = _checked("buffers", buffers, "seq_dims", seq_dims)
    with torch.no_grad():
        return [
            unshard(x, layout, seqlen=seqlen, dim=dim, group=mesh) for x, dim in zip(tensors, dims)
        ]


def set_rotate_method(rotate_method: str) -> None:
    """Choose the route of `context_parallel` in torch's words; results are the same.

    Args:
        rotate_method: "allgather" (route all_gather) or "alltoall" (route ring).
    """
    global _route
    if not isinstance(rotate_method, str) or rotate_method not in _ROUTES:
        raise ValueError(f"rotate_method must be one of {[*_ROUTES]}, not {rotate_method!r}")
    _route = _ROUTES[rotate_method]


def _checked(
    name: str, tensors: object, dims_name: str, dims: object
) -> tuple[list[Tensor], list[int]]:
    """At least one tensor, with its dimension of tokens from 0 on."""
    for each, value in ((name, tensors), (dims_name, dims)):
        if value is not None and not isinstance(value, (list, tuple)):
            raise TypeError(f"{each} must be a list, not {type(value).__name__}")
    if not tensors:
        raise ValueError(f"{name} must hold at least one tensor")
    assert isinstance(tensors, (list, tuple))
    if not isinstance(dims, (list, tuple)) or len(dims) != len(tensors):
        found = len(dims) if isinstance(dims, (list, tuple)) else 0
        raise ValueError(f"{dims_name} must have {len(tensors)} numbers, as {name}, not {found}")
    checked = []
    for number, (x, dim) in enumerate(zip(tensors, dims)):
        checks.check_tensor(f"{name}[{number}]", x)
        dim = checks.check_integer(f"{dims_name}[{number}]", dim)
        if not -x.dim() <= dim < x.dim():
            raise ValueError(
                f"{dims_name}[{number}] = {dim}, but {name}[{number}] has shape {tuple(x.shape)}"
            )
        checked.append(dim % x.dim())
    if len({id(x) for x in tensors}) < len(tensors):
        raise ValueError(f"{name} holds a tensor twice")
    return list(tensors), checked


def _checked_subset(some: object, tensors: Sequence[Tensor]) -> set[int]:
    """The ids of the tensors that are among `some`."""
    if some is not None and not isinstance(some, (set, frozenset, list, tuple)):
        raise TypeError(f"no_restore_buffers must be a set of tensors, not {type(some).__name__}")
    found = {id(x) for x in some or ()}
    if not found <= {id(x) for x in tensors}:
        raise ValueError("no_restore_buffers must be among buffers")
    return found
