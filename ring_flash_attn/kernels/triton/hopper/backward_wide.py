"""Backward on Hopper for head dimensions over 128: dK and dV of 128 keys do not fit registers.

One program owns 64 keys, and each of two consumers half of the columns of their dK and dV, and of
dQ. Both need all of p and ds, and both compute them: 7 products of the size of one instead of 5,
but no consumer waits for the other. ds goes through shared memory from a consumer to itself.

    consumer      S = k·q'  dP = v·dout'  ·p·  dV += p·dout  ·ds·  dK += ds·q  dQ = ds'·k

There is room for two blocks of queries, one of dout, and a quarter of dQ for each consumer, which
so hands it to the producer in two pieces.

    barrier       who arrives       what it says
    kv_full       bulk copies       the program's keys and values are there
    ready         consumer 0        what lies behind them has been cleared
    q_full[s]     bulk copies       stage s holds queries and their lse; do_full: dout and delta
                                    (for short documents the producer arrives: `told_by_copy`)
    q_empty[s]    both consumers    nobody reads stage s any more; do_empty
    dq_full       both consumers    a piece of dQ is in shared memory
    dq_empty      the producer      it has been added to memory
"""

# fmt: off

from .backward import HALF, masked, span_of
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
    barriers,
    clear_from,
    clear_short,
    load_stats,
    of_document,
    place,
    probabilities,
    put,
    scalars,
    score_gradients,
    stats_memory,
    stats_of,
    told_by_copy,
    unknown_zero,
)

PIECE = gl.constexpr(64)  # columns


@gluon.jit
def add_dq(dq_desc, dq_smem, dq_full, dq_empty, number, batch, head, row, DH: gl.constexpr):
    """Have dQ of a block added to memory, piece by piece, as consumers put it there."""
    for piece in gl.static_range(DH // PIECE):
        mbarrier.wait(dq_full.index(0), (number * (DH // PIECE) + piece) & 1)
        for c in gl.static_range(2):
            add_tile(dq_desc, batch, head, row, c * DH + piece * PIECE, dq_smem.index(c))
        wait_for_adds()
        mbarrier.arrive(dq_empty.index(0))


@gluon.jit
def produce(
    loads, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, DH: gl.constexpr, SHORT_DOCS: gl.constexpr,
    DQ: gl.constexpr,
):
    """Load keys and values, then blocks of queries and dout with what is known of their rows."""
    (
        q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, dq_desc, tiles_ptr, q_smem, do_smem,
        k_smem, v_smem, lse_smem, delta_smem, dq_smem, kv_full, q_full, q_empty, do_full, do_empty,
        dq_full, dq_empty, batch, head_k, part, group, row, j0, columns, first_tile, last_tile,
    ) = loads
    mbarrier.expect(kv_full.index(0), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    load_tile(k_desc, batch, head_k, row, kv_full.index(0), k_smem.index(0), False)
    load_tile(v_desc, batch, head_k, row, kv_full.index(0), v_smem.index(0), False)
    n, shorts = 0, 0
    head1, row1, head2, row2 = 0, 0, 0, 0  # of the last two blocks
    for member in range(group):
        head = part * group + member
        for tile in range(first_tile, last_tile):
            begin, _, _, end, last, q_len = span_of(tiles_ptr, tile, j0, columns, HALF, BLOCK_M)
            for i in range(begin, end, BLOCK_M):
                at = gl.minimum(i, last)
                stage, phase = n % STAGES, (n // STAGES) & 1
                mbarrier.wait(q_empty.index(stage), phase ^ 1)
                full = told_by_copy(stage, q_len, q_full, BLOCK_M, SHORT_DOCS)
                mbarrier.expect(full, q_desc.block_type.nbytes + lse_desc.block_type.nbytes)
                load_tile(q_desc, batch, head, at, full, q_smem.index(stage), False)
                load_stats(lse_desc, batch, head, at, full, lse_smem.index(stage))
                if DQ:
                    if n > 1:
                        add_dq(dq_desc, dq_smem, dq_full, dq_empty, n - 2, batch, head2, row2, DH)
                    head2, row2, head1, row1 = head1, row1, head, at
                mbarrier.wait(do_empty.index(0), (n & 1) ^ 1)
                full = told_by_copy(0, q_len, do_full, BLOCK_M, SHORT_DOCS)
                mbarrier.expect(full, do_desc.block_type.nbytes + delta_desc.block_type.nbytes)
                load_tile(do_desc, batch, head, at, full, do_smem.index(0), False)
                load_stats(delta_desc, batch, head, at, full, delta_smem.index(0))
                if SHORT_DOCS:
                    clear_short(q_len, shorts, stage, q_full, (q_smem.index(stage),))
                    shorts = clear_short(q_len, shorts, 0, do_full, (do_smem.index(0),))
                n += 1
    if DQ:
        if n > 1:
            add_dq(dq_desc, dq_smem, dq_full, dq_empty, n - 2, batch, head2, row2, DH)
        if n > 0:
            add_dq(dq_desc, dq_smem, dq_full, dq_empty, n - 1, batch, head1, row1, DH)


@gluon.jit
def piece_of_dq(ds, k, COLUMN: gl.constexpr, BLOCK_M: gl.constexpr):
    """Begin dQ = ds' · k for some of the columns."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    return warpgroup_mma(
        ds.permute((1, 0)), k.slice(COLUMN, PIECE, dim=1),
        gl.zeros([BLOCK_M, PIECE], gl.float32, layout), use_acc=False, is_async=True,
    )


@gluon.jit
def put_dq(
    C: gl.constexpr, dq, dq_smem, dq_full, dq_empty, number, there, SHORT_DOCS: gl.constexpr
):
    """Hand a piece of dQ to the producer; `there` rows of the block belong to its document."""
    if SHORT_DOCS:
        dq = of_document(dq, there)
    mbarrier.wait(dq_empty.index(0), (number & 1) ^ 1)
    dq_smem.index(C).store(dq)
    fence_async_shared()
    mbarrier.arrive(dq_full.index(0))


@gluon.jit
def run(
    dk, dv, n, begin, edge, whole, end, last, q_len, tiles_ptr, tile, j0, shared, scale, softcap,
    C: gl.constexpr, BLOCK_M: gl.constexpr, SOFTCAP: gl.constexpr, SHORT_DOCS: gl.constexpr,
    DQ: gl.constexpr,
):
    """Add the queries in rows begin … end, in blocks; n counts all blocks."""
    (
        q_smem, do_smem, k_smem, v_smem, lse_smem, delta_smem, ds_smem, dq_smem, q_full, q_empty,
        do_full, do_empty, dq_full, dq_empty,
    ) = shared
    STAGES: gl.constexpr = q_smem.shape[0]
    DH: gl.constexpr = dk.shape[1]
    DVH: gl.constexpr = dv.shape[1]
    dtype: gl.constexpr = k_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    of_queries: gl.constexpr = gl.SliceLayout(0, s_layout)
    for_dk: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    for_dv: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    for i in range(begin, end, BLOCK_M):
        stage, phase = n % STAGES, (n // STAGES) & 1
        zero = unknown_zero(n)
        q, dout = q_smem.index(stage), do_smem.index(zero)
        k, v, own_ds = k_smem.index(zero), v_smem.index(zero), ds_smem.index(C + zero)
        mbarrier.wait(q_full.index(stage), phase)
        s = warpgroup_mma(
            k, q.permute((1, 0)), gl.zeros([HALF, BLOCK_M], gl.float32, s_layout), use_acc=False,
            is_async=True,
        )
        mbarrier.wait(do_full.index(0), n & 1)
        dp = warpgroup_mma(
            v, dout.permute((1, 0)), gl.zeros([HALF, BLOCK_M], gl.float32, s_layout), use_acc=False,
            is_async=True,
        )
        s = warpgroup_mma_wait(1, deps=(s,))
        lse = stats_of(lse_smem, stage, of_queries)
        p, tanh = probabilities(s, lse[None, :], scale, softcap, SOFTCAP)
        if (i < edge) | (i >= whole):
            p = masked(p, tiles_ptr, tile, i, gl.minimum(i, last), j0, 0, BLOCK_M)
        rounded = gl.convert_layout(p.to(dtype), for_dv)
        dv_pending = warpgroup_mma(rounded, dout.slice(C * DVH, DVH, dim=1), dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        delta = stats_of(delta_smem, 0, of_queries)
        ds = score_gradients(p, dp, delta[None, :], tanh, SOFTCAP, SHORT_DOCS).to(dtype)
        dk_pending = warpgroup_mma(
            gl.convert_layout(ds, for_dk), q.slice(C * DH, DH, dim=1), dk, is_async=True
        )
        if DQ:
            own_ds.store(ds)
            fence_async_shared()
            dq = piece_of_dq(own_ds, k, C * DH, BLOCK_M)
            dv = warpgroup_mma_wait(2, deps=(dv_pending,))
            mbarrier.arrive(do_empty.index(0))
            dk, dq = warpgroup_mma_wait(0, deps=(dk_pending, dq))
            mbarrier.arrive(q_empty.index(stage))
            put_dq(C, dq * scale, dq_smem, dq_full, dq_empty, 2 * n, q_len, SHORT_DOCS)
            dq = piece_of_dq(own_ds, k, C * DH + PIECE, BLOCK_M)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            put_dq(C, dq * scale, dq_smem, dq_full, dq_empty, 2 * n + 1, q_len, SHORT_DOCS)
        else:
            dv, dk = warpgroup_mma_wait(0, deps=(dv_pending, dk_pending))
            mbarrier.arrive(do_empty.index(0))
            mbarrier.arrive(q_empty.index(stage))
        n += 1
    return dk, dv, n


@gluon.jit
def consume(
    C: gl.constexpr, given, shared, BLOCK_M: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    SOFTCAP: gl.constexpr, SHORT_DOCS: gl.constexpr, EVEN: gl.constexpr, FRESH: gl.constexpr,
    DQ: gl.constexpr,
):
    """Half of the columns of dK and dV of 64 keys, and of dQ."""
    (
        dk_ptr, dv_ptr, tiles_ptr, kv_full, ready, group, j0, columns, first_tile, last_tile, scale,
        softcap, d, dv_width, dk_row, dv_row,
    ) = given
    (
        q_smem, do_smem, k_smem, v_smem, lse_smem, delta_smem, ds_smem, dq_smem, q_full, q_empty,
        do_full, do_empty, dq_full, dq_empty,
    ) = shared
    DH: gl.constexpr = D // 2
    DVH: gl.constexpr = DV // 2
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DH, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DVH, 16])
    dk = gl.zeros([HALF, DH], gl.float32, dk_layout)
    dv = gl.zeros([HALF, DVH], gl.float32, dv_layout)
    mbarrier.wait(kv_full.index(0), 0)
    if C == 0:
        if columns < HALF:  # what lies there may be anything
            clear_from(k_smem.index(0), columns)
            clear_from(v_smem.index(0), columns)
        mbarrier.arrive(ready.index(0))
    mbarrier.wait(ready.index(0), 0)
    n = 0
    for member in range(group):
        for tile in range(first_tile, last_tile):
            begin, edge, whole, end, last, q_len = span_of(
                tiles_ptr, tile, j0, columns, HALF, BLOCK_M
            )
            dk, dv, n = run(
                dk, dv, n, begin, edge, whole, end, last, q_len, tiles_ptr, tile, j0, shared, scale,
                softcap, C, BLOCK_M, SOFTCAP, SHORT_DOCS, DQ,
            )
    own, d_left, dv_left = ds_smem.index(C), d - C * DH, dv_width - C * DVH
    put(dk_ptr + C * DH, dk * scale, own, 0, columns, d_left, dk_row, FRESH, EVEN)
    put(dv_ptr + C * DVH, dv, own, 0, columns, dv_left, dv_row, FRESH, EVEN)


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
    entry = blocks_ptr + block * 16
    row, columns, j0, first_tile = scalars(entry)
    last_tile = gl.load(entry + 4)
    batch, part = pair // heads, pair % heads
    row64, batch64 = row.to(gl.int64), batch.to(gl.int64)
    dk_ptr += batch64 * dk_batch + part * dk_head + row64 * dk_row
    dv_ptr += batch64 * dv_batch + part * dv_head + row64 * dv_row
    shared = (
        q_smem, do_smem, k_smem, v_smem, lse_smem, delta_smem, ds_smem, dq_smem, q_full, q_empty,
        do_full, do_empty, dq_full, dq_empty,
    )
    given = (
        dk_ptr, dv_ptr, tiles_ptr, kv_full, ready, group, j0, columns, first_tile, last_tile, scale,
        softcap, d, dv, dk_row, dv_row,
    )
    loads = (
        q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, dq_desc, tiles_ptr, q_smem, do_smem,
        k_smem, v_smem, lse_smem, delta_smem, dq_smem, kv_full, q_full, q_empty, do_full, do_empty,
        dq_full, dq_empty, batch, part // parts, part, group, row, j0, columns, first_tile,
        last_tile,
    )
    gl.warp_specialize(
        [
            (consume, (0, given, shared, BLOCK_M, D, DV, SOFTCAP, SHORT_DOCS, EVEN, FRESH, DQ)),
            (consume, (1, given, shared, BLOCK_M, D, DV, SOFTCAP, SHORT_DOCS, EVEN, FRESH, DQ)),
            (produce, (loads, BLOCK_M, STAGES, D // 2, SHORT_DOCS, DQ)),
        ],
        [4, 4], [240, 24],
    )
