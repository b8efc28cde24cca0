"""What the Hopper kernels share: the tile scheduler, tables, softcap, mbarriers."""

# fmt: off

from typing import Any, NamedTuple

from ... import tables
from ...tables import BlockEntry, TileEntry
from .gluon import fence_async_shared, gl, gluon, load_numbers, mbarrier, thread_barrier

# Arguments whose divisibility helps nobody: one kernel for all.
ANY_NUMBER = [
    "nheads", "nheads_k", "heads", "group", "count", "section", "pairs", "parts", "d", "dv",
    "l_batch", "l_head", "l_row", "e_batch", "e_head", "e_row",
]
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
BLOCK_COLUMNS = gl.constexpr(tables.BLOCK_COLUMNS)
BLOCK_NUMBERS = gl.constexpr(len(BlockEntry._fields))
TILE_COLUMNS = gl.constexpr(tables.TILE_COLUMNS)
FIRST, LAST = gl.constexpr(tables.FIRST), gl.constexpr(tables.LAST)
MORE, PIECE = gl.constexpr(tables.MORE), gl.constexpr(tables.PIECE)


@gluon.jit
def block_entry(ptr):
    """What `tables.py` says of a block; the compiler drops loads of what is not used."""
    return BlockEntry(
        gl.load(ptr), gl.load(ptr + 1), gl.load(ptr + 2), gl.load(ptr + 3), gl.load(ptr + 4),
        gl.load(ptr + 5), gl.load(ptr + 6), gl.load(ptr + 7), gl.load(ptr + 8),
    )


@gluon.jit
def tile_entry(ptr):
    """And of a tile."""
    return TileEntry(
        gl.load(ptr), gl.load(ptr + 1), gl.load(ptr + 2), gl.load(ptr + 3), gl.load(ptr + 4),
        gl.load(ptr + 5),
    )


class Scale(NamedTuple):
    """What scores are multiplied with, and their softcap."""

    scale: Any
    softcap: Any


class TileScheduler(NamedTuple):
    """What a tile scheduler hands out: each of its blocks for each pair of batch and head."""

    blocks: Any  # pointer to BlockEntry
    tiles: Any  # pointer to TileEntry
    counter: Any  # pointer: how many items are taken
    block_count: Any
    section: Any
    pairs: Any


class Item(NamedTuple):
    """A work item, as the producer passes it to the other warps in shared memory.

    Attributes:
        rows: of the block; 0 says that there are no more items.
        tile, last_tile: see `BlockEntry`.
        length, low, high, begin, end: of the first tile; the forward's alone.
        progress_index: of these rows, in the forward's counters of pieces that are done.
    """

    rows: Any
    row: Any
    batch: Any
    head: Any
    first: Any
    tile: Any
    last_tile: Any
    flags: Any = 0
    length: Any = 0
    low: Any = 0
    high: Any = 0
    begin: Any = 0
    end: Any = 0
    progress_index: Any = 0


@gluon.jit
def place(number, pairs, count, section):
    """Which of `count` blocks and which pair of batch and head; see `place` in `../scores.py`."""
    first = number // (count * section) * section
    width = gl.minimum(section, pairs - first)
    number -= first * count
    return number // width, first + number % width


@gluon.jit
def next_item(counter_ptr, items, OWN: gl.constexpr):
    """The number of the next item, beyond the last one if there is none.

    With OWN programs begin with the one of their own number. The counter is 0 again when all are
    done.
    """
    taken = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    given = gl.num_programs(0) if OWN else 0
    if taken == items + gl.num_programs(0) - given - 1:
        gl.store(counter_ptr, 0)
    return given + taken


@gluon.jit
def first_item(counter_ptr, items, OWN: gl.constexpr):
    """The number of a program's first item."""
    if OWN:
        return gl.program_id(0)
    else:
        return next_item(counter_ptr, items, OWN)


@gluon.jit
def await_pieces(ptr, flags):
    """Until both consumers are done with the pieces before; the last one resets what says so."""
    wanted = 2 * (flags // PIECE)
    if wanted > 0:
        done = gl.atomic_add(ptr, 0, sem="acquire")
        while done < wanted:
            done = gl.atomic_add(ptr, 0, sem="acquire")
        if (flags & MORE) == 0:
            gl.store(ptr, 0)


@gluon.jit
def piece_is_done(ptr, flags):
    """A consumer has written its rows of the state; says so if another piece follows."""
    if (flags & MORE) != 0:
        thread_barrier()
        gl.atomic_add(ptr, 1, sem="release")


@gluon.jit
def write_item(smem, item):
    """Put an item where other warps find it."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    at = gl.arange(0, 16, layout)
    x = gl.zeros([16], gl.int32, layout)
    for i in gl.static_range(len(item)):
        x = gl.where(at == i, item[i], x)
    smem.store(x)


@gluon.jit
def _number(smem, i: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(smem.slice(i, 1).load(layout), 0)


@gluon.jit
def read_item(smem):
    """The item; the compiler drops loads of what is not used.

    Read it again where a number is needed late: registers are few, and shared memory is near.
    """
    return Item(
        _number(smem, 0), _number(smem, 1), _number(smem, 2), _number(smem, 3), _number(smem, 4),
        _number(smem, 5), _number(smem, 6), _number(smem, 7), _number(smem, 8), _number(smem, 9),
        _number(smem, 10), _number(smem, 11), _number(smem, 12), _number(smem, 13),
    )


@gluon.jit
def rows_of(smem, ptr, strides):
    """Where the rows of an item begin, in a tensor with these strides (batch, row, head)."""
    item = read_item(smem)
    ptr += item.row.to(gl.int64) * strides[1]
    return ptr + (item.batch.to(gl.int64) * strides[0] + item.head * strides[2])


@gluon.jit
def unknown_zero(n):
    """0, of which the compiler does not know that it is.

    Addresses that follow from it are computed where they are needed, instead of before the loop and
    kept, for which there are not enough registers.
    """
    return gl.inline_asm_elementwise(
        "mov.u32 $0, 0;", "=r,r", [n], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """Barriers at which COUNT have to arrive."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(made.index(i), COUNT)
    return made


@gluon.jit
def stats_memory(desc, STAGES: gl.constexpr):
    """Shared memory for numbers of rows; as for any TMA, not at any address."""
    shape: gl.constexpr = [STAGES] + desc.block_type.shape  # noqa: RUF005
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def load_stats(desc, batch, head, row, full, smem):
    """Begin to copy one number for each row from any row on: of four copies, one begins there."""
    load_numbers(desc, batch, head, row % 4, row // 4 * 4, full, smem)


@gluon.jit
def stats_of(smem, stage, LAYOUT: gl.constexpr):
    """The numbers of the rows of a stage."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return smem.index(stage)._reinterpret(smem.dtype, [smem.shape[4]], flat).load(LAYOUT)


@gluon.jit
def capped(products, scale, softcap):
    """tanh of the softcap; see `finish_scores` in `../scores.py`."""
    x = products * (scale / softcap)
    tanh = 1.0 - 2.0 / (gl.exp2(x * (2.0 * LOG2E)) + 1.0)
    square = x * x
    series = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return gl.where(square < 0.04, series, tanh)


@gluon.jit
def probabilities(s, lse, scale, softcap, SOFTCAP: gl.constexpr):
    """p = 2^(score − lse), lse in base 2; and, with a softcap, its tanh."""
    if SOFTCAP:
        s = capped(s, scale, softcap)
        p = gl.exp2(s * (softcap * LOG2E) - lse)
    else:
        p = gl.exp2(s * (scale * LOG2E) - lse)
    return p, s


@gluon.jit
def score_gradients(p, dp, delta, tanh, SOFTCAP: gl.constexpr, SHORT_DOCS: gl.constexpr):
    """ds. With SHORT_DOCS, delta of what is not seen may be anything."""
    ds = p * (dp - delta)
    if SOFTCAP:
        ds = ds * (1.0 - tanh * tanh)
    if SHORT_DOCS:
        ds = gl.where(p != 0, ds, 0.0)
    return ds


@gluon.jit
def of_document(dq, there):
    """dQ with zeros for rows of other documents: 0 · NaN in the keys of this one would be NaN."""
    rows = gl.arange(0, dq.shape[0], gl.SliceLayout(1, dq.type.layout))
    return gl.where((rows < there)[:, None], dq, 0.0)


@gluon.jit
def clear_from(smem, row):
    """Zeros from this row on, in shared memory that products will read."""
    ROWS: gl.constexpr = smem.shape[0]
    COLUMNS: gl.constexpr = smem.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    PART: gl.constexpr = 8 if WARPS == 1 else 16  # few registers
    across: gl.constexpr = PART // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [WARPS, 1], [1, 0])
    keep = gl.arange(0, ROWS, gl.SliceLayout(1, layout)) < row
    for i in gl.static_range(COLUMNS // PART):
        part = smem.slice(i * PART, PART, dim=1)
        part.store(gl.where(keep[:, None], part.load(layout), 0.0).to(smem.dtype))
    fence_async_shared()


@gluon.jit
def in_eights(x):
    """(rows, groups, 8): a thread has two columns of each group of 8, and all groups."""
    ROWS: gl.constexpr = x.shape[0]
    GROUPS: gl.constexpr = x.shape[1] // 8
    return x.reshape([ROWS, GROUPS, 8])


@gluon.jit
def rows_and_heads(each, ROWS: gl.constexpr, PACK_GQA: gl.constexpr):
    """Which query of which head each of ROWS rows is, where so many heads are packed, head by head.

    With one head nothing is computed.
    """
    if PACK_GQA == 1:
        return each, gl.zeros_like(each)
    else:
        return each % (ROWS // PACK_GQA), each // (ROWS // PACK_GQA)


@gluon.jit
def in_band(
    x, other, row, low, high, begin, end, at, EIGHTS: gl.constexpr = False,
    PACK_GQA: gl.constexpr = 1,
):
    """x; `other` outside of columns begin … end, and outside of low … high from its row on.

    Rows are counted from `row`, those of each packed head, columns from `at`. With EIGHTS columns
    are counted in groups of 8: then a thread's registers differ in nothing but the group, which the
    compiler knows, so that no register holds it.
    """
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    layout: gl.constexpr = x.type.layout
    if EIGHTS:
        x = in_eights(x)
        by_column: gl.constexpr = gl.SliceLayout(1, x.type.layout)
        by_group: gl.constexpr = gl.SliceLayout(2, x.type.layout)
        each = gl.arange(0, ROWS, gl.SliceLayout(1, by_column))
        rows = row - at + rows_and_heads(each, ROWS, PACK_GQA)[0]
        within = gl.arange(0, 8, gl.SliceLayout(0, by_column))[None, :]
        first = (gl.maximum(rows + low, begin - at)[:, None] - within)[:, None, :]
        last = (gl.minimum(rows + high, end - 1 - at)[:, None] - within)[:, None, :]
        columns = 8 * gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, by_group))[None, :, None]
    else:
        each = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        rows = row - at + rows_and_heads(each, ROWS, PACK_GQA)[0]
        first = gl.maximum(rows + low, begin - at)[:, None]
        last = gl.minimum(rows + high, end - 1 - at)[:, None]
        columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    x = gl.where((columns >= first) & (columns <= last), x, other)
    return gl.convert_layout(x.reshape([ROWS, COLUMNS]), layout)


@gluon.jit
def barrier_of_copy(stage, rows, full, ROWS: gl.constexpr, SHORT_DOCS: gl.constexpr):
    """The mbarrier at which the TMA of a block arrives; with SHORT_DOCS there is one more.

    That one, if fewer rows than a block has belong to its document: what lies behind them may be
    anything, 0 · NaN is NaN, and consumers are to see zeros. Then `clear_short` has to follow.
    """
    if SHORT_DOCS:
        return full.index(full.shape[0] - 1 if rows < ROWS else stage)
    else:
        return full.index(stage)


@gluon.jit
def clear_short(rows, shorts, stage, full, parts):
    """Clear what lies behind so many rows of a block's parts, if that is some, and arrive.

    Returns how many blocks were short so far, which is `shorts` until now.
    """
    if rows < parts[0].shape[0]:
        mbarrier.wait(full.index(full.shape[0] - 1), shorts & 1)
        for i in gl.static_range(len(parts)):
            clear_from(parts[i], rows)
        mbarrier.arrive(full.index(stage))
        shorts += 1
    return shorts


@gluon.jit
def write(
    ptr, acc, smem, C: gl.constexpr, rows, dv, stride, EVEN: gl.constexpr,
    PACK_GQA: gl.constexpr = 1, head_stride=0,
):
    """Round and store; through shared memory, so that a warp writes whole rows."""
    ROWS: gl.constexpr = acc.shape[0]
    DV: gl.constexpr = acc.shape[1]
    dtype: gl.constexpr = smem.dtype
    across: gl.constexpr = DV // 8
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DV], dtype)
    staged = smem._reinterpret(dtype, [ROWS, DV], layout)
    staged.store(acc.to(dtype))
    here, heads = rows_and_heads(gl.arange(0, ROWS, gl.SliceLayout(1, wide)), ROWS, PACK_GQA)
    here += C * (ROWS // PACK_GQA)
    columns = gl.arange(0, DV, gl.SliceLayout(0, wide))
    stored = (here < rows)[:, None]
    if not EVEN:
        stored = stored & (columns < dv)[None, :]
    ptrs = ptr + (here * stride + heads * head_stride)
    gl.store(ptrs[:, None] + columns[None, :], staged.load(wide), mask=stored)


@gluon.jit
def put(
    ptr, x, smem, C: gl.constexpr, rows, width, stride, FRESH: gl.constexpr, EVEN: gl.constexpr
):
    """Store rows of gradients, or add them to what is there."""
    if FRESH and ptr.dtype.element_ty == smem.dtype and smem.shape[1] >= x.shape[1]:
        write(ptr, x, smem, C, rows, width, stride, EVEN)
    else:
        ROWS: gl.constexpr = x.shape[0]
        layout: gl.constexpr = x.type.layout
        here = C * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        depth = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
        stored = (here < rows)[:, None]
        if not EVEN:
            stored = stored & (depth < width)[None, :]
        ptrs = (ptr + here * stride)[:, None] + depth[None, :]
        if not FRESH:
            x += gl.load(ptrs, mask=stored, other=0.0)
        gl.store(ptrs, x, mask=stored)
