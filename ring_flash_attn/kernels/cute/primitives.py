"""What kernels in CuTe DSL share: barriers, products, the tile scheduler, global memory by address.

A consumer is a warpgroup that owns 64 rows. Of a 64 × N block of accumulators a thread holds two
rows, 8 apart, and of every 8 columns two that lie together:

    number 4 · g + 2 · r + e: row 16 · warp + lane // 4 + 8 · r, column 8 · g + 2 · (lane % 4) + e

Rounded, in the same order, these are the left operand of the next product. So a fragment here is a
flat list of registers, and functions name (g, r, e).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils.hopper_helpers import get_smem_layout_atom

from .. import tables
from ..tables import BlockEntry, TileEntry

LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
WARPGROUP = 128  # threads
ROWS = 64  # of a consumer
FIRST, LAST = tables.FIRST, tables.LAST
BLOCK_COLUMNS, TILE_COLUMNS = tables.BLOCK_COLUMNS, tables.TILE_COLUMNS
BLOCK_NUMBERS = len(BlockEntry._fields)
GMEM, SMEM = cute.AddressSpace.gmem, cute.AddressSpace.smem


# Products


def smem_layout(dtype: Any, rows: int, columns: int, stages: int, whole: int = 0) -> Any:
    """Of stages of (rows, columns), a row's columns together, swizzled as widely as they allow.

    With `whole`, so that products may begin at multiples of so many columns.
    """
    kind = get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, whole or columns)
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))


def transposed(smem: Any) -> Any:
    """(columns, rows, stages) of the same memory."""
    rows, columns, stages = smem.shape
    whole = tuple(cute.size(each) for each in (columns, rows, stages))
    return cute.composition(smem, cute.make_ordered_layout(whole, order=(1, 0, 2)))


def product_of(
    dtype: Any, columns: int, from_registers: bool, b_transposed: bool, a_transposed: bool = False
) -> Any:
    """The WGMMA of one consumer: 64 × `columns`, summed in fp32.

    Args:
        dtype: of both operands.
        columns: of the result.
        from_registers: the left operand is there, else in shared memory.
        b_transposed: the right one lies in memory as (inner, columns).
        a_transposed: the left one lies there as (inner, rows).
    """
    source = warpgroup.OperandSource.RMEM if from_registers else warpgroup.OperandSource.SMEM
    majors = [
        OperandMajorMode.MN if each else OperandMajorMode.K for each in (a_transposed, b_transposed)
    ]
    op = warpgroup.MmaF16BF16Op(dtype, Float32, (ROWS, columns, 16), source, *majors)
    return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))


def accumulators(columns: int) -> Any:
    """Registers for 64 × columns."""
    return cute.make_rmem_tensor(columns // 2, Float32)


def operand(columns: int, dtype: Any) -> Any:
    """Registers for a left operand, 64 × columns."""
    return cute.make_rmem_tensor(columns // 2, dtype)


def as_c(registers: Any, columns: int) -> Any:
    """Accumulators as WGMMA wants them."""
    return cute.make_tensor(
        registers.iterator, cute.make_layout(((2, 2, columns // 8), 1, 1), stride=((1, 2, 4), 0, 0))
    )


def as_a(registers: Any, step: int) -> Any:
    """16 columns of a left operand."""
    return cute.make_tensor(
        registers.iterator + 8 * step, cute.make_layout(((2, 2, 2), 1), stride=((1, 2, 4), 0))
    )


@cute.jit
def multiply(mma: Any, c: Any, a: Any, b: Any, steps: cutlass.Constexpr, accumulate: Any) -> None:
    """Issue c (+)= a · b, of which `steps` times 16 inner columns, and do not wait.

    `a` and `b` are indexed by step: descriptors of shared memory, or registers.
    """
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for step in cutlass.range_constexpr(steps):
        cute.gemm(atom, c, a[step], b[step], c)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@dsl_user_op
def pack(low: Any, high: Any, dtype: Any, *, loc: Any = None, ip: Any = None) -> Int32:
    """Two numbers, rounded, in one register: the compiler does not always find that instruction."""
    name = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [Float32(high).ir_value(loc=loc, ip=ip), Float32(low).ir_value(loc=loc, ip=ip)],
            f"cvt.rn.{name}.f32 $0, $1, $2;",
            "=r,f,f",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


@dsl_user_op
def settled(register: Any, *, loc: Any = None, ip: Any = None) -> Int32:
    """The same number, in a register that is written here and not sooner.

    ptxas runs products one by one if anything writes an operand of one while others are under way:
    so what is computed during a product becomes an operand behind the wait for it.
    """
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [Int32(register).ir_value(loc=loc, ip=ip)],
            "mov.b32 $0, $1;",
            "=r,r",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


@cute.jit
def round_into(rounded: Any, numbers: Any) -> None:
    """Registers of 16 bits, from fp32."""
    pairs = cute.recast_tensor(rounded, Int32)
    for i in cutlass.range_constexpr(cute.size(pairs)):
        pairs[i] = pack(numbers[2 * i], numbers[2 * i + 1], rounded.element_type)


@dsl_user_op
def exp2(x: Any, *, loc: Any = None, ip: Any = None) -> Float32:
    """2^x, in one instruction; 0 of −inf."""
    return Float32(cute.math.exp2(Float32(x), fastmath=True, loc=loc, ip=ip))


@dsl_user_op
def inverse(x: Any, *, loc: Any = None, ip: Any = None) -> Float32:
    """1 / x, in one instruction."""
    return Float32(cute.arch.rcp_approx(Float32(x), loc=loc, ip=ip))


# Barriers


class Ring(NamedTuple):
    """Buffers that are filled and emptied in turn: two mbarriers each. Uses are counted from 0."""

    full: Any
    empty: Any
    stages: int

    def stage(self, count: Any) -> Any:
        return Int32(Uint32(count) % self.stages)

    def phase(self, count: Any) -> Any:
        return Int32((Uint32(count) // self.stages) & 1)

    def full_of(self, count: Any) -> Any:
        return self.full + self.stage(count)

    def await_full(self, count: Any) -> None:
        cute.arch.mbarrier_wait(self.full_of(count), self.phase(count))

    def await_empty(self, count: Any) -> None:
        cute.arch.mbarrier_wait(self.empty + self.stage(count), self.phase(count) ^ 1)

    def release(self, count: Any) -> None:
        """A warp is done with what it has read."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + self.stage(count))


def make_ring(smem: Any, stages: int) -> Ring:
    """Memory for its mbarriers; see `init_ring`."""
    return Ring(smem.allocate_array(Int64, stages), smem.allocate_array(Int64, stages), stages)


@cute.jit
def init_ring(ring: Any, full: cutlass.Constexpr, empty: cutlass.Constexpr) -> None:
    """So many arrivals fill a buffer, and so many empty it; one thread calls this."""
    for stage in cutlass.range_constexpr(ring.stages):
        cute.arch.mbarrier_init(ring.full + stage, full)
        cute.arch.mbarrier_init(ring.empty + stage, empty)


def await_turn(barrier: Any) -> None:
    """Until the consumer before this one has passed the turn."""
    cute.arch.barrier(barrier_id=barrier, number_of_threads=2 * WARPGROUP)


def pass_turn(barrier: Any) -> None:
    """To the consumer that waits there."""
    cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=2 * WARPGROUP)


# TMA


def tensor_of(dtype: Any, address: Any, shape: Any, strides: Any) -> Any:
    """(row, d, head, batch), as TMA wants it: strides (row, head, batch) of whole 16 bytes."""
    row, head, batch = (cute.assume(each, divby=128 // dtype.width) for each in strides)
    pointer = cute.make_ptr(dtype, address, GMEM, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=(row, 1, head, batch)))


def tma_of(x: Any, layout: Any, rows: int, columns: int) -> tuple[Any, Any]:
    """For (row, d, head, batch): how to copy (rows, columns) of one head to a stage, and from."""
    return cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), x, cute.select(layout, mode=[0, 1]), (rows, columns)
    )


@cute.jit
def load_rows(
    atom: Any, x: Any, batch: Any, head: Any, row: Any, smem: Any, stage: Any, barrier: Any
) -> None:
    """Begin to copy the rows of a head from `row` on to a stage; what is not there is 0."""
    tile = (cute.size(smem.shape[0]), cute.size(smem.shape[1]))
    rows = cute.domain_offset((row, 0), x[None, None, head, batch])
    there, here = cpasync.tma_partition(
        atom,
        0,
        cute.make_layout(1),
        cute.group_modes(smem, 0, 2),
        cute.group_modes(cute.local_tile(rows, tile, (0, 0)), 0, 2),
    )
    cute.copy(atom, here, there[None, stage], tma_bar_ptr=barrier)


# Global memory


def at(address: Any, dtype: Any, offset: Any, align: int = 0) -> Any:
    """A pointer to element `offset` (Int64) from an address on."""
    size = dtype.width // 8
    return cute.make_ptr(dtype, address + offset * size, GMEM, assumed_align=align or size)


def vector(pointer: Any, length: int) -> Any:
    """So many elements that lie together."""
    return cute.make_tensor(pointer, cute.make_layout(length))


def number(pointer: Any) -> Any:
    """What is there."""
    return vector(pointer, 1)[0]


@dsl_user_op
def prefetch(pointer: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Have a line of global memory in L2."""
    llvm.inline_asm(
        None,
        [pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)],
        "prefetch.global.L2 [$0];",
        "l",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


# The tile scheduler: as in `../triton/hopper/primitives.py`


class Scheduler(NamedTuple):
    """What there is to do: each of `count` blocks for each pair of batch and head."""

    blocks: Any  # address of BlockEntry
    tiles: Any  # address of TileEntry
    counter: Any  # address: how many items are taken
    count: Any
    section: Any
    pairs: Any
    nheads: Any
    group: Any


class KeyRange(NamedTuple):
    """The keys of a tile, its band, and which of them, begin … end, the rows of an item see."""

    row: Any
    length: Any
    low: Any
    high: Any
    position: Any
    token: Any
    begin: Any
    end: Any


def place(number: Any, schedule: Any) -> Any:
    """Which block, and which pair of batch and head, an item is."""
    first = number // (schedule.count * schedule.section) * schedule.section
    width = cutlass.min(schedule.section, schedule.pairs - first)
    rest = number - first * schedule.count
    block = rest // width
    return block, first + (rest - block * width)


@cute.jit
def next_item(schedule: Any, programs: Any, own: cutlass.Constexpr) -> Any:
    """The number of the next item; beyond the last one if there is none.

    With `own`, programs begin with the one of their own number. The counter is 0 again when all are
    done.
    """
    items = schedule.count * schedule.pairs
    counter = at(schedule.counter, Int32, Int64(0))
    given = programs if const_expr(own) else Int32(0)
    taken = Int32(0)
    if cute.arch.lane_idx() == 0:
        taken = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
        if taken == items + programs - given - 1:
            vector(counter, 1)[0] = Int32(0)
    return given + cute.arch.shuffle_sync(taken, 0)


def block_entry(address: Any) -> BlockEntry:
    """What `tables.py` says of a block, in global memory."""
    row = vector(address, BLOCK_NUMBERS)
    return BlockEntry(*(row[i] for i in range(BLOCK_NUMBERS)))


def tile_entry(pointer: Any) -> TileEntry:
    """And of a tile."""
    row = vector(pointer, len(TileEntry._fields))
    return TileEntry(*(row[i] for i in range(len(TileEntry._fields))))


def keys_of(tile: TileEntry, first: Any, rows: Any) -> KeyRange:
    """What the rows of a block, `rows` from `first` on, see of a tile."""
    begin = cutlass.max(tile.low + first, 0)
    end = cutlass.min(tile.length, first + rows + tile.high)
    return KeyRange(*tile, begin, end)


def edges(keys: Any, row: Any, block: int) -> tuple[Any, Any]:
    """Where blocks of a tile's keys begin that need a mask, for 64 rows from `row` on.

    Those before the first number need one on the left; so do those from the second number on, on
    the right, and none in between.
    """
    left = cutlass.min(row + ROWS - 1 + keys.low, keys.end)
    right = cutlass.min(keys.length, row + keys.high + 1) - (block - 1)
    return left, cutlass.min(right, keys.end)


def needs_mask(j: Any, keys: Any, row: Any, block: int) -> Any:
    """Whether one of 64 rows from `row` on does not see all keys of the block from j on."""
    right = j + block > cutlass.min(keys.length, row + keys.high + 1)
    return right | (j < row + ROWS - 1 + keys.low)


def inside(j: Any, length: Any, block: int) -> Any:
    """Where to load the block of keys from j on: the last one ends where the keys do, if it can."""
    return cutlass.max(cutlass.min(j, length - block), 0)


def blocks_in(begin: Any, end: Any, block: int) -> Any:
    """How many blocks cover begin … end."""
    return cutlass.max(end - begin + (block - 1), 0) // block


# What the backward needs besides


@dsl_user_op
def store_matrices(address: Any, words: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Four 8 × 8 matrices of 16-bit numbers, as fragments have them, to shared memory.

    Lane l says where row l % 8 of matrix l // 8 goes: 16 bytes.
    """
    llvm.inline_asm(
        None,
        [Int32(each).ir_value(loc=loc, ip=ip) for each in (address, *words)],
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
        "r,r,r,r,r,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


@dsl_user_op
def load_bytes(
    address: Any, source: Any, size: Any, barrier: Any, *, loc: Any = None, ip: Any = None
) -> None:
    """Begin to copy bytes, a multiple of 16, from global to shared memory."""
    llvm.inline_asm(
        None,
        [
            Int32(address).ir_value(loc=loc, ip=ip),
            source.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
            Int32(size).ir_value(loc=loc, ip=ip),
            Int32(barrier.toint(loc=loc, ip=ip)).ir_value(loc=loc, ip=ip),
        ],
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
        "r,l,r,r,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def adding_tma_of(x: Any, layout: Any, rows: int, columns: int) -> tuple[Any, Any]:
    """For (row, d, head, batch): how to add (rows, columns) of a stage to one head, and to what."""
    return cpasync.make_tiled_tma_atom(
        cpasync.CopyReduceBulkTensorTileS2GOp(),
        x,
        cute.select(layout, mode=[0, 1]),
        (rows, columns),
    )


@cute.jit
def add_rows(
    atom: Any, x: Any, batch: Any, head: Any, row: Any, column: Any, smem: Any, stage: Any
) -> None:
    """Begin to add a stage to the rows and columns of a head from these on, as far as there are."""
    tile = (cute.size(smem.shape[0]), cute.size(smem.shape[1]))
    rows = cute.domain_offset((row, column), x[None, None, head, batch])
    here, there = cpasync.tma_partition(
        atom,
        0,
        cute.make_layout(1),
        cute.group_modes(smem, 0, 2),
        cute.group_modes(cute.local_tile(rows, tile, (0, 0)), 0, 2),
    )
    cute.copy(atom, here[None, stage], there)


@dsl_user_op
def lane_again(*, loc: Any = None, ip: Any = None) -> Int32:
    """A thread's number in its warp, asked for here.

    What follows from it is computed here, too, instead of sooner and kept: registers are few.
    """
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [],
            "mov.u32 $0, %laneid;",
            "=r",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


def uniform_again(x: Any) -> Int32:
    """A warp's number, found in a uniform register here.

    Otherwise ptxas may keep it in a vector register, compute descriptors there, and move each of
    them to uniform registers between two WGMMAs.
    """
    return Int32(cute.arch.warp_redux_sync(Int32(x), "max"))


def shared_at(address: Any, dtype: Any, align: int) -> Any:
    """A pointer to shared memory."""
    return cute.make_ptr(dtype, address, SMEM, assumed_align=align)
