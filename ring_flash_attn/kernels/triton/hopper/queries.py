"""dQ on Hopper by itself, always summed in the same order; see `in_order` in `host.py`.

One program owns 128 queries of one head, 64 for each consumer, and walks through the keys that they
see, as in `forward.py`; dK and dV come from the kernels that own keys.

    consumer      S = q·k'  dP = dout·v'  ·p, ds·  dQ += ds·k

    barrier     who arrives       what it says
    q_full[c]   bulk copies       consumer c's queries and dout are there
    full[s]     bulk copies       stage s holds a block of keys and of values (for short documents
                                  the producer arrives: `told_by_copy`)
    empty[s]    both consumers    nobody reads stage s any more
"""

# fmt: off

from .forward import HALF, inside, masked, span_of
from .gluon import gl, gluon, load_tile, mbarrier, warpgroup_mma, warpgroup_mma_wait
from .primitives import (
    ANY_NUMBER,
    barriers,
    clear_short,
    place,
    probabilities,
    put,
    scalars,
    score_gradients,
    told_by_copy,
)


@gluon.jit
def produce(loads, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SHORT_DOCS: gl.constexpr):
    """Load queries and dout, then blocks of keys and values."""
    (
        q_desc, do_desc, k_desc, v_desc, tiles_ptr, q_smem, do_smem, k_smem, v_smem, q_full, full,
        empty, batch, head, head_k, row, i0, rows, first_tile, last_tile,
    ) = loads
    for c in gl.static_range(2):
        mbarrier.expect(q_full.index(c), q_desc.block_type.nbytes + do_desc.block_type.nbytes)
        load_tile(q_desc, batch, head, row + c * HALF, q_full.index(c), q_smem.index(c), False)
        load_tile(do_desc, batch, head, row + c * HALF, q_full.index(c), do_smem.index(c), False)
    n, shorts = 0, 0
    for tile in range(first_tile, last_tile):
        k_row, k_len, _, _, begin, end = span_of(tiles_ptr + tile * 8, i0, rows)
        for j in range(begin, end, BLOCK_N):
            at = k_row + inside(j, k_len, BLOCK_N)
            stage, phase = n % STAGES, (n // STAGES) & 1
            mbarrier.wait(empty.index(stage), phase ^ 1)
            there = told_by_copy(stage, k_len, full, BLOCK_N, SHORT_DOCS)
            mbarrier.expect(there, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            load_tile(k_desc, batch, head_k, at, there, k_smem.index(stage), False)
            load_tile(v_desc, batch, head_k, at, there, v_smem.index(stage), False)
            if SHORT_DOCS:
                both = k_smem.index(stage), v_smem.index(stage)
                shorts = clear_short(k_len, shorts, stage, full, both)
            n += 1


@gluon.jit
def consume(
    C: gl.constexpr, given, BLOCK_N: gl.constexpr, D: gl.constexpr, SOFTCAP: gl.constexpr,
    EVEN: gl.constexpr, FRESH: gl.constexpr,
):
    """dQ of 64 queries."""
    (
        dq_ptr, lse_ptr, delta_ptr, tiles_ptr, q_smem, do_smem, k_smem, v_smem, q_full, full,
        empty, i0, rows, first_tile, last_tile, scale, softcap, d, dq_row,
    ) = given
    STAGES: gl.constexpr = k_smem.shape[0]
    dtype: gl.constexpr = q_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, dq_layout, 2)
    here = C * HALF + gl.arange(0, HALF, gl.SliceLayout(1, s_layout))
    lse = gl.load(lse_ptr + here, mask=here < rows, other=0.0)
    delta = gl.load(delta_ptr + here, mask=here < rows, other=0.0)
    q, dout = q_smem.index(C), do_smem.index(C)
    dq = gl.zeros([HALF, D], gl.float32, dq_layout)
    mbarrier.wait(q_full.index(C), 0)
    n = 0
    for tile in range(first_tile, last_tile):
        _, k_len, low, high, begin, end = span_of(tiles_ptr + tile * 8, i0, rows)
        left = i0 + C * HALF + HALF - 1 + low
        right = gl.minimum(k_len, i0 + C * HALF + high + 1) - BLOCK_N
        for j in range(begin, end, BLOCK_N):
            stage, phase = n % STAGES, (n // STAGES) & 1
            k, v = k_smem.index(stage), v_smem.index(stage)
            mbarrier.wait(full.index(stage), phase)
            s = warpgroup_mma(
                q, k.permute((1, 0)), gl.zeros([HALF, BLOCK_N], gl.float32, s_layout),
                use_acc=False, is_async=True,
            )
            dp = warpgroup_mma(
                dout, v.permute((1, 0)), gl.zeros([HALF, BLOCK_N], gl.float32, s_layout),
                use_acc=False, is_async=True,
            )
            s = warpgroup_mma_wait(1, deps=(s,))
            p, tanh = probabilities(s, lse[:, None], scale, softcap, SOFTCAP)
            if (j < left) | (j > right):
                p = masked(p, 0.0, j, k_len, low, high, i0, C, BLOCK_N)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            ds = score_gradients(p, dp, delta[:, None], tanh, SOFTCAP, False)
            dq = warpgroup_mma(gl.convert_layout(ds.to(dtype), operand), k, dq, is_async=True)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            mbarrier.arrive(empty.index(stage))
            n += 1
    put(dq_ptr, dq * scale, q, C, rows, d, dq_row, FRESH, EVEN)


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
    entry = blocks_ptr + block * 16
    row, rows, i0, first_tile = scalars(entry)
    last_tile = gl.load(entry + 4)
    batch, head = pair // nheads, pair % nheads
    row64, batch64 = row.to(gl.int64), batch.to(gl.int64)
    lse_ptr += batch64 * l_batch + head.to(gl.int64) * l_head + row64
    delta_ptr += batch64 * e_batch + head.to(gl.int64) * e_head + row64
    dq_ptr += batch64 * dq_batch + head * dq_head + row64 * dq_row
    given = (
        dq_ptr, lse_ptr, delta_ptr, tiles_ptr, q_smem, do_smem, k_smem, v_smem, q_full, full,
        empty, i0, rows, first_tile, last_tile, scale, softcap, d, dq_row,
    )
    loads = (
        q_desc, do_desc, k_desc, v_desc, tiles_ptr, q_smem, do_smem, k_smem, v_smem, q_full, full,
        empty, batch, head, head // group, row, i0, rows, first_tile, last_tile,
    )
    gl.warp_specialize(
        [
            (consume, (0, given, BLOCK_N, D, SOFTCAP, EVEN, FRESH)),
            (consume, (1, given, BLOCK_N, D, SOFTCAP, EVEN, FRESH)),
            (produce, (loads, BLOCK_N, STAGES, SHORT_DOCS)),
        ],
        [4, 4], [240, 24],
    )
