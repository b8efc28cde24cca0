"""Launching the Hopper kernels; what they cannot do, and the portable ones have to: `why_not`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ....tiles import Tile
from ...base import Call, Grads, Saved, State
from ..launcher import INTERPRETED, again, first, launch_plain, section
from ..tables import Table, table
from .stats import stats_kernel

VARIABLE = "RFA_HOPPER"
_MAX_HEADDIM = 256
_HALF = 64  # rows of a consumer
_PIECE = 64  # columns of dQ that are added at once, where heads are wide
_ROWS = 256  # of a program of the small kernel


class Sizes(NamedTuple):
    """How a launch is cut up.

    Attributes:
        block: rows of a block of the inner loop.
        stages: blocks that are loaded ahead.
        consumers: groups of warps that compute.
        registers: of a thread when the kernel begins; groups of warps exchange them later.
    """

    block: int
    stages: int
    consumers: int
    registers: int


_FORWARD = {
    64: Sizes(128, 3, 2, 168),
    128: Sizes(128, 2, 2, 168),
    256: Sizes(64, 2, 2, 168),
}
_BACKWARD = dict.fromkeys((64, 128, 256), Sizes(64, 2, 2, 168))
_QUERIES = {
    64: Sizes(128, 2, 2, 168),
    128: Sizes(64, 2, 2, 168),
    256: Sizes(64, 1, 2, 168),
}


def can(call: Call) -> bool:
    """Whether these kernels do a call."""
    return not _unavailable(call.device) and not why_not(call)


def why_not(call: Call) -> list[str]:
    """Every reason why the portable kernel has to do a call."""
    found = list(_unavailable(call.device))
    if call.dtype not in (torch.float16, torch.bfloat16):
        found.append(f"dtype {call.dtype} is not fp16 or bf16")
    if call.alibi_slopes is not None:
        found.append("it has no ALiBi")
    if call.dropout_p:
        found.append("it has no dropout")
    d, dv = call.headdim, call.headdim_v
    if d % 8 or dv % 8:
        found.append(f"head dimensions {d} and {dv} are not multiples of 8")
    elif max(d, dv) > _MAX_HEADDIM or padded(dv) > padded(d):
        found.append(f"head dimensions {d} and {dv} are not ones that it has blocks for")
    return found


@cache
def _unavailable(device: torch.device) -> tuple[str, ...]:
    if os.environ.get(VARIABLE) != "1":
        return (f"it is not on: {VARIABLE}=1 is not set",)
    if INTERPRETED:
        return ("Triton's interpreter does not run it",)
    if device.type != "cuda" or torch.version.hip is not None:
        return (f"it needs a Hopper GPU, not {device}",)
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return (f"it needs compute capability 9.0, not {capability[0]}.{capability[1]}",)
    try:
        importlib.import_module(f"{__package__}.backward")
    except (ImportError, AttributeError) as error:
        return (f"Triton {triton.__version__} does not have the Gluon that it needs: {error}",)
    return ()


def padded(d: int) -> int:
    """The width of a block in shared memory: blocks are as wide as a power of two."""
    return max(32, triton.next_power_of_2(d))


def forward(
    q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], state: State, call: Call
) -> None:
    """Advance `state` by the keys of `tiles`, in one launch."""
    from .forward import forward_kernel

    out, result = state.out, state.out if state.result is None else state.result
    if out.dtype is not torch.float32:  # nothing is carried: it is not touched
        out = state.lse.as_strided((1, 1, 1, 1), (0, 0, 0, 0))
    d, dv = padded(call.headdim), padded(call.headdim_v)
    sizes = _FORWARD[max(64, d, dv)]
    work = table(tiles, _HALF * sizes.consumers, sizes.block, False, q.device)
    launch(
        forward_kernel,
        ((q, (_HALF, d)), (k, (sizes.block, d)), (v, (sizes.block, dv))),
        (out, state.lse, result),
        work,
        call,
        call.nheads,
        {"dv": call.headdim_v},
        {
            "BLOCK_N": sizes.block,
            "D": d,
            "DV": dv,
            "STAGES": sizes.stages,
            "WINDOW": work.windowed,
            "SOFTCAP": call.softcap > 0,
            "SINK": call.sink,
            "RESULT": result is not out,
            "GUARD": work.short,
            "EVEN": dv == call.headdim_v,
            "CONSUMERS": sizes.consumers,
        },
        sizes.registers,
    )


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Sequence[Tile],
    saved: Saved,
    grads: Grads,
    call: Call,
) -> None:
    """Add the gradients that `tiles` contribute; of dQ in no particular order."""
    dq = grads.dq
    direct = dq.dtype is torch.float32 and fit(dq) is dq
    if not direct:
        dq = torch.zeros_like(dq, dtype=torch.float32, memory_format=torch.contiguous_format)
    elif grads.fresh_q:
        dq.zero_()
    _by_keys(dout, q, k, v, tiles, row_stats(saved), dq, grads, call)
    if not direct:
        grads.dq.copy_(dq) if grads.fresh_q else grads.dq.add_(dq)


def ordered_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Sequence[Tile],
    saved: Saved,
    grads: Grads,
    call: Call,
) -> None:
    """The same, always in the same order: in two launches."""
    from .queries import queries_kernel

    stats = row_stats(saved)
    _by_keys(dout, q, k, v, tiles, stats, None, grads, call)
    d, dv = padded(call.headdim), padded(call.headdim_v)
    sizes = _QUERIES[max(64, d, dv)]
    work = table(tiles, _HALF * sizes.consumers, sizes.block, False, q.device)
    launch(
        queries_kernel,
        ((q, (_HALF, d)), (k, (sizes.block, d)), (v, (sizes.block, dv)), (dout, (_HALF, dv))),
        (*stats, grads.dq),
        work,
        call,
        call.nheads,
        {"d": call.headdim},
        {
            "BLOCK_N": sizes.block,
            "D": d,
            "DV": dv,
            "STAGES": sizes.stages,
            "SOFTCAP": call.softcap > 0,
            "GUARD": work.short,
            "EVEN": d == call.headdim,
            "FRESH": grads.fresh_q,
        },
        sizes.registers,
    )


def _by_keys(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Sequence[Tile],
    stats: tuple[Tensor, Tensor],
    dq: Tensor | None,
    grads: Grads,
    call: Call,
) -> None:
    """One launch of a kernel that owns keys; without dQ if there is nothing to add it to."""
    from .backward import backward_kernel
    from .backward_wide import backward_wide_kernel

    d, dv = padded(call.headdim), padded(call.headdim_v)
    sizes = _BACKWARD[max(64, d, dv)]
    is_wide = d > 128
    keys, columns = (_HALF, _PIECE) if is_wide else (2 * _HALF, d // 2)
    work = table(tiles, keys, sizes.block, True, q.device)
    lse, delta = stats
    rows = sizes.block
    launch(
        backward_wide_kernel if is_wide else backward_kernel,
        (
            (q, (rows, d)),
            (k, (_HALF, d)),
            (v, (_HALF, dv)),
            (dout, (rows, dv)),
            (lse.new_empty((1, 1, 1, 4)) if dq is None else dq, (rows, columns)),
            (lse, (rows,)),
            (delta, (rows,)),
        ),
        (grads.dk, grads.dv),
        work,
        call,
        call.nheads_k,
        {"d": call.headdim, "dv": call.headdim_v},
        {
            "BLOCK_M": rows,
            "D": d,
            "DV": dv,
            "STAGES": sizes.stages,
            "SOFTCAP": call.softcap > 0,
            "GUARD": work.short,
            "EVEN": d == call.headdim and dv == call.headdim_v,
            "FRESH": grads.fresh_k,
            "DQ": dq is not None,
        },
        sizes.registers,
    )


def row_stats(saved: Saved) -> tuple[Tensor, Tensor]:
    """lse in base 2, +inf where no key was seen, and delta; rows that bulk copies can read."""
    batch, nheads, length = saved.lse.shape
    wide = triton.cdiv(length, 4) * 4
    stats = torch.empty((2, batch, nheads, wide), dtype=torch.float32, device=saved.lse.device)
    count = triton.cdiv(length, _ROWS)
    strides = (*saved.lse.stride(), *saved.delta.stride())
    numbers = (length, wide, nheads, count, *strides, _ROWS)
    tensors = (saved.lse, saved.delta, stats[0], stats[1])
    launch_plain(stats_kernel, count * batch * nheads, tensors, numbers)
    return stats[0, ..., :length], stats[1, ..., :length]


def launch(
    kernel: Any,
    tiled: Sequence[tuple[Tensor, tuple[int, ...]]],
    others: Sequence[Tensor],
    work: Table,
    call: Call,
    nheads: int,
    widths: dict[str, int],
    constants: dict[str, Any],
    registers: int,
) -> None:
    """Launch one of the kernels.

    Args:
        kernel: which.
        tiled: tensors that bulk copies read or add to, and the rows and columns of a block.
        others: tensors that it reads and writes through pointers.
        work: what each program does.
        call: the call.
        nheads: heads that have programs of their own.
        widths: head dimensions.
        constants: by name, for the compiler.
        registers: of a thread when the kernel begins.
    """
    tensors = [*(fit(tensor) for tensor, _ in tiled), *others]
    key = (
        kernel,
        id(work),
        call.key,
        *constants.values(),
        *[(x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in tensors],
    )
    if again(key, tensors):
        return
    pairs = tensors[0].shape[0] * nheads
    count = len(work.blocks)
    blocks = [block for _, block in tiled]
    numbers = {
        "scale": float(call.softmax_scale),
        "softcap": float(call.softcap or 1.0),
        "heads": nheads,
        "group": call.nheads // call.nheads_k,
        "count": count,
        "section": section(pairs, nheads, work, call),
        **widths,
    }
    strides = [number for x in others for number in x.stride()[:3]]
    arguments = [
        *(descriptor(x, block) for x, block in zip(tensors, blocks, strict=False)),
        *others,
        work.blocks,
        work.tiles,
        *numbers.values(),
        *strides,
    ]
    names = kernel.arg_names[len(arguments) :]
    assert set(names) == set(constants), set(names) ^ set(constants)
    arguments += [constants[name] for name in names]
    options = {"num_warps": 4, "maxnreg": registers}
    first(key, kernel, (count * pairs, 1, 1), arguments, len(tensors), options, work)


def fit(x: Tensor) -> Tensor:
    """The tensor, or a copy if bulk copies cannot read it."""
    size = x.element_size()
    fits = x.stride(-1) == 1 and x.data_ptr() % 16 == 0
    for length, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        fits = fits and (length == 1 or (stride > 0 and stride * size % 16 == 0))
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def descriptor(x: Tensor, block: tuple[int, ...]) -> Any:
    """For bulk copies: of (batch, row, head, d) rows of one head, of (batch, head, row) numbers."""
    from .gluon import TensorDescriptor, gl

    if x.dim() == 4:
        x = x.transpose(1, 2)
    whole = [1] * (x.dim() - len(block)) + list(block)
    kinds = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
    layout = gl.NVMMASharedLayout.get_default_for(whole, kinds[x.dtype])
    # The stride of a single batch or head may be anything, but is checked all the same.
    strides = [
        stride if length > 1 else 64 for length, stride in zip(x.shape, x.stride(), strict=True)
    ]
    return TensorDescriptor(x, list(x.shape), [*strides[:-1], 1], whole, layout)
