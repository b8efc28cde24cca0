"""Rows that lie apart, as Triton kernels: one pass over memory, whatever the number of parts."""

# fmt: off

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .launches import launch_plain, power_of_2

_NUMBERS = 1024  # of a program
_VECTOR = 4  # numbers that a thread moves at a time, at the least


@triton.jit
def _place(rows, column_blocks, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Where a program works: a sequence of the batch, some rows, some columns."""
    block, column_block = tl.program_id(0) // column_blocks, tl.program_id(0) % column_blocks
    row_blocks = tl.cdiv(rows, ROWS)
    numbers = block % row_blocks * ROWS + tl.arange(0, ROWS)
    column = column_block * COLUMNS + tl.arange(0, COLUMNS)
    return (block // row_blocks).to(tl.int64), numbers, column


@triton.jit(do_not_specialize=["rows", "parts"])
def add_kernel(
    arena_ptr, table_ptr, ours_ptr, rows, parts, columns, column_blocks, first, o_batch, o_row,
    p_batch, ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
):
    """Some rows of ours, and of each part the row that belongs there, if any, in their order."""
    batch, numbers, column = _place(rows, column_blocks, ROWS, COLUMNS)
    inside = numbers < rows
    entries = table_ptr + numbers
    touched = tl.full([ROWS], -1, tl.int64)
    for _ in range(parts):
        touched = tl.maximum(touched, tl.load(entries, mask=inside, other=-1))
        entries += rows
    there = (touched >= 0)[:, None] & (column < columns)[None, :]
    ours = ours_ptr + batch * o_batch + numbers.to(tl.int64)[:, None] * o_row + column[None, :]
    total = tl.load(ours, mask=there, other=0.0)
    theirs = arena_ptr + first + batch * p_batch + column
    entries = table_ptr + numbers
    for _ in range(parts):
        entry = tl.load(entries, mask=inside, other=-1)
        entries += rows
        has_row = (entry >= 0)[:, None] & (column < columns)[None, :]
        begin = tl.multiple_of(tl.maximum(entry, 0), VECTOR)
        total += tl.load(theirs[None, :] + begin[:, None], mask=has_row, other=0.0)
    tl.store(ours, total, mask=there)


@triton.jit(do_not_specialize=["rows"])
def copy_kernel(
    target_ptr, source_ptr, at_ptr, taken_ptr, rows, columns, column_blocks, t_row, t_batch, s_row,
    s_batch, TAKEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Some rows of the source to where they belong."""
    batch, numbers, column = _place(rows, column_blocks, ROWS, COLUMNS)
    inside = numbers < rows
    there = inside[:, None] & (column < columns)[None, :]
    at = tl.load(at_ptr + numbers, mask=inside, other=0)
    if TAKEN:
        taken = tl.load(taken_ptr + numbers, mask=inside, other=0)
    else:
        taken = numbers.to(tl.int64)
    source = source_ptr + batch * s_batch + taken[:, None] * s_row + column[None, :]
    target = target_ptr + batch * t_batch + at[:, None] * t_row + column[None, :]
    tl.store(target, tl.load(source, mask=there).to(target_ptr.dtype.element_ty), mask=there)

# fmt: on


def is_simple(tensor: Tensor) -> bool:
    """Whether what a row has, for one sequence of the batch, lies together."""
    if tensor.dim() == 3:
        return False
    return tensor.stride(3) == 1 and (tensor.shape[2] == 1 or tensor.stride(2) == tensor.shape[3])


def _blocks(columns: int) -> tuple[int, int, int]:
    """Rows and columns of a program, and how many programs share a row."""
    width = min(power_of_2(columns), _NUMBERS)
    return _NUMBERS // width, width, -(-columns // width)


def fused_copy(target: Tensor, source: Tensor, at: Tensor, taken: Tensor | None, dim: int) -> None:
    """See `copy_rows`; both are `is_simple`, of four dimensions."""
    other = 1 - dim  # that of the batch
    columns = target.shape[2] * target.shape[3]
    rows, width, shared = _blocks(columns)
    programs = -(-len(at) // rows) * target.shape[other] * shared
    strides = [tensor.stride(each) for tensor in (target, source) for each in (dim, other)]
    numbers = (len(at), columns, shared, *strides, taken is not None, rows, width)
    launch_plain(
        copy_kernel, programs, (target, source, at, at if taken is None else taken), numbers
    )


def fused_add(
    ours: Sequence[Tensor], arena: Tensor, table: Tensor, firsts: Sequence[int], batch_stride: int
) -> None:
    """Add rows of an arena to ours, which are `is_simple`.

    Args:
        ours: (batch, rows, nheads, headdim) each; a row of a part has that of each side by side.
        arena: where all parts lie.
        table: (parts, rows) int64: where each row of a part begins, for the first of ours; -1 where
            a part has none.
        firsts: where the others begin, after the first.
        batch_stride: of all parts.
    """
    vector = _VECTOR if all(mine.shape[3] % _VECTOR == 0 for mine in ours) else 1
    for mine, first in zip(ours, firsts, strict=True):
        columns = mine.shape[2] * mine.shape[3]
        rows, width, shared = _blocks(columns)
        programs = -(-mine.shape[1] // rows) * len(mine) * shared
        launch_plain(
            add_kernel,
            programs,
            (arena, table, mine),
            (
                mine.shape[1],
                len(table),
                columns,
                shared,
                first,
                mine.stride(0),
                mine.stride(1),
                batch_stride,
                rows,
                width,
                vector,
            ),
        )
