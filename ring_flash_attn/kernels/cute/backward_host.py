"""Launching the backward kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...cache import Cache
from ...plan.tiles import Tile
from .. import row_stats
from ..base import Call, Grads, Saved
from ..dropout import threshold
from ..grad_parts import add_up, make_parts
from ..scheduler import counter, free_processors, programs, section, split
from ..tables import Table, table
from ..tma import fit, tma_strides
from .host import _DTYPES, _CompiledLaunch, _strides
from .sizes import SHARED, BackwardSizes, GradientLaunch, backward_launches, padded

if TYPE_CHECKING:  # it needs CuTe DSL
    from .traits import BackwardTraits

_KEYS = 128  # of an item
_KEPT = 512  # launches
_launches: Cache[tuple[object, ...], _CompiledLaunch] = Cache(_KEPT)


def ordered(call: Call) -> bool:
    """Whether gradients are to be the same every time."""
    return call.deterministic or torch.are_deterministic_algorithms_enabled()


def _many(call: Call) -> bool:
    """Features that leave few registers."""
    return call.softcap > 0 or call.dropout_p > 0 or call.alibi_slopes is not None


def launches_of(call: Call) -> tuple[GradientLaunch, ...]:
    """Launches of a call."""
    return backward_launches(
        call.headdim, call.headdim_v, _many(call), call.dtype is torch.float16, ordered(call)
    )


def delta(dout: Tensor, out: Tensor, call: Call) -> Tensor:
    """(batch, nheads, seqlen_q): the sum of dout · out."""
    return row_stats.delta(dout, out)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Sequence[Tile],
    saved: Saved,
    grads: Grads,
    call: Call,
    sizes: BackwardSizes | None = None,
) -> None:
    """Add the gradients that `tiles` contribute; `sizes`, of one launch, is for measurements."""
    launches = launches_of(call) if sizes is None else (GradientLaunch(sizes),)
    dq = grads.dq
    adds = launches[0].dq  # in no order; else one launch writes dQ
    direct = fit(dq) is dq and (dq.dtype is torch.float32 or (grads.fresh_q and not adds))
    if not direct:
        dq = torch.empty_like(dq, dtype=torch.float32, memory_format=torch.contiguous_format)
    zeroed = not direct or (adds and grads.fresh_q)
    shift = -math.log2(call.softmax_scale) if launches[0].sizes.folded else 0.0
    stats = row_stats.row_stats(saved, dout, dq if zeroed else None, shift)
    for launch in launches:
        if launch.exchanged:
            work = table(tiles, _KEYS, launch.sizes.block, False, q.device)
            inputs = k, q, dout, v
            _launch(inputs, stats, (dq, dq, dq), work, 1, grads.fresh_q or not direct, call, launch)
        else:
            _keys((q, k, v, dout), tiles, stats, dq, grads, call, launch)
    if not direct:
        grads.dq.copy_(dq) if grads.fresh_q else grads.dq.add_(dq)


def _keys(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    tiles: Sequence[Tile],
    stats: tuple[Tensor, Tensor],
    dq: Tensor,
    grads: Grads,
    call: Call,
    launch: GradientLaunch,
) -> None:
    """A launch for what belongs to keys, whose groups of query heads may go in parts."""
    together = programs(dq.shape[0] * call.nheads_k, dq.device)
    work = table(tiles, _KEYS, launch.sizes.block, True, dq.device, together)
    if launch.for_few is not None and work.total < launch.few * len(work.blocks):
        launch = launch._replace(sizes=launch.for_few)
        work = table(tiles, _KEYS, launch.sizes.block, True, dq.device, together)
    parts = split(work, dq.shape[0], call)
    given = [x for name, x in (("dk", grads.dk), ("dv", grads.dv)) if launch.only in ("", name)]
    if parts > 1:
        found = [make_parts(grad, parts, work.rows) for grad in given]
    else:
        found = [fit(grad) for grad in given]
    written = dq, found[0], found[-1]  # of dK and dV, one twice if the other is not computed
    _launch(inputs, stats, written, work, parts, grads.fresh_k, call, launch)
    if parts > 1:
        return add_up(found, given, grads.fresh_k)
    for grad, each in zip(given, found, strict=True):
        if each is not grad:
            grad.copy_(each)


def _launch(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    stats: tuple[Tensor, Tensor],
    written: tuple[Tensor, Tensor, Tensor],
    work: Table,
    parts: int,
    fresh: bool,
    call: Call,
    launch: GradientLaunch,
) -> None:
    """One launch of the kernel: its q, k, v and dout, and its dQ, dK and dV."""
    slopes, seed = call.alibi_slopes, call.seed
    device = inputs[0].device
    tensors = [
        *(fit(x) for x in inputs),
        *stats,
        *written,
        work.blocks if slopes is None else slopes.float().contiguous(),  # never read where it
        work.blocks if seed is None else seed,  # stands in for what is not there
        counter(device),
    ]
    key = (
        id(work),
        launch,
        call.key,
        parts,
        fresh,
        *[(x.shape, x.stride(), x.dtype) for x in tensors[:9]],
    )
    known = _launches.get(key)
    if known is None:
        traits = traits_of(work, call, launch, fresh or parts > 1, written[1].dtype)
        known = _launches.add(key, _first(tensors, work, parts, call, traits))
    known.again(tensors, device)


def traits_of(
    work: Table, call: Call, launch: GradientLaunch, fresh: bool, dtype: torch.dtype
) -> BackwardTraits:
    """What the kernel of a launch is compiled for.

    Args:
        work: the launch's table.
        call: the call.
        launch: how it is cut up, and what it computes.
        fresh: dK and dV, or parts of them, are written.
        dtype: in which.
    """
    from .traits import BackwardTraits

    d, dv = padded(call.headdim), padded(call.headdim_v)
    traits = BackwardTraits(
        dtype=_DTYPES[call.dtype],
        d=d,
        dv=dv,
        **launch.sizes._asdict(),
        even=d == call.headdim and dv == call.headdim_v,
        softcap=call.softcap > 0,
        alibi=call.alibi_slopes is not None,
        dropout=call.dropout_p > 0,
        short=work.short,
        fresh=fresh,
        rounded=dtype is not torch.float32,
        dq=launch.dq,
        only=launch.only,
        exchanged=launch.exchanged,
    )
    assert traits.shared <= SHARED, traits
    assert traits.fresh or not traits.rounded, "what is added to is in fp32"
    return traits


def _first(
    tensors: Sequence[Tensor], work: Table, parts: int, call: Call, traits: BackwardTraits
) -> _CompiledLaunch:
    """Compile or load the kernel, and work out its arguments."""
    from .compiled import backward_kernel

    q, k, v, dout, lse, _, dq, dk, dv = tensors[:9]
    batch, heads = q.shape[0], k.shape[2] * parts
    count = len(work.blocks)
    dropped = threshold(call.dropout_p)
    numbers = (
        work.blocks.data_ptr(),
        work.tiles.data_ptr(),
        batch,
        q.shape[1],
        k.shape[1],
        q.shape[2],
        k.shape[2],
        call.headdim,
        call.headdim_v,
        lse.shape[-1],
        count,
        section(batch * heads, heads, work, call),
        min(count * batch * heads, free_processors(call.device)),
        parts,
        call.slopes_stride,
        *(number for x in (q, k, v, dout) for number in tma_strides(x)),
        *(number for x in (dq, dk, dv) for number in _strides(x)),
        float(call.softmax_scale),
        float(call.softcap or 1.0),
        dropped - (1 << 32) if dropped >= 1 << 31 else dropped,
        1 / (1 - call.dropout_p),
        call.head_start,
    )
    return _CompiledLaunch(backward_kernel(traits), numbers, work)
