"""Forward on Hopper: warps that load, and two groups of warps that compute, on their own clocks.

    producer      Q0  K0  Q1  V0   K1     V1   K2     V2 …          (bulk copies; waits for "empty")
    consumer 0        S0 ·softmax0· S1 P0·V0 ·softmax1· S2 P1·V1 ·softmax2· …
    consumer 1            S0 ·softmax0· S1 P0·V0 ·softmax1· S2 P1·V1 …

One program owns 128 queries of one head, 64 for each consumer, and walks through the tiles of their
span like the portable kernel (`../forward.py`). A consumer hands the products of the next block,
S = q · k', and of this one, p · v, to the tensor cores before it computes the next softmax; `turn`
lets consumers do that one after the other, so that one multiplies while another exponentiates.

    barrier     who arrives       what it says
    q_full[c]   a bulk copy       consumer c's queries are there
    k_full[s]   a bulk copy       stage s holds a block of keys; v_full[s]: of values
    k_empty[s]  both consumers    nobody reads stage s any more; v_empty[s]
    turn[c]     consumer 1 - c    consumer c may issue its products

Registers: the producer keeps 24 a thread, and the consumers have 240. With head dimension 128 a
consumer's thread needs 64 for the output, 64 for scores and 32 for rounded probabilities.
"""

# fmt: off

from .gluon import (
    gl,
    gluon,
    load_tile,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .pieces import (
    ANY_NUMBER,
    LN2,
    LOG2E,
    barriers,
    capped,
    clear_from,
    place,
    scalars,
    write,
)

CARRY = gl.constexpr(23.0)  # see `../forward.py`
HALF = gl.constexpr(64)  # queries of a consumer


@gluon.jit
def span_of(tiles_ptr, tile, i0, rows):
    """A tile: row of its keys, how many, the band, and the keys begin … end that the rows see."""
    k_row, k_len, low, high = scalars(tiles_ptr + tile * 8)
    begin = gl.maximum(0, i0 + low)
    end = gl.minimum(k_len, i0 + rows + high)
    return k_row, k_len, low, high, begin, end


@gluon.jit
def first_span(tiles_ptr, tile, last_tile, i0, rows):
    """The first tile of which the rows see something, else the last, of which they see nothing."""
    k_row, k_len, low, high, begin, end = span_of(tiles_ptr, tile, i0, rows)
    while (begin >= end) & (tile + 1 < last_tile):
        tile += 1
        k_row, k_len, low, high, begin, end = span_of(tiles_ptr, tile, i0, rows)
    if begin >= end:
        begin, end = 0, 1
    return tile, k_row, k_len, low, high, begin, end


@gluon.jit
def inside(j, k_len, BLOCK_N: gl.constexpr):
    """Where to load the block from j on: the last one ends where the keys do, if it can."""
    return gl.maximum(gl.minimum(j, k_len - BLOCK_N), 0)


@gluon.jit
def produce(loads, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """Load queries, then blocks of keys and values."""
    (
        q_desc, k_desc, v_desc, tiles_ptr, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full,
        v_empty, batch, head, head_k, row, i0, rows, tile, last_tile,
    ) = loads
    CONSUMERS: gl.constexpr = q_smem.shape[0]
    load_tile(q_desc, batch, head, row, q_full.index(0), q_smem.index(0))
    tile, k_row, k_len, low, high, begin, end = first_span(tiles_ptr, tile, last_tile, i0, rows)
    i = 0
    while tile < last_tile:
        for j in range(begin, end, BLOCK_N):
            at = k_row + inside(j, k_len, BLOCK_N)
            stage, phase = i % STAGES, (i // STAGES) & 1
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            load_tile(k_desc, batch, head_k, at, k_full.index(stage), k_smem.index(stage))
            if i == 0:
                for c in gl.static_range(1, CONSUMERS):
                    load_tile(q_desc, batch, head, row + c * HALF, q_full.index(c), q_smem.index(c))
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            load_tile(v_desc, batch, head_k, at, v_full.index(stage), v_smem.index(stage))
            i += 1
        tile += 1
        if tile < last_tile:
            k_row, k_len, low, high, begin, end = span_of(tiles_ptr, tile, i0, rows)


@gluon.jit
def masked(x, other, j, k_len, low, high, i0, C: gl.constexpr, BLOCK_N: gl.constexpr):
    """(queries, keys) of the block from j on; `other` where a row does not see the key."""
    layout: gl.constexpr = x.type.layout
    at = inside(j, k_len, BLOCK_N)
    rows = i0 + C * HALF - at + gl.arange(0, HALF, gl.SliceLayout(1, layout))
    keys = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    first = gl.maximum(rows + low, j - at)
    last = gl.minimum(rows + high, k_len - 1 - at)
    seen = (keys[None, :] >= first[:, None]) & (keys[None, :] <= last[:, None])
    return gl.where(seen, x, other)


@gluon.jit
def softmax(s, m, total, scale, softcap, SOFTCAP: gl.constexpr):
    """p = 2^(s − m) for the new maximum m; m; the sum of p; what earlier sums are scaled by."""
    factor = (softcap if SOFTCAP else scale) * LOG2E  # with a softcap s is a tanh
    m_new = gl.maximum(m, gl.max(s, 1) * factor)
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s * factor - m_safe[:, None])
    rescale = gl.exp2(m - m_safe)
    return p, m_new, total * rescale + gl.sum(p, 1), rescale


@gluon.jit
def run(
    MASKED: gl.constexpr, acc, m, total, p, there, i, begin, end, q, k_smem, v_smem, k_full,
    k_empty, v_full, v_empty, turn, i0, k_len, low, high, scale, softcap,
    C: gl.constexpr, SOFTCAP: gl.constexpr, GUARD: gl.constexpr,
):
    """Advance by the keys begin … end, in blocks.

    p are the probabilities of the block before, which wait for their product with its values, of
    which `there` belong to its document. i counts all blocks. Returns where the next run begins.
    """
    STAGES: gl.constexpr = k_smem.shape[0]
    NEXT: gl.constexpr = (C + 1) % turn.shape[0]
    BLOCK_N: gl.constexpr = p.shape[1]
    dtype: gl.constexpr = q.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    for j in range(begin, end, BLOCK_N):
        stage, phase = i % STAGES, (i // STAGES) & 1
        v_stage, v_phase = (i - 1) % STAGES, ((i - 1) // STAGES) & 1
        k, v = k_smem.index(stage), v_smem.index(v_stage)
        if GUARD:  # not while products are under way: a branch would make them wait for each other
            mbarrier.wait(v_full.index(v_stage), v_phase)
            if there < BLOCK_N:
                clear_from(v, there)
        mbarrier.wait(k_full.index(stage), phase)
        if turn.shape[0] > 1:
            mbarrier.wait(turn.index(C), (i & 1) ^ (1 if C == 0 else 0))
        s = warpgroup_mma(
            q, k.permute((1, 0)), gl.zeros([HALF, BLOCK_N], gl.float32, s_layout),
            use_acc=False, is_async=True,
        )
        if not GUARD:
            mbarrier.wait(v_full.index(v_stage), v_phase)
        pending = warpgroup_mma(p, v, acc, is_async=True)
        if turn.shape[0] > 1:
            mbarrier.arrive(turn.index(NEXT))
        s = warpgroup_mma_wait(1, deps=(s,))
        mbarrier.arrive(k_empty.index(stage))
        if SOFTCAP:
            s = capped(s, scale, softcap)
        if MASKED:
            s = masked(s, float("-inf"), j, k_len, low, high, i0, C, BLOCK_N)
        s, m, total, rescale = softmax(s, m, total, scale, softcap, SOFTCAP)
        acc = warpgroup_mma_wait(0, deps=(pending,))
        mbarrier.arrive(v_empty.index(v_stage))
        p = gl.convert_layout(s.to(dtype), p_layout)
        acc = acc * gl.convert_layout(rescale, o_rows)[:, None]
        there = k_len - inside(j, k_len, BLOCK_N)
        i += 1
    done = gl.maximum(gl.cdiv(end - begin, BLOCK_N), 0) * BLOCK_N
    return acc, m, total, p, there, i, begin + done


@gluon.jit
def consume(
    C: gl.constexpr, given, BLOCK_N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, SINK: gl.constexpr, RESULT: gl.constexpr,
    GUARD: gl.constexpr, EVEN: gl.constexpr,
):
    """Output and lse of 64 queries."""
    (
        out_ptr, lse_ptr, result_ptr, tiles_ptr, q_smem, k_smem, v_smem, q_full, k_full, k_empty,
        v_full, v_empty, turn, i0, rows, tile, last_tile, flags, scale, softcap, dv, o_row, l_row,
        r_row,
    ) = given
    STAGES: gl.constexpr = k_smem.shape[0]
    NEXT: gl.constexpr = (C + 1) % turn.shape[0]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = q_smem.dtype

    # Go on from the state (out, lse), on the first launch from a sink or from nothing; see
    # `../forward.py`.
    is_first = (flags & 1) != 0
    here = C * HALF + gl.arange(0, HALF, o_rows)
    columns = gl.arange(0, DV, gl.SliceLayout(0, o_layout))
    out_ptrs = (out_ptr + here * o_row)[:, None] + columns[None, :]
    stored = (here < rows)[:, None]
    if not EVEN:
        stored = stored & (columns < dv)[None, :]
    here_s = C * HALF + gl.arange(0, HALF, s_rows)
    lse_ptrs = lse_ptr + here_s * l_row
    if SINK:
        known = here_s < rows
    else:
        known = (here_s < rows) & (not is_first)
    lse = gl.load(lse_ptrs, mask=known, other=float("-inf"))
    m = lse * LOG2E - CARRY
    total = gl.where(lse > float("-inf"), 8388608.0, 0.0)  # 2^CARRY
    acc = gl.load(out_ptrs, mask=stored & (not is_first), other=0.0) * 8388608.0

    # The first block.
    tile, k_row, k_len, low, high, j, end = first_span(tiles_ptr, tile, last_tile, i0, rows)
    q = q_smem.index(C)
    mbarrier.wait(q_full.index(C), 0)
    mbarrier.wait(k_full.index(0), 0)
    if turn.shape[0] > 1:
        mbarrier.wait(turn.index(C), 1 if C == 0 else 0)
    k = k_smem.index(0)
    s = warpgroup_mma(
        q, k.permute((1, 0)), gl.zeros([HALF, BLOCK_N], gl.float32, s_layout), use_acc=False,
        is_async=True,
    )
    if turn.shape[0] > 1:
        mbarrier.arrive(turn.index(NEXT))
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_empty.index(0))
    if SOFTCAP:
        s = capped(s, scale, softcap)
    s = masked(s, float("-inf"), j, k_len, low, high, i0, C, BLOCK_N)
    s, m, total, rescale = softmax(s, m, total, scale, softcap, SOFTCAP)
    p = gl.convert_layout(s.to(dtype), p_layout)
    acc = acc * gl.convert_layout(rescale, o_rows)[:, None]
    there = k_len - inside(j, k_len, BLOCK_N)  # rows of the block that belong to these keys
    j += BLOCK_N

    i = 1
    while tile < last_tile:
        next_tile = gl.minimum(tile + 1, last_tile - 1)
        n_row, n_len, n_low, n_high, n_begin, n_end = span_of(tiles_ptr, next_tile, i0, rows)
        if WINDOW:
            left = gl.minimum(i0 + C * HALF + HALF - 1 + low, end)
            acc, m, total, p, there, i, j = run(
                True, acc, m, total, p, there, i, j, left, q, k_smem, v_smem, k_full, k_empty,
                v_full, v_empty, turn, i0, k_len, low, high, scale, softcap, C, SOFTCAP, GUARD,
            )
        # Blocks that end here need no mask on the right.
        right = gl.minimum(k_len, i0 + C * HALF + high + 1) - BLOCK_N + 1
        acc, m, total, p, there, i, j = run(
            False, acc, m, total, p, there, i, j, right, q, k_smem, v_smem, k_full, k_empty,
            v_full, v_empty, turn, i0, k_len, low, high, scale, softcap, C, SOFTCAP, GUARD,
        )
        acc, m, total, p, there, i, j = run(
            True, acc, m, total, p, there, i, j, end, q, k_smem, v_smem, k_full, k_empty,
            v_full, v_empty, turn, i0, k_len, low, high, scale, softcap, C, SOFTCAP, GUARD,
        )
        k_len, low, high, j, end = n_len, n_low, n_high, n_begin, n_end
        tile += 1

    v_stage, v_phase = (i - 1) % STAGES, ((i - 1) // STAGES) & 1
    mbarrier.wait(v_full.index(v_stage), v_phase)
    v = v_smem.index(v_stage)
    if GUARD:
        if there < BLOCK_N:
            clear_from(v, there)
    acc = warpgroup_mma(p, v, acc)

    # Normalise; a row that saw no key is (0, −inf).
    seen = total > 0
    inverse = gl.convert_layout(gl.where(seen, 1.0 / total, 0.0), o_rows)[:, None]
    acc = gl.where(inverse > 0, acc * inverse, 0.0)
    lse = gl.where(seen, (m + gl.log2(total)) * LN2, float("-inf"))
    gl.store(lse_ptrs, lse, mask=here_s < rows)
    if RESULT:
        if (flags & 2) != 0:
            write(result_ptr, acc, q_smem.index(C), C, rows, dv, r_row, EVEN)
        else:
            gl.store(out_ptrs, acc, mask=stored)
    else:
        gl.store(out_ptrs, acc, mask=stored)


@gluon.jit(do_not_specialize=ANY_NUMBER)
def forward_kernel(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, result_ptr, blocks_ptr, tiles_ptr, scale, softcap,
    nheads, group, count, section, dv, o_batch, o_row, o_head, l_batch, l_head, l_row, r_batch,
    r_row, r_head,
    BLOCK_N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr,
    WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, SINK: gl.constexpr, RESULT: gl.constexpr,
    GUARD: gl.constexpr, EVEN: gl.constexpr, CONSUMERS: gl.constexpr,
):
    """Output and lse of a block of queries of one head: all tiles of the span."""
    dtype: gl.constexpr = q_desc.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, D], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], dtype)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, DV], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [CONSUMERS, HALF, D], q_layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], k_layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DV], v_layout)
    q_full, turn = barriers(CONSUMERS, 1), barriers(CONSUMERS, 1)
    k_full, v_full = barriers(STAGES, 1), barriers(STAGES, 1)
    k_empty, v_empty = barriers(STAGES, CONSUMERS), barriers(STAGES, CONSUMERS)

    block, pair = place(count, section)
    entry = blocks_ptr + block * 12
    row, rows, i0, tile = scalars(entry)
    last_tile, flags = gl.load(entry + 4), gl.load(entry + 5)
    batch, head = pair // nheads, pair % nheads
    head_k = head // group
    row64, batch64 = row.to(gl.int64), batch.to(gl.int64)
    out_ptr += batch64 * o_batch + head * o_head + row64 * o_row
    result_ptr += batch64 * r_batch + head * r_head + row64 * r_row
    lse_ptr += batch64 * l_batch + head * l_head + row64 * l_row
    given = (
        out_ptr, lse_ptr, result_ptr, tiles_ptr, q_smem, k_smem, v_smem, q_full, k_full, k_empty,
        v_full, v_empty, turn, i0, rows, tile, last_tile, flags, scale, softcap, dv, o_row, l_row,
        r_row,
    )
    loads = (
        q_desc, k_desc, v_desc, tiles_ptr, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full,
        v_empty, batch, head, head_k, row, i0, rows, tile, last_tile,
    )
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (consume, (0, given, BLOCK_N, D, DV, WINDOW, SOFTCAP, SINK, RESULT, GUARD, EVEN)),
                (produce, (loads, BLOCK_N, STAGES)),
            ],
            [4], [24],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (0, given, BLOCK_N, D, DV, WINDOW, SOFTCAP, SINK, RESULT, GUARD, EVEN)),
                (consume, (1, given, BLOCK_N, D, DV, WINDOW, SOFTCAP, SINK, RESULT, GUARD, EVEN)),
                (produce, (loads, BLOCK_N, STAGES)),
            ],
            [4, 4], [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (0, given, BLOCK_N, D, DV, WINDOW, SOFTCAP, SINK, RESULT, GUARD, EVEN)),
                (consume, (1, given, BLOCK_N, D, DV, WINDOW, SOFTCAP, SINK, RESULT, GUARD, EVEN)),
                (consume, (2, given, BLOCK_N, D, DV, WINDOW, SOFTCAP, SINK, RESULT, GUARD, EVEN)),
                (produce, (loads, BLOCK_N, STAGES)),
            ],
            [4, 4, 4], [160, 160, 24],
        )
