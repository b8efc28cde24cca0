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

from ....plan.tiles import Tile
from ...base import Call, Grads, Saved, State
from ...device_cache import capturing, stream_handle
from ..launcher import INTERPRETED, again, first, launch_plain, power_of_2, processors, section
from ..tables import Table, table
from .parts import parts_kernel
from .stats import prepare_kernel, stats_kernel

VARIABLE, MARGIN = "RFA_HOPPER", "RFA_SM_MARGIN"
_MAX_HEADDIM = 256
_HALF = 64  # rows of a consumer
_PIECE = 64  # columns of dQ that are added at once, where heads are wide
_COPIES = 4  # of what is known of rows
_COUNTERS = 1024  # launches of captured graphs whose counters need not be set to zero
_REGISTERS = 168  # of a thread when a kernel begins; groups of warps exchange them later
_ROWS = 256  # of a program of the small kernel
_LONGEST = 1.25  # of a program's share of the work: longer pieces are split
_SUMMED = 512  # numbers of a program that adds up parts
_NUMBERS = 8192  # of out, of a program of the one that prepares the backward pass


class Sizes(NamedTuple):
    """How a launch is cut up.

    Attributes:
        block: rows of a block of the inner loop.
        stages: blocks that are loaded ahead.
    """

    block: int
    stages: int


_FORWARD = {
    64: Sizes(128, 3),
    128: Sizes(128, 2),
    256: Sizes(64, 2),
}
_BACKWARD = {
    64: Sizes(128, 2),
    128: Sizes(64, 2),
    256: Sizes(64, 2),
}
_QUERIES = {
    64: Sizes(128, 2),
    128: Sizes(64, 2),
    256: Sizes(64, 1),
}


def can(call: Call) -> bool:
    """Whether these kernels do a call."""
    return not why_not(call)


def in_order(call: Call) -> bool:
    """Whether gradients are summed in one order, by two kernels.

    Where it is asked for, or faster: by 6 % where values, too, are wider than 128.
    """
    asked = call.deterministic or torch.are_deterministic_algorithms_enabled()
    return asked or padded(call.headdim_v) > 128


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
    value = os.environ.get(VARIABLE, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{VARIABLE} must be 0 or 1, not {value!r}")
    if value == "0":
        return (f"it is off: {VARIABLE}=0 is set",)
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
    return max(32, power_of_2(d))


def forward(
    q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], state: State, call: Call
) -> None:
    """Advance `state` by the keys of `tiles`, in one launch."""
    from .forward import forward_kernel

    out, result = state.out, state.out if state.result is None else state.result
    alone = out.dtype is not torch.float32  # nothing is carried: out is not touched
    if alone:
        out = state.lse.as_strided((1, 1, 1, 1), (0, 0, 0, 0))
    d, dv = padded(call.headdim), padded(call.headdim_v)
    sizes = _FORWARD[max(64, d, dv)]
    work = table(tiles, 2 * _HALF, sizes.block, False, q.device)
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
            "ITEMS": 2 if d <= 128 else 1,
            "WINDOW": work.windowed,
            "SOFTCAP": call.softcap > 0,
            "SINK": call.sink,
            "RESULT": result is not out,
            "SHORT_DOCS": work.short,
            "EVEN": dv == call.headdim_v,
            "HALVES": work.halves,
            "SINGLE_LAUNCH": alone,  # else transfers may run on some SMs
        },
        counter(q.device),
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
        dq = torch.empty_like(dq, dtype=torch.float32, memory_format=torch.contiguous_format)
    stats = row_stats(saved, dout, dq if not direct or grads.fresh_q else None)
    _by_keys(dout, q, k, v, tiles, stats, dq, grads, call)
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

    stats = row_stats(saved, dout, None)
    _by_keys(dout, q, k, v, tiles, stats, None, grads, call)
    d, dv = padded(call.headdim), padded(call.headdim_v)
    sizes = _QUERIES[max(64, d, dv)]
    work = table(tiles, 2 * _HALF, sizes.block, False, q.device)
    launch(
        queries_kernel,
        ((q, (_HALF, d)), (k, (sizes.block, d)), (v, (sizes.block, dv)), (dout, (_HALF, dv))),
        (*(x[:, :, 0] for x in stats), grads.dq),
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
            "SHORT_DOCS": work.short,
            "EVEN": d == call.headdim,
            "FRESH": grads.fresh_q,
        },
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
    sizes = backward_sizes(d, dv, call.softcap > 0)
    is_wide = d > 128
    keys = _HALF if is_wide else 2 * _HALF
    work = table(tiles, keys, sizes.block, True, q.device)
    parts = split(work, q.shape[0], call)
    found = [grads.dk, grads.dv]
    if parts > 1:
        found = [_parts(grad, parts, grads.fresh_k) for grad in found]
    lse, delta = stats
    rows = sizes.block
    launch(
        backward_wide_kernel if is_wide else backward_kernel,
        (
            (q, (rows, d)),
            (k, (_HALF, d)),
            (v, (_HALF, dv)),
            (dout, (rows, dv)),
            (lse[:1, :1, :1, :4] if dq is None else dq, added(d, rows)),
            (lse, (1, rows)),
            (delta, (1, rows)),
        ),
        found,
        work,
        call,
        call.nheads_k * parts,
        {"parts": parts, "d": call.headdim, "dv": call.headdim_v},
        ({} if is_wide else {"OWN": grads.dk.dtype is not torch.float32})
        | {
            "BLOCK_M": rows,
            "D": d,
            "DV": dv,
            "STAGES": sizes.stages,
            "SOFTCAP": call.softcap > 0,
            "SHORT_DOCS": work.short,
            "EVEN": d == call.headdim and dv == call.headdim_v,
            "FRESH": grads.fresh_k or parts > 1,
            "DQ": dq is not None,
        },
        None if is_wide else counter(q.device),
    )
    if parts > 1:
        for grad, each in zip((grads.dk, grads.dv), found, strict=True):
            _add_up(each, grad, grads.fresh_k)


def split(work: Table, batch: int, call: Call) -> int:
    """Into how many parts a group of query heads goes, so that there is work for all programs.

    As few as it takes for none to be much longer than a program's share. As parts are added up one
    by one, results depend on it: so not on how many processors are left to others.
    """
    group = call.nheads // call.nheads_k
    share = batch * call.nheads_k * work.total / processors(call.device)
    parts = (n for n in range(1, group) if group % n == 0 and work.longest <= n * _LONGEST * share)
    return next(parts, group)


def _parts(grad: Tensor, parts: int, fresh: bool) -> Tensor:
    """Where parts of dK or dV go; zeros where there may be keys that no tile names."""
    batch, rows, nheads_k, d = grad.shape
    make = torch.empty if fresh else torch.zeros
    return make(batch, rows, nheads_k * parts, d, dtype=torch.float32, device=grad.device)


def _add_up(parts: Tensor, grad: Tensor, fresh: bool) -> None:
    """Their sum, written to a gradient or added to it."""
    batch, rows, nheads_k, d = grad.shape
    width = power_of_2(d)
    block = _SUMMED // width
    count = batch * rows * nheads_k
    numbers = (count, rows, nheads_k, d, *grad.stride()[:3])
    constants = (parts.shape[2] // nheads_k, block, width, fresh)
    launch_plain(parts_kernel, -(-count // block), (parts, grad), (*numbers, *constants))


def backward_sizes(d: int, dv: int, softcap: bool) -> Sizes:
    """Of the kernels that own keys; with a softcap there are no registers for large blocks."""
    width = max(64, d, dv)
    return Sizes(64, 3) if softcap and width == 64 else _BACKWARD[width]


def added(d: int, rows: int) -> tuple[int, int]:
    """Rows and columns of dQ that are added to memory at a time, of a block of so many rows."""
    return (_HALF, d) if rows > _HALF else (rows, min(d // 2, _PIECE))


def row_stats(saved: Saved, dout: Tensor, dq: Tensor | None) -> tuple[Tensor, Tensor]:
    """lse in base 2, +inf where no key was seen, and delta: (batch, head, copy, row).

    TMA begins at multiples of 16 bytes, blocks at any row: so there are four, and the n-th
    begins at row n. Sets dq to zero if there is one.
    """
    batch, nheads, length = saved.lse.shape
    wide = -(-length // _COPIES) * _COPIES
    shape = (2, batch, nheads, _COPIES, wide)
    stats = torch.empty(shape, dtype=torch.float32, device=saved.lse.device)
    if saved.out is not None:
        prepare(saved.out, dout, saved.lse, stats, dq)
        return stats[0], stats[1]
    if dq is not None:
        dq.zero_()
    count = -(-length // _ROWS)
    strides = (*saved.lse.stride(), *saved.delta.stride())
    numbers = (length, wide, nheads, count, *strides, _COPIES, _ROWS)
    tensors = (saved.lse, saved.delta, stats[0], stats[1])
    launch_plain(stats_kernel, count * batch * nheads, tensors, numbers)
    return stats[0], stats[1]


def prepare(out: Tensor, dout: Tensor, lse: Tensor, stats: Tensor, dq: Tensor | None) -> None:
    """What `row_stats` does, delta included, in one launch."""
    zeros = out if dq is None else dq
    batch, length, nheads, d = zeros.shape
    dv = out.shape[-1]
    widths = power_of_2(d), power_of_2(dv)
    rows = _NUMBERS // max(widths)
    count = -(-length // rows)
    strides = (*out.stride()[:3], *dout.stride(), *lse.stride(), *zeros.stride()[:3])
    numbers = (length, stats.shape[-1], nheads, d, dv, count, *strides, _COPIES, rows, *widths)
    tensors = (out, dout, lse, stats[0], stats[1], zeros)
    launch_plain(prepare_kernel, count * batch * nheads, tensors, (*numbers, dq is not None))


def launch(
    kernel: Any,
    tiled: Sequence[tuple[Tensor, tuple[int, ...]]],
    others: Sequence[Tensor],
    work: Table,
    call: Call,
    nheads: int,
    widths: dict[str, int],
    constants: dict[str, Any],
    taken: Tensor | None = None,
) -> None:
    """Launch one of the kernels.

    Args:
        kernel: which.
        tiled: tensors that TMA reads or adds to, and the rows and columns of a block.
        others: tensors that it reads and writes through pointers.
        work: what each program does.
        call: the call.
        nheads: heads that have programs of their own.
        widths: head dimensions; before them, if groups may be split, into how many parts.
        constants: by name, for the compiler.
        taken: the counter of a persistent kernel's tile scheduler: how many items are taken.
    """
    tensors = [*(fit(tensor) for tensor, _ in tiled), *others]
    if taken is not None:
        tensors.append(taken)
    key = (
        kernel,
        id(work),
        nheads,
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
        "group": call.nheads // (call.nheads_k * widths.get("parts", 1)),
        "count": count,
        "section": section(pairs, nheads, work, call),
        **({} if taken is None else {"pairs": pairs}),
        **widths,
    }
    strides = [number for x in others for number in x.stride()[:3]]
    arguments = [
        *(descriptor(x, block) for x, block in zip(tensors, blocks, strict=False)),
        *tensors[len(tiled) :],
        work.blocks,
        work.tiles,
        *numbers.values(),
        *strides,
    ]
    names = kernel.arg_names[len(arguments) :]
    assert set(names) == set(constants), set(names) ^ set(constants)
    arguments += [constants[name] for name in names]
    options = {"num_warps": 4, "maxnreg": _REGISTERS}
    programs = count * pairs
    if taken is not None:
        programs = min(programs, free_processors(call.device))
    first(key, kernel, (programs, 1, 1), arguments, len(tensors), options, work)


@cache
def free_processors(device: torch.device) -> int:
    """All SMs but those left to others, such as NCCL's kernels."""
    value, count = os.environ.get(MARGIN, "0"), processors(device)
    if not value.isdecimal() or int(value) >= count:
        raise ValueError(f"{MARGIN} must be less than {device}'s {count} processors, not {value!r}")
    return count - int(value)


def counter(device: torch.device) -> Tensor:
    """A zero, which the kernel that gets it leaves behind as one.

    Kernels that run at the same time get different ones: every stream has its own, and so has
    every launch of a captured graph, which may run at any time. It is zero already, unless there
    are no more of these, or none yet: then the graph sets one to zero.
    """
    if capturing(device):
        spare = _spare.get(device)
        return spare.pop() if spare else torch.zeros(1, dtype=torch.int32, device=device)
    return _counter(device, stream_handle(device))


@cache
def _counter(device: torch.device, stream: int) -> Tensor:
    if device not in _spare:  # a blocking copy: no stream has to wait for it
        zeros = torch.zeros(_COUNTERS, 4, dtype=torch.int32, device="cpu").to(device)
        _spare[device] = list(zeros[:, :1].unbind())  # 16 bytes apart
    return torch.zeros(1, dtype=torch.int32, device=device)


_spare: dict[torch.device, list[Tensor]] = {}  # for graphs that are to be captured


def fit(x: Tensor) -> Tensor:
    """The tensor, or a copy if TMA cannot read it."""
    size = x.element_size()
    fits = x.stride(-1) == 1 and x.data_ptr() % 16 == 0
    for length, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        fits = fits and (length == 1 or (stride > 0 and stride * size % 16 == 0))
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def descriptor(x: Tensor, block: tuple[int, ...]) -> Any:
    """For TMA: of (batch, row, head, d) rows of one head, else of the last dimensions."""
    from .gluon import TensorDescriptor, gl

    if block[0] > 1:
        x = x.transpose(1, 2)
    whole = [1] * (x.dim() - len(block)) + list(block)
    kinds = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
    layout = gl.NVMMASharedLayout.get_default_for(whole, kinds[x.dtype])
    # The stride of a single batch or head may be anything, but is checked all the same.
    strides = [
        stride if length > 1 else 64 for length, stride in zip(x.shape, x.stride(), strict=True)
    ]
    return TensorDescriptor(x, list(x.shape), [*strides[:-1], 1], whole, layout)
