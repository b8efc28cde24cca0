"""dQ on Hopper by itself, always summed in the same order; see `in_order` in `host.py`.

One program owns 128 queries of one head, 64 for each consumer, and walks through the keys that they
see, as in `forward.py`; dK and dV come from the kernels that own keys.

    consumer      S = q·k'  dP = dout·v'  ·p, ds·  dQ += ds·k

    mbarrier    who arrives       what it says
    q_full[c]   TMA               consumer c's queries and dout are there
    full[s]     TMA               stage s holds a block of keys and of values (for short documents
                                  the producer arrives: `barrier_of_copy`)
    empty[s]    both consumers    nobody reads stage s any more
"""

# fmt: off

from typing import Any, NamedTuple

from .forward import HALF, inside, masked, span_of
from .gluon import gl, gluon, load_tile, mbarrier, warpgroup_mma, warpgroup_mma_wait
from .primitives import (
    ANY_NUMBER,
    BLOCK_COLUMNS,
    TILE_COLUMNS,
    Item,
    Scale,
    barrier_of_copy,
    barriers,
    block_entry,
    clear_short,
    place,
    probabilities,
    put,
    score_gradients,
)


class DqTraits(NamedTuple):
    """What the kernel was compiled for."""

    BLOCK_N: Any
    D: Any
    SOFTCAP: Any
    SHORT_DOCS: Any
    EVEN: Any
    FRESH: Any


class DqInputs(NamedTuple):
    """What the producer loads: TMA descriptors."""

    q: Any
    dout: Any
    k: Any
    v: Any
    group: Any


class DqShared(NamedTuple):
    """Shared memory and its mbarriers."""

    q: Any  # [2, HALF, D]
    dout: Any  # [2, HALF, DV]
    k: Any  # [STAGES, BLOCK_N, D]
    v: Any  # [STAGES, BLOCK_N, DV]
    q_full: Any
    full: Any
    empty: Any


class DqRows(NamedTuple):
    """Where a program's rows begin: lse and delta, which it reads, and dQ."""

    lse: Any
    delta: Any
    dq: Any
    d: Any
    dq_row: Any


@gluon.jit
def produce(inputs, tiles_ptr, item, shared, traits: gl.constexpr):
    """Load queries and dout, then blocks of keys and values."""
    BLOCK_N: gl.constexpr = traits.BLOCK_N
    SHORT_DOCS: gl.constexpr = traits.SHORT_DOCS
    STAGES: gl.constexpr = shared.k.shape[0]
    Q_BYTES: gl.constexpr = inputs.q.block_type.nbytes + inputs.dout.block_type.nbytes
    KV_BYTES: gl.constexpr = inputs.k.block_type.nbytes + inputs.v.block_type.nbytes
    batch, head = item.batch, item.head
    head_k = head // inputs.group
    for c in gl.static_range(2):
        q_full, row = shared.q_full.index(c), item.row + c * HALF
        mbarrier.expect(q_full, Q_BYTES)
        load_tile(inputs.q, batch, head, row, q_full, shared.q.index(c), False)
        load_tile(inputs.dout, batch, head, row, q_full, shared.dout.index(c), False)
    n, shorts = 0, 0
    for tile in range(item.tile, item.last_tile):
        k_row, keys = span_of(tiles_ptr + tile * TILE_COLUMNS, item.first, item.rows)
        for j in range(keys.begin, keys.end, BLOCK_N):
            at = k_row + inside(j, keys.length, BLOCK_N)
            stage, phase = n % STAGES, (n // STAGES) & 1
            k, v = shared.k.index(stage), shared.v.index(stage)
            mbarrier.wait(shared.empty.index(stage), phase ^ 1)
            full = barrier_of_copy(stage, keys.length, shared.full, BLOCK_N, SHORT_DOCS)
            mbarrier.expect(full, KV_BYTES)
            load_tile(inputs.k, batch, head_k, at, full, k, False)
            load_tile(inputs.v, batch, head_k, at, full, v, False)
            if SHORT_DOCS:
                shorts = clear_short(keys.length, shorts, stage, shared.full, (k, v))
            n += 1


@gluon.jit
def consume(C: gl.constexpr, own, tiles_ptr, item, shared, scores, traits: gl.constexpr):
    """dQ of 64 queries."""
    BLOCK_N: gl.constexpr = traits.BLOCK_N
    i0, rows = item.first, item.rows
    STAGES: gl.constexpr = shared.k.shape[0]
    D: gl.constexpr = traits.D
    dtype: gl.constexpr = shared.q.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, dq_layout, 2)
    here = C * HALF + gl.arange(0, HALF, gl.SliceLayout(1, s_layout))
    lse = gl.load(own.lse + here, mask=here < rows, other=0.0)
    delta = gl.load(own.delta + here, mask=here < rows, other=0.0)
    q, dout = shared.q.index(C), shared.dout.index(C)
    dq = gl.zeros([HALF, D], gl.float32, dq_layout)
    mbarrier.wait(shared.q_full.index(C), 0)
    n = 0
    for tile in range(item.tile, item.last_tile):
        _, keys = span_of(tiles_ptr + tile * TILE_COLUMNS, i0, rows)
        left = i0 + C * HALF + HALF - 1 + keys.low
        right = gl.minimum(keys.length, i0 + C * HALF + keys.high + 1) - BLOCK_N
        for j in range(keys.begin, keys.end, BLOCK_N):
            stage, phase = n % STAGES, (n // STAGES) & 1
            k, v = shared.k.index(stage), shared.v.index(stage)
            mbarrier.wait(shared.full.index(stage), phase)
            s = warpgroup_mma(
                q, k.permute((1, 0)), gl.zeros([HALF, BLOCK_N], gl.float32, s_layout),
                use_acc=False, is_async=True,
            )
            dp = warpgroup_mma(
                dout, v.permute((1, 0)), gl.zeros([HALF, BLOCK_N], gl.float32, s_layout),
                use_acc=False, is_async=True,
            )
            s = warpgroup_mma_wait(1, deps=(s,))
            p, tanh = probabilities(s, lse[:, None], scores.scale, scores.softcap, traits.SOFTCAP)
            if (j < left) | (j > right):
                p = masked(p, 0.0, j, keys, i0, C, BLOCK_N)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            ds = score_gradients(p, dp, delta[:, None], tanh, traits.SOFTCAP, False)
            dq = warpgroup_mma(gl.convert_layout(ds.to(dtype), operand), k, dq, is_async=True)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            mbarrier.arrive(shared.empty.index(stage))
            n += 1
    dq = dq * scores.scale
    put(own.dq, dq, q, C, rows, own.d, own.dq_row, traits.FRESH, traits.EVEN)


@gluon.jit(do_not_specialize=ANY_NUMBER)
def queries_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr, dq_ptr, blocks_ptr, tiles_ptr, scale,
    softcap, nheads, group, count, section, d, l_batch, l_head, l_row, e_batch, e_head, e_row,
    dq_batch, dq_row, dq_head,
    BLOCK_N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr,
    SOFTCAP: gl.constexpr, SHORT_DOCS: gl.constexpr, EVEN: gl.constexpr, FRESH: gl.constexpr,
):
    """dQ of 128 queries of one head: all tiles of the span."""
    dtype: gl.constexpr = q_desc.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, D], dtype)
    do_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, DV], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], dtype)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, DV], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [2, HALF, D], q_layout)
    do_smem = gl.allocate_shared_memory(dtype, [2, HALF, DV], do_layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], k_layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DV], v_layout)
    q_full, empty = barriers(2, 1), barriers(STAGES, 2)
    full = barriers(STAGES + 1 if SHORT_DOCS else STAGES, 1)

    block, pair = place(gl.program_id(0), gl.num_programs(0) // count, count, section)
    own = block_entry(blocks_ptr + block * BLOCK_COLUMNS)
    batch, head = pair // nheads, pair % nheads
    row64, batch64 = own.row.to(gl.int64), batch.to(gl.int64)
    lse_ptr += batch64 * l_batch + head.to(gl.int64) * l_head + row64
    delta_ptr += batch64 * e_batch + head.to(gl.int64) * e_head + row64
    dq_ptr += batch64 * dq_batch + head * dq_head + row64 * dq_row
    item = Item(own.rows, own.row, batch, head, own.first, own.tile, own.last_tile)
    traits: gl.constexpr = DqTraits(BLOCK_N, D, SOFTCAP, SHORT_DOCS, EVEN, FRESH)
    inputs = DqInputs(q_desc, do_desc, k_desc, v_desc, group)
    shared = DqShared(q_smem, do_smem, k_smem, v_smem, q_full, full, empty)
    rows = DqRows(lse_ptr, delta_ptr, dq_ptr, d, dq_row)
    scores = Scale(scale, softcap)
    gl.warp_specialize(
        [
            (consume, (0, rows, tiles_ptr, item, shared, scores, traits)),
            (consume, (1, rows, tiles_ptr, item, shared, scores, traits)),
            (produce, (inputs, tiles_ptr, item, shared, traits)),
        ],
        [4, 4], [240, 24],
    )
