"""Forward on Hopper: warps that load, and two groups of warps that compute, on their own clocks.

    producer      Q  K0  V0   K1     V1   K2     V2 …               (bulk copies; waits for "empty")
    consumer 0        S0 ·softmax0· S1 P0·V0 ·softmax1· S2 P1·V1 ·softmax2· …
    consumer 1            S0 ·softmax0· S1 P0·V0 ·softmax1· S2 P1·V1 …

A piece of work is 128 queries of one head, 64 for each consumer, which walks through the tiles of
their span like the portable kernel (`../forward.py`). A consumer hands the products of the next
block, S = q · k', and of this one, p · v, to the tensor cores before it computes the next softmax;
while it does that, the other one multiplies. They take turns at it: products of both at once would
all come late. With narrow heads (64), whose products are short, a consumer passes the turn when its
own are there, and warps release keys and values one by one.

Most blocks need no new maximum: powers above the one that the row has are right as long as none
is too large, which their sums tell. So a consumer's warp looks for a maximum in the first block, in
those with a mask, and in others only when a sum is above LIMIT; else neither the output nor the sum
so far is scaled, and powers need not wait.

There is a program for each multiprocessor, which does one piece of work after the other: the
producer takes the next one from a counter in memory, tells the consumers, and loads it while they
are still busy with the one before. So nobody waits for a program to start, the longest pieces come
first, and of one that starts late, because something else runs on its multiprocessor, the others do
all; where nothing else is to be expected, because there is but one launch (SINGLE_LAUNCH), all but
its first piece, which it need not ask for. Where a state is carried, the producer also has the
cache fetch the one that the next piece goes on from.

Of a piece with at most 64 queries consumer 1 has none. Where many are like that (HALVES), it does
no more for them than keep step.

    barrier         who arrives       what it says
    item_full[b]    the producer      buffer b says which piece of work is next
    item_empty[b]   both consumers    they are done with it, and with its queries
    q_full[b]       bulk copies       the queries of that piece are there
    k_full[s]       a bulk copy       stage s holds a block of keys; v_full[s]: of values (for short
                                      documents the producer arrives: see `told_by_copy`)
    k_empty[s]      both consumers    nobody reads stage s any more; v_empty[s]
    turn of c       the other one     it has handed over its products, has them, or has none

To make one takes some 70 clocks, and nothing is loaded before all are made: where there is no state
to load sooner (SINGLE_LAUNCH), item_full and q_full are the same.

Registers: the producer keeps 24 a thread, and the consumers have 240. With head dimension 128 a
consumer's thread needs 64 for the output, 64 for scores and 32 for rounded probabilities.
"""

# fmt: off

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
    LN2,
    LOG2E,
    barriers,
    begin_of,
    capped,
    clear_short,
    first_item,
    in_band,
    in_eights,
    next_item,
    place,
    scalars,
    tell,
    told,
    told_by_copy,
    write,
)

CARRY = gl.constexpr(23.0)  # see `../forward.py`
HALF = gl.constexpr(64)  # queries of a consumer
K_EMPTY = gl.constexpr(0)  # the first of these barriers' numbers
V_EMPTY = gl.constexpr(3)
LIMIT = gl.constexpr(1024.0)  # of sums of powers above a maximum that is not new; fp16 has 65504


@gluon.jit
def span_of(tile_ptr, i0, rows):
    """A tile: row of its keys, how many, the band, and the keys begin … end that the rows see."""
    k_row, k_len, low, high = scalars(tile_ptr)
    begin = gl.maximum(0, i0 + low)
    end = gl.minimum(k_len, i0 + rows + high)
    return k_row, k_len, low, high, begin, end


@gluon.jit
def inside(j, k_len, BLOCK_N: gl.constexpr):
    """Where to load the block from j on: the last one ends where the keys do, if it can."""
    return gl.maximum(gl.minimum(j, k_len - BLOCK_N), 0)


@gluon.jit
def release(FIRST: gl.constexpr, empty, stage, NARROW: gl.constexpr):
    """A consumer is done with a stage."""
    if NARROW:
        warp_arrives(FIRST + stage)
    else:
        mbarrier.arrive(empty.index(stage))


@gluon.jit
def await_release(FIRST: gl.constexpr, empty, stage, phase, NARROW: gl.constexpr):
    """Until both consumers are."""
    if NARROW:
        wait_for_warps(FIRST + stage, phase)
    else:
        mbarrier.wait(empty.index(stage), phase)


@gluon.jit
def fetch_state(state, batch, head, row, rows, DV: gl.constexpr):
    """Have a state in the cache before the consumers ask for it."""
    out_ptr, lse_ptr, dv, o_batch, o_row, o_head, l_batch, l_head, l_row = state
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    each = row + gl.minimum(gl.arange(0, 2 * HALF, layout), rows - 1)
    prefetch(lse_ptr + (batch.to(gl.int64) * l_batch + head * l_head) + each * l_row)
    out_ptrs = out_ptr + (batch.to(gl.int64) * o_batch + head * o_head) + each.to(gl.int64) * o_row
    for i in gl.static_range(DV // 32):
        prefetch(out_ptrs + gl.minimum(i * 32, dv - 1))


@gluon.jit
def produce(
    loads, state, BLOCK_N: gl.constexpr, DV: gl.constexpr, SHORT_DOCS: gl.constexpr,
    OWN: gl.constexpr,
):
    """Find pieces of work; load their queries, then blocks of keys and values."""
    (
        q_desc, k_desc, v_desc, blocks_ptr, tiles_ptr, counter_ptr, q_smem, k_smem, v_smem, item,
        item_full, item_empty, q_full, k_full, k_empty, v_full, v_empty, nheads, group, count,
        section, pairs,
    ) = loads
    items = count * pairs
    STAGES: gl.constexpr = k_smem.shape[0]
    ITEMS: gl.constexpr = item.shape[0]
    NARROW: gl.constexpr = v_smem.shape[2] <= HALF
    i, n, shorts, number = 0, 0, 0, first_item(counter_ptr, items, OWN)
    while number < items:
        block, pair = place(number, pairs, count, section)
        entry = blocks_ptr + block * 16
        row, rows, i0, tile = scalars(entry)
        last_tile, flags = gl.load(entry + 4), gl.load(entry + 5)
        k_row, k_len, low, high, begin, end = span_of(entry + 12, i0, rows)
        if begin >= end:  # they see nothing: let them look at one block
            begin, end = 0, 1
        batch, head = pair // nheads, pair % nheads
        head_k = head // group
        here = n % ITEMS
        mbarrier.wait(item_empty.index(here), ((n // ITEMS) & 1) ^ 1)
        mbarrier.expect(q_full.index(here), 2 * q_desc.block_type.nbytes)
        for c in gl.static_range(2):
            q = q_smem.index(here * 2 + c)
            load_tile(q_desc, batch, head, row + c * HALF, q_full.index(here), q, False)
        tell(
            item.index(here),
            (rows, row, batch, head, i0, tile, last_tile, flags, k_len, low, high, begin, end),
        )
        mbarrier.arrive(item_full.index(here))
        if not OWN:
            if (flags & 1) == 0:
                fetch_state(state, batch, head, row, rows, DV)
        while tile < last_tile:
            for j in range(begin, end, BLOCK_N):
                at = k_row + inside(j, k_len, BLOCK_N)
                stage, phase = i % STAGES, (i // STAGES) & 1
                await_release(K_EMPTY, k_empty, stage, phase ^ 1, NARROW)
                load_tile(k_desc, batch, head_k, at, k_full.index(stage), k_smem.index(stage))
                await_release(V_EMPTY, v_empty, stage, phase ^ 1, NARROW)
                full = told_by_copy(stage, k_len, v_full, BLOCK_N, SHORT_DOCS)
                load_tile(v_desc, batch, head_k, at, full, v_smem.index(stage))
                if SHORT_DOCS:
                    shorts = clear_short(k_len, shorts, stage, v_full, (v_smem.index(stage),))
                i += 1
            tile += 1
            if tile < last_tile:
                k_row, k_len, low, high, begin, end = span_of(tiles_ptr + tile * 8, i0, rows)
        number = next_item(counter_ptr, items, OWN)
        n += 1
    here = n % ITEMS
    mbarrier.wait(item_empty.index(here), ((n // ITEMS) & 1) ^ 1)
    tell(item.index(here), (0,))
    mbarrier.arrive(item_full.index(here), count=2 if OWN else 1)


@gluon.jit
def masked(
    x, other, j, k_len, low, high, i0, C: gl.constexpr, BLOCK_N: gl.constexpr,
    EIGHTS: gl.constexpr = False,
):
    """(queries, keys) of the block from j on; `other` where a row does not see the key."""
    at = inside(j, k_len, BLOCK_N)
    return in_band(x, other, i0 + C * HALF, low, high, j, k_len, at, EIGHTS)


@gluon.jit
def eight_sums(p, like):
    """Eight sums of each row, for which threads need not exchange theirs."""
    sums: gl.constexpr = like.type.layout
    return gl.convert_layout(gl.sum(in_eights(p), 1), sums)


@gluon.jit
def softmax(s, m, total, scale, softcap, SOFTCAP: gl.constexpr):
    """p = 2^(s − m) for the new maximum m; m; the sums of p; what earlier sums are scaled by."""
    factor = (softcap if SOFTCAP else scale) * LOG2E  # with a softcap s is a tanh
    m_new = gl.maximum(m, gl.max(s, 1) * factor)
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s * factor - m_safe[:, None])
    rescale = gl.exp2(m - m_safe)
    total *= gl.convert_layout(rescale, gl.SliceLayout(1, total.type.layout))[:, None]
    return p, m_new, total + eight_sums(p, total), rescale


@gluon.jit
def run(
    MASKED: gl.constexpr, acc, m, total, p, i, begin, end, q, k_smem, v_smem, k_full,
    k_empty, v_full, v_empty, i0, k_len, low, high, scale, softcap,
    C: gl.constexpr, SOFTCAP: gl.constexpr,
):
    """Advance by the keys begin … end, in blocks.

    p are the probabilities of the block before, which wait for their product with its values. i
    counts all blocks. Returns where the next run begins.
    """
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = p.shape[1]
    NARROW: gl.constexpr = acc.shape[1] <= HALF
    dtype: gl.constexpr = q.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    for j in range(begin, end, BLOCK_N):
        stage, phase = i % STAGES, (i // STAGES) & 1
        v_stage, v_phase = (i - 1) % STAGES, ((i - 1) // STAGES) & 1
        k, v = k_smem.index(stage), v_smem.index(v_stage)
        mbarrier.wait(k_full.index(stage), phase)
        await_turn(C)
        s = warpgroup_mma(
            q, k.permute((1, 0)), gl.zeros([HALF, BLOCK_N], gl.float32, s_layout),
            use_acc=False, is_async=True,
        )
        mbarrier.wait(v_full.index(v_stage), v_phase)
        pending = warpgroup_mma(p, v, acc, is_async=True)
        if not NARROW:
            pass_turn(C)
        s = warpgroup_mma_wait(1, deps=(s,))
        release(K_EMPTY, k_empty, stage, NARROW)
        if SOFTCAP:
            s = capped(s, scale, softcap)
        if MASKED:
            s = masked(
                s, float("-inf"), j, k_len, low, high, i0, C, BLOCK_N, acc.shape[1] > 128
            )
            s, m, total, rescale = softmax(s, m, total, scale, softcap, SOFTCAP)
            p = gl.convert_layout(s.to(dtype), p_layout)
            acc, p = warpgroup_mma_wait(0, deps=(pending, p))
            if NARROW:
                pass_turn(C)
            release(V_EMPTY, v_empty, v_stage, NARROW)
            acc = acc * gl.convert_layout(rescale, o_rows)[:, None]
        else:
            powers = gl.exp2(s * ((softcap if SOFTCAP else scale) * LOG2E) - m[:, None])
            p = gl.convert_layout(powers.to(dtype), p_layout)
            sums = eight_sums(powers, total)
            above = vote_above(sums, LIMIT)  # as are those of rows that have no maximum yet
            acc, p = warpgroup_mma_wait(0, deps=(pending, p))
            if NARROW:
                pass_turn(C)
            release(V_EMPTY, v_empty, v_stage, NARROW)
            if above:
                s, m, total, rescale = softmax(s, m, total, scale, softcap, SOFTCAP)
                p = gl.convert_layout(s.to(dtype), p_layout)
                acc = acc * gl.convert_layout(rescale, o_rows)[:, None]
            else:
                total += sums
        i += 1
    done = gl.maximum(gl.cdiv(end - begin, BLOCK_N), 0) * BLOCK_N
    return acc, m, total, p, i, begin + done


@gluon.jit
def consume(
    C: gl.constexpr, given, BLOCK_N: gl.constexpr, DV: gl.constexpr,
    WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, SINK: gl.constexpr, RESULT: gl.constexpr,
    EVEN: gl.constexpr, SINGLE_LAUNCH: gl.constexpr, HALVES: gl.constexpr,
):
    """Output and lse of 64 queries of each piece of work."""
    item, item_full = given[8], given[9]
    ITEMS: gl.constexpr = item.shape[0]
    i, n = 0, 0
    if C == 1:
        pass_turn(1)  # consumer 0 begins
    mbarrier.wait(item_full.index(0), 0)
    while told(item.index(n % ITEMS), 0) > 0:
        if HALVES and C == 1:
            if told(item.index(n % ITEMS), 0) > HALF:
                i = attend(
                    C, given, i, n, BLOCK_N, DV, WINDOW, SOFTCAP, SINK, RESULT, EVEN, SINGLE_LAUNCH
                )
            else:
                i = keep_step(C, given, i, n, BLOCK_N, DV)
        else:
            i = attend(
                C, given, i, n, BLOCK_N, DV, WINDOW, SOFTCAP, SINK, RESULT, EVEN, SINGLE_LAUNCH
            )
        n += 1
        mbarrier.wait(item_full.index(n % ITEMS), (n // ITEMS) & 1)
    if C == 0:
        await_turn(0)  # as often as it was passed


@gluon.jit
def keep_step(C: gl.constexpr, given, i, n, BLOCK_N: gl.constexpr, DV: gl.constexpr):
    """What a consumer does for a piece of work all of whose queries are the other one's.

    It need not wait for the queries: their buffer is free when the other one, which does, is done.
    """
    tiles_ptr, k_smem, item, item_empty = given[3], given[5], given[8], given[10]
    k_full, k_empty, v_full, v_empty = given[12], given[13], given[14], given[15]
    STAGES: gl.constexpr = k_smem.shape[0]
    ITEMS: gl.constexpr = item.shape[0]
    NARROW: gl.constexpr = DV <= HALF
    here = n % ITEMS
    it = item.index(here)
    rows, i0, tile, last_tile = told(it, 0), told(it, 4), told(it, 5), told(it, 6)
    last = i + gl.cdiv(told(it, 12) - told(it, 11), BLOCK_N)
    for later in range(tile + 1, last_tile):
        _, _, _, _, begin, end = span_of(tiles_ptr + later * 8, i0, rows)
        last += gl.maximum(gl.cdiv(end - begin, BLOCK_N), 0)
    while i < last:
        stage, phase = i % STAGES, (i // STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        await_turn(C)
        pass_turn(C)
        release(K_EMPTY, k_empty, stage, NARROW)
        mbarrier.wait(v_full.index(stage), phase)
        release(V_EMPTY, v_empty, stage, NARROW)
        i += 1
    mbarrier.arrive(item_empty.index(here))
    return i


@gluon.jit
def lse_of(C: gl.constexpr, it, ptr, batch, row, head, LAYOUT: gl.constexpr):
    """Where the lse of a consumer's rows are, and which there are."""
    rows = C * HALF + gl.arange(0, HALF, LAYOUT)
    return begin_of(it, ptr, batch, row, head) + rows * row, rows < told(it, 0)


@gluon.jit
def out_of(
    C: gl.constexpr, it, ptr, batch, row, head, dv, DV: gl.constexpr, EVEN: gl.constexpr
):
    """Where a consumer's rows of the output are, and which there are."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    rows, there = lse_of(C, it, ptr, batch, row, head, gl.SliceLayout(1, layout))
    columns = gl.arange(0, DV, gl.SliceLayout(0, layout))
    there = there[:, None]
    if not EVEN:
        there = there & (columns < dv)[None, :]
    return rows[:, None] + columns[None, :], there


@gluon.jit
def attend(
    C: gl.constexpr, given, i, n, BLOCK_N: gl.constexpr, DV: gl.constexpr,
    WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, SINK: gl.constexpr, RESULT: gl.constexpr,
    EVEN: gl.constexpr, SINGLE_LAUNCH: gl.constexpr,
):
    """Output and lse of 64 queries; n counts pieces of work and i blocks of keys."""
    (
        out_ptr, lse_ptr, result_ptr, tiles_ptr, q_smem, k_smem, v_smem, of_all, item, item_full,
        item_empty, q_full, k_full, k_empty, v_full, v_empty,
    ) = given
    (
        scale, softcap, dv, o_batch, o_row, o_head, l_batch, l_head, l_row, r_batch, r_row, r_head,
    ) = of_all
    STAGES: gl.constexpr = k_smem.shape[0]
    ITEMS: gl.constexpr = item.shape[0]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    NARROW: gl.constexpr = DV <= HALF
    LAST: gl.constexpr = 2 if RESULT else 4  # nothing has that: it stays in fp32
    dtype: gl.constexpr = q_smem.dtype
    here = n % ITEMS
    it = item.index(here)
    rows, i0, tile, last_tile = told(it, 0), told(it, 4), told(it, 5), told(it, 6)
    k_len, low, high, j, end = told(it, 8), told(it, 9), told(it, 10), told(it, 11), told(it, 12)

    # Go on from the state (out, lse), on the first launch from a sink or from nothing; see
    # `../forward.py`.
    lse = gl.full([HALF], float("-inf"), gl.float32, s_rows)
    acc = gl.zeros([HALF, DV], gl.float32, o_layout)
    lse_ptrs, there_s = lse_of(C, it, lse_ptr, l_batch, l_row, l_head, s_rows)
    if not SINGLE_LAUNCH:
        is_first = (told(it, 7) & 1) != 0
        out_ptrs, there_o = out_of(C, it, out_ptr, o_batch, o_row, o_head, dv, DV, EVEN)
        if SINK or not is_first:
            lse = gl.load(lse_ptrs, mask=there_s, other=float("-inf"))
        if not is_first:
            acc = gl.load(out_ptrs, mask=there_o, other=0.0) * 8388608.0  # 2^CARRY
    elif SINK:
        lse = gl.load(lse_ptrs, mask=there_s, other=float("-inf"))
    m = lse * LOG2E - CARRY
    eights: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    known = gl.convert_layout(lse, gl.SliceLayout(1, eights))[:, None]
    total = gl.zeros([HALF, 8], gl.float32, eights)
    total = gl.where(known != float("-inf"), 1048576.0, total)  # 2^CARRY / 8

    # The first block.
    stage, phase_k = i % STAGES, (i // STAGES) & 1
    q = q_smem.index(here * 2 + C)
    if not SINGLE_LAUNCH:
        mbarrier.wait(q_full.index(here), (n // ITEMS) & 1)
    mbarrier.wait(k_full.index(stage), phase_k)
    await_turn(C)
    s = warpgroup_mma(
        q, k_smem.index(stage).permute((1, 0)), gl.zeros([HALF, BLOCK_N], gl.float32, s_layout),
        use_acc=False, is_async=True,
    )
    pass_turn(C)
    s = warpgroup_mma_wait(0, deps=(s,))
    release(K_EMPTY, k_empty, stage, NARROW)
    if SOFTCAP:
        s = capped(s, scale, softcap)
    partly = j + BLOCK_N > gl.minimum(k_len, i0 + C * HALF + high + 1)
    if WINDOW:
        partly = partly | (j < i0 + C * HALF + HALF - 1 + low)
    if partly:
        s = masked(s, float("-inf"), j, k_len, low, high, i0, C, BLOCK_N, DV > 128)
    s, m, total, rescale = softmax(s, m, total, scale, softcap, SOFTCAP)
    p = gl.convert_layout(s.to(dtype), p_layout)
    acc = acc * gl.convert_layout(rescale, o_rows)[:, None]
    j += BLOCK_N
    i += 1

    while tile < last_tile:
        n_len, n_low, n_high, n_begin, n_end = k_len, low, high, j, end
        if tile + 1 < last_tile:
            _, n_len, n_low, n_high, n_begin, n_end = span_of(tiles_ptr + tile * 8 + 8, i0, rows)
        if WINDOW:
            left = gl.minimum(i0 + C * HALF + HALF - 1 + low, end)
            acc, m, total, p, i, j = run(
                True, acc, m, total, p, i, j, left, q, k_smem, v_smem, k_full, k_empty,
                v_full, v_empty, i0, k_len, low, high, scale, softcap, C, SOFTCAP,
            )
        # Blocks that end here need no mask on the right.
        right = gl.minimum(k_len, i0 + C * HALF + high + 1) - BLOCK_N + 1
        if BLOCK_N <= HALF:  # else there are always more keys
            right = gl.minimum(right, end)
        acc, m, total, p, i, j = run(
            False, acc, m, total, p, i, j, right, q, k_smem, v_smem, k_full, k_empty,
            v_full, v_empty, i0, k_len, low, high, scale, softcap, C, SOFTCAP,
        )
        acc, m, total, p, i, j = run(
            True, acc, m, total, p, i, j, end, q, k_smem, v_smem, k_full, k_empty,
            v_full, v_empty, i0, k_len, low, high, scale, softcap, C, SOFTCAP,
        )
        k_len, low, high, j, end = n_len, n_low, n_high, n_begin, n_end
        tile += 1

    v_stage, v_phase = (i - 1) % STAGES, ((i - 1) // STAGES) & 1
    mbarrier.wait(v_full.index(v_stage), v_phase)
    acc = warpgroup_mma(p, v_smem.index(v_stage), acc)
    release(V_EMPTY, v_empty, v_stage, NARROW)

    # Normalise; a row that saw no key is (0, −inf).
    total = gl.convert_layout(gl.sum(total, 1), s_rows)
    seen = total != 0  # NaN is
    inverse = gl.convert_layout(gl.where(seen, 1.0 / total, 0.0), o_rows)[:, None]
    acc = gl.where(inverse != 0, acc * inverse, 0.0)
    lse = gl.where(seen, (m + gl.log2(total)) * LN2, float("-inf"))
    lse_ptrs, there_s = lse_of(C, it, lse_ptr, l_batch, l_row, l_head, s_rows)
    gl.store(lse_ptrs, lse, mask=there_s)
    if SINGLE_LAUNCH or (told(it, 7) & LAST) != 0:
        result_ptr = begin_of(it, result_ptr, r_batch, r_row, r_head)
        write(result_ptr, acc, q, C, told(it, 0), dv, r_row, EVEN)
        fence_async_shared()  # bulk copies come next to where it was
    else:
        out_ptrs, there_o = out_of(C, it, out_ptr, o_batch, o_row, o_head, dv, DV, EVEN)
        gl.store(out_ptrs, acc, mask=there_o)
    mbarrier.arrive(item_empty.index(here))
    return i


@gluon.jit(do_not_specialize=ANY_NUMBER)
def forward_kernel(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, result_ptr, counter_ptr, blocks_ptr, tiles_ptr, scale,
    softcap, nheads, group, count, section, pairs, dv, o_batch, o_row, o_head, l_batch, l_head,
    l_row, r_batch, r_row, r_head,
    BLOCK_N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr,
    ITEMS: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, SINK: gl.constexpr,
    RESULT: gl.constexpr, SHORT_DOCS: gl.constexpr, EVEN: gl.constexpr, SINGLE_LAUNCH: gl.constexpr,
    HALVES: gl.constexpr,
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
    of_all = (
        scale, softcap, dv, o_batch, o_row, o_head, l_batch, l_head, l_row, r_batch, r_row, r_head,
    )
    given = (
        out_ptr, lse_ptr, result_ptr, tiles_ptr, q_smem, k_smem, v_smem, of_all, item, item_full,
        item_empty, q_full, k_full, k_empty, v_full, v_empty,
    )
    loads = (
        q_desc, k_desc, v_desc, blocks_ptr, tiles_ptr, counter_ptr, q_smem, k_smem, v_smem, item,
        item_full, item_empty, q_full, k_full, k_empty, v_full, v_empty, nheads, group, count,
        section, pairs,
    )
    state = out_ptr, lse_ptr, dv, o_batch, o_row, o_head, l_batch, l_head, l_row
    LOADERS: gl.constexpr = 4 if SHORT_DOCS else 1  # one warp loads faster, four clear faster
    gl.warp_specialize(
        [
            (consume, (
                0, given, BLOCK_N, DV, WINDOW, SOFTCAP, SINK, RESULT, EVEN, SINGLE_LAUNCH, HALVES,
            )),
            (consume, (
                1, given, BLOCK_N, DV, WINDOW, SOFTCAP, SINK, RESULT, EVEN, SINGLE_LAUNCH, HALVES,
            )),
            (produce, (loads, state, BLOCK_N, DV, SHORT_DOCS, SINGLE_LAUNCH)),
        ],
        [4, LOADERS], [240, 24],
    )
