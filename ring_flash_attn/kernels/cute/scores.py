"""What happens to a block of scores: softcap, ALiBi, band, softmax with a carried state, dropout.

Scores are in base 2, so that an exponential is one instruction. A thread has two rows (r = 0, 1)
of a block; m and the sums are its own registers. See `primitives.py` for the order of registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from .primitives import LN2, LOG2E, at, exp2, inverse, number, pack, shared_at, vector

CARRY = 23  # log2 of the weight that a state starts with; see `../triton/forward.py`
LIMIT = 1024.0  # of sums of powers above a maximum that is not new; fp16 has 65504


class Scores(NamedTuple):
    """What turns products into scores, the same for a whole launch.

    Attributes:
        inner: what a product is multiplied with in the softcap's exponential.
        outer: what a product, or with a softcap its tanh, is multiplied with.
        factor: what a finished score is still multiplied with; see `finish`.
    """

    inner: Any
    outer: Any
    factor: Any


class ThreadRows(NamedTuple):
    """A thread's two rows, and the column where its numbers begin.

    Attributes:
        first: number of the first of them in its span; the other is 8 further on.
        column: 2 · (lane % 4).
        position: of row 0 of the span, ALiBi's; `stride` is what positions and tokens grow by.
        slope: of ALiBi, in base 2.
        hashes: of dropout, one for each row.
    """

    first: Any
    column: Any
    position: Any
    stride: Any
    slope: Any
    hashes: Any


class RunningSoftmax(NamedTuple):
    """The running state of a thread's two rows.

    Attributes:
        m: maximum of each row, in base 2.
        sums: 4 sums of powers, number 2 · r + e; over a row, they and its other threads' add up.
    """

    m: Any
    sums: Any


def scores_of(scale: Any, softcap: Any, traits: Any) -> Scores:
    """For a launch."""
    outer = (softcap if traits.softcap else scale) * LOG2E
    return Scores(scale / softcap * (2.0 * LOG2E), outer, Float32(1.0) if traits.alibi else outer)


@cute.jit
def finish(
    s: Any, scores: Any, rows: Any, keys: Any, start: Any, traits: cutlass.Constexpr
) -> None:
    """Softcap and ALiBi, of the keys from `start` on; else nothing is left to do."""
    cap(s, scores, traits)
    slant(s, scores, rows, keys, start, traits)


@cute.jit
def cap(s: Any, scores: Any, traits: cutlass.Constexpr) -> None:
    """The softcap's tanh, if there is a softcap.

    It is exact to some 3e-7: that is what the exponential makes of it, and times the softcap it is
    far below the rounding of p.
    """
    if const_expr(traits.softcap):
        for i in cutlass.range_constexpr(cute.size(s)):
            s[i] = 1.0 - 2.0 * inverse(exp2(s[i] * scores.inner) + 1.0)


@cute.jit
def slant(s: Any, scores: Any, rows: Any, keys: Any, start: Any, traits: cutlass.Constexpr) -> None:
    """ALiBi, if there is any: then scores are finished, in base 2."""
    if const_expr(traits.alibi):
        for r in cutlass.range_constexpr(2):
            query = rows.position + (rows.first + 8 * r) * rows.stride
            distance = keys.position + (start + rows.column) * rows.stride - query
            for g in cutlass.range_constexpr(cute.size(s) // 4):
                for e in cutlass.range_constexpr(2):
                    i = 4 * g + 2 * r + e
                    away = Float32(distance + (8 * g + e) * rows.stride)
                    s[i] = s[i] * scores.outer - rows.slope * cute.arch.fmax(away, -away)


@cute.jit
def mask(s: Any, rows: Any, keys: Any, j: Any, start: Any, end: Any = None) -> None:
    """−inf outside of the band, and for keys before j; the block begins at `start`.

    And for all of a row from `end` on, if that is given.
    """
    for r in cutlass.range_constexpr(2):
        row = rows.first + 8 * r
        first = cutlass.max(row + keys.low, j) - start - rows.column
        last = cutlass.min(row + keys.high, keys.length - 1) - start - rows.column
        if const_expr(end is not None):
            last = last if row < end else Int32(-1)
        for g in cutlass.range_constexpr(cute.size(s) // 4):
            for e in cutlass.range_constexpr(2):
                column = 8 * g + e
                seen = (first <= column) & (last >= column)
                s[4 * g + 2 * r + e] = s[4 * g + 2 * r + e] if seen else -Float32.inf


@cute.jit
def powers(s: Any, softmax: Any, scores: Any, rescale: Any) -> None:
    """s becomes p = 2^(s − m) for the new maximum m; `rescale` is what to scale the output with."""
    groups = cute.size(s) // 4
    for r in cutlass.range_constexpr(2):
        even, odd = s[2 * r], s[2 * r + 1]
        for g in cutlass.range_constexpr(1, groups):
            even = cute.arch.fmax(even, s[4 * g + 2 * r])
            odd = cute.arch.fmax(odd, s[4 * g + 2 * r + 1])
        top = cute.arch.fmax(even, odd)
        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1))
        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=2))
        m = softmax.m[r]
        new = cute.arch.fmax(m, top * scores.factor)
        safe = Float32(0.0) if new == -Float32.inf else new
        rescale[r] = exp2(m - safe)
        softmax.m[r] = new
        for e in cutlass.range_constexpr(2):
            total = softmax.sums[2 * r + e] * rescale[r]
            for g in cutlass.range_constexpr(groups):
                i = 4 * g + 2 * r + e
                s[i] = exp2(s[i] * scores.factor - safe)
                total = total + s[i]
            softmax.sums[2 * r + e] = total


@cute.jit
def scaled(out: Any, rescale: Any) -> None:
    """Every number of a row times what is its row's."""
    for g in cutlass.range_constexpr(cute.size(out) // 4):
        for r in cutlass.range_constexpr(2):
            out[4 * g + 2 * r] = out[4 * g + 2 * r] * rescale[r]
            out[4 * g + 2 * r + 1] = out[4 * g + 2 * r + 1] * rescale[r]


@cute.jit
def powers_of_old_maximum(
    p: Any, s: Any, softmax: Any, scores: Any, sums: Any, rows: Any, keys: Any, start: Any,
    dropout: Any, traits: cutlass.Constexpr,
) -> Any:  # fmt: skip
    """p, rounded, and its four sums, for the maximum that the rows have; s stays.

    Returns whether that will not do for some row of this warp: a sum is too large, or there is no
    maximum yet.
    """
    pairs = cute.recast_tensor(p, Int32)
    tokens = tokens_of(rows, keys, start)
    for r in cutlass.range_constexpr(2):
        m = softmax.m[r]
        even, odd = Float32(0.0), Float32(0.0)
        for g in cutlass.range_constexpr(cute.size(s) // 4):
            i = 4 * g + 2 * r
            low = exp2(s[i] * scores.factor - m)
            high = exp2(s[i + 1] * scores.factor - m)
            even = even + low
            odd = odd + high
            if const_expr(traits.dropout):
                low = low if kept(rows, tokens, r, 8 * g, dropout) else Float32(0.0)
                high = high if kept(rows, tokens, r, 8 * g + 1, dropout) else Float32(0.0)
            pairs[i // 2] = pack(low, high, p.element_type)
        sums[2 * r] = even
        sums[2 * r + 1] = odd
    # Not `> LIMIT`: a NaN must be found, too.
    fine = (sums[0] <= LIMIT) & (sums[1] <= LIMIT) & (sums[2] <= LIMIT) & (sums[3] <= LIMIT)
    return cute.arch.vote_any_sync(not fine)


# The carried state


@cute.jit
def begin(softmax: Any, lse: Any) -> None:
    """Go on from an lse of each row; −inf: from nothing.

    As one key of weight 1 a state would push later keys below fp16's range: so m starts 2^CARRY
    lower and the sums that much higher. A row's state counts once, in the four threads' first sums.
    """
    for r in cutlass.range_constexpr(2):
        known = lse[r] != -Float32.inf
        softmax.m[r] = lse[r] * LOG2E - float(CARRY)
        softmax.sums[2 * r] = Float32(2.0 ** (CARRY - 2)) if known else Float32(0.0)
        softmax.sums[2 * r + 1] = Float32(0.0)


@cute.jit
def end(softmax: Any, lse: Any, inverses: Any) -> None:
    """lse of each row, −inf if it saw no key; and what its output is to be multiplied with, 0."""
    for r in cutlass.range_constexpr(2):
        total = softmax.sums[2 * r] + softmax.sums[2 * r + 1]
        total = total + cute.arch.shuffle_sync_bfly(total, offset=1)
        total = total + cute.arch.shuffle_sync_bfly(total, offset=2)
        seen = total != 0.0  # NaN is
        inverses[r] = 1.0 / total if seen else Float32(0.0)
        log = cute.math.log2(total, fastmath=True)
        lse[r] = (softmax.m[r] + log) * LN2 if seen else -Float32.inf


# Dropout: see `../dropout.py`


class Dropout(NamedTuple):
    """The key of the draws, and how many of 2^32 are dropped."""

    seed: Any  # address of an int64
    threshold: Any
    keep_scale: Any
    head_start: Any


def mix(x: Any) -> Any:
    """MurmurHash3's finaliser."""
    x = (x ^ (x >> 16)) * Uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * Uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def spread(x: Any) -> Any:
    return Uint32(x) * Uint32(0x9E3779B1)


def row_hash(dropout: Dropout, batch: Any, head: Any, token: Any) -> Any:
    """The part of the hash that does not depend on the key."""
    return mix(head_hash(dropout, batch, head) ^ spread(token))


def head_hash(dropout: Dropout, batch: Any, head: Any) -> Any:
    """The part that depends on neither query nor key."""
    seed = vector_of_words(dropout.seed)
    word = mix(mix(seed[0]) ^ seed[1])
    word = mix(word ^ spread(batch))
    return mix(word ^ spread(head + dropout.head_start))


def vector_of_words(address: Any) -> tuple[Any, Any]:
    """The low and the high half of an int64. What is loaded counts as signed until it is cast."""
    low, high = (number(at(address, Uint32, Int64(half))) for half in range(2))
    return Uint32(low), Uint32(high)


def tokens_of(rows: Any, keys: Any, start: Any) -> tuple[Any, Any]:
    """What the hash takes of the thread's first key of a block, and what that grows by."""
    return spread(keys.token + (start + rows.column) * rows.stride), spread(rows.stride)


def kept(rows: Any, tokens: Any, r: int, column: int, dropout: Any) -> Any:
    """Whether a number stays."""
    first, step = tokens
    return mix(rows.hashes[r] ^ (first + step * Uint32(column))) >= dropout.threshold


@cute.jit
def drop(p: Any, rows: Any, keys: Any, start: Any, dropout: Any) -> None:
    """0 for what is dropped."""
    tokens = tokens_of(rows, keys, start)
    for r in cutlass.range_constexpr(2):
        for g in cutlass.range_constexpr(cute.size(p) // 4):
            for e in cutlass.range_constexpr(2):
                i = 4 * g + 2 * r + e
                stays = kept(rows, tokens, r, 8 * g + e, dropout)
                p[i] = p[i] if stays else Float32(0.0)


@cute.jit
def normalised(out: Any, inverses: Any) -> None:
    """Every number of a row times what `end` says; 0 where that is 0, whatever the number is."""
    for g in cutlass.range_constexpr(cute.size(out) // 4):
        for r in cutlass.range_constexpr(2):
            for e in cutlass.range_constexpr(2):
                i = 4 * g + 2 * r + e
                some = inverses[r] != 0.0
                out[i] = out[i] * inverses[r] if some else Float32(0.0)


# The backward's: rows are keys, and columns queries


class Columns(NamedTuple):
    """What is known of a block's queries, in shared memory or registers.

    Attributes:
        lse: in base 2, less log2 of the softmax scale if `folded`, +inf where no key was seen:
            registers, or the address of a thread's first in shared memory.
        delta: the same of what is subtracted from dp.
        hash: dropout's, of the head.

    Where roles are exchanged rows are queries: lse and delta are numbers of a thread's two rows.
    """

    lse: Any
    delta: Any
    hash: Any


class EarlyStats(NamedTuple):
    """lse or delta: the first in registers, the others from an address on."""

    registers: Any
    address: Any


def pair_of(numbers: Any, g: int) -> Any:
    """Two numbers, of a thread's two columns of group g: in registers, or from an address on."""
    if isinstance(numbers, EarlyStats):
        known = numbers.registers
        if 2 * g < cute.size(known):
            return known[2 * g], known[2 * g + 1]
        numbers = numbers.address
    return vector(shared_at(numbers + 32 * g, Float32, 8), 2).load()


def load_stats(address: Any, columns: int) -> EarlyStats:
    """A thread's lse or delta of a block's first columns."""
    numbers = cute.make_rmem_tensor(columns // 4, Float32)
    for g in range(columns // 8):
        pair = pair_of(address, g)
        numbers[2 * g] = pair[0]
        numbers[2 * g + 1] = pair[1]
    return EarlyStats(numbers, address)


@cute.jit
def probabilities(
    s: Any, p: Any, scores: Any, rows: Any, columns: Any, token: Any, dropout: Any, bits: Any,
    capped: Any, traits: cutlass.Constexpr,
) -> None:  # fmt: skip
    """s, scores, becomes what ds is a multiple of; p, rounded, what dV is computed with.

    The first is p, with a softcap times its derivative; the second what dropout leaves of p, and
    `bits`, if there are any, say what that is. Without `p` it is not needed yet. `token` is that
    of the block's first query. `capped` has the softcap's derivative, where s does not say it.
    """
    for g in cutlass.range_constexpr(cute.size(s) // 4):
        lse = columns.lse if const_expr(traits.exchanged) else pair_of(columns.lse, g)
        hashes: Any = None
        if const_expr(traits.dropout):
            tokens = [token + (rows.column + 8 * g + e) * rows.stride for e in range(2)]
            hashes = [spread(each) for each in tokens]
            if const_expr(not traits.exchanged):
                hashes = [mix(columns.hash ^ each) for each in hashes]
        for r in cutlass.range_constexpr(2):
            shown = []
            for e in cutlass.range_constexpr(2):
                i = 4 * g + 2 * r + e
                power = exp2(s[i] * scores.factor - lse[r if const_expr(traits.exchanged) else e])
                if const_expr(traits.dropout):
                    stays = mix(hashes[e] ^ rows.hashes[r]) >= dropout.threshold
                    bit = Uint32(1 << i % 32)
                    bits[i // 32] = bits[i // 32] | (bit if stays else Uint32(0))
                    shown.append(power if stays else Float32(0.0))
                else:
                    shown.append(power)
                if const_expr(traits.softcap and traits.alibi):
                    s[i] = power * Float32(capped[i])
                elif const_expr(traits.softcap):
                    slope = cute.arch.fmax(1.0 - s[i] * s[i], Float32(0.0))  # −inf where masked
                    s[i] = power * slope
                else:
                    s[i] = power
            if const_expr(p is not None):
                cute.recast_tensor(p, Int32)[2 * g + r] = pack(shown[0], shown[1], p.element_type)


@cute.jit
def slopes_of_cap(s: Any, capped: Any) -> None:
    """1 − tanh², rounded, of the tanh."""
    pairs = cute.recast_tensor(capped, Int32)
    for i in cutlass.range_constexpr(cute.size(pairs)):
        low, high = s[2 * i], s[2 * i + 1]
        pairs[i] = pack(1.0 - low * low, 1.0 - high * high, cutlass.Float16)


@cute.jit
def score_gradients(
    ds: Any, s: Any, dp: Any, rows: Any, columns: Any, dropout: Any, bits: Any,
    traits: cutlass.Constexpr,
) -> None:  # fmt: skip
    """ds, rounded, with the softmax scale if `s` has it (`folded`)."""
    pairs = cute.recast_tensor(ds, Int32)
    for g in cutlass.range_constexpr(cute.size(s) // 4):
        delta = columns.delta if const_expr(traits.exchanged) else pair_of(columns.delta, g)
        for r in cutlass.range_constexpr(2):
            found = []
            for e in cutlass.range_constexpr(2):
                i = 4 * g + 2 * r + e
                away = dp[i]
                if const_expr(traits.dropout):
                    stays = (bits[i // 32] & Uint32(1 << i % 32)) != 0
                    away = away * dropout.keep_scale if stays else Float32(0.0)
                found.append(
                    Float32(s[i]) * (away - delta[r if const_expr(traits.exchanged) else e])
                )
            pairs[2 * g + r] = pack(found[0], found[1], ds.element_type)
