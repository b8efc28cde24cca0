"""The backward kernel's other warps: one loads, and one for each consumer adds dQ to memory."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ..tables import BlockEntry
from .primitives import (
    BLOCK_COLUMNS,
    BLOCK_NUMBERS,
    ROWS,
    TILE_COLUMNS,
    Scheduler,
    add_rows,
    at,
    block_entry,
    inside,
    keys_of,
    load_bytes,
    load_rows,
    next_item,
    place,
    tile_entry,
)
from .traits import BATCH, CONSUMERS, HEAD, BackwardShared, BackwardTraits

COPIES = 4  # of lse and delta: the n-th begins at row n, so that copies begin at 16 bytes


def read_item(shared: BackwardShared, slot: Any) -> tuple[BlockEntry, Any, Any]:
    """Its block of the table, batch, and number of its part of a KV head."""
    own = BlockEntry(*(shared.items[n, slot] for n in range(BLOCK_NUMBERS)))
    return own, shared.items[BATCH, slot], shared.items[HEAD, slot]


def queries_of(schedule: Scheduler, tile: Any, own: BlockEntry) -> Any:
    """The queries of a tile, and which of them see some of an item's keys."""
    entry = tile_entry(at(schedule.tiles, Int32, Int64(tile) * TILE_COLUMNS, 16))
    return keys_of(entry, own.first, own.rows)


class BackwardProducer:
    """Its phases, in order; w counts items, and n blocks of queries."""

    def __init__(self, traits: BackwardTraits) -> None:
        self.traits = traits

    @cute.jit
    def produce(self, loads: Any, schedule: Any, parts: Any, nheads: Any, shared: Any) -> None:
        """Take items; load keys and values, and blocks of queries with what is known of them.

        Keys and values come behind the first queries, for which there is room sooner.
        """
        traits = self.traits
        programs, _, _ = cute.arch.grid_dim()
        items = schedule.count * schedule.pairs
        w = Int32(0)
        n = Int32(0)
        shorts = Int32(0)
        taken, _, _ = cute.arch.block_idx()
        if const_expr(not traits.rounded):
            taken = next_item(schedule, programs, False)
        while taken < items:
            block, pair = place(taken, schedule)
            entry = at(schedule.blocks, Int32, Int64(block) * BLOCK_COLUMNS, 16)
            own = block_entry(entry)
            batch = pair // schedule.nheads
            part = pair - batch * schedule.nheads
            head_k = part // parts
            shared.item.await_empty(w)
            self.write_item(shared, w, own, batch, part)
            waiting = Int32(1)
            head = part * schedule.group
            last = head + schedule.group
            while head < last:
                tile = own.tile
                while tile < own.last_tile:
                    queries = queries_of(schedule, tile, own)
                    j = queries.begin
                    while j < queries.end:
                        row = queries.row + inside(j, queries.length, traits.block)
                        stats = (batch * nheads + head) * COPIES
                        other = head
                        if const_expr(traits.exchanged):
                            other = head // (schedule.nheads // nheads)
                        for h in cutlass.range_constexpr(traits.pieces):
                            u = n * traits.pieces + h
                            shorts = self.load_piece(
                                loads, shared, u, shorts, batch, other, row + h * traits.piece,
                                queries.length, h * traits.piece, stats,
                            )  # fmt: skip
                        if waiting == 1:
                            self.load_keys(loads, shared, w, batch, head_k, own.row)
                            waiting = Int32(0)
                        n += 1
                        j += traits.block
                    tile += 1
                head += 1
            if waiting == 1:
                self.load_keys(loads, shared, w, batch, head_k, own.row)
            w += 1
            taken = next_item(schedule, programs, traits.rounded)
        shared.item.await_empty(w)
        if cute.arch.lane_idx() == 0:
            shared.items[1, shared.item.stage(w)] = Int32(0)  # rows: there are no more
            cute.arch.mbarrier_arrive(shared.item.full_of(w))

    @cute.jit
    def write_item(self, shared: Any, w: Any, own: Any, batch: Any, part: Any) -> None:
        """Tell the others."""
        slot = shared.item.stage(w)
        if cute.arch.lane_idx() == 0:
            for n in cutlass.range_constexpr(BLOCK_NUMBERS):
                shared.items[n, slot] = own[n]
            shared.items[BATCH, slot] = batch
            shared.items[HEAD, slot] = part
            cute.arch.mbarrier_arrive(shared.item.full_of(w))

    @cute.jit
    def load_keys(self, loads: Any, shared: Any, w: Any, batch: Any, head: Any, row: Any) -> None:
        """Keys and values of an item, for each consumer."""
        traits = self.traits
        shared.keys.await_empty(w)
        self.load_halves(
            loads.k, shared.k, shared.keys.stage(w), shared.keys.full_of(w), traits.width, batch,
            head, row,
        )  # fmt: skip
        if const_expr(traits.values > 0):
            shared.values.await_empty(w)
            self.load_halves(
                loads.v, shared.v, Int32(0), shared.values.full_of(w), traits.dv, batch, head, row
            )

    @cute.jit
    def load_halves(
        self, load: Any, smem: Any, stage: Any, full: Any, columns: cutlass.Constexpr, batch: Any,
        head: Any, row: Any,
    ) -> None:  # fmt: skip
        """64 rows for each consumer."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, CONSUMERS * ROWS * columns * 2)
        for c in cutlass.range_constexpr(CONSUMERS):
            load_rows(*load, batch, head, row + c * ROWS, smem, stage * CONSUMERS + c, full)

    @cute.jit
    def load_piece(
        self, loads: Any, shared: Any, n: Any, shorts: Any, batch: Any, head: Any, row: Any,
        length: Any, before: cutlass.Constexpr, stats: Any,
    ) -> Any:  # fmt: skip
        """Queries from a row on, dout, lse and delta; `before` rows of the block are others."""
        traits = self.traits
        q_full, do_full = shared.queries.full_of(n), shared.douts.full_of(n)
        if const_expr(not traits.paired):
            shared.queries.await_empty(n)
        if const_expr(traits.short):
            if length < traits.block:
                if const_expr(traits.separate):
                    shared.douts.await_empty(n)
                if const_expr(traits.paired):
                    shared.queries.await_empty(n)
                self.load_both(
                    loads, shared, n, batch, head, row, stats, shared.landed, shared.landed, 1
                )
                cute.arch.mbarrier_wait(shared.landed, shorts & 1)
                self.clear_rest(shared, n, cutlass.max(length - before, 0))
                shorts += 1
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(q_full)
                    cute.arch.mbarrier_arrive(do_full)
            else:
                self.load_both(loads, shared, n, batch, head, row, stats, q_full, do_full, 2)
        else:
            self.load_both(loads, shared, n, batch, head, row, stats, q_full, do_full, 2)
        return shorts

    @cute.jit
    def load_both(
        self, loads: Any, shared: Any, n: Any, batch: Any, head: Any, row: Any, stats: Any,
        q_full: Any, do_full: Any, barriers: cutlass.Constexpr,
    ) -> None:  # fmt: skip
        """At one barrier or two."""
        traits = self.traits
        stage, at_dout = shared.queries.stage(n), shared.douts.stage(n)
        copy, first = row & (COPIES - 1), cutlass.min(row & -COPIES, loads.wide - COPIES)
        there = Int64(stats + copy) * Int64(loads.wide) + Int64(first)
        size = cutlass.min(Int32(traits.piece), loads.wide - first) * 4
        if const_expr(traits.exchanged):
            size = Int32(0)  # consumers read what belongs to their rows
        q_bytes, do_bytes = traits.piece * traits.d * 2, traits.piece * traits.dv * 2
        sooner = const_expr(traits.paired and barriers == 2)  # there is room for dout
        if const_expr(sooner):
            shared.douts.await_empty(n)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(do_full, do_bytes + size)
            self.load_dout(loads, shared, batch, head, row, at_dout, there, size, do_full)
            shared.queries.await_empty(n)
        with cute.arch.elect_one():
            if const_expr(barriers == 1):
                cute.arch.mbarrier_arrive_and_expect_tx(q_full, q_bytes + do_bytes + 2 * size)
            else:
                cute.arch.mbarrier_arrive_and_expect_tx(q_full, q_bytes + size)
        load_rows(*loads.q, batch, head, row, shared.q, stage, q_full)
        with cute.arch.elect_one():
            if const_expr(not traits.exchanged):
                lse = shared.lse[None, stage].iterator
                load_bytes(lse.toint(), at(loads.lse, Float32, there, 16), size, q_full)
            if const_expr(barriers == 2 and not traits.separate):
                cute.arch.mbarrier_arrive_and_expect_tx(do_full, do_bytes + size)
        if const_expr(barriers == 2 and traits.whole):
            shared.douts.await_empty(n)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(do_full, do_bytes + size)
        if const_expr(not sooner):
            self.load_dout(loads, shared, batch, head, row, at_dout, there, size, do_full)

    @cute.jit
    def load_dout(
        self, loads: Any, shared: Any, batch: Any, head: Any, row: Any, stage: Any, there: Any,
        size: Any, full: Any,
    ) -> None:  # fmt: skip
        """And delta."""
        load_rows(*loads.dout, batch, head, row, shared.dout, stage, full)
        if const_expr(not self.traits.exchanged):
            with cute.arch.elect_one():
                delta = shared.delta[None, stage].iterator
                load_bytes(delta.toint(), at(loads.delta, Float32, there, 16), size, full)

    @cute.jit
    def clear_rest(self, shared: Any, n: Any, length: Any) -> None:
        """What lies behind a short document may be NaN, and 0 · NaN is: zeros, and p = 0."""
        traits = self.traits
        lane = cute.arch.lane_idx()
        stage, at_dout = shared.queries.stage(n), shared.douts.stage(n)
        for smem, columns, here in ((shared.q, traits.d, stage), (shared.dout, traits.dv, at_dout)):
            words = cute.recast_tensor(smem, Int32)
            pairs = columns // 2
            for row in cutlass.range(length, traits.piece, unroll=1):
                for m in cutlass.range_constexpr((pairs + 31) // 32):
                    if lane + 32 * m < pairs:
                        words[row, lane + 32 * m, here] = Int32(0)
        for m in cutlass.range_constexpr((traits.piece + 31) // 32):
            row = lane + 32 * m
            if (row >= length) & (row < traits.piece):
                shared.lse[row, stage] = Float32.inf
                shared.delta[row, at_dout] = Float32(0.0)
        cute.arch.fence_view_async_shared()  # WGMMAs read it next
        cute.arch.sync_warp()


class Adder:
    """Adds one consumer's half of dQ of each block to memory, one part after the other."""

    def __init__(self, traits: BackwardTraits) -> None:
        self.traits = traits

    @cute.jit
    def add(self, c: Any, dq: Any, schedule: Any, shared: Any) -> None:
        """Of all items."""
        traits = self.traits
        shift = c * ROWS if const_expr(traits.by_rows) else Int32(0)
        columns = traits.dq_parts * traits.dq_columns
        column = Int32(0) if const_expr(traits.by_rows) else c * columns
        w = Int32(0)
        n = Int32(0)
        shared.item.await_full(w)
        own, batch, part = read_item(shared, shared.item.stage(w))
        while own.rows > 0:
            shared.item.release(w)
            head = part * schedule.group
            last = head + schedule.group
            while head < last:
                tile = own.tile
                while tile < own.last_tile:
                    queries = queries_of(schedule, tile, own)
                    j = queries.begin
                    while j < queries.end:
                        start = inside(j, queries.length, traits.block)
                        row = queries.row + start + shift
                        for h in cutlass.range_constexpr(traits.dq_parts):
                            part_column = column + h * traits.dq_columns
                            cute.arch.mbarrier_wait(shared.sums.full + c, n & 1)
                            if const_expr(traits.short):
                                self.clear_rest(shared, c, queries.length - shift)
                            # Rows of other blocks or documents get zeros.
                            add_rows(*dq, batch, head, row, part_column, shared.dq, c)
                            cute.arch.cp_async_bulk_commit_group()
                            cute.arch.cp_async_bulk_wait_group(0, read=True)
                            cute.arch.sync_warp()
                            with cute.arch.elect_one():
                                cute.arch.mbarrier_arrive(shared.sums.empty + c)
                            n += 1
                        j += traits.block
                    tile += 1
                head += 1
            w += 1
            shared.item.await_full(w)
            own, batch, part = read_item(shared, shared.item.stage(w))

    @cute.jit
    def clear_rest(self, shared: Any, c: Any, length: Any) -> None:
        """Zeros for what lies behind a short document: there 0 · k is NaN if a key is inf."""
        traits = self.traits
        lane = cute.arch.lane_idx()
        for row in cutlass.range(cutlass.max(length, 0), traits.dq_rows, unroll=1):
            for m in cutlass.range_constexpr((traits.dq_columns + 31) // 32):
                if lane + 32 * m < traits.dq_columns:
                    shared.dq[row, lane + 32 * m, c] = Float32(0.0)
        if length < traits.dq_rows:
            cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
