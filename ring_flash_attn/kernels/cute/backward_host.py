"""Launching the backward kernel."""

from __future__ import annotations

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
from ..scheduler import counter, free_processors, section, split
from ..tables import Table, table
from ..tma import fit, tma_strides
from .host import _DTYPES, _CompiledLaunch, _strides
from .sizes import SHARED, BackwardSizes, backward_sizes, padded

if TYPE_CHECKING:  # it needs CuTe DSL
    from .traits import BackwardTraits

_KEYS = 128  # of an item
_KEPT = 512  # launches
_COMPARED = 128  # head dimensions whose gradients were compared with fp64 on a GPU
_launches: Cache[tuple[object, ...], _CompiledLaunch] = Cache(_KEPT)


def why_not(call: Call) -> list[str]:
    """Reasons, besides the forward's, why it cannot do a call."""
    found = []
    if sizes_of(call) is None or call.headdim > _COMPARED:
        found.append(
            f"head dimensions {call.headdim} and {call.headdim_v} are not ones that it has a "
            "backward pass for"
        )
    if call.deterministic or torch.are_deterministic_algorithms_enabled():
        found.append("its backward pass adds dQ in no particular order")
    return found


def sizes_of(call: Call) -> BackwardSizes | None:
    """How its launches are cut up."""
    many = call.softcap > 0 or call.dropout_p > 0 or call.alibi_slopes is not None
    return backward_sizes(call.headdim, call.headdim_v, many)


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
    """Add the gradients that `tiles` contribute, of dQ in no order; `sizes` is for measurements."""
    sizes = sizes or sizes_of(call)
    assert sizes is not None, "why_not"
    dq = grads.dq
    direct = dq.dtype is torch.float32 and fit(dq) is dq
    if not direct:
        dq = torch.empty_like(dq, dtype=torch.float32, memory_format=torch.contiguous_format)
    stats = row_stats.row_stats(saved, dout, dq if not direct or grads.fresh_q else None)
    work = table(tiles, _KEYS, sizes.block, True, q.device)
    parts = split(work, q.shape[0], call)
    given = grads.dk, grads.dv
    if parts > 1:
        found = [make_parts(grad, parts, work.rows) for grad in given]
    else:
        found = [fit(grad) for grad in given]
    _launch((q, k, v, dout), stats, dq, found, work, parts, grads.fresh_k, call, sizes)
    for grad, each in zip(given, found, strict=True):
        if parts > 1:
            add_up(each, grad, grads.fresh_k)
        elif each is not grad:
            grad.copy_(each)
    if not direct:
        grads.dq.copy_(dq) if grads.fresh_q else grads.dq.add_(dq)


def _launch(
    inputs: tuple[Tensor, ...],
    stats: tuple[Tensor, Tensor],
    dq: Tensor,
    found: Sequence[Tensor],
    work: Table,
    parts: int,
    fresh: bool,
    call: Call,
    sizes: BackwardSizes,
) -> None:
    """One launch of the kernel."""
    slopes, seed = call.alibi_slopes, call.seed
    device = inputs[0].device
    tensors = [
        *(fit(x) for x in inputs),
        *stats,
        dq,
        *found,
        work.blocks if slopes is None else slopes.float().contiguous(),  # never read where it
        work.blocks if seed is None else seed,  # stands in for what is not there
        counter(device),
    ]
    key = (
        id(work),
        sizes,
        call.key,
        parts,
        fresh,
        *[(x.shape, x.stride(), x.dtype) for x in tensors[:9]],
    )
    launch = _launches.get(key)
    if launch is None:
        traits = traits_of(work, call, sizes, fresh or parts > 1, found[0].dtype)
        launch = _launches.add(key, _first(tensors, work, parts, call, traits))
    launch.again(tensors, device)


def traits_of(
    work: Table, call: Call, sizes: BackwardSizes, fresh: bool, dtype: torch.dtype
) -> BackwardTraits:
    """What the kernel of a launch is compiled for.

    Args:
        work: the launch's table.
        call: the call.
        sizes: how it is cut up.
        fresh: dK and dV, or parts of them, are written.
        dtype: in which.
    """
    from .traits import BackwardTraits

    d, dv = padded(call.headdim), padded(call.headdim_v)
    traits = BackwardTraits(
        dtype=_DTYPES[call.dtype],
        d=d,
        dv=dv,
        **sizes._asdict(),
        even=d == call.headdim and dv == call.headdim_v,
        softcap=call.softcap > 0,
        alibi=call.alibi_slopes is not None,
        dropout=call.dropout_p > 0,
        short=work.short,
        fresh=fresh,
        rounded=dtype is not torch.float32,
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
    batch, heads = q.shape[0], call.nheads_k * parts
    count = len(work.blocks)
    dropped = threshold(call.dropout_p)
    numbers = (
        work.blocks.data_ptr(),
        work.tiles.data_ptr(),
        batch,
        q.shape[1],
        k.shape[1],
        call.nheads,
        call.nheads_k,
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
