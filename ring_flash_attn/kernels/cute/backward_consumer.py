"""The backward kernel's consumers: two warpgroups of 64 keys each."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ..tables import BlockEntry
from . import scores as scores_of
from .backward_producer import COPIES, queries_of, read_item
from .primitives import (
    GMEM,
    LOG2E,
    ROWS,
    WARPGROUP,
    Scheduler,
    accumulators,
    as_a,
    as_c,
    at,
    edges,
    inside,
    lane_again,
    multiply,
    number,
    operand,
    pack,
    product_of,
    round_into,
    shared_at,
    store_matrices,
    transposed,
    uniform_again,
    vector,
)
from .scores import Columns, Dropout, Scores, ThreadRows
from .traits import CONSUMERS, OWN, BackwardShared, BackwardTraits, Gradients, offset


def ds_place(row: Any, g: int, more: Any, block: int) -> Any:
    """Byte of ds, (key, query), of a consumer: of key `row` and group g + `more` of 8 queries.

    Lines are as long as a block allows, 128 bytes as a rule, and their chunks are swizzled.
    """
    line = next(each for each in (128, 64, 32) if block * 2 % each == 0)
    chunks = line // 16
    chunk = (g % chunks + more) ^ (row // (8 // chunks) % chunks)
    return row * line + g // chunks * (ROWS * line) + chunk * 16


def swapped_place(warp: Any, lane: Any, r: int, e: int, block: int) -> Any:
    """Byte of dQ, (query, column), of a consumer: of number 2 · r + e of a transposed fragment.

    Four threads' queries are in four banks; the next 8 queries are 1024 bytes further.
    """
    chunk = (warp % 2 * 4 + 2 * r + lane // 16) ^ (lane % 4 * 2 + e)
    query = lane % 4 * 2 + e
    return warp // 2 * (block * 128) + query * 128 + chunk * 16 + lane // 4 % 4 * 4


class BackwardLaunch(NamedTuple):
    """What is the same for all items."""

    schedule: Scheduler
    gradients: Gradients
    scale: Any
    scores: Scores
    slopes: Any  # ALiBi's: address, and what it grows by for each batch
    stats: Any  # addresses of lse and delta, and numbers of a copy of them
    dropout: Dropout
    shared: BackwardShared


class Operands(NamedTuple):
    """A product, and its left and right operands, as far as they are in shared memory."""

    mma: Any
    a: Any
    b: Any


class Thread(NamedTuple):
    """Who a thread is, and its products.

    Attributes:
        number: of its consumer.
        warp: in that.
        s, dp, dv, dk, dq: products.
    """

    number: Any
    warp: Any
    s: Operands
    dp: Any  # None where it is not needed, and so is dQ
    dv: Operands
    dk: Operands
    dq: Any


class KeyBlock(NamedTuple):
    """An item under way.

    Attributes:
        own: its block of the table.
        batch, part: which part of which KV head.
        keys: where its keys are in shared memory.
        row: the consumer's first key, in the span.
        first: number of its first block.
        stats: lse and delta of a thread's rows, where these are queries.
        dk, dv: registers.
        kept: registers: parts of dQ of the block before, which the adder has not got yet.
    """

    own: BlockEntry
    batch: Any
    part: Any
    keys: Any
    row: Any
    first: Any
    stats: Any
    dk: Any
    dv: Any
    kept: Any


class QueryHead(NamedTuple):
    """Of a query head: ALiBi's slope, in base 2, and dropout's hash."""

    slope: Any
    hash: Any


class QueryRange(NamedTuple):
    """A tile's queries that see keys of an item, and where blocks of them begin that need a mask.

    Those before `left` do, for this consumer's keys, and those from `right` on.
    """

    begin: Any
    left: Any
    right: Any
    end: Any


class BackwardConsumer:
    """Its phases, in order; w counts items, and n blocks of queries, over all items."""

    def __init__(self, traits: BackwardTraits) -> None:
        self.traits = traits

    @cute.jit
    def consume(
        self, schedule: Any, gradients: Any, numbers: Any, dropout: Any, shared: Any
    ) -> None:
        """dK and dV of 64 keys, and half of dQ, of each item."""
        scale, softcap, slopes, slopes_batch, *stats = numbers
        scores = scores_of.scores_of(scale, softcap, self.traits)
        launch = BackwardLaunch(
            schedule,
            gradients,
            scale,
            scores,
            (slopes, slopes_batch),
            tuple(stats),
            dropout,
            shared,
        )
        me = self.who(shared)
        w = Int32(0)
        n = Int32(0)
        shared.item.await_full(w)
        rows = shared.items[1, shared.item.stage(w)]
        while rows > 0:
            n = self.differentiate(launch, me, w, n)
            shared.item.release(w)
            w += 1
            shared.item.await_full(w)
            rows = shared.items[1, shared.item.stage(w)]

    def who(self, shared: BackwardShared) -> Thread:
        """This thread."""
        traits = self.traits
        thread, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(thread // WARPGROUP) - 1
        warp = cute.arch.make_warp_uniform(thread // 32) % (WARPGROUP // 32)
        dtype = traits.element
        s = product_of(dtype, traits.piece, False, False)
        dp = product_of(dtype, traits.piece, False, False)
        dv = product_of(dtype, traits.dv, True, True)
        dk = product_of(dtype, traits.d, True, True)
        left, right = transposed(shared.ds), transposed(shared.k)
        if traits.swapped:
            left, right = right, left
        columns = traits.block if traits.swapped else traits.product_columns
        dq = product_of(dtype, columns, False, True, True)
        return Thread(
            group,
            warp,
            self.operands(s, shared.k, shared.q),
            self.operands(dp, shared.v, shared.dout) if traits.values else None,
            self.operands(dv, None, transposed(shared.dout)),
            self.operands(dk, None, transposed(shared.q)),
            self.operands(dq, left, right) if traits.dq else None,
        )

    def operands(self, mma: Any, a: Any, b: Any) -> Operands:
        """Descriptors of shared memory."""
        of = mma.get_slice(0)
        left = None if a is None else of.make_fragment_A(of.partition_A(a))
        return Operands(mma, left, of.make_fragment_B(of.partition_B(b)))

    # An item

    @cute.jit
    def differentiate(self, launch: Any, me: Any, w: Any, n: Any) -> Any:
        """dK and dV of 64 keys, and half of dQ of their queries."""
        traits, shared = self.traits, launch.shared
        own, batch, part = read_item(shared, shared.item.stage(w))
        dk, dv, kept, stats = None, None, None, None
        if const_expr(traits.only != "dv"):
            dk = accumulators(traits.d)
            dk.fill(0.0)
        if const_expr(traits.only != "dk"):
            dv = accumulators(traits.dv)
            dv.fill(0.0)
        if const_expr(traits.exchanged):
            stats = self.stats_of_rows(launch, me, own, batch, part)
        if const_expr(traits.kept > 0):
            kept = accumulators(traits.dq_columns * traits.kept)
            kept.fill(0.0)
        keys = shared.keys.stage(w) * CONSUMERS
        item = KeyBlock(
            own, batch, part, keys, own.first + me.number * ROWS, n, stats, dk, dv, kept
        )
        shared.keys.await_full(w)
        if const_expr(traits.values > 0):
            shared.values.await_full(w)
        self.clear_rest(shared, me, item)
        head = part * launch.schedule.group
        last = head + launch.schedule.group
        while head < last:
            of_head = self.head_of(launch, item, head)
            tile = own.tile
            while tile < own.last_tile:
                span = self.span_of(launch, item, tile)
                j = span.begin
                while j < span.end:
                    self.block(launch, me, item, of_head, span, tile, n, j)
                    n += 1
                    j += traits.block
                tile += 1
            head += 1
        if const_expr(traits.values > 0):
            shared.values.release(w)
        if const_expr(traits.paired):
            self.hand_over_kept(launch, me, item, n - 1)
            shared.ready.await_empty(n)  # nobody reads ds
        elif const_expr(traits.dq):
            self.await_block(shared, n - 1)  # its ds is there, and nobody reads those before
            if n > item.first:
                for h in cutlass.range_constexpr(traits.pieces):
                    dq = self.issue_dq(me, item, n - 1, h)
                    warpgroup.wait_group(0)
                    self.put_dq(launch, me, dq, (n - 1) * traits.pieces + h, lane_again())
                    self.fence()
                    self.say_dq(shared, me)
        shared.keys.release(w)
        self.store_gradients(launch, me, w, n, dk, dv)
        return n

    def stats_of_rows(self, launch: Any, me: Any, own: Any, batch: Any, part: Any) -> Any:
        """lse and delta of a thread's two rows, where these are queries."""
        lse, delta, wide = launch.stats
        row = me.number * ROWS + me.warp * 16 + lane_again() // 4
        first = Int64((batch * launch.schedule.nheads + part) * COPIES) * Int64(wide)
        places = [first + Int64(own.row + cutlass.min(row + 8 * r, own.rows - 1)) for r in range(2)]
        return tuple(
            tuple(number(at(address, Float32, place)) for place in places)
            for address in (lse, delta)
        )

    @cute.jit
    def clear_rest(self, shared: Any, me: Any, item: Any) -> None:
        """Zeros behind the item's last key: what lies there may be NaN, and 0 · NaN is."""
        traits = self.traits
        lane = lane_again()
        there = item.own.rows - me.number * ROWS
        if there < ROWS:
            for smem, stage, columns in (
                (shared.k, item.keys + me.number, traits.width),
                (shared.v, me.number, traits.values),
            )[: 2 if traits.values else 1]:
                words = cute.recast_tensor(smem, Int32)
                first = cutlass.max(there, 0) + me.warp
                for row in cutlass.range(first, ROWS, WARPGROUP // 32, unroll=1):
                    for m in cutlass.range_constexpr((columns // 2 + 31) // 32):
                        if lane + 32 * m < columns // 2:
                            words[row, lane + 32 * m, stage] = Int32(0)
            cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=OWN + me.number, number_of_threads=WARPGROUP)

    def head_of(self, launch: BackwardLaunch, item: KeyBlock, head: Any) -> QueryHead:
        """What ALiBi and dropout want to know of a query head."""
        traits = self.traits
        slope, word = None, None
        if traits.alibi:
            slopes, slopes_batch = launch.slopes
            slope = number(at(slopes, Float32, Int64(item.batch * slopes_batch + head))) * LOG2E
        if traits.dropout:
            word = scores_of.head_hash(launch.dropout, item.batch, head)
        return QueryHead(slope, word)

    def rows_of(self, me: Thread, item: KeyBlock, head: QueryHead, lane: Any) -> ThreadRows:
        """A thread's keys; worked out where they are needed, for want of registers."""
        traits, own = self.traits, item.own
        row = me.number * ROWS + me.warp * 16 + lane // 4  # in the item
        words = None
        if traits.dropout:
            words = [scores_of.spread(own.token + (row + 8 * r) * own.stride) for r in range(2)]
            if traits.exchanged:
                words = [scores_of.mix(head.hash ^ word) for word in words]
        origin = own.position - own.first * own.stride  # own.position is of the item's first row
        return ThreadRows(own.first + row, lane % 4 * 2, origin, own.stride, head.slope, words)

    @cute.jit
    def span_of(self, launch: Any, item: Any, tile: Any) -> Any:
        """Of a tile's queries."""
        block, own = self.traits.block, item.own
        queries = queries_of(launch.schedule, tile, own)
        left, right = edges(queries, item.row, block)
        right = right if item.row + ROWS <= own.first + own.rows else Int32(0)
        uniform = cute.arch.make_warp_uniform
        return QueryRange(*(uniform(each) for each in (queries.begin, left, right, queries.end)))

    # A block of queries

    @cute.jit
    def block(
        self, launch: Any, me: Any, item: Any, head: Any, span: Any, tile: Any, n: Any, j: Any
    ) -> None:
        """One piece after the other; as a rule it is one."""
        if const_expr(self.traits.pieces == 1):
            self.piece(launch, me, item, head, span, tile, n, j, 0)
        else:
            for h in cutlass.range(self.traits.pieces, unroll=1):
                self.piece(launch, me, item, head, span, tile, n, j, h)

    @cute.jit
    def piece(
        self, launch: Any, me: Any, item: Any, head: Any, span: Any, tile: Any, n: Any, j: Any,
        h: Any,
    ) -> None:  # fmt: skip
        """Its part of dK and dV, its ds, and a part of dQ, mostly of the block before."""
        traits, shared = self.traits, launch.shared
        lane = lane_again()
        u = n * traits.pieces + h
        stage = shared.queries.stage(u)
        dp = None
        if const_expr(traits.paired):
            shared.douts.await_full(u)
            dp = accumulators(traits.piece)
            self.issue(me.dp, dp, traits.piece, me.number, shared.douts.stage(u), traits.dv // 16)
            self.hand_over_kept(launch, me, item, n - 1)
        shared.queries.await_full(u)
        s = accumulators(traits.piece)
        self.issue(me.s, s, traits.piece, item.keys + me.number, stage, traits.d // 16)
        if const_expr(traits.values > 0 and not traits.separate):
            shared.douts.await_full(u)
            dp = accumulators(traits.piece)
            at_dout = shared.douts.stage(u)
            self.issue(me.dp, dp, traits.piece, me.number, at_dout, traits.dv // 16)
        rows = self.rows_of(me, item, head, lane)
        if const_expr(traits.exchanged):
            lse, delta = item.stats
        else:
            lse = self.stats(shared.lse, stage, rows)
            delta = self.stats(shared.delta, shared.douts.stage(u), rows)
        if const_expr(traits.early_lse):
            lse = scores_of.load_stats(lse, traits.early_columns)
        columns = Columns(lse, delta, head.hash)
        warpgroup.wait_group(0 if const_expr(dp is None or traits.paired) else 1)
        p, ds = operand(traits.piece, traits.element), operand(traits.piece, traits.element)
        bits = cute.make_rmem_tensor((traits.piece + 63) // 64, Uint32)
        bits.fill(0)
        row = h * traits.piece
        self.probabilities(launch, item, rows, columns, span, tile, s, p, j, row, bits)
        if const_expr(traits.paired):
            self.end_paired(launch, me, item, rows, columns, s, dp, ds, bits, n, stage, lane)
        elif const_expr(traits.only):
            self.end_piece(launch, me, item, rows, columns, s, dp, p, ds, bits, u, stage)
        elif const_expr(traits.whole):
            self.end_whole(launch, me, item, rows, columns, s, p, ds, bits, n, stage, lane)
        else:
            self.end_all(launch, me, item, rows, columns, s, dp, p, ds, bits, n, u, h, stage, lane)

    @cute.jit
    def end_piece(
        self, launch: Any, me: Any, item: Any, rows: Any, columns: Any, s: Any, dp: Any, p: Any,
        ds: Any, bits: Any, u: Any, stage: Any,
    ) -> None:  # fmt: skip
        """dK or dV, where nothing else is wanted."""
        traits, shared = self.traits, launch.shared
        if const_expr(traits.only == "dv"):
            shared.douts.await_full(u)
            self.add(me.dv, item.dv, p, traits.dv, stage)
        else:
            warpgroup.wait_group(0)
            scores_of.score_gradients(ds, s, dp, rows, columns, launch.dropout, bits, traits)
            self.add(me.dk, item.dk, ds, traits.d, stage)
        warpgroup.wait_group(0)
        shared.queries.release(u)

    @cute.jit
    def end_all(
        self, launch: Any, me: Any, item: Any, rows: Any, columns: Any, s: Any, dp: Any, p: Any,
        ds: Any, bits: Any, n: Any, u: Any, h: Any, stage: Any, lane: Any,
    ) -> None:  # fmt: skip
        """dV and dK, and dQ of the block before."""
        traits, shared = self.traits, launch.shared
        if const_expr(not traits.late):
            self.add(me.dv, item.dv, p, traits.dv, stage)
        if const_expr(traits.early_delta):
            columns = columns._replace(
                delta=scores_of.load_stats(columns.delta, traits.early_columns)
            )
        warpgroup.wait_group(0 if const_expr(traits.late) else 1)
        if const_expr(traits.dq and not traits.early_delta):
            self.await_block(shared, n - 1)
        scores_of.score_gradients(ds, s, dp, rows, columns, launch.dropout, bits, traits)
        if const_expr(traits.dq and traits.early_delta):
            self.await_block(shared, n - 1)
        if const_expr(traits.dq and traits.swapped and not traits.store_last):
            self.store_ds(shared, me, ds, n, h, lane)  # before products: else it is computed later
        if const_expr(traits.late):
            round_into(p, s)
            self.add(me.dv, item.dv, p, traits.dv, stage)
        if const_expr(traits.dq):
            if const_expr(not traits.swapped and not traits.store_last):
                self.store_ds(shared, me, ds, n, h, lane)  # before dQ
            dq = self.issue_dq(me, item, n - 1, h)
            self.add(me.dk, item.dk, ds, traits.d, stage)
            if const_expr(traits.store_last):
                self.store_ds(shared, me, ds, n, h, lane)
            warpgroup.wait_group(1)
            if n > item.first:
                self.put_dq(launch, me, dq, u - traits.pieces, lane)
            warpgroup.wait_group(0)
            self.fence()
            if n > item.first:
                self.say_dq(shared, me)
        else:
            self.add(me.dk, item.dk, ds, traits.d, stage)
            warpgroup.wait_group(0)
        shared.queries.release(u)

    @cute.jit
    def end_whole(
        self, launch: Any, me: Any, item: Any, rows: Any, columns: Any, s: Any, p: Any, ds: Any,
        bits: Any, n: Any, stage: Any, lane: Any,
    ) -> None:  # fmt: skip
        """The same in few registers: S was complete before dP begins, and dK is before dQ does.

        ds is computed from p as it is rounded for dV, during dV.
        """
        traits, shared = self.traits, launch.shared
        at_dout = shared.douts.stage(n)
        shared.douts.await_full(n)
        dp = accumulators(traits.piece)
        self.issue(me.dp, dp, traits.piece, me.number, at_dout, traits.dv // 16)
        self.add(me.dv, item.dv, p, traits.dv, at_dout)
        warpgroup.wait_group(1)
        scores_of.score_gradients(ds, p, dp, rows, columns, launch.dropout, bits, traits)
        self.add(me.dk, item.dk, ds, traits.d, stage)
        self.await_block(shared, n - 1)
        self.store_ds(shared, me, ds, n, 0, lane)
        warpgroup.wait_group(1)
        shared.douts.release(n)
        warpgroup.wait_group(0)
        dq = self.issue_dq(me, item, n - 1, 0)
        warpgroup.wait_group(0)
        if n > item.first:
            self.put_dq(launch, me, dq, n - 1, lane)
        self.fence()
        if n > item.first:
            self.say_dq(shared, me)
        shared.queries.release(n)

    @cute.jit
    def end_paired(
        self, launch: Any, me: Any, item: Any, rows: Any, columns: Any, s: Any, dp: Any, ds: Any,
        bits: Any, n: Any, stage: Any, lane: Any,
    ) -> None:  # fmt: skip
        """dK, and dQ of the same block, which the adder gets during dK and the next block's dP."""
        traits, shared = self.traits, launch.shared
        ready = shared.ready
        scores_of.score_gradients(ds, s, dp, rows, columns, launch.dropout, bits, traits)
        shared.douts.release(n)
        ready.await_empty(n)
        self.store_ds(shared, me, ds, n, 0, lane)
        self.fence()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(ready.full_of(n))
        ready.await_full(n)
        dq = self.issue_dq(me, item, n, 0)
        self.add(me.dk, item.dk, ds, traits.d, stage)
        warpgroup.wait_group(1)
        ready.release(n)
        sent = traits.dq_parts - traits.kept
        self.hand_over(launch, me, dq, n, 0, sent)
        if const_expr(traits.kept > 0):
            for i in cutlass.range_constexpr(cute.size(item.kept)):
                item.kept[i] = dq[sent * (traits.dq_columns // 2) + i]
        warpgroup.wait_group(0)
        shared.queries.release(n)

    @cute.jit
    def hand_over_kept(self, launch: Any, me: Any, item: Any, n: Any) -> None:
        """What was kept of dQ of block n, if it is one of the item's."""
        traits = self.traits
        if const_expr(traits.kept > 0):
            if n >= item.first:
                first = traits.dq_parts - traits.kept
                self.hand_over(launch, me, item.kept, n, first, traits.dq_parts)

    @cute.jit
    def hand_over(
        self, launch: Any, me: Any, dq: Any, n: Any, first: cutlass.Constexpr,
        last: cutlass.Constexpr,
    ) -> None:  # fmt: skip
        """Parts of dQ of a block to the adder, one by one; registers begin with the first."""
        traits = self.traits
        size = traits.dq_columns // 2  # registers of a part
        for h in cutlass.range_constexpr(first, last):
            part = [dq[size * (h - first) + i] for i in range(size)]
            self.put_dq(launch, me, part, n * traits.dq_parts + h, lane_again())
            self.fence()
            self.say_dq(launch.shared, me)

    def issue(self, of: Operands, c: Any, columns: int, left: Any, right: Any, steps: int) -> None:
        """Begin c = a · b, both from shared memory."""
        left = uniform_again(left) if self.traits.separate else left
        a = [of.a[None, None, m, left] for m in range(steps)]
        b = [of.b[None, None, m, right] for m in range(steps)]
        multiply(of.mma, as_c(c, columns), a, b, steps, False)

    def add(self, of: Operands, c: Any, rounded: Any, columns: int, stage: Any) -> None:
        """Begin c += a · b, with a piece's rounded numbers on the left."""
        steps = self.traits.piece // 16
        a = [as_a(rounded, m) for m in range(steps)]
        b = [of.b[None, None, m, stage] for m in range(steps)]
        multiply(of.mma, as_c(c, columns), a, b, steps, True)

    def stats(self, smem: Any, stage: Any, rows: ThreadRows) -> Any:
        """Address of the number of a thread's first query of a block."""
        return Int32(smem[None, stage].iterator.toint()) + rows.column * 4

    @cute.jit
    def probabilities(
        self, launch: Any, item: Any, rows: Any, columns: Any, span: Any, tile: Any, s: Any, p: Any,
        j: Any, at_row: Any, bits: Any,
    ) -> None:  # fmt: skip
        """s becomes p, or what ds is a multiple of.

        Where a tile's numbers are needed they are read again: most blocks need none, and no
        registers for them.
        """
        traits = self.traits
        queries: Any = None
        start = Int32(0)
        if const_expr(traits.alibi or traits.dropout):
            queries = queries_of(launch.schedule, tile, item.own)
            start = inside(j, queries.length, traits.block) + at_row
        capped = None
        scores_of.cap(s, launch.scores, traits)
        if const_expr(traits.softcap and traits.alibi):
            capped = operand(traits.piece, cutlass.Float16)
            scores_of.slopes_of_cap(s, capped)
        scores_of.slant(s, launch.scores, rows, queries, start, traits)
        if (j < span.left) | (j >= span.right):
            masked = queries_of(launch.schedule, tile, item.own)
            begin = inside(j, masked.length, traits.block) + at_row
            end = item.own.first + item.own.rows
            scores_of.mask(s, rows, masked, j, begin, end)
        later = traits.late or traits.only == "dk"
        shown = None if const_expr(later) else p
        token = queries.token + start * rows.stride if const_expr(traits.dropout) else None
        scores_of.probabilities(
            s, shown, launch.scores, rows, columns, token, launch.dropout, bits, capped, traits
        )

    # dQ

    def await_block(self, shared: BackwardShared, n: Any) -> None:
        """Until both consumers are done with block n, and so with ds of the one before.

        Block −1 is done: its phase is the one before the first.
        """
        queries, pieces = shared.queries, self.traits.pieces
        last = (n + 1) * pieces - 1
        cute.arch.mbarrier_wait(queries.empty + queries.stage(last), queries.phase(last))

    def issue_dq(self, me: Thread, item: KeyBlock, n: Any, h: Any) -> Any:
        """Begin dQ = ds' · k of a block, over both consumers' keys; a part of a consumer's half."""
        traits, of = self.traits, me.dq
        wide = traits.block if traits.swapped else traits.product_columns
        dq = accumulators(wide)
        number = uniform_again(me.number) if traits.separate else me.number
        row, column = (number, 0) if traits.by_rows else (0, number * traits.pieces + h)
        buffer = 0 if traits.paired else (n & 1) * CONSUMERS
        a, b = [], []
        for c in range(CONSUMERS):
            for m in range(ROWS // 16):
                if traits.swapped:
                    a.append(of.a[None, me.number, m, item.keys + c])
                    b.append(of.b[None, 0, m, buffer + c])
                else:
                    a.append(of.a[None, row, m, buffer + c])
                    b.append(of.b[None, column, m, item.keys + c])
        steps = CONSUMERS * ROWS // 16
        multiply(
            of.mma,
            as_c(dq, wide),
            [self.one(x) for x in a],
            [self.one(x) for x in b],
            steps,
            False,
        )
        return dq

    def one(self, fragment: Any) -> Any:
        """A fragment with a mode for its tile, of which there is one."""
        return cute.make_tensor(
            fragment.iterator, cute.append(fragment.layout, cute.make_layout(1, stride=0))
        )

    @cute.jit
    def store_ds(self, shared: Any, me: Any, ds: Any, n: Any, h: Any, lane: Any) -> None:
        """Where both consumers read it for dQ: (key, query), see `ds_place`."""
        traits = self.traits
        words = cute.recast_tensor(ds, Int32)
        buffer = me.number if const_expr(traits.paired) else (n & 1) * CONSUMERS + me.number
        base = Int32(shared.ds[None, None, buffer].iterator.toint())
        row = me.warp * 16 + lane % 16
        groups = traits.piece // 8
        for g in cutlass.range_constexpr(0, groups, 2):
            to = base + ds_place(row, g, h * groups + lane // 16, traits.block)
            store_matrices(to, [words[2 * g + m] for m in range(4)])

    @cute.jit
    def put_dq(self, launch: Any, me: Any, dq: Any, n: Any, lane: Any) -> None:
        """Put the n-th part of dQ where the adder finds it; a fence has to follow."""
        traits, sums = self.traits, launch.shared.sums
        cute.arch.mbarrier_wait(sums.empty + me.number, (n & 1) ^ 1)
        if const_expr(traits.swapped):
            self.put_swapped(launch, me, dq, lane)
        else:
            self.put_straight(launch, me, dq, lane)

    @cute.jit
    def put_swapped(self, launch: Any, me: Any, dq: Any, lane: Any) -> None:
        """A thread has two columns of d, of two queries in each 8; four rows are in four banks."""
        traits = self.traits
        base = Int32(launch.shared.dq[None, None, me.number].iterator.toint())
        for r in cutlass.range_constexpr(2):
            for e in cutlass.range_constexpr(2):
                here = base + swapped_place(me.warp, lane, r, e, traits.block)
                for g in cutlass.range_constexpr(traits.block // 8):
                    number = self.scaled(launch, dq[4 * g + 2 * r + e])
                    vector(shared_at(here + g * 1024, Float32, 4), 1)[0] = number

    @cute.jit
    def put_straight(self, launch: Any, me: Any, dq: Any, lane: Any) -> None:
        """A thread has two queries, and two columns of each 8."""
        traits = self.traits
        line = 32 if const_expr(traits.dq_columns % 32 == 0) else 16  # columns of its swizzle
        chunks, lines = line // 4, 32 // line  # chunks of 16 bytes in it, and it in 128 bytes
        base = Int32(launch.shared.dq[None, None, me.number].iterator.toint())
        row = me.warp * 16 + lane // 4
        to = base + row * (4 * line) + lane % 2 * 8
        # Groups of columns are exchanged in half of the rows: then four rows are in four banks.
        away = chunks // 4
        exchanged = (row // lines) % 2 != 0
        swizzle = (row // lines) % chunks
        swizzle = swizzle ^ (2 * away) if exchanged else swizzle
        pair = cute.make_rmem_tensor(2, Float32)
        for g in cutlass.range_constexpr(traits.dq_columns // 8):
            chunk = (2 * g % chunks + lane % 4 // 2) ^ swizzle
            for r in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(2):
                    i = 2 * r + e
                    other = dq[4 * (g ^ away) + i]
                    pair[e] = self.scaled(launch, other if exchanged else dq[4 * g + i])
                here = to + 2 * g // chunks * (ROWS * 4 * line) + 8 * r * (4 * line) + chunk * 16
                cute.autovec_copy(pair, vector(shared_at(here, Float32, 8), 2))

    def scaled(self, launch: BackwardLaunch, number: Any) -> Any:
        """Of dQ or dK."""
        return number if self.traits.folded else number * launch.scale

    def say_dq(self, shared: BackwardShared, me: Thread) -> None:
        """It is there: a warp arrives."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(shared.sums.full + me.number)

    def fence(self) -> None:
        """What this warp wrote to shared memory, TMA and WGMMAs read next."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()

    # Its end

    @cute.jit
    def store_gradients(self, launch: Any, me: Any, w: Any, n: Any, dk: Any, dv: Any) -> None:
        """dK and dV of the item's keys."""
        traits, gradients, shared = self.traits, launch.gradients, launch.shared
        own, batch, part = read_item(shared, shared.item.stage(w))  # again: spares registers
        dk_row = offset(gradients.dk_strides, batch, own.row, part)
        dv_row = offset(gradients.dv_strides, batch, own.row, part)
        dk_scale = self.scaled(launch, Float32(1.0))
        dv_scale = launch.dropout.keep_scale if const_expr(traits.dropout) else Float32(1.0)
        if const_expr(traits.folded):
            dv_scale = dv_scale / launch.scale
        room = Int32(0)
        if const_expr(traits.rounded):
            two = const_expr(traits.ds_buffers > CONSUMERS)
            buffer = (n & 1) * CONSUMERS if two else 0
            room = Int32(shared.ds[None, None, buffer + me.number].iterator.toint())
        if const_expr(traits.only != "dv"):
            self.store(
                me, room, dk, gradients.dk, dk_row, gradients.dk_strides[1], own.rows, traits.d,
                gradients.d, dk_scale,
            )  # fmt: skip
        if const_expr(traits.only != "dk"):
            self.store(
                me, room, dv, gradients.dv, dv_row, gradients.dv_strides[1], own.rows, traits.dv,
                gradients.dv_width, dv_scale,
            )  # fmt: skip

    def store(self, me: Any, room: Any, *numbers: Any) -> None:
        """A gradient, rounded or not."""
        if self.traits.rounded:
            self.store_rounded(me, room, *numbers)
        else:
            self.store_sums(me, *numbers)

    @cute.jit
    def store_sums(
        self, me: Any, x: Any, address: Any, begin: Any, stride: Any, rows: Any,
        columns: cutlass.Constexpr, width: Any, scale: Any,
    ) -> None:  # fmt: skip
        """In fp32, written or added; four threads have 32 bytes of a row."""
        traits = self.traits
        lane = lane_again()
        row = me.number * ROWS + me.warp * 16 + lane // 4
        for r in cutlass.range_constexpr(2):
            if row + 8 * r < rows:
                first = begin + Int64(row + 8 * r) * stride + lane % 4 * 2
                for g in cutlass.range_constexpr(columns // 8):
                    if const_expr(traits.even):
                        self.store_pair(x, address, first, g, r, scale)
                    else:
                        if 8 * g < width:
                            self.store_pair(x, address, first, g, r, scale)

    @cute.jit
    def store_pair(
        self, x: Any, address: Any, first: Any, g: cutlass.Constexpr, r: cutlass.Constexpr,
        scale: Any,
    ) -> None:  # fmt: skip
        """Two columns of a row."""
        pair = cute.make_rmem_tensor(2, Float32)
        there = vector(at(address, Float32, first + 8 * g, 8), 2)
        pair[0] = x[4 * g + 2 * r] * scale
        pair[1] = x[4 * g + 2 * r + 1] * scale
        if const_expr(not self.traits.fresh):
            known = there.load()
            pair[0] = pair[0] + known[0]
            pair[1] = pair[1] + known[1]
        cute.autovec_copy(pair, there)

    @cute.jit
    def store_rounded(
        self, me: Any, room: Any, x: Any, address: Any, begin: Any, stride: Any, rows: Any,
        columns: cutlass.Constexpr, width: Any, scale: Any,
    ) -> None:  # fmt: skip
        """Rounded; through shared memory, 64 columns at a time, so that a warp writes whole rows.

        ThreadRows have 128 bytes there, and their 16-byte chunks are swizzled.
        """
        dtype = self.traits.element
        lane = lane_again()
        staged = room + me.warp * (16 * 128)
        for part in cutlass.range_constexpr((columns + 63) // 64):
            groups = min(8, columns // 8 - 8 * part)
            for g in cutlass.range_constexpr(groups):
                for r in cutlass.range_constexpr(2):
                    i = 4 * (8 * part + g) + 2 * r
                    word = pack(x[i] * scale, x[i + 1] * scale, dtype)
                    row = lane // 4 + 8 * r
                    to = staged + row * 128 + (g ^ (row % 8)) * 16 + lane % 4 * 4
                    vector(shared_at(to, Int32, 4), 1)[0] = word
            cute.arch.sync_warp()
            for m in cutlass.range_constexpr(4):
                row, chunk = lane // 8 + 4 * m, lane % 8
                here = me.number * ROWS + me.warp * 16 + row
                first = 64 * part + 8 * chunk
                if (here < rows) & (first < width) & (chunk < groups):
                    words = cute.make_rmem_tensor(4, Int32)
                    source = staged + row * 128 + (chunk ^ (row % 8)) * 16
                    cute.autovec_copy(vector(shared_at(source, Int32, 16), 4), words)
                    there = begin + Int64(here) * stride + first
                    target = cute.make_ptr(Int32, address + there * 2, GMEM, assumed_align=16)
                    cute.autovec_copy(words, vector(target, 4))
            cute.arch.sync_warp()
