"""Forward: the online softmax over a block of queries, going on from the state of earlier steps.

One program owns BLOCK_M queries of one head and walks through the tiles of their span. In a tile it
goes over the keys that the band `low <= j - i <= high` leaves, in up to three runs: an edge on the
left (sliding window), whole blocks, an edge on the right (causal, end of the span).
"""

# fmt: off

import triton
import triton.language as tl

from .scores import (
    ANY_NUMBER,
    FIRST,
    LAST,
    LN2,
    LOG2E,
    block_entry,
    dot,
    finish_scores,
    inside_of,
    load_rows,
    mix,
    place,
    row_keys,
    slope_of,
    spread,
    tile_entry,
)

CARRY = tl.constexpr(23.0)  # log2 of the weight that the state starts with; see `forward_kernel`


@triton.jit
def add_values(
    acc, p, v_mat, v_row, v_col, stride_v, inside, dv, BLOCK_N: tl.constexpr, DV: tl.constexpr,
    EVEN: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr, SHORT_DOCS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """acc + p · v for the BLOCK_N values from v_row on; p is rounded like v."""
    v = load_rows(
        v_mat, v_row, v_col, stride_v, inside, dv, BLOCK_N, DV, TMA, EVEN, MASKED, SHORT_DOCS
    )
    if UPCAST:
        return acc + dot(p, v, UPCAST)
    else:
        return tl.dot(p, v, acc, input_precision="ieee")


@triton.jit
def run(
    acc, m, total, q, k_mat, v_mat, k_row, k_col, v_row, v_col, begin, end, k_len, first, last,
    distance, row_hash, token, slope, scale, softcap, threshold, stride_k, stride_v, stride, d,
    dv,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    EVEN: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr, SHORT_DOCS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
    UPCAST: tl.constexpr, STAGES: tl.constexpr,
):
    """Advance (acc, m, total) by keys begin … end, in blocks; row i sees keys first[i] … last[i].

    m is the running maximum, total the running sum of p = 2^(s − m), acc that of p · v. A block's
    p · v waits until the next block's scores are there: tensor cores multiply it while the other
    units compute the next softmax. Before the first block p is 0, with any values it may see.
    (p is rounded after the next scores, not before: until they are there, the product of the block
    before may still be reading the registers that hold its own rounded p.)
    """
    columns = tl.arange(0, BLOCK_N)
    p = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    rescale = tl.full([BLOCK_M], 1.0, tl.float32)
    for j in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        at = inside_of(j, k_len, BLOCK_N, MASKED, SHORT_DOCS)
        keys = at + columns
        k = load_rows(
            k_mat, k_row + at, k_col, stride_k, keys < k_len, d, BLOCK_N, D, TMA, EVEN, MASKED,
            False
        )
        s = dot(q, tl.trans(k), UPCAST)
        rounded = p.to(q.dtype)
        before = inside_of(tl.maximum(j - BLOCK_N, begin), k_len, BLOCK_N, MASKED, SHORT_DOCS)
        acc = add_values(
            acc * rescale[:, None], rounded, v_mat, v_row + before, v_col, stride_v,
            before + columns < k_len, dv, BLOCK_N, DV, EVEN, TMA, MASKED, SHORT_DOCS, UPCAST
        )
        if SOFTCAP or ALIBI:
            s, _ = finish_scores(
                s, distance[:, None] + keys[None, :] * stride, slope, scale, softcap, SOFTCAP,
                ALIBI
            )
            factor = 1.0
        else:
            factor = scale * LOG2E  # one multiply-add with the maximum, below
        if MASKED:
            seen = (keys[None, :] <= last[:, None]) & (keys >= j)[None, :]
            if WINDOW:
                seen = seen & (keys[None, :] >= first[:, None])
            s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * factor)
        if MASKED:
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        else:
            m_safe = m_new
        p = tl.exp2(s * factor - m_safe[:, None])
        rescale = tl.exp2(m - m_safe)
        total = total * rescale + tl.sum(p, 1)
        if DROPOUT:
            bits = mix(row_hash[:, None] ^ spread(token + keys * stride)[None, :])
            p = tl.where(bits >= threshold, p, 0.0)
        m = m_new
    if begin < end:
        before = begin + (end - begin - 1) // BLOCK_N * BLOCK_N
        before = inside_of(before, k_len, BLOCK_N, MASKED, SHORT_DOCS)
        acc = add_values(
            acc * rescale[:, None], p.to(q.dtype), v_mat, v_row + before, v_col, stride_v,
            before + columns < k_len, dv, BLOCK_N, DV, EVEN, TMA, MASKED, SHORT_DOCS, UPCAST
        )
    return acc, m, total


@triton.jit(do_not_specialize=ANY_NUMBER)
def forward_kernel(
    q_mat, k_mat, v_mat, out_ptr, lse_ptr, result_ptr, slopes_ptr, seed_ptr, blocks_ptr, tiles_ptr,
    scale, softcap, threshold, keep_scale, head_start, d, dv, nheads, group, count, section,
    q_stride, q_brow, q_bcol, q_hrow, q_hcol, k_stride, k_brow, k_bcol, k_hrow, k_hcol,
    v_stride, v_brow, v_bcol, v_hrow, v_hcol, o_batch, o_row, o_head, l_batch, l_head, l_row,
    r_batch, r_row, r_head, slopes_stride,
    D: tl.constexpr, DV: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
    SHORT_DOCS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr, SINK: tl.constexpr,
    RESULT: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr,
):
    """Output and lse of BLOCK_M queries of one head: all tiles of the span."""
    block, pair = place(count, section)
    own = block_entry(blocks_ptr, block)
    row, rows, i0, tile = own.row, own.rows, own.first, own.tile
    position, index, stride = own.position, own.token, own.stride
    batch, head = pair // nheads, pair % nheads
    head_k = head // group

    # Queries stay in registers or shared memory for the whole program.
    numbers = tl.arange(0, BLOCK_M)
    valid = numbers < rows
    depth_v = tl.arange(0, DV)
    here = (row + numbers).to(tl.int64)
    q_row0, q_col = batch * q_brow + head * q_hrow, batch * q_bcol + head * q_hcol
    q = load_rows(
        q_mat, q_row0 + row, q_col, q_stride, valid, d, BLOCK_M, D, TMA, EVEN, True, False
    )
    k_row0, k_col = batch * k_brow + head_k * k_hrow, batch * k_bcol + head_k * k_hcol
    v_row0, v_col = batch * v_brow + head_k * v_hrow, batch * v_bcol + head_k * v_hcol

    # Go on from the state (out, lse), on the first launch from a sink or from nothing. As one key
    # of score lse and weight 1 the state would push later keys below fp16's range; so m starts
    # CARRY lower and total and acc 2^CARRY higher.
    out_ptrs = out_ptr + batch.to(tl.int64) * o_batch + head * o_head
    out_ptrs += here[:, None] * o_row + depth_v[None, :]
    lse_ptrs = lse_ptr + batch.to(tl.int64) * l_batch + head * l_head + here * l_row
    out_mask = valid[:, None] & (depth_v[None, :] < dv)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DV], tl.float32)
    is_first = (own.flags & FIRST) != 0
    if SINK or not is_first:
        lse = tl.load(lse_ptrs, mask=valid, other=float("-inf"))
        m = lse * LOG2E - CARRY
        total = tl.where(lse != float("-inf"), tl.exp2(CARRY), 0.0)
    if not is_first:
        acc = tl.load(out_ptrs, mask=out_mask, other=0.0) * total[:, None]
        if DROPOUT:
            acc = acc / keep_scale  # acc is scaled once, at the end

    slope = 0.0
    if ALIBI:
        slope = slope_of(slopes_ptr, slopes_stride, blocks_ptr, block, batch, head)
    row_hash = numbers.to(tl.uint32)
    if DROPOUT:
        row_hash = row_keys(seed_ptr, batch, head + head_start, index + numbers * stride)
    rows_i = i0 + numbers

    while tile < own.last_tile:
        keys = tile_entry(tiles_ptr, tile)
        k_row, k_len, low, high, k_index = keys.row, keys.length, keys.low, keys.high, keys.token
        distance = keys.position - position - numbers * stride
        begin = tl.maximum(0, i0 + low)
        end = tl.minimum(k_len, i0 + rows + high)
        first = rows_i + low
        last = tl.minimum(rows_i + high, k_len - 1)
        if WINDOW:
            edge = tl.maximum(i0 + rows - 1 + low, begin)
            edge = tl.minimum(begin + (edge - begin + BLOCK_N - 1) // BLOCK_N * BLOCK_N, end)
            acc, m, total = run(
                acc, m, total, q, k_mat, v_mat, k_row0 + k_row, k_col, v_row0 + k_row, v_col,
                begin, edge, k_len, first, last, distance, row_hash, k_index, slope, scale,
                softcap, threshold, k_stride, v_stride, stride, d, dv, BLOCK_M, BLOCK_N, D, DV,
                EVEN, TMA, True, SHORT_DOCS, WINDOW, SOFTCAP, ALIBI, DROPOUT, UPCAST, STAGES,
            )
            begin = edge
        whole = tl.minimum(k_len, i0 + high + 1)
        whole = begin + tl.maximum(whole - begin, 0) // BLOCK_N * BLOCK_N
        acc, m, total = run(
            acc, m, total, q, k_mat, v_mat, k_row0 + k_row, k_col, v_row0 + k_row, v_col, begin,
            whole, k_len, first, last, distance, row_hash, k_index, slope, scale, softcap,
            threshold, k_stride, v_stride, stride, d, dv, BLOCK_M, BLOCK_N, D, DV, EVEN, TMA,
            False, SHORT_DOCS, WINDOW, SOFTCAP, ALIBI, DROPOUT, UPCAST, STAGES,
        )
        acc, m, total = run(
            acc, m, total, q, k_mat, v_mat, k_row0 + k_row, k_col, v_row0 + k_row, v_col, whole,
            end, k_len, first, last, distance, row_hash, k_index, slope, scale, softcap,
            threshold, k_stride, v_stride, stride, d, dv, BLOCK_M, BLOCK_N, D, DV, EVEN, TMA,
            True, SHORT_DOCS, WINDOW, SOFTCAP, ALIBI, DROPOUT, UPCAST, STAGES,
        )
        tile += 1

    # Normalise; a row that saw no key is (0, −inf).
    l_safe = tl.where(total != 0, total, 1.0)  # NaN stays
    if DROPOUT:
        acc = acc * (keep_scale / l_safe)[:, None]
    else:
        acc = acc / l_safe[:, None]
    tl.debug_barrier()  # several warps may have read the lse that one of them writes
    tl.store(lse_ptrs, tl.where(total != 0, (m + tl.log2(l_safe)) * LN2, float("-inf")), mask=valid)
    if RESULT and (own.flags & LAST) != 0:
        result_ptrs = result_ptr + batch.to(tl.int64) * r_batch + head * r_head
        result_ptrs += here[:, None] * r_row + depth_v[None, :]
        tl.store(result_ptrs, acc.to(result_ptr.dtype.element_ty), mask=out_mask)
    else:
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=out_mask)
