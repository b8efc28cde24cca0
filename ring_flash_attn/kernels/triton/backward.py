"""Backward in two kernels, without atomics: one owns keys and sums dK and dV, one owns queries.

Both recompute p = 2^(s − lse), where lse is that of the whole softmax over all steps, so that a
step needs nothing from the others. With dp = dout · v' and delta = sum of dout · out:

    dv = p' · dout      ds = p ∘ (dp − delta)      dk = ds' · q · scale      dq = ds · k · scale

Each accumulator is read and added to once, at the end of a program; FRESH ones are written (in the
user's dtype, if there is a single launch). Always deterministic.
"""

# fmt: off

import triton
import triton.language as tl

from ..row_stats import stats_of_rows
from .scores import (
    ANY_NUMBER,
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


@triton.jit(do_not_specialize=ANY_NUMBER)
def stats_kernel(
    lse_ptr, delta_ptr, stats_ptr, length, nheads, count, l_batch, l_head, l_row, e_batch, e_head,
    e_row, BLOCK: tl.constexpr,
):
    """(lse, delta) of a row side by side, as `stats_of_rows` has them.

    Side by side, a block's numbers are one short contiguous load. Read from two tensors they would
    be fetched number by number, by every thread that needs them, in each turn of the loop.
    """
    pair, rows, mask, lse, delta = stats_of_rows(
        lse_ptr, delta_ptr, length, nheads, count, l_batch, l_head, l_row, e_batch, e_head, e_row,
        0.0, BLOCK,
    )
    stats_ptr += (pair * length + rows) * 2
    tl.store(stats_ptr, lse, mask=mask)
    tl.store(stats_ptr + 1, delta, mask=mask)


@triton.jit
def load_stats(stats_ptr, i, length, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """lse and delta of BLOCK rows from i on; 0 beyond `length`, where masks hide the row."""
    numbers = i * 2 + tl.arange(0, 2 * BLOCK)
    if MASKED:
        pairs = tl.load(stats_ptr + numbers, mask=numbers < 2 * length, other=0.0)
    else:
        pairs = tl.load(stats_ptr + numbers)
    return tl.split(tl.reshape(pairs, [BLOCK, 2]))


@triton.jit
def probabilities(
    products, distance, other, first, last, lse, slope, scale, softcap,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
):
    """p, and the derivative of the softcap (1 without one); first <= other <= last are seen."""
    s, tanh = finish_scores(products, distance, slope, scale, softcap, SOFTCAP, ALIBI)
    p = tl.exp2(s - lse)
    if MASKED:
        p = tl.where((other >= first) & (other <= last), p, 0.0)
    if SOFTCAP:
        return p, 1.0 - tanh * tanh
    else:
        return p, 1.0


@triton.jit
def put(pointers, x, mask, FRESH: tl.constexpr):
    """Add x to what is there, or FRESH put it there."""
    if not FRESH:
        x += tl.load(pointers, mask=mask, other=0.0)
    tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def run_keys(
    dk, dv_acc, k, v, q_mat, dout_mat, q_row, q_col, o_row, o_col, stats_ptr, begin, end, q_len,
    first, last, distance, key_words, seed_ptr, batch, head, token, slope, scale,
    softcap, threshold, keep_scale, stride_q, stride_o, stride, d, dv,
    D: tl.constexpr, DV: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
    SHORT_DOCS: tl.constexpr, BLOCK_M: tl.constexpr,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
    UPCAST: tl.constexpr, STAGES: tl.constexpr,
):
    """Add queries begin … end to dK and dV of a block of keys; scores are (keys, queries)."""
    numbers = tl.arange(0, BLOCK_M)
    for i in tl.range(begin, end, BLOCK_M, num_stages=STAGES):
        at = inside_of(i, q_len, BLOCK_M, MASKED, SHORT_DOCS)
        inside = at + numbers < q_len
        q = load_rows(
            q_mat, q_row + at, q_col, stride_q, inside, d, BLOCK_M, D, TMA, EVEN, MASKED, SHORT_DOCS
        )
        dout = load_rows(
            dout_mat, o_row + at, o_col, stride_o, inside, dv, BLOCK_M, DV, TMA, EVEN, MASKED,
            SHORT_DOCS
        )
        lse, delta = load_stats(stats_ptr, at, q_len, BLOCK_M, MASKED)
        rows = (at + numbers)[None, :]
        p, slope_of_cap = probabilities(
            dot(k, tl.trans(q), UPCAST), distance[:, None] - rows * stride, rows,
            tl.maximum(first, i)[:, None], last[:, None], lse[None, :], slope, scale, softcap,
            MASKED, SOFTCAP, ALIBI,
        )
        dp = dot(v, tl.trans(dout), UPCAST)
        if DROPOUT:
            row_hash = row_keys(seed_ptr, batch, head, token + (at + numbers) * stride)
            kept = mix(row_hash[None, :] ^ key_words[:, None]) >= threshold
            dp = tl.where(kept, dp * keep_scale, 0.0)
            shown = tl.where(kept, p * keep_scale, 0.0)
        else:
            shown = p
        dv_acc += dot(shown.to(dout.dtype), dout, UPCAST)
        ds = p * (dp - delta[None, :]) * slope_of_cap
        dk += dot(ds.to(q.dtype), q, UPCAST)
    return dk, dv_acc


@triton.jit(do_not_specialize=ANY_NUMBER)
def keys_kernel(
    q_mat, k_mat, v_mat, dout_mat, stats_ptr, dk_ptr, dv_ptr, slopes_ptr, seed_ptr, blocks_ptr,
    tiles_ptr, scale, softcap, threshold, keep_scale, head_start, d, dv, nheads_k, group, count,
    section, q_stride, q_brow, q_bcol, q_hrow, q_hcol, k_stride, k_brow, k_bcol, k_hrow, k_hcol,
    v_stride, v_brow, v_bcol, v_hrow, v_hcol, o_stride, o_brow, o_bcol, o_hrow, o_hcol,
    s_batch, s_head, s_row, dk_batch, dk_row, dk_head, dv_batch, dv_row, dv_head, slopes_stride,
    D: tl.constexpr, DV: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
    SHORT_DOCS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
    UPCAST: tl.constexpr, STAGES: tl.constexpr, FRESH: tl.constexpr,
):
    """dK and dV of BLOCK_N keys of one KV head: all query heads of its group, all tiles."""
    block, pair = place(count, section)
    own = block_entry(blocks_ptr, block)
    row, columns, j0 = own.row, own.rows, own.first
    position, index, stride = own.position, own.token, own.stride
    batch, head_k = pair // nheads_k, pair % nheads_k
    batch64 = batch.to(tl.int64)

    numbers = tl.arange(0, BLOCK_N)
    valid = numbers < columns
    depth, depth_v = tl.arange(0, D), tl.arange(0, DV)
    here = (row + numbers).to(tl.int64)
    k_mask, v_mask = valid[:, None] & (depth < d)[None, :], valid[:, None] & (depth_v < dv)[None, :]
    k_row0, k_col = batch * k_brow + head_k * k_hrow, batch * k_bcol + head_k * k_hcol
    v_row0, v_col = batch * v_brow + head_k * v_hrow, batch * v_bcol + head_k * v_hcol
    k = load_rows(
        k_mat, k_row0 + row, k_col, k_stride, valid, d, BLOCK_N, D, TMA, EVEN, True, False
    )
    v = load_rows(
        v_mat, v_row0 + row, v_col, v_stride, valid, dv, BLOCK_N, DV, TMA, EVEN, True, False
    )
    key_words = spread(index + numbers * stride)
    columns_j = j0 + numbers
    dk = tl.zeros([BLOCK_N, D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, DV], tl.float32)

    for member in range(0, group):
        head = head_k * group + member
        slope = 0.0
        if ALIBI:
            slope = slope_of(slopes_ptr, slopes_stride, blocks_ptr, block, batch, head)
        q_row0, q_col = batch * q_brow + head * q_hrow, batch * q_bcol + head * q_hcol
        o_row0, o_col = batch * o_brow + head * o_hrow, batch * o_bcol + head * o_hcol
        stats_base = stats_ptr + batch64 * s_batch + head.to(tl.int64) * s_head
        tile = own.tile
        while tile < own.last_tile:
            queries = tile_entry(tiles_ptr, tile)
            other, q_len, low = queries.row, queries.length, queries.low
            high, q_index = queries.high, queries.token
            other64 = other.to(tl.int64)
            distance = position + numbers * stride - queries.position  # to the tile's first query
            begin = tl.maximum(0, j0 + low)
            end = tl.minimum(q_len, j0 + columns + high)
            first = columns_j + low
            last = tl.minimum(columns_j + high, q_len - 1)
            # Causal masks cut at the beginning here: the edge comes first, then whole blocks.
            edge = tl.maximum(j0 + columns - 1 + low, begin)
            edge = tl.minimum(begin + (edge - begin + BLOCK_M - 1) // BLOCK_M * BLOCK_M, end)
            whole = tl.minimum(q_len, j0 + high + 1)
            whole = edge + tl.maximum(whole - edge, 0) // BLOCK_M * BLOCK_M
            dk, dv_acc = run_keys(
                dk, dv_acc, k, v, q_mat, dout_mat, q_row0 + other, q_col, o_row0 + other, o_col,
                stats_base + other64 * s_row, begin, edge, q_len, first, last, distance,
                key_words, seed_ptr, batch, head + head_start, q_index, slope, scale, softcap,
                threshold, keep_scale, q_stride, o_stride, stride, d, dv, D, DV, EVEN, TMA,
                SHORT_DOCS, BLOCK_M, True, SOFTCAP, ALIBI, DROPOUT, UPCAST, STAGES,
            )
            dk, dv_acc = run_keys(
                dk, dv_acc, k, v, q_mat, dout_mat, q_row0 + other, q_col, o_row0 + other, o_col,
                stats_base + other64 * s_row, edge, whole, q_len, first, last, distance,
                key_words, seed_ptr, batch, head + head_start, q_index, slope, scale, softcap,
                threshold, keep_scale, q_stride, o_stride, stride, d, dv, D, DV, EVEN, TMA,
                SHORT_DOCS, BLOCK_M, False, SOFTCAP, ALIBI, DROPOUT, UPCAST, STAGES,
            )
            dk, dv_acc = run_keys(
                dk, dv_acc, k, v, q_mat, dout_mat, q_row0 + other, q_col, o_row0 + other, o_col,
                stats_base + other64 * s_row, whole, end, q_len, first, last, distance,
                key_words, seed_ptr, batch, head + head_start, q_index, slope, scale, softcap,
                threshold, keep_scale, q_stride, o_stride, stride, d, dv, D, DV, EVEN, TMA,
                SHORT_DOCS, BLOCK_M, True, SOFTCAP, ALIBI, DROPOUT, UPCAST, STAGES,
            )
            tile += 1

    dk_ptrs = dk_ptr + batch64 * dk_batch + head_k * dk_head
    dk_ptrs += here[:, None] * dk_row + depth[None, :]
    dv_ptrs = dv_ptr + batch64 * dv_batch + head_k * dv_head
    dv_ptrs += here[:, None] * dv_row + depth_v[None, :]
    put(dk_ptrs, dk * scale, k_mask, FRESH)
    put(dv_ptrs, dv_acc, v_mask, FRESH)


@triton.jit
def run_queries(
    dq, q, dout, lse, delta, k_mat, v_mat, k_row, k_col, v_row, v_col, begin, end, k_len, first,
    last, distance, row_hash, token, slope, scale, softcap, threshold, keep_scale,
    stride_k, stride_v, stride, d, dv,
    D: tl.constexpr, DV: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
    SHORT_DOCS: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
    UPCAST: tl.constexpr, STAGES: tl.constexpr,
):
    """Add keys begin … end to dQ of a block of queries."""
    columns = tl.arange(0, BLOCK_N)
    for j in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        at = inside_of(j, k_len, BLOCK_N, MASKED, SHORT_DOCS)
        inside = at + columns < k_len
        k = load_rows(
            k_mat, k_row + at, k_col, stride_k, inside, d, BLOCK_N, D, TMA, EVEN, MASKED, SHORT_DOCS
        )
        v = load_rows(
            v_mat, v_row + at, v_col, stride_v, inside, dv, BLOCK_N, DV, TMA, EVEN, MASKED,
            SHORT_DOCS,
        )
        keys = (at + columns)[None, :]
        products = dot(q, tl.trans(k), UPCAST)
        dp = dot(dout, tl.trans(v), UPCAST)
        p, slope_of_cap = probabilities(
            products, distance[:, None] + keys * stride, keys,
            tl.maximum(first, j)[:, None], last[:, None],
            lse[:, None], slope, scale, softcap, MASKED, SOFTCAP, ALIBI,
        )
        if DROPOUT:
            kept = mix(row_hash[:, None] ^ spread(token + keys * stride)) >= threshold
            dp = tl.where(kept, dp * keep_scale, 0.0)
        ds = p * (dp - delta[:, None]) * slope_of_cap
        dq += dot(ds.to(k.dtype), k, UPCAST)
    return dq


@triton.jit(do_not_specialize=ANY_NUMBER)
def queries_kernel(
    q_mat, k_mat, v_mat, dout_mat, stats_ptr, dq_ptr, slopes_ptr, seed_ptr, blocks_ptr, tiles_ptr,
    scale, softcap, threshold, keep_scale, head_start, d, dv, nheads, group, count, section,
    q_stride, q_brow, q_bcol, q_hrow, q_hcol, k_stride, k_brow, k_bcol, k_hrow, k_hcol,
    v_stride, v_brow, v_bcol, v_hrow, v_hcol, o_stride, o_brow, o_bcol, o_hrow, o_hcol,
    s_batch, s_head, s_row, dq_batch, dq_row, dq_head, slopes_stride,
    D: tl.constexpr, DV: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
    SHORT_DOCS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
    UPCAST: tl.constexpr, STAGES: tl.constexpr, FRESH: tl.constexpr,
):
    """dQ of BLOCK_M queries of one head: all tiles of the span."""
    block, pair = place(count, section)
    own = block_entry(blocks_ptr, block)
    row, rows, i0, tile = own.row, own.rows, own.first, own.tile
    position, index, stride = own.position, own.token, own.stride
    batch, head = pair // nheads, pair % nheads
    batch64, head_k = batch.to(tl.int64), head // group

    numbers = tl.arange(0, BLOCK_M)
    valid = numbers < rows
    depth = tl.arange(0, D)
    here = (row + numbers).to(tl.int64)
    q_mask = valid[:, None] & (depth[None, :] < d)
    q_row0, q_col = batch * q_brow + head * q_hrow, batch * q_bcol + head * q_hcol
    o_row0, o_col = batch * o_brow + head * o_hrow, batch * o_bcol + head * o_hcol
    q = load_rows(
        q_mat, q_row0 + row, q_col, q_stride, valid, d, BLOCK_M, D, TMA, EVEN, True, False
    )
    dout = load_rows(
        dout_mat, o_row0 + row, o_col, o_stride, valid, dv, BLOCK_M, DV, TMA, EVEN, True, False
    )
    stats_ptr += batch64 * s_batch + head.to(tl.int64) * s_head + row.to(tl.int64) * s_row
    lse, delta = load_stats(stats_ptr, 0, rows, BLOCK_M, True)
    k_row0, k_col = batch * k_brow + head_k * k_hrow, batch * k_bcol + head_k * k_hcol
    v_row0, v_col = batch * v_brow + head_k * v_hrow, batch * v_bcol + head_k * v_hcol
    slope = 0.0
    if ALIBI:
        slope = slope_of(slopes_ptr, slopes_stride, blocks_ptr, block, batch, head)
    row_hash = numbers.to(tl.uint32)
    if DROPOUT:
        row_hash = row_keys(seed_ptr, batch, head + head_start, index + numbers * stride)
    rows_i = i0 + numbers
    dq = tl.zeros([BLOCK_M, D], tl.float32)

    while tile < own.last_tile:
        keys = tile_entry(tiles_ptr, tile)
        k_row, k_len, low, high, k_index = keys.row, keys.length, keys.low, keys.high, keys.token
        distance = keys.position - position - numbers * stride
        begin = tl.maximum(0, i0 + low)
        end = tl.minimum(k_len, i0 + rows + high)
        first = rows_i + low
        last = tl.minimum(rows_i + high, k_len - 1)
        whole = tl.minimum(k_len, i0 + high + 1)
        if WINDOW:
            edge = tl.maximum(i0 + rows - 1 + low, begin)
            edge = tl.minimum(begin + (edge - begin + BLOCK_N - 1) // BLOCK_N * BLOCK_N, end)
            dq = run_queries(
                dq, q, dout, lse, delta, k_mat, v_mat, k_row0 + k_row, k_col, v_row0 + k_row, v_col,
                begin, edge, k_len, first, last, distance, row_hash, k_index, slope, scale,
                softcap, threshold, keep_scale, k_stride, v_stride, stride, d, dv, D, DV, EVEN,
                TMA, SHORT_DOCS, BLOCK_N, True, SOFTCAP, ALIBI, DROPOUT, UPCAST, STAGES,
            )
            begin = edge
        whole = begin + tl.maximum(whole - begin, 0) // BLOCK_N * BLOCK_N
        dq = run_queries(
            dq, q, dout, lse, delta, k_mat, v_mat, k_row0 + k_row, k_col, v_row0 + k_row, v_col,
            begin, whole, k_len, first, last, distance, row_hash, k_index, slope, scale,
            softcap, threshold, keep_scale, k_stride, v_stride, stride, d, dv, D, DV, EVEN, TMA,
            SHORT_DOCS, BLOCK_N, False, SOFTCAP, ALIBI, DROPOUT, UPCAST, STAGES,
        )
        dq = run_queries(
            dq, q, dout, lse, delta, k_mat, v_mat, k_row0 + k_row, k_col, v_row0 + k_row, v_col,
            whole, end, k_len, first, last, distance, row_hash, k_index, slope, scale,
            softcap, threshold, keep_scale, k_stride, v_stride, stride, d, dv, D, DV, EVEN, TMA,
            SHORT_DOCS, BLOCK_N, True, SOFTCAP, ALIBI, DROPOUT, UPCAST, STAGES,
        )
        tile += 1

    dq_ptrs = dq_ptr + batch64 * dq_batch + head * dq_head + here[:, None] * dq_row + depth[None, :]
    put(dq_ptrs, dq * scale, q_mask, FRESH)
