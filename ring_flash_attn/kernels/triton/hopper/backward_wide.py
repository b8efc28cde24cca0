"""Backward on Hopper for head dimensions over 128: dK and dV of 128 keys do not fit registers.

One program owns 64 keys, and each of two consumer warpgroups half of the columns of their dK and
dV, and of dQ. Both need all of p and ds, and both compute them: 7 products of the size of one
instead of 5, but no consumer waits for the other. ds goes through shared memory from a consumer to
itself.

    consumer      S = k·q'  dP = v·dout'  ·p·  dV += p·dout  ·ds·  dK += ds·q  dQ = ds'·k

There is room for two blocks of queries, one of dout, and a quarter of dQ for each consumer, which
so hands it to the producer in two pieces.

    mbarrier      who arrives       what it says
    kv_full       TMA               the program's keys and values are there
    ready         consumer 0        what lies behind them has been cleared
    q_full[s]     TMA               stage s holds queries and their lse; do_full: dout and delta
                                    (for short documents the producer arrives: `barrier_of_copy`)
    q_empty[s]    both consumers    nobody reads stage s any more; do_empty
    dq_full       both consumers    a piece of dQ is in shared memory
    dq_empty      the producer      it has been added to memory
"""

# fmt: off

from typing import Any, NamedTuple

from .backward import HALF, BwdInputs, BwdOutput, BwdTraits, masked, span_of
from .gluon import (
    add_tile,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    wait_for_adds,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .primitives import (
    ANY_NUMBER,
    BLOCK_COLUMNS,
    Item,
    Scale,
    barrier_of_copy,
    barriers,
    block_entry,
    clear_from,
    clear_short,
    load_stats,
    of_document,
    place,
    probabilities,
    put,
    score_gradients,
    stats_memory,
    stats_of,
    unknown_zero,
)

PIECE = gl.constexpr(64)  # columns


class WideShared(NamedTuple):
    """Shared memory and its mbarriers."""

    q: Any  # [STAGES, BLOCK_M, D]
    dout: Any  # [1, BLOCK_M, DV]
    k: Any  # [1, HALF, D]
    v: Any  # [1, HALF, DV]
    lse: Any
    delta: Any
    ds: Any  # [2, HALF, BLOCK_M]: one of each consumer
    dq: Any  # [2, BLOCK_M, PIECE]
    kv_full: Any
    ready: Any
    q_full: Any
    q_empty: Any
    do_full: Any
    do_empty: Any
    dq_full: Any
    dq_empty: Any


@gluon.jit
def add_dq(dq_desc, shared, number, batch, head, row, DH: gl.constexpr):
    """Have dQ of a block added to memory, piece by piece, as consumers put it there."""
    for piece in gl.static_range(DH // PIECE):
        mbarrier.wait(shared.dq_full.index(0), (number * (DH // PIECE) + piece) & 1)
        for c in gl.static_range(2):
            add_tile(dq_desc, batch, head, row, c * DH + piece * PIECE, shared.dq.index(c))
        wait_for_adds()
        mbarrier.arrive(shared.dq_empty.index(0))


@gluon.jit
def produce(inputs, dq_desc, tiles_ptr, item, shared, traits: gl.constexpr):
    """Load keys and values, then blocks of queries and dout with what is known of their rows."""
    STAGES: gl.constexpr = shared.q.shape[0]
    BLOCK_M: gl.constexpr = traits.BLOCK_M
    SHORT_DOCS: gl.constexpr = traits.SHORT_DOCS
    DH: gl.constexpr = traits.D // 2
    KV_BYTES: gl.constexpr = inputs.k.block_type.nbytes + inputs.v.block_type.nbytes
    Q_BYTES: gl.constexpr = inputs.q.block_type.nbytes + inputs.lse.block_type.nbytes
    DO_BYTES: gl.constexpr = inputs.dout.block_type.nbytes + inputs.delta.block_type.nbytes
    batch, head_k, kv_full = item.batch, item.head // inputs.parts, shared.kv_full.index(0)
    mbarrier.expect(kv_full, KV_BYTES)
    load_tile(inputs.k, batch, head_k, item.row, kv_full, shared.k.index(0), False)
    load_tile(inputs.v, batch, head_k, item.row, kv_full, shared.v.index(0), False)
    n, shorts = 0, 0
    head1, row1, head2, row2 = 0, 0, 0, 0  # of the last two blocks
    for member in range(inputs.group):
        head = item.head * inputs.group + member
        for tile in range(item.tile, item.last_tile):
            queries = span_of(tiles_ptr, tile, item.first, item.rows, HALF, BLOCK_M)
            for i in range(queries.begin, queries.end, BLOCK_M):
                at = gl.minimum(i, queries.last)
                stage, phase = n % STAGES, (n // STAGES) & 1
                q, dout = shared.q.index(stage), shared.dout.index(0)
                mbarrier.wait(shared.q_empty.index(stage), phase ^ 1)
                full = barrier_of_copy(stage, queries.length, shared.q_full, BLOCK_M, SHORT_DOCS)
                mbarrier.expect(full, Q_BYTES)
                load_tile(inputs.q, batch, head, at, full, q, False)
                load_stats(inputs.lse, batch, head, at, full, shared.lse.index(stage))
                if traits.DQ:
                    if n > 1:
                        add_dq(dq_desc, shared, n - 2, batch, head2, row2, DH)
                    head2, row2, head1, row1 = head1, row1, head, at
                mbarrier.wait(shared.do_empty.index(0), (n & 1) ^ 1)
                full = barrier_of_copy(0, queries.length, shared.do_full, BLOCK_M, SHORT_DOCS)
                mbarrier.expect(full, DO_BYTES)
                load_tile(inputs.dout, batch, head, at, full, dout, False)
                load_stats(inputs.delta, batch, head, at, full, shared.delta.index(0))
                if SHORT_DOCS:
                    clear_short(queries.length, shorts, stage, shared.q_full, (q,))
                    shorts = clear_short(queries.length, shorts, 0, shared.do_full, (dout,))
                n += 1
    if traits.DQ:
        if n > 1:
            add_dq(dq_desc, shared, n - 2, batch, head2, row2, DH)
        if n > 0:
            add_dq(dq_desc, shared, n - 1, batch, head1, row1, DH)


@gluon.jit
def piece_of_dq(ds, k, COLUMN: gl.constexpr, BLOCK_M: gl.constexpr):
    """Begin dQ = ds' · k for some of the columns."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    return warpgroup_mma(
        ds.permute((1, 0)), k.slice(COLUMN, PIECE, dim=1),
        gl.zeros([BLOCK_M, PIECE], gl.float32, layout), use_acc=False, is_async=True,
    )


@gluon.jit
def put_dq(C: gl.constexpr, dq, shared, number, there, SHORT_DOCS: gl.constexpr):
    """Hand a piece of dQ to the producer; `there` rows of the block belong to its document."""
    if SHORT_DOCS:
        dq = of_document(dq, there)
    mbarrier.wait(shared.dq_empty.index(0), (number & 1) ^ 1)
    shared.dq.index(C).store(dq)
    fence_async_shared()
    mbarrier.arrive(shared.dq_full.index(0))


@gluon.jit
def run(
    C: gl.constexpr, dk, dv, n, queries, tiles_ptr, tile, j0, shared, scores, traits: gl.constexpr
):
    """Add a tile's queries, in blocks; n counts all blocks."""
    scale, softcap = scores.scale, scores.softcap
    STAGES: gl.constexpr = shared.q.shape[0]
    BLOCK_M: gl.constexpr = traits.BLOCK_M
    SOFTCAP: gl.constexpr = traits.SOFTCAP
    SHORT_DOCS: gl.constexpr = traits.SHORT_DOCS
    DH: gl.constexpr = dk.shape[1]
    DVH: gl.constexpr = dv.shape[1]
    dtype: gl.constexpr = shared.k.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    of_queries: gl.constexpr = gl.SliceLayout(0, s_layout)
    for_dk: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    for_dv: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    for i in range(queries.begin, queries.end, BLOCK_M):
        stage, phase = n % STAGES, (n // STAGES) & 1
        zero = unknown_zero(n)
        q, dout = shared.q.index(stage), shared.dout.index(zero)
        k, v, own_ds = shared.k.index(zero), shared.v.index(zero), shared.ds.index(C + zero)
        mbarrier.wait(shared.q_full.index(stage), phase)
        s = warpgroup_mma(
            k, q.permute((1, 0)), gl.zeros([HALF, BLOCK_M], gl.float32, s_layout), use_acc=False,
            is_async=True,
        )
        mbarrier.wait(shared.do_full.index(0), n & 1)
        dp = warpgroup_mma(
            v, dout.permute((1, 0)), gl.zeros([HALF, BLOCK_M], gl.float32, s_layout), use_acc=False,
            is_async=True,
        )
        s = warpgroup_mma_wait(1, deps=(s,))
        lse = stats_of(shared.lse, stage, of_queries)
        p, tanh = probabilities(s, lse[None, :], scale, softcap, SOFTCAP)
        if (i < queries.edge) | (i >= queries.whole):
            p = masked(p, tiles_ptr, tile, i, gl.minimum(i, queries.last), j0, 0, BLOCK_M)
        rounded = gl.convert_layout(p.to(dtype), for_dv)
        dv_pending = warpgroup_mma(rounded, dout.slice(C * DVH, DVH, dim=1), dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        delta = stats_of(shared.delta, 0, of_queries)
        ds = score_gradients(p, dp, delta[None, :], tanh, SOFTCAP, SHORT_DOCS).to(dtype)
        dk_pending = warpgroup_mma(
            gl.convert_layout(ds, for_dk), q.slice(C * DH, DH, dim=1), dk, is_async=True
        )
        if traits.DQ:
            own_ds.store(ds)
            fence_async_shared()
            dq = piece_of_dq(own_ds, k, C * DH, BLOCK_M)
            dv = warpgroup_mma_wait(2, deps=(dv_pending,))
            mbarrier.arrive(shared.do_empty.index(0))
            dk, dq = warpgroup_mma_wait(0, deps=(dk_pending, dq))
            mbarrier.arrive(shared.q_empty.index(stage))
            put_dq(C, dq * scale, shared, 2 * n, queries.length, SHORT_DOCS)
            dq = piece_of_dq(own_ds, k, C * DH + PIECE, BLOCK_M)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            put_dq(C, dq * scale, shared, 2 * n + 1, queries.length, SHORT_DOCS)
        else:
            dv, dk = warpgroup_mma_wait(0, deps=(dv_pending, dk_pending))
            mbarrier.arrive(shared.do_empty.index(0))
            mbarrier.arrive(shared.q_empty.index(stage))
        n += 1
    return dk, dv, n


@gluon.jit
def consume(
    C: gl.constexpr, output, tiles_ptr, group, item, shared, scores, traits: gl.constexpr
):
    """Half of the columns of dK and dV of 64 keys, and of dQ."""
    BLOCK_M: gl.constexpr = traits.BLOCK_M
    EVEN: gl.constexpr = traits.EVEN
    FRESH: gl.constexpr = traits.FRESH
    DH: gl.constexpr = traits.D // 2
    DVH: gl.constexpr = traits.DV // 2
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DH, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DVH, 16])
    dk = gl.zeros([HALF, DH], gl.float32, dk_layout)
    dv = gl.zeros([HALF, DVH], gl.float32, dv_layout)
    mbarrier.wait(shared.kv_full.index(0), 0)
    if C == 0:
        if item.rows < HALF:  # what lies there may be anything
            clear_from(shared.k.index(0), item.rows)
            clear_from(shared.v.index(0), item.rows)
        mbarrier.arrive(shared.ready.index(0))
    mbarrier.wait(shared.ready.index(0), 0)
    n = 0
    for member in range(group):
        for tile in range(item.tile, item.last_tile):
            queries = span_of(tiles_ptr, tile, item.first, item.rows, HALF, BLOCK_M)
            dk, dv, n = run(
                C, dk, dv, n, queries, tiles_ptr, tile, item.first, shared, scores, traits
            )
    room, dk_row, dv_row = shared.ds.index(C), output.dk_strides[1], output.dv_strides[1]
    d_left, dv_left = output.d - C * DH, output.dv_width - C * DVH
    put(output.dk + C * DH, dk * scores.scale, room, 0, item.rows, d_left, dk_row, FRESH, EVEN)
    put(output.dv + C * DVH, dv, room, 0, item.rows, dv_left, dv_row, FRESH, EVEN)


@gluon.jit(do_not_specialize=ANY_NUMBER)
def backward_wide_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, lse_desc, delta_desc, dk_ptr, dv_ptr, blocks_ptr,
    tiles_ptr, scale, softcap, heads, group, count, section, parts, d, dv, dk_batch, dk_row,
    dk_head, dv_batch, dv_row, dv_head,
    BLOCK_M: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr,
    SOFTCAP: gl.constexpr, SHORT_DOCS: gl.constexpr, EVEN: gl.constexpr, FRESH: gl.constexpr,
    DQ: gl.constexpr,
):
    """Gradients that 64 keys of one KV head have a part in: all query heads, all tiles.

    Or one of `parts` of its query heads: then a `group` is a part, and `heads`, as in dK and dV,
    are all parts of all KV heads.
    """
    dtype: gl.constexpr = q_desc.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, D], dtype)
    do_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, DV], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, D], dtype)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, DV], dtype)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, BLOCK_M], dtype)
    dq_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, PIECE], gl.float32)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], q_layout)
    do_smem = gl.allocate_shared_memory(dtype, [1, BLOCK_M, DV], do_layout)
    k_smem = gl.allocate_shared_memory(dtype, [1, HALF, D], k_layout)
    v_smem = gl.allocate_shared_memory(dtype, [1, HALF, DV], v_layout)
    lse_smem = stats_memory(lse_desc, STAGES)
    delta_smem = stats_memory(delta_desc, 1)
    ds_smem = gl.allocate_shared_memory(dtype, [2, HALF, BLOCK_M], ds_layout)
    dq_smem = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M, PIECE], dq_layout)
    kv_full, ready = barriers(1, 1), barriers(1, 1)
    MORE: gl.constexpr = 1 if SHORT_DOCS else 0
    q_full, q_empty = barriers(STAGES + MORE, 1), barriers(STAGES, 2)
    do_full, do_empty = barriers(1 + MORE, 1), barriers(1, 2)
    dq_full, dq_empty = barriers(1, 2), barriers(1, 1)

    block, pair = place(gl.program_id(0), gl.num_programs(0) // count, count, section)
    own = block_entry(blocks_ptr + block * BLOCK_COLUMNS)
    batch, part = pair // heads, pair % heads
    row64, batch64 = own.row.to(gl.int64), batch.to(gl.int64)
    dk_ptr += batch64 * dk_batch + part * dk_head + row64 * dk_row
    dv_ptr += batch64 * dv_batch + part * dv_head + row64 * dv_row
    item = Item(own.rows, own.row, batch, part, own.first, own.tile, own.last_tile)
    traits: gl.constexpr = BwdTraits(BLOCK_M, D, DV, SOFTCAP, SHORT_DOCS, EVEN, FRESH, DQ)
    inputs = BwdInputs(q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, heads, parts, group)
    shared = WideShared(
        q_smem, do_smem, k_smem, v_smem, lse_smem, delta_smem, ds_smem, dq_smem, kv_full, ready,
        q_full, q_empty, do_full, do_empty, dq_full, dq_empty,
    )
    output = BwdOutput(
        dk_ptr, dv_ptr, d, dv, (dk_batch, dk_row, dk_head), (dv_batch, dv_row, dv_head)
    )
    scores = Scale(scale, softcap)
    gl.warp_specialize(
        [
            (consume, (0, output, tiles_ptr, group, item, shared, scores, traits)),
            (consume, (1, output, tiles_ptr, group, item, shared, scores, traits)),
            (produce, (inputs, dq_desc, tiles_ptr, item, shared, traits)),
        ],
        [4, 4], [240, 24],
    )
