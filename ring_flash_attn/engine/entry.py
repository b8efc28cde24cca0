"""From a user's arguments to a problem; one function for each way to describe the documents."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .. import comm
from ..cache import Cache
from ..kernels.base import registrations
from ..plan.build import BY_HEADS, BY_NODES, BY_SOURCES, check_route
from ..plan.layout import Layout, get_layout
from ..plan.llama3 import Llama3Problem
from ..plan.problem import Problem
from . import checks
from .attention import QKV, PreparedCall
from .checks import CuSeqlens, document_lengths
from .prepare import (
    GroupCall,
    Options,
    Output,
    check_capture,
    on_group,
    prepare,
    prepare_on_group,
    run_on_group,
    run_prepared,
)

if TYPE_CHECKING:
    from ..comm import Group

_DOCUMENTS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def ring_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: str | Layout,
    route: str,
    packed: bool | None = None,
    equal_shards: bool = False,
    cu_seqlens: CuSeqlens | None = None,
    cu_seqlens_k: CuSeqlens | None = None,
    max_seqlen: int | None = None,
    seqlen: int | None = None,
    seqlen_k: int | None = None,
    heads_k_stride: int | None = None,
    sources_per_launch: int | None = None,
    ranks_per_node: int | None = None,
    group: Group | None = None,
    **options: Any,
) -> GroupCall:
    """A batch, or packed documents, spread over the group.

    Without `packed`, cu_seqlens decides. It is that of the whole stream or, with `equal_shards`,
    that of every rank's shard. Shards of a batch are equal unless seqlen says.
    """
    if packed is None:
        packed = cu_seqlens is not None
        if cu_seqlens_k is not None and not packed:
            raise ValueError("cu_seqlens_k is given without cu_seqlens")
        if packed and (seqlen is not None or seqlen_k is not None):
            raise ValueError("seqlen and seqlen_k go with a batch, not with cu_seqlens")
    check_route(route)
    if route in BY_NODES:
        group, ranks_per_node = comm.group_and_node(group, ranks_per_node)
    group = comm.resolve_group(group)
    rank, world_size = comm.rank_and_size(group)
    opts = Options(**options)
    shard = q, k, v = _prepare(q, k, v, packed)
    same: dict[str, object]
    if packed:
        lengths_q = lengths_k = document_lengths(cast(CuSeqlens, cu_seqlens), q.device)
        if cu_seqlens_k is not None:
            lengths_k = document_lengths(cu_seqlens_k, q.device, "cu_seqlens_k")
        if max_seqlen is not None or equal_shards:
            checks.check_max_seqlen("max_seqlen", max_seqlen, lengths_q)
        if equal_shards:
            for name, tensor in (("q", q), ("k", k)):
                checks.check_total(lengths_q, tensor[0], name, "cu_seqlens")
            lengths_q = lengths_k = tuple(length * world_size for length in lengths_q)
        same = {
            "tokens": (sum(lengths_q), sum(lengths_k)),
            "documents": len(lengths_q),
            **document_values(cu_seqlens=lengths_q, cu_seqlens_k=lengths_k),
        }
    else:
        lengths_q, lengths_k = (
            (x.shape[1] * world_size if length is None else checks.check_integer(name, length, 0),)
            for name, length, x in (("seqlen", seqlen, q), ("seqlen_k", seqlen_k, k))
        )
        same = {"seqlen_q": lengths_q, "seqlen_k": lengths_k, "batch": q.shape[0]}
    heads = k.shape[2], heads_k_stride, sources_per_launch, ranks_per_node
    problem = make_problem(layout, route, lengths_q, lengths_k, world_size, opts, *heads)
    return GroupCall(route, problem, shard, opts, group, rank, same, packed)


def llama3_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: str,
    route: str,
    packed: bool,
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: slice,
    group: Group | None = None,
    **options: Any,
) -> GroupCall:
    """Packed documents in a stream that is split evenly; each rank knows its own part."""
    group = comm.resolve_group(group)
    rank, world_size = comm.rank_and_size(group)
    opts = Options(**options)
    shard = q, k, v = _prepare(q, k, v, packed)
    lengths_q, lengths_k = checks.document_pairs(
        q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    )
    checks.check_total(lengths_q, q[0], "q", "cu_seqlens_q")
    _check_documents(lengths_q, lengths_k)
    local_k_slice = checks.check_slice("local_k_slice", local_k_slice)
    gathered = range(k.shape[1] * world_size)[local_k_slice]
    if gathered.step != 1 or len(gathered) != sum(lengths_k):
        raise ValueError(
            f"local_k_slice = {local_k_slice} takes {len(gathered)} of {k.shape[1] * world_size} "
            f"gathered keys in steps of {gathered.step}, but cu_seqlens_k ends at {sum(lengths_k)}"
        )
    problem = Llama3Problem(
        get_layout(layout),
        lengths_q,
        lengths_k,
        world_size,
        opts.mask,
        k.shape[2],
        checks.check_heads_k_stride(heads_k_stride, k.shape[2]),
        k_start=gathered.start,
        rank=rank,
        size_q=q.shape[1],
        size_k=k.shape[1],
        bottom_right=opts.causal or q.shape[1] != k.shape[1],
    )
    same = {"total_q": q.shape[1], "total_k": k.shape[1]}
    return GroupCall(route, problem, shard, opts, group, rank, same, packed)


def run_ring(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Output:
    """`ring_call`, run."""
    return _run(ring_call, q, k, v, options)


def run_llama3(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Output:
    """`llama3_call`, run."""
    return _run(llama3_call, q, k, v, options)


# Of each group, by all that checks, plans and the ranks' agreement depend on: the layers of a model
# make a few kinds of calls. Without what refers to the group, so that it can go.
_ready_on_group: WeakKeyDictionary[Any, Cache[tuple[object, ...], PreparedCall]] = (
    WeakKeyDictionary()
)
_KINDS, _PIECES = 16, 1 << 22  # of a group, and those of their plans, as many as all plans may have


def _run(
    make: Callable[..., GroupCall], q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> Output:
    """A call on a group, checked and planned once for all like it."""
    check_route(options["route"])
    group = options.get("group")
    if options["route"] in BY_NODES:
        group, nodes = comm.group_and_node(group, options.get("ranks_per_node"))
        options["ranks_per_node"] = nodes
    options["group"] = group = comm.resolve_group(group)
    q, k, v = in_autocast_dtype(q, k, v)
    ready = _ready_on_group.get(group)
    if ready is None:
        ready = _ready_on_group[group] = Cache(_KINDS, weigh=_pieces, most=_PIECES)
    key = _group_key(make, q, k, v, options)
    prepared = ready.get(key) if key is not None else None
    if prepared is None:
        prepared = prepare_on_group(make(q, k, v, **options))
        if key is not None:
            ready.add(key, replace(prepared, connect=tuple))
    else:
        check_capture(group, q.device)
        comm.agree(prepared.signature, group)  # an earlier call may have failed
        prepared = replace(prepared, connect=on_group(group, q.device))
        if prepared.call.alibi_slopes is not None:
            prepared = prepared.changed(alibi_slopes=options["alibi_slopes"])
    packed = q.dim() == 3
    return run_on_group(prepared, _batched(q, k, v, packed), options.get("sink"), group, packed)


def _pieces(prepared: PreparedCall) -> int:
    return sum(each.forward.pieces + each.backward.pieces for each in prepared.ranks)


def _group_key(
    make: Callable[..., GroupCall], q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> tuple[object, ...] | None:
    """`_key` of a call on a group; None also where the ranks have to meet at every call."""
    mode = comm.check_mode()
    if make is llama3_call and mode == "values":
        return None
    plain: dict[str, Any] = {}
    lengths: dict[str, tuple[int, ...]] = {}
    for name, value in options.items():
        if value is not None and name.startswith("cu_seqlens"):
            same = next((each for each in lengths if options[each] is value), None)
            lengths[name] = lengths[same] if same else document_lengths(value, q.device, name)
        elif name == "layout":  # another one may have been registered under a name
            plain[name] = get_layout(value)
        elif isinstance(value, slice):
            value = checks.check_slice(name, value)
            plain[name] = value.start, value.stop, value.step
        elif name != "group":
            plain[name] = value
    return _key(q, k, v, (make, mode, *lengths.items()), plain, None)


def run_single(
    q: Tensor, k: Tensor, v: Tensor, *, block_table: Tensor | None = None, **options: Any
) -> Output:
    """A batch on one device; or packed documents, with cu_seqlens (of qkv), or those of q and k."""
    lengths = None
    if block_table is not None:
        checks.check_tensor("block_table", block_table)
        raise NotImplementedError(
            "block_table: keys and values in pages are not supported. Gather the pages, and pass k "
            "and v as (total_k, nheads_k, headdim)"
        )
    if "cu_seqlens" in options:
        same = document_lengths(options.pop("cu_seqlens"), q.device)
        checks.check_max_seqlen("max_seqlen", options.pop("max_seqlen"), same)
        checks.check_total(same, q, "qkv", "cu_seqlens")
        lengths = same, same
    elif "cu_seqlens_q" in options:
        checks.check_tensor("q", q)
        lengths = checks.document_pairs(q, *(options.pop(name) for name in _DOCUMENTS))
    prepared, shard = prepare_single(q, k, v, lengths, options)
    with_lse = options.get("return_attn_probs", False)
    return run_prepared(prepared, [shard], options.get("sink"), with_lse, lengths is not None)[0]


# By all that checks and plan depend on; few, as plans of long packs are large.
_ready: Cache[tuple[object, ...], PreparedCall] = Cache(64)


def prepare_single(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None,
    options: dict[str, Any],
    grad: bool | None = None,
) -> tuple[PreparedCall, QKV]:
    """What does a call on one device, and its tensors; checked and planned once for all like it.

    `grad` says whether there will be a backward pass, where the tensors do not.
    """
    packed = lengths is not None
    q, k, v = in_autocast_dtype(q, k, v)
    key = _key(q, k, v, lengths, options, grad)
    prepared = _ready.get(key) if key is not None else None
    if prepared is not None:
        if prepared.call.alibi_slopes is not None:
            prepared = prepared.changed(alibi_slopes=options["alibi_slopes"])
        return prepared, _batched(q, k, v, packed)
    opts = Options(**options)
    checks.check_tensors(q, k, v, packed)
    shard = _batched(q, k, v, packed)
    if lengths is None:
        lengths = (q.shape[1],), (k.shape[1],)
    else:
        checks.check_total(lengths[0], q, "q", "cu_seqlens_q")
        checks.check_total(lengths[1], k, "k", "cu_seqlens_k")
    problem = make_problem("contiguous", "ring", *lengths, 1, opts, shard[1].shape[2])
    prepared = prepare("ring", problem, {0: shard}, opts, grad=grad)
    if key is not None:
        _ready.add(key, prepared)
    return prepared, shard


def _key(
    q: Tensor, k: Tensor, v: Tensor, lengths: object, options: dict[str, Any], grad: bool | None
) -> tuple[object, ...] | None:
    """What decides whether a call is right and how it is done; None if that takes a closer look."""
    for name in ("alibi_slopes", "sink"):
        if options.get(name) is not None:
            checks.check_tensor(name, options[name])
    mode = torch.is_grad_enabled() if grad is None else (grad,)
    deterministic = torch.are_deterministic_algorithms_enabled()
    values: list[object] = [lengths, mode, registrations(), deterministic]
    for x in (q, k, v, options.get("alibi_slopes"), options.get("sink")):
        kind = (x.shape, x.dtype, x.device, x.requires_grad) if isinstance(x, Tensor) else x
        values.append(kind)
    for name, value in options.items():
        if name not in ("alibi_slopes", "sink"):
            if isinstance(value, Tensor):  # equal to itself, whatever it holds
                return None
            values += name, type(value), value
    left, right = checks.check_window(options.get("window_size", (-1, -1)))
    key = (*values, left, right)
    try:
        hash(key)
    except TypeError:  # a list for a tuple, perhaps
        return None
    return key


def run_virtual(
    layout: str | Layout,
    route: str,
    shards: Sequence[QKV],
    lengths_q: tuple[int, ...],
    lengths_k: tuple[int, ...],
    packed: bool,
    heads_k_stride: int | None,
    sources_per_launch: int | None = None,
    ranks_per_node: int | None = None,
    **options: Any,
) -> list[Output]:
    """All ranks in this process, one shard (q, k, v) each."""
    opts = Options(**options)
    shards = [_prepare(*shard, packed=packed) for shard in shards]
    heads = shards[0][1].shape[2], heads_k_stride, sources_per_launch, ranks_per_node
    problem = make_problem(layout, route, lengths_q, lengths_k, len(shards), opts, *heads)
    prepared = prepare(route, problem, dict(enumerate(shards)), opts)
    return run_prepared(prepared, shards, opts.sink, opts.return_attn_probs, packed)


def _prepare(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> QKV:
    """Checked, in autocast's dtype, as (batch, seqlen, nheads, headdim)."""
    q, k, v = in_autocast_dtype(q, k, v)
    checks.check_tensors(q, k, v, packed)
    return _batched(q, k, v, packed)


def _batched(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> QKV:
    return (q[None], k[None], v[None]) if packed else (q, k, v)


def in_autocast_dtype(q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """What autocast makes of them, where it is on; TypeError unless all three are tensors."""
    checks.check_tensor("q", q)
    checks.check_tensor("k", k)
    checks.check_tensor("v", v)
    dtype = checks.autocast_dtype(q.device.type)
    if dtype is not None:
        lower = (torch.float32, torch.float16, torch.bfloat16)
        q, k, v = (x.to(dtype) if x.dtype in lower else x for x in (q, k, v))
    return q, k, v


def document_values(**lengths: tuple[int, ...]) -> dict[str, object]:
    """What of cu_seqlens the ranks compare beyond its size: nothing, or all."""
    if comm.check_mode() != "values":
        return {}
    return {
        name: hashlib.sha1(repr(value).encode()).hexdigest()[:12] + f" of {value[:8]}"
        for name, value in lengths.items()
    }


def _check_documents(lengths_q: Sequence[int], lengths_k: Sequence[int]) -> None:
    if len(lengths_q) != len(lengths_k):
        raise ValueError(
            f"cu_seqlens of the queries delimits {len(lengths_q)} documents, that of the keys "
            f"{len(lengths_k)}"
        )


def check_ranks_per_node(ranks_per_node: object, route: str, world_size: int) -> int | None:
    """It, if it is None or goes with the route and divides the ranks; ValueError otherwise."""
    if ranks_per_node is None:
        return None
    checked = checks.check_integer("ranks_per_node", ranks_per_node, 1)
    if route not in BY_NODES:
        have = " and ".join(map(repr, BY_NODES))
        raise ValueError(f"ranks_per_node = {checked}: only routes {have} have nodes")
    if world_size % checked:
        raise ValueError(
            f"ranks_per_node = {checked} must divide the number of ranks, {world_size}"
        )
    return checked


def make_problem(
    layout: str | Layout,
    route: str,
    lengths_q: tuple[int, ...],
    lengths_k: tuple[int, ...],
    world_size: int,
    opts: Options,
    nheads_k: int,
    heads_k_stride: int | None = None,
    sources_per_launch: int | None = None,
    ranks_per_node: int | None = None,
) -> Problem:
    """What is to be computed; ValueError where that makes no sense."""
    check_route(route)
    _check_documents(lengths_q, lengths_k)
    if heads_k_stride is None:
        heads_k_stride = nheads_k
    elif route not in BY_HEADS:
        raise ValueError(
            f"heads_k_stride = {heads_k_stride}: route {route!r} takes all heads at once"
        )
    if sources_per_launch is not None and route not in BY_SOURCES:
        group = ", ".join(map(repr, BY_SOURCES))
        raise ValueError(
            f"sources_per_launch = {sources_per_launch!r}: only routes {group} group sources, "
            f"not {route!r}"
        )
    return Problem(
        get_layout(layout),
        lengths_q,
        lengths_k,
        world_size,
        opts.mask,
        nheads_k,
        checks.check_heads_k_stride(heads_k_stride, nheads_k),
        sources_per_launch
        if sources_per_launch is None
        else checks.check_integer("sources_per_launch", sources_per_launch, 1),
        check_ranks_per_node(ranks_per_node, route, world_size),
    )
