"""What users otherwise write by hand and get wrong: shard, unshard, relayout, position ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor

from .. import comm
from ..engine import checks
from ..engine.checks import CuSeqlens, document_lengths
from ..engine.gather import check_grad, gather
from ..engine.relayout import prepare_relayout, relayout_on_group, run_relayout
from ..engine.tokens import held_positions, held_tokens, order_of_shards
from ..plan.layout import Layout, get_layout
from ..plan.problem import Problem
from ..plan.steps import Side
from ..plan.tiles import Mask

if TYPE_CHECKING:
    from ..comm import Group


def shard(
    x: Tensor,
    layout: str | Layout,
    *,
    cu_seqlens: CuSeqlens | None = None,
    cu_seqlens_q: CuSeqlens | None = None,
    dim: int | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    group: Group | None = None,
) -> Tensor:
    """This rank's part of a tensor that holds all tokens: ids, labels, loss weights, q, k, v, …

    Args:
        x: has all tokens along `dim`. Every rank passes the same tensor.
        layout: as in `ring_attention`.
        cu_seqlens: (documents + 1,) of the whole packed stream; None for a batch of equal
            sequences.
        cu_seqlens_q: that of the queries, where these tokens are keys and their numbers differ;
            layout "balanced" then places keys with their queries.
        dim: the dimension of tokens; 0 with cu_seqlens, 1 without, unless given.
        rank, world_size: which part of how many; by default this process's in `group`.
        group: process group, or a DeviceMesh of one axis; the default group if None.

    Returns:
        The rank's tokens in local order, a new tensor. Differentiable.
    """
    dim = _token_dim(dim, cu_seqlens, x)
    rank, world_size = which_rank(rank, world_size, group)
    where = f"x in dim = {dim}"
    problem = _problem(layout, cu_seqlens, cu_seqlens_q, x.shape[dim], world_size, where)
    return x.index_select(dim, held_tokens(problem, rank, x.device))


def unshard(
    x: Tensor | Sequence[Tensor],
    layout: str | Layout,
    *,
    cu_seqlens: CuSeqlens | None = None,
    cu_seqlens_q: CuSeqlens | None = None,
    seqlen: int | None = None,
    dim: int | None = None,
    group: Group | None = None,
    grad: str | None = None,
) -> Tensor:
    """All tokens, from the shards: the inverse of `shard`.

    Args:
        x: this rank's shard, to be gathered over `group`; or the list of all ranks' shards.
        layout: as in `ring_attention`.
        cu_seqlens: (documents + 1,) of the whole packed stream; None for a batch of equal
            sequences.
        cu_seqlens_q: that of the queries, where these tokens are keys and their numbers differ;
            layout "balanced" then places keys with their queries.
        seqlen: tokens of the whole sequence without cu_seqlens; by default all shards are equal.
        dim: the dimension of tokens; 0 with cu_seqlens, 1 without, unless given.
        group: process group, or a DeviceMesh of one axis; the default group if None.
        grad: the gradient of a shard that is gathered over a group. "sum": that of all ranks'
            copies, for a loss that is a sum of what the ranks compute. "slice": that of this rank's
            own copy, for a loss that every rank computes alike. If None, a shard that requires a
            gradient is refused.

    Returns:
        A tensor with all tokens. Differentiable for a list of shards, and with `grad` over a group;
        with "sum", every rank of the group then has to run its backward pass: one whose loss does
        not use the tensor adds `0 * tensor.sum()`.
    """
    check_grad(grad)
    if seqlen is not None:
        seqlen = checks.check_integer("seqlen", seqlen, 0)
    if isinstance(x, Tensor):
        dim = _token_dim(dim, cu_seqlens, x)
        if grad is None and x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "x requires a gradient, and every rank will have a gathered copy of it: say "
                'grad="sum" (the losses of the ranks are added up) or grad="slice" (all ranks '
                "compute the same loss), or detach x"
            )
        rank, world_size = comm.rank_and_size(group)
        if seqlen is None and cu_seqlens is None:
            seqlen = x.shape[dim] * world_size
        problem = _problem(layout, cu_seqlens, cu_seqlens_q, seqlen, world_size)
        _check_size(problem, rank, x, dim)
        sizes = problem.sizes(Side.KEY)
        shapes = [(*x.shape[:dim], size, *x.shape[dim:][1:]) for size in sizes]
        x = gather(x, shapes, comm.resolve_group(group), grad)
    else:
        if grad is not None:
            raise ValueError(f"grad = {grad!r}: a list of shards is differentiable as it is")
        dim, total = _check_shards(x, dim, cu_seqlens, seqlen, group)
        where = f"x in dim = {dim}"
        problem = _problem(layout, cu_seqlens, cu_seqlens_q, total, len(x), where)
        for rank, part in enumerate(x):
            _check_size(problem, rank, part, dim)
    return torch.cat(list(x), dim).index_select(dim, order_of_shards(problem, x[0].device))


@overload
def relayout(
    x: Tensor,
    from_layout: str | Layout,
    to_layout: str | Layout,
    *,
    cu_seqlens: CuSeqlens | None = None,
    cu_seqlens_q: CuSeqlens | None = None,
    seqlen: int | None = None,
    dim: int | None = None,
    group: Group | None = None,
) -> Tensor: ...
@overload
def relayout(
    x: Sequence[Tensor],
    from_layout: str | Layout,
    to_layout: str | Layout,
    *,
    cu_seqlens: CuSeqlens | None = None,
    cu_seqlens_q: CuSeqlens | None = None,
    seqlen: int | None = None,
    dim: int | None = None,
) -> list[Tensor]: ...
def relayout(
    x: Tensor | Sequence[Tensor],
    from_layout: str | Layout,
    to_layout: str | Layout,
    *,
    cu_seqlens: CuSeqlens | None = None,
    cu_seqlens_q: CuSeqlens | None = None,
    seqlen: int | None = None,
    dim: int | None = None,
    group: Group | None = None,
) -> Tensor | list[Tensor]:
    """This rank's tokens in another layout, from its shard in one: for models that mix layers.

    Each rank sends a peer only the tokens that the peer holds next, in one message. What stays is
    copied. Nothing is padded or gathered.

    Args:
        x: this rank's shard in `from_layout`, of any dtype; or the list of all ranks' shards.
        from_layout, to_layout: as in `ring_attention`.
        cu_seqlens: (documents + 1,) of the whole packed stream; None for a batch of equal
            sequences.
        cu_seqlens_q: that of the queries, where these tokens are keys and their numbers differ;
            layout "balanced" then places keys with their queries.
        seqlen: tokens of the whole sequence without cu_seqlens; by default all shards are equal.
        dim: the dimension of tokens; 0 with cu_seqlens, 1 without, unless given.
        group: process group, or a DeviceMesh of one axis; the default group if None.

    Returns:
        The shard in `to_layout`, a new tensor; or the list of them. Differentiable once: gradients
        go the way back, so every rank of the group has to run its backward pass.
    """
    if torch.compiler.is_compiling():  # break the graph instead of tracing into a plan
        run = torch.compiler.disable(_relayout)
    else:
        run = _relayout
    return run(x, (from_layout, to_layout), (cu_seqlens, cu_seqlens_q), seqlen, dim, group)


def _relayout(
    x: Tensor | Sequence[Tensor],
    layouts: tuple[str | Layout, str | Layout],
    offsets: tuple[CuSeqlens | None, CuSeqlens | None],
    seqlen: int | None,
    dim: int | None,
    group: Group | None,
) -> Tensor | list[Tensor]:
    cu_seqlens, _ = offsets
    if seqlen is not None:
        seqlen = checks.check_integer("seqlen", seqlen, 0)
    where = "seqlen"
    if isinstance(x, Tensor):
        dim = _token_dim(dim, cu_seqlens, x)
        _, world_size = comm.rank_and_size(group)
        if seqlen is None and cu_seqlens is None:
            seqlen = x.shape[dim] * world_size
    else:
        dim, seqlen = _check_shards(x, dim, cu_seqlens, seqlen, group)
        world_size, where = len(x), f"x in dim = {dim}"
    before, after = (
        _problem(layout, *offsets, seqlen, world_size, where, fresh=False) for layout in layouts
    )
    if isinstance(x, Tensor):
        group, packed = comm.resolve_group(group), cu_seqlens is not None
        return relayout_on_group(before, after, x, dim % x.dim(), group, packed)
    prepared = prepare_relayout(before, after, dict(enumerate(x)), dim % x[0].dim())
    return run_relayout(prepared, x)


def _check_shards(
    x: Sequence[Tensor],
    dim: int | None,
    cu_seqlens: CuSeqlens | None,
    seqlen: int | None,
    group: Group | None,
) -> tuple[int, int]:
    """The dimension of tokens, and how many; an error unless the shards differ there alone."""
    if not isinstance(x, (list, tuple)):
        raise TypeError(f"x must be a tensor or a list of tensors, not {type(x).__name__}")
    if not x:
        raise ValueError("x must hold at least one shard, but is an empty list")
    for rank, part in enumerate(x):
        checks.check_tensor(f"x[{rank}]", part)
    dim = _token_dim(dim, cu_seqlens, x[0])
    kinds = [(p.dtype, p.device, p.dim(), p.shape[:dim], p.shape[dim:][1:]) for p in x]
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            first, here = (f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in (x[0], x[rank]))
            raise ValueError(
                f"x must hold shards that differ in dimension {dim} alone, but x[0] is {first}, "
                f"and x[{rank}] is {here}"
            )
    if group is not None:
        raise ValueError("a list of shards takes no group: nothing is sent to other processes")
    total = sum(part.shape[dim] for part in x)
    if seqlen is not None and seqlen != total:
        raise ValueError(f"seqlen = {seqlen}, but the shards hold {total} tokens")
    return dim, total


def position_ids(
    layout: str | Layout,
    *,
    cu_seqlens: CuSeqlens | None = None,
    cu_seqlens_q: CuSeqlens | None = None,
    seqlen: int | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    group: Group | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Positions of this rank's tokens in their documents, as RoPE needs them.

    Args:
        layout: as in `ring_attention`.
        cu_seqlens: (documents + 1,) of the whole packed stream; None for a batch of equal
            sequences.
        cu_seqlens_q: that of the queries, where these tokens are keys and their numbers differ;
            layout "balanced" then places keys with their queries.
        seqlen: tokens of the whole sequence; needed without cu_seqlens.
        rank, world_size: which part of how many; by default this process's in `group`.
        group: process group, or a DeviceMesh of one axis; the default group if None.
        device: of the result; cu_seqlens's device if None.

    Returns:
        (local tokens,) int64.
    """
    if cu_seqlens is None and seqlen is None:
        raise ValueError("position_ids needs cu_seqlens or seqlen")
    if seqlen is not None:
        seqlen = checks.check_integer("seqlen", seqlen, 0)
    device = checks.check_device("device", device)
    if device is None and isinstance(cu_seqlens, Tensor):
        device = cu_seqlens.device
    rank, world_size = which_rank(rank, world_size, group)
    problem = _problem(layout, cu_seqlens, cu_seqlens_q, seqlen, world_size)
    device = torch.empty(0, device=device).device  # with its number; the default one if None
    return held_positions(problem, rank, device).clone()


def _token_dim(dim: int | None, cu_seqlens: CuSeqlens | None, x: Tensor) -> int:
    checks.check_tensor("x", x)
    if dim is None:
        dim = 1 if cu_seqlens is None else 0
    dim = checks.check_integer("dim", dim)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"tokens are looked for in dimension {dim}, but x has shape {tuple(x.shape)}: give dim"
        )
    return dim


def which_rank(rank: int | None, world_size: int | None, group: Group | None) -> tuple[int, int]:
    """Rank and world size: those of a group unless both are given."""
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank = {rank} and world_size = {world_size}: give both or neither")
    if rank is None or world_size is None:
        return comm.rank_and_size(group)
    found = checks.check_rank(rank, world_size)
    if group is not None:
        raise ValueError("give either rank and world_size or group")
    return found


def _problem(
    layout: str | Layout,
    cu_seqlens: CuSeqlens | None,
    cu_seqlens_q: CuSeqlens | None,
    total: int | None,
    world_size: int,
    where: str = "seqlen",
    fresh: bool = True,
) -> Problem:
    """Who holds what; without cu_seqlens, of one document. `fresh`: see `document_lengths`."""
    lengths = (total or 0,) if cu_seqlens is None else document_lengths(cu_seqlens, fresh=fresh)
    if cu_seqlens is not None and total is not None and sum(lengths) != total:
        raise ValueError(
            f"cu_seqlens ends at {sum(lengths)}, but there are {total} tokens ({where})"
        )
    queries = lengths
    if cu_seqlens_q is not None:
        if cu_seqlens is None:
            raise ValueError("cu_seqlens_q is given without cu_seqlens")
        queries = document_lengths(cu_seqlens_q, name="cu_seqlens_q", fresh=fresh)
        if len(queries) != len(lengths):
            raise ValueError(
                f"cu_seqlens_q delimits {len(queries)} documents, cu_seqlens {len(lengths)}"
            )
    return Problem(get_layout(layout), queries, lengths, world_size, Mask())


def _check_size(problem: Problem, rank: int, x: Tensor, dim: int) -> None:
    size, name = problem.size(Side.KEY, rank), problem.layout.name
    checks.check_shard(x, dim, size, name, rank, problem.world_size)
