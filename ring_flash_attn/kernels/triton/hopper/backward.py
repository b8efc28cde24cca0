"""Backward on Hopper: one kernel for dQ, dK and dV.

A piece of work is 128 keys of one KV head, 64 for each of two consumers, which walk through the
blocks of queries that see them, of all query heads of the group: dK and dV stay in registers. Where
there are too few pieces for all programs, each has a part of the group's heads, and dK and dV of
its own, which are added up later.

Scores are computed the other way round, (keys, queries), so that p and ds are operands of dV and dK
just as they are in registers. Only ds goes through shared memory, for dQ = ds' · k over the keys of
both consumers, of which each computes half of the columns, or of the rows where a block has 128
queries (head dimension 64). A warp for each consumer has its half added to fp32 in memory by bulk
copies, in no particular order.

As in `forward.py`, a program does one piece of work after the other. While consumers end one, the
next one's keys and first queries are loaded; its values as soon as nobody needs the last ones, for
which there is no second place. dK and dV go to memory through where ds of a next block would be, or
values were.

    producer      loads q, lse, dout, delta of block n + 1, n + 2 …
    consumer      S = k·q'  dP = v·dout'  ·p·  dV += p·dout  ·ds·  dQ of block n - 1   dK += ds·q
                                                                ↓       ↑      ↓
    shared memory                                    ds of block n   of n - 1  ↓
    adder                                                                   dQ of block n - 1 …

dQ of a block is computed one block later, so that no consumer waits for the other, and stored while
dK is computed.

    barrier       who arrives       what it says
    item_full[b]  the producer      buffer b says which piece of work is next
    item_empty[b] all others        they are done with it, and with its keys
    k_full[b]     bulk copies       the keys of that piece are there; v_full: its values
    v_empty       consumers' warps  nobody reads these values any more
    q_full[s]     bulk copies       stage s holds queries and their lse; do_full[s]: dout and delta
                                    (for short documents the producer arrives: `told_by_copy`)
    empty[s]      consumers' warps  they are done with stage s: ds of its block is in shared memory,
                                    and nobody reads ds of the block before any more
    dq_full[c]    c's warps         consumer c's half of dQ of a block is in shared memory
    dq_empty[c]   its adder         and has been read

What limits it is shared memory: with head dimension 128 products, copies and additions of a block
take some 3,300 of its cycles, and products 2,560 of the tensor cores'.

Registers: with head dimension 128 a consumer's thread needs 128 for dK and dV, 64 for S and dP, and
32 for p and ds as operands, of 240. So what is the same for all blocks is not kept but found again:
addresses (`unknown_zero`) and a tile's numbers (`masked`); and lse and delta come through shared
memory, where a block's first rows need them, rather than by a load of their own. A fence while
products are under way, or S of the next block, would make them all wait for each other.
"""

# fmt: off

from .gluon import (
    add_tile,
    declare_warp_barriers,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    thread_barrier,
    wait_for_adds,
    wait_for_warps,
    warp_arrives,
    warp_barriers,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .primitives import (
    ANY_NUMBER,
    barriers,
    begin_of,
    clear_from,
    clear_short,
    first_item,
    in_band,
    load_stats,
    next_item,
    of_document,
    place,
    probabilities,
    put,
    scalars,
    score_gradients,
    stats_memory,
    stats_of,
    tell,
    told,
    told_by_copy,
    unknown_zero,
)

HALF = gl.constexpr(64)  # keys of a consumer
EMPTY = gl.constexpr(0)  # the first of these barriers' numbers
DQ_FULL = gl.constexpr(8)
V_EMPTY = gl.constexpr(10)


@gluon.jit
def span_of(tiles_ptr, tile, j0, columns, KEYS: gl.constexpr, BLOCK_M: gl.constexpr):
    """Rows of a tile's queries at which blocks begin and end.

    Blocks from begin on need a mask, those from edge on none, those from whole to end one again. No
    block is loaded from a row beyond `last`, so that it ends where the document does, if that is
    as long as a block; its first rows are then some of the block before, and masked. Also returns
    the number of queries.
    """
    q_row, q_len, low, high = scalars(tiles_ptr + tile * 8)
    begin = gl.maximum(0, j0 + low)
    end = gl.maximum(gl.minimum(q_len, j0 + columns + high), begin)
    edge = gl.maximum(j0 + KEYS - 1 + low, begin)
    edge = begin + gl.cdiv(edge - begin, BLOCK_M) * BLOCK_M
    whole = gl.minimum(q_len, j0 + high + 1) - BLOCK_M + 1
    last = gl.maximum(q_len - BLOCK_M, 0)
    return q_row + begin, q_row + edge, q_row + whole, q_row + end, q_row + last, q_len


@gluon.jit
def wait_for_block(n, STAGES: gl.constexpr):
    """Until both consumers are done with block n, and so with ds of the one before.

    There is no block −1: nobody waits for it, and nobody looks at its dQ.
    """
    wait_for_warps(EMPTY + (n + STAGES) % STAGES, ((n + STAGES) // STAGES - 1) & 1)


@gluon.jit
def load_halves(desc, batch, head, row, full, smem, first):
    """Load what belongs to the program's keys, for each consumer."""
    mbarrier.expect(full, 2 * desc.block_type.nbytes)
    for c in gl.static_range(2):
        load_tile(desc, batch, head, row + c * HALF, full, smem.index(first + c), False)


@gluon.jit
def produce(
    loads, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, SHORT_DOCS: gl.constexpr, OWN: gl.constexpr
):
    """Find pieces of work; load keys and values, and blocks of queries with what is known of them.

    Values come behind the first queries, for which there is room sooner.
    """
    (
        q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, blocks_ptr, tiles_ptr, counter_ptr,
        q_smem, do_smem, k_smem, v_smem, lse_smem, delta_smem, k_full, v_full, q_full, do_full,
        item, item_full, item_empty, heads, parts, group, count, section, pairs,
    ) = loads
    items = count * pairs
    n, w, shorts, number = 0, 0, 0, first_item(counter_ptr, items, OWN)
    while number < items:
        block, pair = place(number, pairs, count, section)
        row, columns, j0, first_tile = scalars(blocks_ptr + block * 16)
        last_tile = gl.load(blocks_ptr + block * 16 + 4)
        batch, part = pair // heads, pair % heads
        head_k = part // parts
        mbarrier.wait(item_empty.index(w % 2), ((w // 2) & 1) ^ 1)
        tell(item.index(w % 2), (columns, row, batch, part, j0, first_tile, last_tile))
        mbarrier.arrive(item_full.index(w % 2))
        load_halves(k_desc, batch, head_k, row, k_full.index(w % 2), k_smem, w % 2 * 2)
        waiting = 1
        for member in range(group):
            head = part * group + member
            for tile in range(first_tile, last_tile):
                begin, _, _, end, last, q_len = span_of(
                    tiles_ptr, tile, j0, columns, 2 * HALF, BLOCK_M
                )
                for i in range(begin, end, BLOCK_M):
                    at = gl.minimum(i, last)
                    stage, phase = n % STAGES, (n // STAGES) & 1
                    wait_for_warps(EMPTY + stage, phase ^ 1)
                    full = told_by_copy(stage, q_len, q_full, BLOCK_M, SHORT_DOCS)
                    mbarrier.expect(full, q_desc.block_type.nbytes + lse_desc.block_type.nbytes)
                    load_tile(q_desc, batch, head, at, full, q_smem.index(stage), False)
                    load_stats(lse_desc, batch, head, at, full, lse_smem.index(stage))
                    full = told_by_copy(stage, q_len, do_full, BLOCK_M, SHORT_DOCS)
                    mbarrier.expect(full, do_desc.block_type.nbytes + delta_desc.block_type.nbytes)
                    load_tile(do_desc, batch, head, at, full, do_smem.index(stage), False)
                    load_stats(delta_desc, batch, head, at, full, delta_smem.index(stage))
                    if SHORT_DOCS:
                        clear_short(q_len, shorts, stage, q_full, (q_smem.index(stage),))
                        shorts = clear_short(
                            q_len, shorts, stage, do_full, (do_smem.index(stage),)
                        )
                    if waiting == 1:
                        wait_for_warps(V_EMPTY, (w & 1) ^ 1)
                        load_halves(v_desc, batch, head_k, row, v_full.index(0), v_smem, 0)
                        waiting = 0
                    n += 1
        if waiting == 1:
            wait_for_warps(V_EMPTY, (w & 1) ^ 1)
            load_halves(v_desc, batch, head_k, row, v_full.index(0), v_smem, 0)
        number = next_item(counter_ptr, items, OWN)
        w += 1
    mbarrier.wait(item_empty.index(w % 2), ((w // 2) & 1) ^ 1)
    tell(item.index(w % 2), (0,))
    mbarrier.arrive(item_full.index(w % 2))


@gluon.jit
def add(C: gl.constexpr, adds, BLOCK_M: gl.constexpr):
    """Have one consumer's half of dQ of each block added to memory."""
    dq_desc, tiles_ptr, dq_smem, dq_empty, item, item_full, item_empty, group = adds
    BY_ROWS: gl.constexpr = BLOCK_M > HALF
    shift = C * HALF if BY_ROWS else 0
    column = 0 if BY_ROWS else C * dq_desc.block_type.shape[3]
    n, w = 0, 0
    mbarrier.wait(item_full.index(0), 0)
    while told(item.index(w % 2), 0) > 0:
        it = item.index(w % 2)
        columns, batch, part, j0 = told(it, 0), told(it, 2), told(it, 3), told(it, 4)
        first_tile, last_tile = told(it, 5), told(it, 6)
        mbarrier.arrive(item_empty.index(w % 2))
        for member in range(group):
            head = part * group + member
            for tile in range(first_tile, last_tile):
                begin, _, _, end, last, _ = span_of(tiles_ptr, tile, j0, columns, 2 * HALF, BLOCK_M)
                for i in range(begin, end, BLOCK_M):
                    wait_for_warps(DQ_FULL + C, n & 1)
                    at = gl.minimum(i, last) + shift
                    add_tile(dq_desc, batch, head, at, column, dq_smem.index(C))
                    wait_for_adds()
                    mbarrier.arrive(dq_empty.index(C))
                    n += 1
        w += 1
        mbarrier.wait(item_full.index(w % 2), (w // 2) & 1)


@gluon.jit
def half_dq(C: gl.constexpr, ds_smem, k_smem, dq_smem, buffer, keys):
    """Begin dQ = ds' · k over both consumers' keys, for this consumer's half of rows or columns."""
    ROWS: gl.constexpr = dq_smem.shape[1]
    COLUMNS: gl.constexpr = dq_smem.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    dq = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    for c in gl.static_range(2):
        ds, k = ds_smem.index(2 * buffer + c), k_smem.index(c + keys)
        if ds_smem.shape[2] > HALF:
            ds = ds.slice(C * ROWS, ROWS, dim=1)
        else:
            k = k.slice(C * COLUMNS, COLUMNS, dim=1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=c > 0, is_async=True)
    return dq


@gluon.jit
def put_dq(
    C: gl.constexpr, dq, dq_smem, dq_empty, n, first, there, SHORT_DOCS: gl.constexpr,
    BLOCK_M: gl.constexpr,
):
    """Put dQ of block n − 1 where the adder finds it; a fence has to follow.

    Of a piece of work's first block, anything: nobody is told.
    """
    if SHORT_DOCS:
        dq = of_document(dq, there - C * HALF if BLOCK_M > HALF else there)
    mbarrier.wait(dq_empty.index(C), gl.maximum(n, first + 1) & 1)
    dq_smem.index(C).store(dq)


@gluon.jit
def masked(x, tiles_ptr, tile, i, at, j0, C: gl.constexpr, BLOCK_M: gl.constexpr):
    """(keys, queries) of the block from i on, loaded from `at`; 0 where a key is not seen.

    The tile's numbers are read again: most blocks need no mask, and no registers for them.
    """
    q_row, q_len, low, high = scalars(tiles_ptr + tile * 8)
    at -= q_row
    return in_band(x, 0.0, j0 + C * HALF, low, high, i - q_row, q_len, at, BLOCK_M > HALF)


@gluon.jit
def run(
    dk, dv, n, first, there, begin, edge, whole, end, last, q_len, tiles_ptr, tile, j0, keys,
    v_smem, shared, scale, softcap,
    C: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    SOFTCAP: gl.constexpr, SHORT_DOCS: gl.constexpr, DQ: gl.constexpr,
):
    """Add the queries in rows begin … end, in blocks; n counts all blocks, this work's from first.

    `there` says how many rows of the block before belong to its document, where that may be less
    than all. Returns that of the last one, too.
    """
    (
        q_smem, do_smem, k_smem, lse_smem, delta_smem, ds_smem, dq_smem, q_full, do_full, dq_empty,
    ) = shared
    STAGES: gl.constexpr = q_smem.shape[0]
    dtype: gl.constexpr = k_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    of_queries: gl.constexpr = gl.SliceLayout(0, s_layout)
    for_dk: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    for_dv: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    for i in range(begin, end, BLOCK_M):
        stage, phase = n % STAGES, (n // STAGES) & 1
        q, dout = q_smem.index(stage), do_smem.index(stage)
        zero = unknown_zero(n)
        k, v = k_smem.index(C + keys + zero), v_smem.index(C + zero)
        mbarrier.wait(q_full.index(stage), phase)
        s = warpgroup_mma(
            k, q.permute((1, 0)), gl.zeros([HALF, BLOCK_M], gl.float32, s_layout), use_acc=False,
            is_async=True,
        )
        mbarrier.wait(do_full.index(stage), phase)
        dp = warpgroup_mma(
            v, dout.permute((1, 0)), gl.zeros([HALF, BLOCK_M], gl.float32, s_layout), use_acc=False,
            is_async=True,
        )
        if BLOCK_M > HALF:
            s = warpgroup_mma_wait(1, deps=(s,))
            lse = stats_of(lse_smem, stage, of_queries)
        else:
            lse = stats_of(lse_smem, stage, of_queries)
            s, lse = warpgroup_mma_wait(1, deps=(s, lse))  # read before, not behind it
        p, tanh = probabilities(s, lse[None, :], scale, softcap, SOFTCAP)
        if (i < edge) | (i >= whole):
            p = masked(p, tiles_ptr, tile, i, gl.minimum(i, last), j0, C, BLOCK_M)
        if BLOCK_M > HALF:  # there are no registers for both of a large block's operands
            dp = warpgroup_mma_wait(0, deps=(dp,))
            delta = stats_of(delta_smem, stage, of_queries)
            ds = score_gradients(p, dp, delta[None, :], tanh, SOFTCAP, SHORT_DOCS).to(dtype)
            rounded = gl.convert_layout(p.to(dtype), for_dv)
            dv_pending = warpgroup_mma(rounded, dout, dv, is_async=True)
        else:
            rounded = gl.convert_layout(p.to(dtype), for_dv)
            dv_pending = warpgroup_mma(rounded, dout, dv, is_async=True)
            dp = warpgroup_mma_wait(1, deps=(dp,))
            delta = stats_of(delta_smem, stage, of_queries)
            ds = score_gradients(p, dp, delta[None, :], tanh, SOFTCAP, SHORT_DOCS).to(dtype)
        if DQ:
            wait_for_block(n - 1, STAGES)
            dq_pending = half_dq(C, ds_smem, k_smem, dq_smem, (n & 1) ^ 1, keys + zero)
            dk_pending = warpgroup_mma(gl.convert_layout(ds, for_dk), q, dk, is_async=True)
            ds_smem.index(2 * (n & 1) + C).store(ds)
            dv, dq = warpgroup_mma_wait(1, deps=(dv_pending, dq_pending))
            put_dq(C, dq * scale, dq_smem, dq_empty, n, first, there, SHORT_DOCS, BLOCK_M)
            dk = warpgroup_mma_wait(0, deps=(dk_pending,))
            fence_async_shared()
            if n > first:
                warp_arrives(DQ_FULL + C)
            warp_arrives(EMPTY + stage)
        else:
            dk_pending = warpgroup_mma(gl.convert_layout(ds, for_dk), q, dk, is_async=True)
            dv, dk = warpgroup_mma_wait(0, deps=(dv_pending, dk_pending))
            warp_arrives(EMPTY + stage)
        n += 1
        if SHORT_DOCS:
            there = q_len
    return dk, dv, n, there


@gluon.jit
def consume(
    C: gl.constexpr, given, shared, BLOCK_M: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    SOFTCAP: gl.constexpr, SHORT_DOCS: gl.constexpr, EVEN: gl.constexpr, FRESH: gl.constexpr,
    DQ: gl.constexpr,
):
    """dK and dV of 64 keys, and half of dQ, of each piece of work."""
    item, item_full = given[5], given[6]
    n, w = 0, 0
    mbarrier.wait(item_full.index(0), 0)
    while told(item.index(w % 2), 0) > 0:
        n = gradients(C, given, shared, n, w, BLOCK_M, D, DV, SOFTCAP, SHORT_DOCS, EVEN, FRESH, DQ)
        w += 1
        mbarrier.wait(item_full.index(w % 2), (w // 2) & 1)


@gluon.jit
def gradients(
    C: gl.constexpr, given, shared, n, w, BLOCK_M: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    SOFTCAP: gl.constexpr, SHORT_DOCS: gl.constexpr, EVEN: gl.constexpr, FRESH: gl.constexpr,
    DQ: gl.constexpr,
):
    """dK and dV of 64 keys, and half of dQ; n counts blocks and w pieces of work."""
    (
        dk_ptr, dv_ptr, tiles_ptr, v_smem, k_full, item, item_full, item_empty, v_full, group,
        scale, softcap, d, dv_width, dk_batch, dk_row, dk_head, dv_batch, dv_row, dv_head,
    ) = given
    (
        q_smem, do_smem, k_smem, lse_smem, delta_smem, ds_smem, dq_smem, q_full, do_full, dq_empty,
    ) = shared
    STAGES: gl.constexpr = q_smem.shape[0]
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    it = item.index(w % 2)
    columns, j0, first_tile, last_tile = told(it, 0), told(it, 4), told(it, 5), told(it, 6)
    keys = w % 2 * 2
    k, v = k_smem.index(C + keys), v_smem.index(C)
    dk = gl.zeros([HALF, D], gl.float32, dk_layout)
    dv = gl.zeros([HALF, DV], gl.float32, dv_layout)
    mbarrier.wait(k_full.index(w % 2), (w // 2) & 1)
    mbarrier.wait(v_full.index(0), w & 1)
    if columns < (C + 1) * HALF:  # what lies there may be anything
        clear_from(k, columns - C * HALF)
        clear_from(v, columns - C * HALF)
    thread_barrier()  # here, and not in the loop, where the compiler would put it
    first, there = n, 0
    for member in range(group):
        for tile in range(first_tile, last_tile):
            begin, edge, whole, end, last, q_len = span_of(
                tiles_ptr, tile, j0, columns, 2 * HALF, BLOCK_M
            )
            dk, dv, n, there = run(
                dk, dv, n, first, there, begin, edge, whole, end, last, q_len, tiles_ptr, tile, j0,
                keys, v_smem, shared, scale, softcap, C, BLOCK_M, D, DV, SOFTCAP, SHORT_DOCS, DQ,
            )
    SPARE: gl.constexpr = DQ and BLOCK_M >= D  # there is room where ds of the next block will be
    if SPARE:
        warp_arrives(V_EMPTY)
    if DQ:
        wait_for_block(n - 1, STAGES)
        dq = half_dq(C, ds_smem, k_smem, dq_smem, (n & 1) ^ 1, keys)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        put_dq(C, dq * scale, dq_smem, dq_empty, n, first, there, SHORT_DOCS, BLOCK_M)
        fence_async_shared()
        if n > first:
            warp_arrives(DQ_FULL + C)
    dk_ptr = begin_of(it, dk_ptr, dk_batch, dk_row, dk_head)
    dv_ptr = begin_of(it, dv_ptr, dv_batch, dv_row, dv_head)
    columns = told(it, 0)
    if SPARE:
        put(dk_ptr, dk * scale, ds_smem.index(2 * (n & 1) + C), C, columns, d, dk_row, FRESH, EVEN)
        put(dv_ptr, dv, ds_smem.index(2 * (n & 1) + C), C, columns, dv_width, dv_row, FRESH, EVEN)
    else:
        put(dk_ptr, dk * scale, v, C, columns, d, dk_row, FRESH, EVEN)
        put(dv_ptr, dv, v, C, columns, dv_width, dv_row, FRESH, EVEN)
        fence_async_shared()  # bulk copies come next to where they were
        warp_arrives(V_EMPTY)
    mbarrier.arrive(item_empty.index(w % 2))
    return n


@gluon.jit(do_not_specialize=ANY_NUMBER)
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, lse_desc, delta_desc, dk_ptr, dv_ptr, counter_ptr,
    blocks_ptr, tiles_ptr, scale, softcap, heads, group, count, section, pairs, parts, d, dv,
    dk_batch, dk_row, dk_head, dv_batch, dv_row, dv_head,
    BLOCK_M: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr,
    SOFTCAP: gl.constexpr, SHORT_DOCS: gl.constexpr, EVEN: gl.constexpr, FRESH: gl.constexpr,
    DQ: gl.constexpr, OWN: gl.constexpr,
):
    """Gradients that 128 keys of one KV head have a part in: all query heads, all tiles.

    Or one of `parts` of its query heads: then a `group` is a part, and `heads`, as in dK and dV,
    are all parts of all KV heads.
    """
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = q_desc.dtype
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, BLOCK_M], dtype)
    BUFFERS: gl.constexpr = 4 if DQ else 1
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, D], dtype)
    do_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, DV], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, D], dtype)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, DV], dtype)
    ROWS: gl.constexpr = dq_desc.block_type.shape[2]
    PART: gl.constexpr = dq_desc.block_type.shape[3]
    dq_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, PART], gl.float32)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], q_layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, DV], do_layout)
    k_smem = gl.allocate_shared_memory(dtype, [4, HALF, D], k_layout)
    v_smem = gl.allocate_shared_memory(dtype, [2, HALF, DV], v_layout)
    lse_smem = stats_memory(lse_desc, STAGES)
    delta_smem = stats_memory(delta_desc, STAGES)
    ds_smem = gl.allocate_shared_memory(dtype, [BUFFERS, HALF, BLOCK_M], ds_layout)
    dq_smem = gl.allocate_shared_memory(gl.float32, [2, ROWS, PART], dq_layout)
    k_full, v_full = barriers(2, 1), barriers(1, 1)
    FULL: gl.constexpr = STAGES + 1 if SHORT_DOCS else STAGES
    q_full, do_full = barriers(FULL, 1), barriers(FULL, 1)
    dq_empty = barriers(2, 1)
    declare_warp_barriers()
    warp_barriers(EMPTY, STAGES, 8)
    warp_barriers(DQ_FULL, 2, 4)
    warp_barriers(V_EMPTY, 1, 8)
    item = gl.allocate_shared_memory(gl.int32, [2, 16], flat)
    READERS: gl.constexpr = 4 if DQ else 2
    item_full, item_empty = barriers(2, 1), barriers(2, READERS)

    shared = (
        q_smem, do_smem, k_smem, lse_smem, delta_smem, ds_smem, dq_smem, q_full, do_full, dq_empty,
    )
    given = (
        dk_ptr, dv_ptr, tiles_ptr, v_smem, k_full, item, item_full, item_empty, v_full, group,
        scale, softcap, d, dv, dk_batch, dk_row, dk_head, dv_batch, dv_row, dv_head,
    )
    adds = dq_desc, tiles_ptr, dq_smem, dq_empty, item, item_full, item_empty, group
    loads = (
        q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, blocks_ptr, tiles_ptr, counter_ptr,
        q_smem, do_smem, k_smem, v_smem, lse_smem, delta_smem, k_full, v_full, q_full, do_full,
        item, item_full, item_empty, heads, parts, group, count, section, pairs,
    )
    if DQ:
        gl.warp_specialize(
            [
                (consume, (0, given, shared, BLOCK_M, D, DV, SOFTCAP, SHORT_DOCS, EVEN, FRESH, DQ)),
                (consume, (1, given, shared, BLOCK_M, D, DV, SOFTCAP, SHORT_DOCS, EVEN, FRESH, DQ)),
                (produce, (loads, BLOCK_M, STAGES, SHORT_DOCS, OWN)),
                (add, (0, adds, BLOCK_M)),
                (add, (1, adds, BLOCK_M)),
            ],
            [4, 1, 1, 1], [240, 24, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (0, given, shared, BLOCK_M, D, DV, SOFTCAP, SHORT_DOCS, EVEN, FRESH, DQ)),
                (consume, (1, given, shared, BLOCK_M, D, DV, SOFTCAP, SHORT_DOCS, EVEN, FRESH, DQ)),
                (produce, (loads, BLOCK_M, STAGES, SHORT_DOCS, OWN)),
            ],
            [4, 1], [240, 24],
        )
