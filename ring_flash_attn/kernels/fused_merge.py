"""The merge as one Triton kernel: one pass over the state and the block, nothing in between."""

# fmt: off

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .base import Rows, State
from .device_cache import DeviceCache, to_device

_ROWS = 16  # of a program
_bits: DeviceCache[Tensor] = DeviceCache()  # a byte for each row


@triton.jit(do_not_specialize=["start", "end", "offset", "nheads"])
def merge_kernel(
    out_ptr, lse_ptr, result_ptr, block_ptr, block_lse_ptr, bits_ptr, start, end, offset, nheads,
    dv, o_batch, o_row, o_head, l_batch, l_head, l_row, r_batch, r_row, r_head, b_batch, b_row,
    b_head, m_batch, m_head, m_row,
    ROWS: tl.constexpr, DV: tl.constexpr, SINK: tl.constexpr, RESULT: tl.constexpr,
):
    """Some rows of one head. Bits of a row: 1 there is no state yet, 2 it is final, 4 a block."""
    blocks = tl.cdiv(end - start, ROWS)
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch, head = (pair // nheads).to(tl.int64), (pair % nheads).to(tl.int64)
    rows = start + block * ROWS + tl.arange(0, ROWS)
    bits = tl.load(bits_ptr + (rows - start), mask=rows < end, other=0)
    touched, has_state, has_block = bits != 0, (bits != 0) & ((bits & 1) == 0), (bits & 4) != 0
    here, there = rows.to(tl.int64), (rows - offset).to(tl.int64)

    # Weights of the two sides: exp(lse − lse of both). A side that saw no key has none.
    lse_ptrs = lse_ptr + batch * l_batch + head * l_head + here * l_row
    ours = tl.load(lse_ptrs, mask=touched if SINK else has_state, other=float("-inf"))
    block_lse_ptrs = block_lse_ptr + batch * m_batch + head * m_head + there * m_row
    theirs = tl.load(block_lse_ptrs, mask=has_block, other=float("-inf"))
    theirs = tl.where(theirs == float("inf"), float("-inf"), theirs)
    m = tl.maximum(ours, theirs)
    m = tl.where(m == float("-inf"), 0.0, m)
    our_weight, their_weight = tl.exp(ours - m), tl.exp(theirs - m)
    total = our_weight + their_weight
    safe = tl.where(total > 0, total, 1.0)

    columns = tl.arange(0, DV)
    inside = columns[None, :] < dv
    out_ptrs = out_ptr + batch * o_batch + head * o_head
    out_ptrs += here[:, None] * o_row + columns[None, :]
    block_ptrs = block_ptr + batch * b_batch + head * b_head
    block_ptrs += there[:, None] * b_row + columns[None, :]
    out = tl.load(out_ptrs, mask=has_state[:, None] & inside, other=0.0)
    their_out = tl.load(block_ptrs, mask=(their_weight > 0)[:, None] & inside, other=0.0)
    out = out * (our_weight / safe)[:, None]
    out += their_out.to(tl.float32) * (their_weight / safe)[:, None]

    # Every warp has read the rows' lse, and some perhaps the same numbers of out: not until all of
    # them have may one of them write.
    tl.debug_barrier()
    tl.store(lse_ptrs, tl.where(total > 0, m + tl.log(safe), float("-inf")), mask=touched)
    is_final = (bits & 2) != 0
    if RESULT:
        result_ptrs = result_ptr + batch * r_batch + head * r_head
        result_ptrs += here[:, None] * r_row + columns[None, :]
        tl.store(
            result_ptrs, out.to(result_ptr.dtype.element_ty), mask=is_final[:, None] & inside
        )
        touched = touched & ~is_final
    tl.store(out_ptrs, out, mask=touched[:, None] & inside)


def fused_merge(
    state: State, out: Tensor, lse: Tensor, offset: int, rows: Sequence[Rows], sink: bool
) -> None:
    """See `merge_rows`."""
    if not rows or state.out.numel() == 0:
        return
    batch, _, nheads, dv = state.out.shape
    start, end = min(each.start for each in rows), max(each.end for each in rows)
    result = state.out if state.result is None else state.result
    assert all(x.stride(-1) == 1 for x in (state.out, result, out)), "rows of numbers side by side"
    bits = _bits_of(rows, start, end, out.device)
    grid = (triton.cdiv(end - start, _ROWS) * batch * nheads,)  # one axis: others end at 65535
    with torch.cuda.device_of(out):
        merge_kernel[grid](
            state.out, state.lse, result, out, lse, bits, start, end, offset, nheads, dv,
            *state.out.stride()[:3], *state.lse.stride(), *result.stride()[:3],
            *out.stride()[:3], *lse.stride(), ROWS=_ROWS, DV=triton.next_power_of_2(dv), SINK=sink,
            RESULT=state.result is not None,
        )


def _bits_of(rows: Sequence[Rows], start: int, end: int, device: torch.device) -> Tensor:
    """(end − start,) int8: the bits of each row; plans hand out the same rows each time."""

    def make() -> Tensor:
        bits = torch.zeros(end - start, dtype=torch.int8, device="cpu")
        for each in rows:
            bits[each.start - start : each.end - start] = each.bits
        return to_device(bits, device)

    return _bits.get(rows, device, None, make)
