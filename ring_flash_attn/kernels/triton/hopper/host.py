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
from ...device_cache import DeviceCache
from ...grad_parts import add_up, make_parts
from ...launches import INTERPRETED, again, first, power_of_2
from ...row_stats import row_stats
from ...scheduler import (
    counter,
    free_processors,
    pieces,
    programs,
    progress,
    section,
    split,
)
from ...tables import Table, padded_pairs, table
from ...tma import fit, tma_strides

VARIABLE = "RFA_HOPPER"
_MAX_HEADDIM = 256
_HALF = 64  # rows of a consumer
_COLUMNS = 64  # columns of dQ that are added at once, where heads are wide
_REGISTERS = 168  # of a thread when a kernel begins; groups of warps exchange them later
_PACKED = 8  # query heads in a block at most
_MOST_ROWS = 1 << 24  # of all pairs of batch and head, of which the progress is kept: 64 MiB
_LESS = 0.99  # of the pairs without, where rows are padded


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


_forward_tables: DeviceCache[tuple[int, Table]] = DeviceCache()


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
    heads, work = forward_table(tiles, q, sizes.block, call, alone)
    nheads, taken = call.nheads // heads, counter(q.device)
    queries = (_HALF, d) if heads == 1 else (heads, _HALF // heads, d)
    launch(
        forward_kernel,
        ((q, queries), (k, (sizes.block, d)), (v, (sizes.block, dv))),
        (out, state.lse, result),
        work,
        call,
        nheads,
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
            "HALVES": work.halves and work.pieces == 1,
            "PACK_GQA": heads,
            "PIECES": work.pieces > 1,
            "SINGLE_LAUNCH": alone,  # else transfers may run on some SMs
        },
        taken,
        taken if work.pieces == 1 else progress(q.shape[1] * q.shape[0] * nheads, q.device),
    )


def forward_table(
    tiles: Sequence[Tile], q: Tensor, block: int, call: Call, alone: bool
) -> tuple[int, Table]:
    """How many query heads with the same keys share blocks of rows; and what the blocks are.

    One, unless more leave enough fewer rows empty. Unless the launch is alone, its longest items
    may be cut into pieces.
    """
    group = call.nheads // call.nheads_k
    packed = min(group & -group, _PACKED)

    def make() -> tuple[int, Table]:
        heads, rows = 1, 2 * _HALF
        if packed > 1:
            few = rows // packed
            if padded_pairs(tiles, few) < _LESS * padded_pairs(tiles, rows):
                heads, rows = packed, few
        work = table(tiles, rows, block, False, call.device)
        pairs = q.shape[0] * call.nheads // heads
        if not alone and q.shape[1] * pairs <= _MOST_ROWS:
            cut = table(
                tiles, rows, block, False, call.device, pieces=pieces(work, pairs, call.device)
            )
            work = work if cut.short and not work.short else cut  # that is another, slower kernel
        return heads, work

    wanted = packed, block, alone or (q.shape[0] * call.nheads, q.shape[1])
    return _forward_tables.get(tiles, call.device, wanted, make)


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
    together = programs(q.shape[0] * call.nheads_k, q.device)
    work = table(tiles, keys, sizes.block, True, q.device, together)
    parts = split(work, q.shape[0], call)
    found = [grads.dk, grads.dv]
    if parts > 1:
        found = [make_parts(grad, parts, work.rows) for grad in found]
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
        add_up(found, (grads.dk, grads.dv), grads.fresh_k)


def backward_sizes(d: int, dv: int, softcap: bool) -> Sizes:
    """Of the kernels that own keys; with a softcap there are no registers for large blocks."""
    width = max(64, d, dv)
    return Sizes(64, 3) if softcap and width == 64 else _BACKWARD[width]


def added(d: int, rows: int) -> tuple[int, int]:
    """Rows and columns of dQ that are added to memory at a time, of a block of so many rows."""
    return (_HALF, d) if rows > _HALF else (rows, min(d // 2, _COLUMNS))


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
    done: Tensor | None = None,
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
        done: how far the pieces of each row's keys are, for each pair of batch and head.
    """
    tensors = [*(fit(tensor) for tensor, _ in tiled), *others]
    if taken is not None:
        tensors.append(taken)
    if done is not None:
        tensors.append(done)
    key = (
        id(kernel),
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
    packed = constants.get("PACK_GQA", 1)
    numbers = {
        "scale": float(call.softmax_scale),
        "softcap": float(call.softcap or 1.0),
        "heads": nheads,
        "group": call.nheads // (call.nheads_k * widths.get("parts", 1) * packed),
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


def descriptor(x: Tensor, block: tuple[int, ...]) -> Any:
    """For TMA: of (batch, row, head, d) rows of one head, else of the last dimensions."""
    from .gluon import TensorDescriptor, gl

    if block[0] > 1:
        x = x.transpose(1, 2)
    whole = [1] * (x.dim() - len(block)) + list(block)
    kinds = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
    layout = gl.NVMMASharedLayout.get_default_for(whole, kinds[x.dtype])
    return TensorDescriptor(x, list(x.shape), [*tma_strides(x), 1], whole, layout)
