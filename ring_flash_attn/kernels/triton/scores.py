"""What every Triton kernel does with a block of scores: scale, softcap, ALiBi, mask, dropout.

Scores are kept in base 2, s = log2(e) · (score), so that exp is one instruction; the lse outside is
natural.
"""

# fmt: off

import triton
import triton.language as tl

from .. import tables
from ..tables import BlockEntry, TileEntry

# Arguments that change from call to call and whose divisibility helps nobody: one kernel for all.
ANY_NUMBER = [
    "threshold", "head_start", "nheads", "nheads_k", "group", "count", "section", "slopes_stride",
    "length", "l_batch", "l_head", "e_batch", "e_head", "s_batch", "s_head",
    *(f"{x}_{y}row" for x in "qkvo" for y in "bh"),
]
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
BLOCK_COLUMNS = tl.constexpr(tables.BLOCK_COLUMNS)
TILE_COLUMNS = tl.constexpr(tables.TILE_COLUMNS)
DOCUMENT = tl.constexpr(tables.DOCUMENT)
FIRST, LAST = tl.constexpr(tables.FIRST), tl.constexpr(tables.LAST)


@triton.jit
def block_entry(blocks_ptr, number):
    """What a program does; loads of what it does not use are dropped by the compiler."""
    at = blocks_ptr + number * BLOCK_COLUMNS
    return BlockEntry(
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4),
        tl.load(at + 5), tl.load(at + 6), tl.load(at + 7), tl.load(at + 8),
    )


@triton.jit
def slope_of(slopes_ptr, slopes_stride, blocks_ptr, block, batch, head):
    """ALiBi's slope for a block of rows: that of its batch entry or document, and of a head."""
    document = tl.load(blocks_ptr + block * BLOCK_COLUMNS + DOCUMENT)
    return tl.load(slopes_ptr + (batch + document) * slopes_stride + head)


@triton.jit
def tile_entry(tiles_ptr, number):
    """One tile."""
    at = tiles_ptr + number * TILE_COLUMNS
    return TileEntry(
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4),
        tl.load(at + 5),
    )


@triton.jit
def place(count, section):
    """Which of `count` blocks and which pair of batch and head this program does.

    Blocks come longest first. Pairs come in sections: in one, a block of all pairs comes before the
    next block, so that what is begun last is short, for all pairs; and a section is small enough
    for its keys and values to stay in the cache.
    """
    number, pairs = tl.program_id(0), tl.num_programs(0) // count
    first = number // (count * section) * section
    width = tl.minimum(section, pairs - first)
    number -= first * count
    return number // width, first + number % width


@triton.jit
def dot(a, b, UPCAST: tl.constexpr):
    """a @ b in fp32, without TF32. UPCAST: the interpreter multiplies bf16 wrongly."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def inside_of(i, length, BLOCK: tl.constexpr, MASKED: tl.constexpr, SHORT_DOCS: tl.constexpr):
    """Where to load the block that begins at i: the last one ends where the document does.

    Its first rows are then some of the block before, and must be masked. With SHORT_DOCS there are
    documents shorter than a block, which it cannot be moved into.
    """
    if MASKED and not SHORT_DOCS:
        return tl.minimum(i, length - BLOCK)
    else:
        return i


@triton.jit
def load_rows(
    matrix, row, column, row_stride, inside, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
    MASKED: tl.constexpr, SHORT_DOCS: tl.constexpr,
):
    """ROWS × COLUMNS numbers of a matrix, from a descriptor (TMA) or a pointer.

    With MASKED, rows that are not `inside` are 0. A descriptor reads what lies there, which may be
    another document's NaN: SHORT_DOCS clears it. EVEN: COLUMNS is the width.
    """
    if TMA:
        x = matrix.load([row, column])
        if MASKED and SHORT_DOCS:
            x = tl.where(inside[:, None], x, 0.0)
        return x
    else:
        rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
        pointers = matrix + (row.to(tl.int64) * row_stride + column)
        pointers += rows[:, None] * row_stride + columns[None, :]
        if MASKED:
            return tl.load(pointers, mask=inside[:, None] & (columns[None, :] < width), other=0.0)
        elif EVEN:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=columns[None, :] < width, other=0.0)


@triton.jit
def finish_scores(
    products, distance, slope, scale, softcap, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr
):
    """q·k → (base-2 scores, tanh of the softcap). distance = key position − query position."""
    if SOFTCAP:
        x = products * (scale / softcap)
        tanh = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
        square = x * x  # near 0 the difference cancels: the series is exact to fp32 there
        series = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
        tanh = tl.where(square < 0.04, series, tanh)
        s = tanh * (softcap * LOG2E)
    else:
        tanh = products
        s = products * (scale * LOG2E)
    if ALIBI:
        s -= (slope * LOG2E) * tl.abs(distance).to(tl.float32)
    return s, tanh


@triton.jit
def mix(x):
    """MurmurHash3's finaliser on uint32; see kernels/dropout.py."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def spread(number):
    return number.to(tl.uint32) * 0x9E3779B1


@triton.jit
def row_keys(seed_ptr, batch, head, tokens):
    """The part of dropout's hash that does not depend on the key."""
    seed = tl.load(seed_ptr)
    word = mix((seed & 0xFFFFFFFF).to(tl.uint32)) ^ ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    word = mix(mix(word) ^ spread(batch))
    word = mix(word ^ spread(head))
    return mix(word ^ spread(tokens))
