"""Forward on Hopper: a persistent, warp-specialised kernel with ping-pong scheduling.

    producer      Q  K0  V0   K1     V1   K2     V2 …               (TMA; waits for "empty")
    consumer 0        S0 ·softmax0· S1 P0·V0 ·softmax1· S2 P1·V1 ·softmax2· …
    consumer 1            S0 ·softmax0· S1 P0·V0 ·softmax1· S2 P1·V1 …

A work item is 128 queries of one head, 64 for each consumer warpgroup, which goes through the tiles
of their span like the portable kernel (`../forward.py`). A consumer issues the WGMMAs of the next
block, S = q · k', and of this one, p · v, before it computes the next softmax; while it does that,
the other one multiplies. Named barriers order them (ping-pong): WGMMAs of both at once would all
come late. With narrow heads (64), whose products are short, a consumer passes the turn when its own
are complete, and warps release keys and values one by one.

Most blocks need no new maximum: powers above the one that the row has are right as long as none
is too large, which their sums tell. So a consumer's warp looks for a maximum in the first block, in
those with a mask, and in others only when a sum is above LIMIT; else neither the output nor the sum
so far is rescaled, and powers need not wait.

The kernel is persistent, one program for each SM: the producer takes the next item from an atomic
counter in memory, passes it to the consumers, and loads it while they are still busy with the one
before. So no program waits to be launched, the longest items come first, and of a program that
starts late, because something else runs on its SM, the others do all; where nothing else is to be
expected, because there is but one launch (SINGLE_LAUNCH), all but its first item, which it need not
ask for. Where a state is carried, the producer also prefetches the next item's into L2.

Query heads that share keys can share items (PACK_GQA): with 8 of them an item is 16 queries of all
8, 8 queries for each consumer, head after head in its 64 rows. A block that ends with its document
then leaves fewer rows empty. See `forward_table` in `host.py`.

Where items are few and long, some SMs would be idle at the end of a launch. So the keys of the
longest items can come in pieces (PIECES), which are items of their own: the next piece of the same
rows goes on from the state that the one before leaves in memory. Its producer waits for that; but
each piece comes a round after the one before, so it is there, as a rule. See `pieces` in
`../../scheduler.py`.

Of an item with at most 64 rows consumer 1 has none. Where many are like that (HALVES), it only
arrives at the barriers.

    mbarrier        who arrives       what it says
    item_full[b]    the producer      buffer b holds the next item
    item_empty[b]   both consumers    they are done with it, and with its queries
    q_full[b]       TMA               the queries of that item are there
    k_full[s]       TMA               stage s holds a block of keys; v_full[s]: of values (for short
                                      documents the producer arrives: see `barrier_of_copy`)
    k_empty[s]      both consumers    nobody reads stage s any more; v_empty[s]
    turn of c       the other one     it has issued its WGMMAs, has the results, or has none

To initialise an mbarrier takes some 70 clocks, and nothing is loaded before all are: where there is
no state to load sooner (SINGLE_LAUNCH), item_full and q_full are the same.

Registers: the producer keeps 24 a thread, and the consumers have 240. With head dimension 128 a
consumer's thread needs 64 for the output, 64 for scores and 32 for rounded probabilities.
"""

# fmt: off

from typing import Any, NamedTuple

from .gluon import (
    await_turn,
    declare_vote,
    declare_warp_barriers,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    pass_turn,
    prefetch,
    vote_above,
    wait_for_warps,
    warp_arrives,
    warp_barriers,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .primitives import (
    ANY_NUMBER,
    BLOCK_COLUMNS,
    BLOCK_NUMBERS,
    FIRST,
    LAST,
    LN2,
    LOG2E,
    TILE_COLUMNS,
    Item,
    Scale,
    TileScheduler,
    await_pieces,
    barrier_of_copy,
    barriers,
    block_entry,
    capped,
    clear_short,
    first_item,
    in_band,
    in_eights,
    next_item,
    piece_is_done,
    place,
    read_item,
    rows_and_heads,
    rows_of,
    tile_entry,
    write,
    write_item,
)

CARRY = gl.constexpr(23.0)  # see `../forward.py`
HALF = gl.constexpr(64)  # rows of a consumer
K_EMPTY = gl.constexpr(0)  # the first of these barriers' numbers
V_EMPTY = gl.constexpr(3)
LIMIT = gl.constexpr(1024.0)  # of sums of powers above a maximum that is not new; fp16 has 65504


class FwdTraits(NamedTuple):
    """What the kernel was compiled for."""

    BLOCK_N: Any
    DV: Any
    WINDOW: Any
    SOFTCAP: Any
    SINK: Any
    RESULT: Any
    SHORT_DOCS: Any
    EVEN: Any
    SINGLE_LAUNCH: Any
    HALVES: Any
    PACK_GQA: Any
    PIECES: Any


class FwdInputs(NamedTuple):
    """What the producer loads: TMA descriptors, and how heads go together.

    Attributes:
        nheads, group: in packs of PACK_GQA query heads: all, and those of a KV head.
    """

    q: Any
    k: Any
    v: Any
    nheads: Any
    group: Any


class FwdShared(NamedTuple):
    """Shared memory and its mbarriers."""

    q: Any  # [ITEMS * 2, HALF, D]; rows of a head together
    k: Any  # [STAGES, BLOCK_N, D]
    v: Any  # [STAGES, BLOCK_N, DV]
    item: Any  # [ITEMS, 16]
    item_full: Any
    item_empty: Any
    q_full: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


class FwdOutput(NamedTuple):
    """Pointers, with strides (batch, row, head): the state (out, lse), and the final output."""

    out: Any
    lse: Any
    result: Any
    progress: Any
    dv: Any
    out_strides: Any
    lse_strides: Any
    result_strides: Any


class Keys(NamedTuple):
    """The keys of a tile, its band, and which keys, begin … end, the rows of an item see."""

    length: Any
    low: Any
    high: Any
    begin: Any
    end: Any


class Softmax(NamedTuple):
    """The running state of online softmax."""

    acc: Any  # output, not normalised
    m: Any  # maximum of each row, in base 2
    total: Any  # eight sums of each row
    p: Any  # probabilities of the last block, which wait for their product with its values


@gluon.jit
def span_of(tile_ptr, i0, rows):
    """The row of a tile's first key, and its keys."""
    tile = tile_entry(tile_ptr)
    begin = gl.maximum(0, i0 + tile.low)
    end = gl.minimum(tile.length, i0 + rows + tile.high)
    return tile.row, Keys(tile.length, tile.low, tile.high, begin, end)


@gluon.jit
def inside(j, k_len, BLOCK_N: gl.constexpr):
    """Where to load the block from j on: the last one ends where the keys do, if it can."""
    return gl.maximum(gl.minimum(j, k_len - BLOCK_N), 0)


@gluon.jit
def release(FIRST_BARRIER: gl.constexpr, empty, stage, NARROW: gl.constexpr):
    """A consumer is done with a stage."""
    if NARROW:
        warp_arrives(FIRST_BARRIER + stage)
    else:
        mbarrier.arrive(empty.index(stage))


@gluon.jit
def await_release(FIRST_BARRIER: gl.constexpr, empty, stage, phase, NARROW: gl.constexpr):
    """Until both consumers are."""
    if NARROW:
        wait_for_warps(FIRST_BARRIER + stage, phase)
    else:
        mbarrier.wait(empty.index(stage), phase)


@gluon.jit
def prefetch_state(output, batch, head, row, rows, DV: gl.constexpr, PACK_GQA: gl.constexpr):
    """Have a state in L2 before the consumers ask for it."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    within, heads = rows_and_heads(gl.arange(0, 2 * HALF, layout), 2 * HALF, PACK_GQA)
    each, heads = row + gl.minimum(within, rows - 1), head + heads
    batch = batch.to(gl.int64)
    lse = output.lse + batch * output.lse_strides[0]
    prefetch(lse + (heads * output.lse_strides[2] + each * output.lse_strides[1]))
    out = output.out + batch * output.out_strides[0] + heads * output.out_strides[2]
    out += each.to(gl.int64) * output.out_strides[1]
    for i in gl.static_range(DV // 32):
        prefetch(out + gl.minimum(i * 32, output.dv - 1))


@gluon.jit
def produce(inputs, scheduler, shared, output, traits: gl.constexpr):
    """Take items; load their queries, then blocks of keys and values."""
    items = scheduler.block_count * scheduler.pairs
    STAGES: gl.constexpr = shared.k.shape[0]
    ITEMS: gl.constexpr = shared.item.shape[0]
    BLOCK_N: gl.constexpr = traits.BLOCK_N
    OWN: gl.constexpr = traits.SINGLE_LAUNCH
    SHORT_DOCS: gl.constexpr = traits.SHORT_DOCS
    NARROW: gl.constexpr = traits.DV <= HALF
    QUERIES: gl.constexpr = HALF // traits.PACK_GQA
    i, n, shorts, number = 0, 0, 0, first_item(scheduler.counter, items, OWN)
    while number < items:
        block, pair = place(number, scheduler.pairs, scheduler.block_count, scheduler.section)
        entry = scheduler.blocks + block * BLOCK_COLUMNS
        own = block_entry(entry)
        k_row, keys = span_of(entry + BLOCK_NUMBERS, own.first, own.rows)
        begin, end = keys.begin, keys.end
        if begin >= end:  # they see nothing: let them look at one block
            begin, end = 0, 1
        progress_index = own.row * scheduler.pairs + pair
        if traits.PIECES:
            await_pieces(output.progress + progress_index, own.flags)
        batch, head = pair // inputs.nheads, pair % inputs.nheads
        head_k, head = head // inputs.group, head * traits.PACK_GQA
        here = n % ITEMS
        mbarrier.wait(shared.item_empty.index(here), ((n // ITEMS) & 1) ^ 1)
        q_full = shared.q_full.index(here)
        mbarrier.expect(q_full, 2 * inputs.q.block_type.nbytes)
        for c in gl.static_range(2):
            q = shared.q.index(here * 2 + c)
            load_tile(inputs.q, batch, head, own.row + c * QUERIES, q_full, q, False)
        write_item(
            shared.item.index(here),
            Item(
                own.rows, own.row, batch, head, own.first, own.tile, own.last_tile, own.flags,
                keys.length, keys.low, keys.high, begin, end, progress_index,
            ),
        )
        mbarrier.arrive(shared.item_full.index(here))
        if not OWN:
            if (own.flags & FIRST) == 0:
                prefetch_state(output, batch, head, own.row, own.rows, traits.DV, traits.PACK_GQA)
        k_len = keys.length
        tile = own.tile
        while tile < own.last_tile:
            for j in range(begin, end, BLOCK_N):
                at = k_row + inside(j, k_len, BLOCK_N)
                stage, phase = i % STAGES, (i // STAGES) & 1
                k, v = shared.k.index(stage), shared.v.index(stage)
                await_release(K_EMPTY, shared.k_empty, stage, phase ^ 1, NARROW)
                load_tile(inputs.k, batch, head_k, at, shared.k_full.index(stage), k)
                await_release(V_EMPTY, shared.v_empty, stage, phase ^ 1, NARROW)
                v_full = barrier_of_copy(stage, k_len, shared.v_full, BLOCK_N, SHORT_DOCS)
                load_tile(inputs.v, batch, head_k, at, v_full, v)
                if SHORT_DOCS:
                    shorts = clear_short(k_len, shorts, stage, shared.v_full, (v,))
                i += 1
            tile += 1
            if tile < own.last_tile:
                k_row, keys = span_of(scheduler.tiles + tile * TILE_COLUMNS, own.first, own.rows)
                k_len, begin, end = keys.length, keys.begin, keys.end
        number = next_item(scheduler.counter, items, OWN)
        n += 1
    here = n % ITEMS
    mbarrier.wait(shared.item_empty.index(here), ((n // ITEMS) & 1) ^ 1)
    write_item(shared.item.index(here), (0,))
    mbarrier.arrive(shared.item_full.index(here), count=2 if OWN else 1)


@gluon.jit
def masked(
    x, other, j, keys, i0, C: gl.constexpr, BLOCK_N: gl.constexpr, EIGHTS: gl.constexpr = False,
    PACK_GQA: gl.constexpr = 1,
):
    """(queries, keys) of the block from j on; `other` where a row does not see the key."""
    at = inside(j, keys.length, BLOCK_N)
    i0 += C * (HALF // PACK_GQA)
    return in_band(x, other, i0, keys.low, keys.high, j, keys.length, at, EIGHTS, PACK_GQA)


@gluon.jit
def eight_sums(p, like):
    """Eight sums of each row, for which threads need not exchange theirs."""
    sums: gl.constexpr = like.type.layout
    return gl.convert_layout(gl.sum(in_eights(p), 1), sums)


@gluon.jit
def softmax(s, m, total, scores, SOFTCAP: gl.constexpr):
    """p = 2^(s − m) for the new maximum m; m; the sums of p; what earlier sums are scaled by."""
    factor = (scores.softcap if SOFTCAP else scores.scale) * LOG2E  # with a softcap s is a tanh
    m_new = gl.maximum(m, gl.max(s, 1) * factor)
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s * factor - m_safe[:, None])
    rescale = gl.exp2(m - m_safe)
    total *= gl.convert_layout(rescale, gl.SliceLayout(1, total.type.layout))[:, None]
    return p, m_new, total + eight_sums(p, total), rescale


@gluon.jit
def run(
    C: gl.constexpr, MASKED: gl.constexpr, state, i, begin, end, q, i0, keys, shared, scores,
    traits: gl.constexpr,
):
    """Advance by the keys begin … end, in blocks; i counts all blocks.

    Returns the state, i, and where the next run begins.
    """
    acc, m, total, p = state.acc, state.m, state.total, state.p
    STAGES: gl.constexpr = shared.k.shape[0]
    BLOCK_N: gl.constexpr = traits.BLOCK_N
    SOFTCAP: gl.constexpr = traits.SOFTCAP
    NARROW: gl.constexpr = traits.DV <= HALF
    dtype: gl.constexpr = q.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    for j in range(begin, end, BLOCK_N):
        stage, phase = i % STAGES, (i // STAGES) & 1
        v_stage, v_phase = (i - 1) % STAGES, ((i - 1) // STAGES) & 1
        k, v = shared.k.index(stage), shared.v.index(v_stage)
        mbarrier.wait(shared.k_full.index(stage), phase)
        await_turn(C)
        s = warpgroup_mma(
            q, k.permute((1, 0)), gl.zeros([HALF, BLOCK_N], gl.float32, s_layout),
            use_acc=False, is_async=True,
        )
        mbarrier.wait(shared.v_full.index(v_stage), v_phase)
        pending = warpgroup_mma(p, v, acc, is_async=True)
        if not NARROW:
            pass_turn(C)
        s = warpgroup_mma_wait(1, deps=(s,))
        release(K_EMPTY, shared.k_empty, stage, NARROW)
        if SOFTCAP:
            s = capped(s, scores.scale, scores.softcap)
        if MASKED:
            s = masked(
                s, float("-inf"), j, keys, i0, C, BLOCK_N, traits.DV > 128, traits.PACK_GQA
            )
            s, m, total, rescale = softmax(s, m, total, scores, SOFTCAP)
            p = gl.convert_layout(s.to(dtype), p_layout)
            acc, p = warpgroup_mma_wait(0, deps=(pending, p))
            if NARROW:
                pass_turn(C)
            release(V_EMPTY, shared.v_empty, v_stage, NARROW)
            acc = acc * gl.convert_layout(rescale, o_rows)[:, None]
        else:
            factor = (scores.softcap if SOFTCAP else scores.scale) * LOG2E
            powers = gl.exp2(s * factor - m[:, None])
            p = gl.convert_layout(powers.to(dtype), p_layout)
            sums = eight_sums(powers, total)
            above = vote_above(sums, LIMIT)  # as are those of rows that have no maximum yet
            acc, p = warpgroup_mma_wait(0, deps=(pending, p))
            if NARROW:
                pass_turn(C)
            release(V_EMPTY, shared.v_empty, v_stage, NARROW)
            if above:
                s, m, total, rescale = softmax(s, m, total, scores, SOFTCAP)
                p = gl.convert_layout(s.to(dtype), p_layout)
                acc = acc * gl.convert_layout(rescale, o_rows)[:, None]
            else:
                total += sums
        i += 1
    done = gl.maximum(gl.cdiv(end - begin, BLOCK_N), 0) * BLOCK_N
    return Softmax(acc, m, total, p), i, begin + done


@gluon.jit
def consume(C: gl.constexpr, output, tiles_ptr, shared, scores, traits: gl.constexpr):
    """Output and lse of 64 rows of each item."""
    ITEMS: gl.constexpr = shared.item.shape[0]
    i, n = 0, 0
    if C == 1:
        pass_turn(1)  # consumer 0 begins
    mbarrier.wait(shared.item_full.index(0), 0)
    while read_item(shared.item.index(n % ITEMS)).rows > 0:
        if traits.HALVES and C == 1:
            if read_item(shared.item.index(n % ITEMS)).rows > HALF // traits.PACK_GQA:
                i = attend(C, output, tiles_ptr, shared, scores, i, n, traits)
            else:
                i = skip_item(C, tiles_ptr, shared, i, n, traits)
        else:
            i = attend(C, output, tiles_ptr, shared, scores, i, n, traits)
        n += 1
        mbarrier.wait(shared.item_full.index(n % ITEMS), (n // ITEMS) & 1)
    if C == 0:
        await_turn(0)  # as often as it was passed


@gluon.jit
def skip_item(C: gl.constexpr, tiles_ptr, shared, i, n, traits: gl.constexpr):
    """What a consumer does for an item all of whose rows are the other one's.

    It need not wait for the queries: their buffer is free when the other one, which does, is done.
    """
    STAGES: gl.constexpr = shared.k.shape[0]
    ITEMS: gl.constexpr = shared.item.shape[0]
    BLOCK_N: gl.constexpr = traits.BLOCK_N
    NARROW: gl.constexpr = traits.DV <= HALF
    here = n % ITEMS
    item = read_item(shared.item.index(here))
    last = i + gl.cdiv(item.end - item.begin, BLOCK_N)
    for later in range(item.tile + 1, item.last_tile):
        _, keys = span_of(tiles_ptr + later * TILE_COLUMNS, item.first, item.rows)
        last += gl.maximum(gl.cdiv(keys.end - keys.begin, BLOCK_N), 0)
    while i < last:
        stage, phase = i % STAGES, (i // STAGES) & 1
        mbarrier.wait(shared.k_full.index(stage), phase)
        await_turn(C)
        pass_turn(C)
        release(K_EMPTY, shared.k_empty, stage, NARROW)
        mbarrier.wait(shared.v_full.index(stage), phase)
        release(V_EMPTY, shared.v_empty, stage, NARROW)
        i += 1
    mbarrier.arrive(shared.item_empty.index(here))
    return i


@gluon.jit
def lse_of(C: gl.constexpr, item, output, PACK_GQA: gl.constexpr, LAYOUT: gl.constexpr):
    """Where the lse of a consumer's rows are, and which there are."""
    rows, heads = rows_and_heads(gl.arange(0, HALF, LAYOUT), HALF, PACK_GQA)
    rows += C * (HALF // PACK_GQA)
    begin = rows_of(item, output.lse, output.lse_strides)
    offsets = rows * output.lse_strides[1] + heads * output.lse_strides[2]
    return begin + offsets, rows < read_item(item).rows


@gluon.jit
def out_of(C: gl.constexpr, item, output, traits: gl.constexpr):
    """Where a consumer's rows of the state's output are, and which there are."""
    PACK_GQA: gl.constexpr = traits.PACK_GQA
    DV: gl.constexpr = traits.DV
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    rows, heads = rows_and_heads(gl.arange(0, HALF, row_layout), HALF, PACK_GQA)
    rows += C * (HALF // PACK_GQA)
    begin = rows_of(item, output.out, output.out_strides)
    columns = gl.arange(0, DV, gl.SliceLayout(0, layout))
    there = (rows < read_item(item).rows)[:, None]
    if not traits.EVEN:
        there = there & (columns < output.dv)[None, :]
    offsets = rows * output.out_strides[1] + heads * output.out_strides[2]
    return (begin + offsets)[:, None] + columns[None, :], there


@gluon.jit
def attend(C: gl.constexpr, output, tiles_ptr, shared, scores, i, n, traits: gl.constexpr):
    """Output and lse of 64 rows; n counts items and i blocks of keys."""
    STAGES: gl.constexpr = shared.k.shape[0]
    ITEMS: gl.constexpr = shared.item.shape[0]
    BLOCK_N: gl.constexpr = traits.BLOCK_N
    DV: gl.constexpr = traits.DV
    QUERIES: gl.constexpr = HALF // traits.PACK_GQA
    SOFTCAP: gl.constexpr = traits.SOFTCAP
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    NARROW: gl.constexpr = DV <= HALF
    FINAL: gl.constexpr = LAST if traits.RESULT else 4  # nothing has that: it stays in fp32
    dtype: gl.constexpr = shared.q.dtype
    here = n % ITEMS
    slot = shared.item.index(here)
    item = read_item(slot)
    rows, i0, tile, last_tile = item.rows, item.first, item.tile, item.last_tile
    keys = Keys(item.length, item.low, item.high, item.begin, item.end)
    j = keys.begin

    # Go on from the state (out, lse), on the first launch from a sink or from nothing; see
    # `../forward.py`.
    lse = gl.full([HALF], float("-inf"), gl.float32, s_rows)
    acc = gl.zeros([HALF, DV], gl.float32, o_layout)
    lse_ptrs, there_s = lse_of(C, slot, output, traits.PACK_GQA, s_rows)
    if not traits.SINGLE_LAUNCH:
        is_first = (item.flags & FIRST) != 0
        out_ptrs, there_o = out_of(C, slot, output, traits)
        if traits.SINK or not is_first:
            lse = gl.load(lse_ptrs, mask=there_s, other=float("-inf"))
        if not is_first:
            acc = gl.load(out_ptrs, mask=there_o, other=0.0) * 8388608.0  # 2^CARRY
    elif traits.SINK:
        lse = gl.load(lse_ptrs, mask=there_s, other=float("-inf"))
    m = lse * LOG2E - CARRY
    eights: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    known = gl.convert_layout(lse, gl.SliceLayout(1, eights))[:, None]
    total = gl.zeros([HALF, 8], gl.float32, eights)
    total = gl.where(known != float("-inf"), 1048576.0, total)  # 2^CARRY / 8

    # The first block.
    stage, phase_k = i % STAGES, (i // STAGES) & 1
    q = shared.q.index(here * 2 + C)
    if not traits.SINGLE_LAUNCH:
        mbarrier.wait(shared.q_full.index(here), (n // ITEMS) & 1)
    mbarrier.wait(shared.k_full.index(stage), phase_k)
    await_turn(C)
    s = warpgroup_mma(
        q, shared.k.index(stage).permute((1, 0)),
        gl.zeros([HALF, BLOCK_N], gl.float32, s_layout), use_acc=False, is_async=True,
    )
    pass_turn(C)
    s = warpgroup_mma_wait(0, deps=(s,))
    release(K_EMPTY, shared.k_empty, stage, NARROW)
    if SOFTCAP:
        s = capped(s, scores.scale, scores.softcap)
    partly = j + BLOCK_N > gl.minimum(keys.length, i0 + C * QUERIES + keys.high + 1)
    if traits.WINDOW:
        partly = partly | (j < i0 + C * QUERIES + QUERIES - 1 + keys.low)
    if partly:
        s = masked(s, float("-inf"), j, keys, i0, C, BLOCK_N, DV > 128, traits.PACK_GQA)
    s, m, total, rescale = softmax(s, m, total, scores, SOFTCAP)
    acc = acc * gl.convert_layout(rescale, o_rows)[:, None]
    state = Softmax(acc, m, total, gl.convert_layout(s.to(dtype), p_layout))
    j += BLOCK_N
    i += 1

    while tile < last_tile:
        following = keys
        if tile + 1 < last_tile:
            _, following = span_of(tiles_ptr + (tile + 1) * TILE_COLUMNS, i0, rows)
        if traits.WINDOW:
            left = gl.minimum(i0 + C * QUERIES + QUERIES - 1 + keys.low, keys.end)
            state, i, j = run(C, True, state, i, j, left, q, i0, keys, shared, scores, traits)
        # Blocks that end here need no mask on the right.
        right = gl.minimum(keys.length, i0 + C * QUERIES + keys.high + 1) - BLOCK_N + 1
        right = gl.minimum(right, keys.end)  # 1 if they see nothing
        state, i, j = run(C, False, state, i, j, right, q, i0, keys, shared, scores, traits)
        state, i, j = run(C, True, state, i, j, keys.end, q, i0, keys, shared, scores, traits)
        keys = following
        j = keys.begin
        tile += 1

    v_stage, v_phase = (i - 1) % STAGES, ((i - 1) // STAGES) & 1
    mbarrier.wait(shared.v_full.index(v_stage), v_phase)
    acc = warpgroup_mma(state.p, shared.v.index(v_stage), state.acc)
    release(V_EMPTY, shared.v_empty, v_stage, NARROW)

    # Normalise; a row that saw no key is (0, −inf).
    total = gl.convert_layout(gl.sum(state.total, 1), s_rows)
    seen = total != 0  # NaN is
    inverse = gl.convert_layout(gl.where(seen, 1.0 / total, 0.0), o_rows)[:, None]
    acc = gl.where(inverse != 0, acc * inverse, 0.0)
    lse = gl.where(seen, (state.m + gl.log2(total)) * LN2, float("-inf"))
    lse_ptrs, there_s = lse_of(C, slot, output, traits.PACK_GQA, s_rows)
    gl.store(lse_ptrs, lse, mask=there_s)
    if traits.SINGLE_LAUNCH or (read_item(slot).flags & FINAL) != 0:
        result = rows_of(slot, output.result, output.result_strides)
        rows = read_item(slot).rows
        strides = output.result_strides
        write(
            result, acc, q, C, rows, output.dv, strides[1], traits.EVEN, traits.PACK_GQA, strides[2]
        )
        fence_async_shared()  # TMA writes there next
    else:
        out_ptrs, there_o = out_of(C, slot, output, traits)
        gl.store(out_ptrs, acc, mask=there_o)
    if traits.PIECES:
        item = read_item(slot)
        piece_is_done(output.progress + item.progress_index, item.flags)
    mbarrier.arrive(shared.item_empty.index(here))
    return i


@gluon.jit(do_not_specialize=ANY_NUMBER)
def forward_kernel(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, result_ptr, counter_ptr, progress_ptr, blocks_ptr,
    tiles_ptr, scale, softcap, nheads, group, count, section, pairs, dv, o_batch, o_row, o_head,
    l_batch, l_head, l_row, r_batch, r_row, r_head,
    BLOCK_N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr,
    ITEMS: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, SINK: gl.constexpr,
    RESULT: gl.constexpr, SHORT_DOCS: gl.constexpr, EVEN: gl.constexpr, SINGLE_LAUNCH: gl.constexpr,
    HALVES: gl.constexpr, PACK_GQA: gl.constexpr, PIECES: gl.constexpr,
):
    """Output and lse of blocks of queries, one after the other: all tiles of their span."""
    dtype: gl.constexpr = q_desc.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, D], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], dtype)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, DV], dtype)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_smem = gl.allocate_shared_memory(dtype, [ITEMS * 2, HALF, D], q_layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], k_layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DV], v_layout)
    item = gl.allocate_shared_memory(gl.int32, [ITEMS, 16], flat)
    q_full, item_empty = barriers(ITEMS, 2 if SINGLE_LAUNCH else 1), barriers(ITEMS, 2)
    if SINGLE_LAUNCH:
        item_full = q_full
    else:
        item_full = barriers(ITEMS, 1)
    k_full, v_full = barriers(STAGES, 1), barriers(STAGES + 1 if SHORT_DOCS else STAGES, 1)
    declare_vote()
    if DV <= HALF:
        gl.static_assert(STAGES <= V_EMPTY - K_EMPTY)
        declare_warp_barriers()
        warp_barriers(K_EMPTY, V_EMPTY - K_EMPTY + STAGES, 8)
        k_empty, v_empty = k_full, v_full  # warps have theirs
    else:
        k_empty, v_empty = barriers(STAGES, 2), barriers(STAGES, 2)
    traits: gl.constexpr = FwdTraits(
        BLOCK_N, DV, WINDOW, SOFTCAP, SINK, RESULT, SHORT_DOCS, EVEN, SINGLE_LAUNCH, HALVES,
        PACK_GQA, PIECES,
    )
    inputs = FwdInputs(q_desc, k_desc, v_desc, nheads, group)
    scheduler = TileScheduler(blocks_ptr, tiles_ptr, counter_ptr, count, section, pairs)
    shared = FwdShared(
        q_smem, k_smem, v_smem, item, item_full, item_empty, q_full, k_full, k_empty, v_full,
        v_empty,
    )
    output = FwdOutput(
        out_ptr, lse_ptr, result_ptr, progress_ptr, dv, (o_batch, o_row, o_head),
        (l_batch, l_row, l_head), (r_batch, r_row, r_head),
    )
    scores = Scale(scale, softcap)
    LOADERS: gl.constexpr = 4 if SHORT_DOCS else 1  # one warp loads faster, four clear faster
    gl.warp_specialize(
        [
            (consume, (0, output, tiles_ptr, shared, scores, traits)),
            (consume, (1, output, tiles_ptr, shared, scores, traits)),
            (produce, (inputs, scheduler, shared, output, traits)),
        ],
        [4, LOADERS], [240, 24],
    )
