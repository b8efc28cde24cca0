"""Backward on Hopper: one persistent kernel for dQ, dK and dV.

A work item is 128 keys of one KV head, 64 for each of two consumer warpgroups, which go through the
blocks of queries that see them, of all query heads of the group: dK and dV stay in registers. Where
there are too few items for all SMs, each has a part of the group's heads, and dK and dV of its own,
which are added up later.

Scores are computed transposed, (keys, queries), so that p and ds are register operands of the
WGMMAs of dV and dK. Only ds goes through shared memory, for dQ = ds' · k over the keys of both
consumers, of which each computes half of the columns, or of the rows where a block has 128 queries
(head dimension 64). A warp for each consumer has its half added to fp32 in memory by TMA
reductions, in no particular order.

As in `forward.py`, a program does one item after the other. While consumers end one, the next one's
keys and first queries are loaded; its values as soon as nobody needs the last ones, for which there
is no second buffer. dK and dV go to memory through where ds of a next block would be, or values
were.

    producer      loads q, lse, dout, delta of block n + 1, n + 2 …
    consumer      S = k·q'  dP = v·dout'  ·p·  dV += p·dout  ·ds·  dQ of block n - 1   dK += ds·q
                                                                ↓       ↑      ↓
    shared memory                                    ds of block n   of n - 1  ↓
    adder                                                                   dQ of block n - 1 …

dQ of a block is computed one block later, so that no consumer waits for the other, and stored while
dK is computed.

    mbarrier      who arrives       what it says
    item_full[b]  the producer      buffer b holds the next item
    item_empty[b] all others        they are done with it, and with its keys
    k_full[b]     TMA               the keys of that item are there; v_full: its values
    v_empty       consumers' warps  nobody reads these values any more
    q_full[s]     TMA               stage s holds queries and their lse; do_full[s]: dout and delta
                                    (for short documents the producer arrives: `barrier_of_copy`)
    empty[s]      consumers' warps  they are done with stage s: ds of its block is in shared memory,
                                    and nobody reads ds of the block before any more
    dq_full[c]    c's warps         consumer c's half of dQ of a block is in shared memory
    dq_empty[c]   its adder         and has been read

Shared memory bounds it: with head dimension 128 products, copies and additions of a block take some
3,300 of its cycles, and products 2,560 of the tensor cores'.

Registers: with head dimension 128 a consumer's thread needs 128 for dK and dV, 64 for S and dP, and
32 for p and ds as operands, of 240. So what is the same for all blocks is not kept but found again:
addresses (`unknown_zero`) and a tile's numbers (`masked`); and lse and delta come through shared
memory, where a block's first rows need them, rather than by a load of their own. A fence while
WGMMAs are in flight, or S of the next block, would serialise them.
"""

# fmt: off

from typing import Any, NamedTuple

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
    BLOCK_COLUMNS,
    TILE_COLUMNS,
    Item,
    Scale,
    TileScheduler,
    barrier_of_copy,
    barriers,
    block_entry,
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
    read_item,
    rows_of,
    score_gradients,
    stats_memory,
    stats_of,
    tile_entry,
    unknown_zero,
    write_item,
)

HALF = gl.constexpr(64)  # keys of a consumer
EMPTY = gl.constexpr(0)  # the first of these barriers' numbers
DQ_FULL = gl.constexpr(8)
V_EMPTY = gl.constexpr(10)


class BwdTraits(NamedTuple):
    """What a kernel was compiled for."""

    BLOCK_M: Any
    D: Any
    DV: Any
    SOFTCAP: Any
    SHORT_DOCS: Any
    EVEN: Any
    FRESH: Any
    DQ: Any
    OWN: Any = False


class BwdInputs(NamedTuple):
    """What the producer loads: TMA descriptors, and how heads go together."""

    q: Any
    dout: Any
    k: Any
    v: Any
    lse: Any
    delta: Any
    heads: Any
    parts: Any
    group: Any


class BwdShared(NamedTuple):
    """Shared memory and its mbarriers."""

    q: Any  # [STAGES, BLOCK_M, D]
    dout: Any  # [STAGES, BLOCK_M, DV]
    k: Any  # [4, HALF, D]: two items, two consumers
    v: Any  # [2, HALF, DV]
    lse: Any
    delta: Any
    ds: Any  # [4, HALF, BLOCK_M]: two blocks, two consumers
    dq: Any  # [2, rows, columns]: a half for each consumer
    item: Any  # [2, 16]
    item_full: Any
    item_empty: Any
    k_full: Any
    v_full: Any
    q_full: Any
    do_full: Any
    dq_empty: Any


class BwdOutput(NamedTuple):
    """Pointers, with strides (batch, row, head)."""

    dk: Any
    dv: Any
    d: Any
    dv_width: Any
    dk_strides: Any
    dv_strides: Any


class Queries(NamedTuple):
    """Rows of a tile's queries at which blocks begin and end.

    Blocks from begin on need a mask, those from edge on none, those from whole to end one again. No
    block is loaded from a row beyond `last`, so that it ends where the document does, if that is
    as long as a block; its first rows are then some of the block before, and masked.
    """

    begin: Any
    edge: Any
    whole: Any
    end: Any
    last: Any
    length: Any


@gluon.jit
def span_of(tiles_ptr, tile, j0, columns, KEYS: gl.constexpr, BLOCK_M: gl.constexpr):
    """Which of a tile's queries see some of the keys from j0 on."""
    entry = tile_entry(tiles_ptr + tile * TILE_COLUMNS)
    row, length = entry.row, entry.length
    begin = gl.maximum(0, j0 + entry.low)
    end = gl.maximum(gl.minimum(length, j0 + columns + entry.high), begin)
    edge = gl.maximum(j0 + KEYS - 1 + entry.low, begin)
    edge = begin + gl.cdiv(edge - begin, BLOCK_M) * BLOCK_M
    whole = gl.minimum(length, j0 + entry.high + 1) - BLOCK_M + 1
    last = gl.maximum(length - BLOCK_M, 0)
    return Queries(row + begin, row + edge, row + whole, row + end, row + last, length)


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
def produce(inputs, scheduler, shared, traits: gl.constexpr):
    """Take items; load keys and values, and blocks of queries with what is known of them.

    Values come behind the first queries, for which there is room sooner.
    """
    items = scheduler.block_count * scheduler.pairs
    STAGES: gl.constexpr = shared.q.shape[0]
    BLOCK_M: gl.constexpr = traits.BLOCK_M
    SHORT_DOCS: gl.constexpr = traits.SHORT_DOCS
    Q_BYTES: gl.constexpr = inputs.q.block_type.nbytes + inputs.lse.block_type.nbytes
    DO_BYTES: gl.constexpr = inputs.dout.block_type.nbytes + inputs.delta.block_type.nbytes
    n, w, shorts, number = 0, 0, 0, first_item(scheduler.counter, items, traits.OWN)
    while number < items:
        block, pair = place(number, scheduler.pairs, scheduler.block_count, scheduler.section)
        own = block_entry(scheduler.blocks + block * BLOCK_COLUMNS)
        batch, part = pair // inputs.heads, pair % inputs.heads
        head_k = part // inputs.parts
        mbarrier.wait(shared.item_empty.index(w % 2), ((w // 2) & 1) ^ 1)
        write_item(
            shared.item.index(w % 2),
            Item(own.rows, own.row, batch, part, own.first, own.tile, own.last_tile),
        )
        mbarrier.arrive(shared.item_full.index(w % 2))
        k_full, v_full = shared.k_full.index(w % 2), shared.v_full.index(0)
        load_halves(inputs.k, batch, head_k, own.row, k_full, shared.k, w % 2 * 2)
        waiting = 1
        for member in range(inputs.group):
            head = part * inputs.group + member
            for tile in range(own.tile, own.last_tile):
                queries = span_of(scheduler.tiles, tile, own.first, own.rows, 2 * HALF, BLOCK_M)
                for i in range(queries.begin, queries.end, BLOCK_M):
                    at = gl.minimum(i, queries.last)
                    stage, phase = n % STAGES, (n // STAGES) & 1
                    q, dout = shared.q.index(stage), shared.dout.index(stage)
                    wait_for_warps(EMPTY + stage, phase ^ 1)
                    full = barrier_of_copy(
                        stage, queries.length, shared.q_full, BLOCK_M, SHORT_DOCS
                    )
                    mbarrier.expect(full, Q_BYTES)
                    load_tile(inputs.q, batch, head, at, full, q, False)
                    load_stats(inputs.lse, batch, head, at, full, shared.lse.index(stage))
                    full = barrier_of_copy(
                        stage, queries.length, shared.do_full, BLOCK_M, SHORT_DOCS
                    )
                    mbarrier.expect(full, DO_BYTES)
                    load_tile(inputs.dout, batch, head, at, full, dout, False)
                    load_stats(inputs.delta, batch, head, at, full, shared.delta.index(stage))
                    if SHORT_DOCS:
                        clear_short(queries.length, shorts, stage, shared.q_full, (q,))
                        shorts = clear_short(queries.length, shorts, stage, shared.do_full, (dout,))
                    if waiting == 1:
                        wait_for_warps(V_EMPTY, (w & 1) ^ 1)
                        load_halves(inputs.v, batch, head_k, own.row, v_full, shared.v, 0)
                        waiting = 0
                    n += 1
        if waiting == 1:
            wait_for_warps(V_EMPTY, (w & 1) ^ 1)
            load_halves(inputs.v, batch, head_k, own.row, v_full, shared.v, 0)
        number = next_item(scheduler.counter, items, traits.OWN)
        w += 1
    mbarrier.wait(shared.item_empty.index(w % 2), ((w // 2) & 1) ^ 1)
    write_item(shared.item.index(w % 2), (0,))
    mbarrier.arrive(shared.item_full.index(w % 2))


@gluon.jit
def add(C: gl.constexpr, dq_desc, tiles_ptr, group, shared, BLOCK_M: gl.constexpr):
    """Have one consumer's half of dQ of each block added to memory."""
    BY_ROWS: gl.constexpr = BLOCK_M > HALF
    shift = C * HALF if BY_ROWS else 0
    column = 0 if BY_ROWS else C * dq_desc.block_type.shape[3]
    n, w = 0, 0
    mbarrier.wait(shared.item_full.index(0), 0)
    while read_item(shared.item.index(w % 2)).rows > 0:
        item = read_item(shared.item.index(w % 2))
        mbarrier.arrive(shared.item_empty.index(w % 2))
        for member in range(group):
            head = item.head * group + member
            for tile in range(item.tile, item.last_tile):
                queries = span_of(tiles_ptr, tile, item.first, item.rows, 2 * HALF, BLOCK_M)
                for i in range(queries.begin, queries.end, BLOCK_M):
                    wait_for_warps(DQ_FULL + C, n & 1)
                    at = gl.minimum(i, queries.last) + shift
                    add_tile(dq_desc, item.batch, head, at, column, shared.dq.index(C))
                    wait_for_adds()
                    mbarrier.arrive(shared.dq_empty.index(C))
                    n += 1
        w += 1
        mbarrier.wait(shared.item_full.index(w % 2), (w // 2) & 1)


@gluon.jit
def half_dq(C: gl.constexpr, shared, buffer, keys):
    """Begin dQ = ds' · k over both consumers' keys, for this consumer's half of rows or columns."""
    ROWS: gl.constexpr = shared.dq.shape[1]
    COLUMNS: gl.constexpr = shared.dq.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    dq = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    for c in gl.static_range(2):
        ds, k = shared.ds.index(2 * buffer + c), shared.k.index(c + keys)
        if shared.ds.shape[2] > HALF:
            ds = ds.slice(C * ROWS, ROWS, dim=1)
        else:
            k = k.slice(C * COLUMNS, COLUMNS, dim=1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=c > 0, is_async=True)
    return dq


@gluon.jit
def put_dq(C: gl.constexpr, dq, shared, n, first, there, traits: gl.constexpr):
    """Put dQ of block n − 1 where the adder finds it; a fence has to follow.

    Of an item's first block, anything: nobody reads it.
    """
    if traits.SHORT_DOCS:
        dq = of_document(dq, there - C * HALF if traits.BLOCK_M > HALF else there)
    mbarrier.wait(shared.dq_empty.index(C), gl.maximum(n, first + 1) & 1)
    shared.dq.index(C).store(dq)


@gluon.jit
def masked(x, tiles_ptr, tile, i, at, j0, C: gl.constexpr, BLOCK_M: gl.constexpr):
    """(keys, queries) of the block from i on, loaded from `at`; 0 where a key is not seen.

    The tile's numbers are read again: most blocks need no mask, and no registers for them.
    """
    queries = tile_entry(tiles_ptr + tile * TILE_COLUMNS)
    return in_band(
        x, 0.0, j0 + C * HALF, queries.low, queries.high, i - queries.row, queries.length,
        at - queries.row, BLOCK_M > HALF,
    )


@gluon.jit
def run(
    C: gl.constexpr, dk, dv, n, first, there, queries, tiles_ptr, tile, j0, keys, shared, scores,
    traits: gl.constexpr,
):
    """Add a tile's queries, in blocks; n counts all blocks, this item's from first.

    `there` says how many rows of the block before belong to its document, where that may be less
    than all. Returns that of the last one, too.
    """
    scale, softcap = scores.scale, scores.softcap
    STAGES: gl.constexpr = shared.q.shape[0]
    BLOCK_M: gl.constexpr = traits.BLOCK_M
    SOFTCAP: gl.constexpr = traits.SOFTCAP
    SHORT_DOCS: gl.constexpr = traits.SHORT_DOCS
    dtype: gl.constexpr = shared.k.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    of_queries: gl.constexpr = gl.SliceLayout(0, s_layout)
    for_dk: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    for_dv: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    for i in range(queries.begin, queries.end, BLOCK_M):
        stage, phase = n % STAGES, (n // STAGES) & 1
        q, dout = shared.q.index(stage), shared.dout.index(stage)
        zero = unknown_zero(n)
        k, v = shared.k.index(C + keys + zero), shared.v.index(C + zero)
        mbarrier.wait(shared.q_full.index(stage), phase)
        s = warpgroup_mma(
            k, q.permute((1, 0)), gl.zeros([HALF, BLOCK_M], gl.float32, s_layout), use_acc=False,
            is_async=True,
        )
        mbarrier.wait(shared.do_full.index(stage), phase)
        dp = warpgroup_mma(
            v, dout.permute((1, 0)), gl.zeros([HALF, BLOCK_M], gl.float32, s_layout), use_acc=False,
            is_async=True,
        )
        if BLOCK_M > HALF:
            s = warpgroup_mma_wait(1, deps=(s,))
            lse = stats_of(shared.lse, stage, of_queries)
        else:
            lse = stats_of(shared.lse, stage, of_queries)
            s, lse = warpgroup_mma_wait(1, deps=(s, lse))  # read before, not behind it
        p, tanh = probabilities(s, lse[None, :], scale, softcap, SOFTCAP)
        if (i < queries.edge) | (i >= queries.whole):
            p = masked(p, tiles_ptr, tile, i, gl.minimum(i, queries.last), j0, C, BLOCK_M)
        if BLOCK_M > HALF:  # there are no registers for both of a large block's operands
            dp = warpgroup_mma_wait(0, deps=(dp,))
            delta = stats_of(shared.delta, stage, of_queries)
            ds = score_gradients(p, dp, delta[None, :], tanh, SOFTCAP, SHORT_DOCS).to(dtype)
            rounded = gl.convert_layout(p.to(dtype), for_dv)
            dv_pending = warpgroup_mma(rounded, dout, dv, is_async=True)
        else:
            rounded = gl.convert_layout(p.to(dtype), for_dv)
            dv_pending = warpgroup_mma(rounded, dout, dv, is_async=True)
            dp = warpgroup_mma_wait(1, deps=(dp,))
            delta = stats_of(shared.delta, stage, of_queries)
            ds = score_gradients(p, dp, delta[None, :], tanh, SOFTCAP, SHORT_DOCS).to(dtype)
        if traits.DQ:
            wait_for_block(n - 1, STAGES)
            dq_pending = half_dq(C, shared, (n & 1) ^ 1, keys + zero)
            dk_pending = warpgroup_mma(gl.convert_layout(ds, for_dk), q, dk, is_async=True)
            shared.ds.index(2 * (n & 1) + C).store(ds)
            dv, dq = warpgroup_mma_wait(1, deps=(dv_pending, dq_pending))
            put_dq(C, dq * scale, shared, n, first, there, traits)
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
            there = queries.length
    return dk, dv, n, there


@gluon.jit
def consume(C: gl.constexpr, output, tiles_ptr, group, shared, scores, traits: gl.constexpr):
    """dK and dV of 64 keys, and half of dQ, of each item."""
    n, w = 0, 0
    mbarrier.wait(shared.item_full.index(0), 0)
    while read_item(shared.item.index(w % 2)).rows > 0:
        n = gradients(C, output, tiles_ptr, group, shared, scores, n, w, traits)
        w += 1
        mbarrier.wait(shared.item_full.index(w % 2), (w // 2) & 1)


@gluon.jit
def gradients(
    C: gl.constexpr, output, tiles_ptr, group, shared, scores, n, w, traits: gl.constexpr
):
    """dK and dV of 64 keys, and half of dQ; n counts blocks and w items."""
    STAGES: gl.constexpr = shared.q.shape[0]
    BLOCK_M: gl.constexpr = traits.BLOCK_M
    D: gl.constexpr = traits.D
    EVEN: gl.constexpr = traits.EVEN
    FRESH: gl.constexpr = traits.FRESH
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, traits.DV, 16])
    slot = shared.item.index(w % 2)
    item = read_item(slot)
    columns, j0 = item.rows, item.first
    keys = w % 2 * 2
    k, v = shared.k.index(C + keys), shared.v.index(C)
    dk = gl.zeros([HALF, D], gl.float32, dk_layout)
    dv = gl.zeros([HALF, traits.DV], gl.float32, dv_layout)
    mbarrier.wait(shared.k_full.index(w % 2), (w // 2) & 1)
    mbarrier.wait(shared.v_full.index(0), w & 1)
    if columns < (C + 1) * HALF:  # what lies there may be anything
        clear_from(k, columns - C * HALF)
        clear_from(v, columns - C * HALF)
    thread_barrier()  # here, and not in the loop, where the compiler would put it
    first, there = n, 0
    for member in range(group):
        for tile in range(item.tile, item.last_tile):
            queries = span_of(tiles_ptr, tile, j0, columns, 2 * HALF, BLOCK_M)
            dk, dv, n, there = run(
                C, dk, dv, n, first, there, queries, tiles_ptr, tile, j0, keys, shared, scores,
                traits,
            )
    SPARE: gl.constexpr = traits.DQ and BLOCK_M >= D  # there is room where the next ds will be
    if SPARE:
        warp_arrives(V_EMPTY)
    if traits.DQ:
        wait_for_block(n - 1, STAGES)
        dq = half_dq(C, shared, (n & 1) ^ 1, keys)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        put_dq(C, dq * scores.scale, shared, n, first, there, traits)
        fence_async_shared()
        if n > first:
            warp_arrives(DQ_FULL + C)
    dk_ptr = rows_of(slot, output.dk, output.dk_strides)
    dv_ptr = rows_of(slot, output.dv, output.dv_strides)
    dk_row, dv_row = output.dk_strides[1], output.dv_strides[1]
    columns = read_item(slot).rows
    if SPARE:
        room = shared.ds.index(2 * (n & 1) + C)
        put(dk_ptr, dk * scores.scale, room, C, columns, output.d, dk_row, FRESH, EVEN)
        put(dv_ptr, dv, room, C, columns, output.dv_width, dv_row, FRESH, EVEN)
    else:
        put(dk_ptr, dk * scores.scale, v, C, columns, output.d, dk_row, FRESH, EVEN)
        put(dv_ptr, dv, v, C, columns, output.dv_width, dv_row, FRESH, EVEN)
        fence_async_shared()  # TMA writes there next
        warp_arrives(V_EMPTY)
    mbarrier.arrive(shared.item_empty.index(w % 2))
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

    traits: gl.constexpr = BwdTraits(BLOCK_M, D, DV, SOFTCAP, SHORT_DOCS, EVEN, FRESH, DQ, OWN)
    inputs = BwdInputs(q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, heads, parts, group)
    scheduler = TileScheduler(blocks_ptr, tiles_ptr, counter_ptr, count, section, pairs)
    shared = BwdShared(
        q_smem, do_smem, k_smem, v_smem, lse_smem, delta_smem, ds_smem, dq_smem, item, item_full,
        item_empty, k_full, v_full, q_full, do_full, dq_empty,
    )
    output = BwdOutput(
        dk_ptr, dv_ptr, d, dv, (dk_batch, dk_row, dk_head), (dv_batch, dv_row, dv_head)
    )
    scores = Scale(scale, softcap)
    if DQ:
        gl.warp_specialize(
            [
                (consume, (0, output, tiles_ptr, group, shared, scores, traits)),
                (consume, (1, output, tiles_ptr, group, shared, scores, traits)),
                (produce, (inputs, scheduler, shared, traits)),
                (add, (0, dq_desc, tiles_ptr, group, shared, BLOCK_M)),
                (add, (1, dq_desc, tiles_ptr, group, shared, BLOCK_M)),
            ],
            [4, 1, 1, 1], [240, 24, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (0, output, tiles_ptr, group, shared, scores, traits)),
                (consume, (1, output, tiles_ptr, group, shared, scores, traits)),
                (produce, (inputs, scheduler, shared, traits)),
            ],
            [4, 1], [240, 24],
        )
