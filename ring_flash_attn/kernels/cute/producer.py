"""The forward kernel's producer: one warp that takes items and loads what they need."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ..tables import TileEntry
from .primitives import (
    BLOCK_COLUMNS,
    BLOCK_NUMBERS,
    FIRST,
    ROWS,
    TILE_COLUMNS,
    at,
    block_entry,
    inside,
    keys_of,
    load_rows,
    next_item,
    place,
    prefetch,
    tile_entry,
)
from .traits import BATCH, Traits, offset


class Producer:
    """Its phases, in order."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits

    @cute.jit
    def produce(self, loads: Any, schedule: Any, output: Any, shared: Any) -> None:
        """Take items; load their queries, then blocks of keys and values."""
        traits = self.traits
        programs, _, _ = cute.arch.grid_dim()
        items = schedule.count * schedule.pairs
        item = Int32(0)
        i = Int32(0)  # counts blocks of keys
        shorts = Int32(0)
        taken, _, _ = cute.arch.block_idx()
        if const_expr(not traits.single):
            taken = next_item(schedule, programs, False)
        while taken < items:
            block, pair = place(taken, schedule)
            entry = at(schedule.blocks, Int32, Int64(block) * BLOCK_COLUMNS, 16)
            own = block_entry(entry)
            keys = keys_of(tile_entry(entry + BLOCK_NUMBERS), own.first, own.rows)
            batch = pair // schedule.nheads
            head = pair - batch * schedule.nheads
            head_k = head // schedule.group
            begin, end = keys.begin, keys.end
            if begin >= end:  # they see nothing: let them look at one block
                begin = Int32(0)
                end = Int32(1)
            shared.item.await_empty(item)
            self.write_item(shared, item, own, keys, (batch, head, begin, end))
            self.load_queries(loads, shared, item, own, batch, head)
            if const_expr(not traits.single):
                if (own.flags & FIRST) == 0:
                    self.prefetch_state(output, batch, head, own.row, own.rows)
            i, shorts = self.load_tile(
                loads, shared, i, shorts, batch, head_k, keys.row, keys.length, begin, end
            )
            tile = own.tile + 1
            while tile < own.last_tile:
                later = keys_of(
                    tile_entry(at(schedule.tiles, Int32, Int64(tile) * TILE_COLUMNS, 16)),
                    own.first,
                    own.rows,
                )
                i, shorts = self.load_tile(
                    loads, shared, i, shorts, batch, head_k, later.row, later.length, later.begin,
                    later.end,
                )  # fmt: skip
                tile += 1
            item += 1
            taken = next_item(schedule, programs, traits.single)
        shared.item.await_empty(item)
        if cute.arch.lane_idx() == 0:
            shared.items[1, shared.item.stage(item)] = Int32(0)  # rows: there are no more
            cute.arch.mbarrier_arrive(shared.item.full_of(item))

    @cute.jit
    def write_item(self, shared: Any, item: Any, own: Any, keys: Any, others: Any) -> None:
        """Tell the consumers: `BlockEntry`, `TileEntry`, batch, head, begin, end."""
        slot = shared.item.stage(item)
        if cute.arch.lane_idx() == 0:
            for n in cutlass.range_constexpr(BLOCK_NUMBERS):
                shared.items[n, slot] = own[n]
            for n in cutlass.range_constexpr(len(TileEntry._fields)):
                shared.items[BLOCK_NUMBERS + n, slot] = keys[n]
            for n in cutlass.range_constexpr(4):
                shared.items[BATCH + n, slot] = others[n]
            cute.arch.mbarrier_arrive(shared.item.full_of(item))

    @cute.jit
    def load_queries(
        self, loads: Any, shared: Any, item: Any, own: Any, batch: Any, head: Any
    ) -> None:
        """Of those consumers that have some."""
        traits = self.traits
        slot = shared.item.stage(item)
        barrier = shared.queries + slot
        size = ROWS * traits.width * 2
        parts = cutlass.min((own.rows + (ROWS - 1)) // ROWS, traits.consumers)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, parts * size)
        for c in cutlass.range_constexpr(traits.consumers):
            if c < parts:
                load_rows(
                    *loads.q, batch, head, own.row + c * ROWS, shared.q,
                    slot * traits.consumers + c, barrier,
                )  # fmt: skip

    @cute.jit
    def load_tile(
        self, loads: Any, shared: Any, i: Any, shorts: Any, batch: Any, head: Any, row: Any,
        length: Any, begin: Any, end: Any,
    ) -> Any:  # fmt: skip
        """Blocks of keys and values that cover begin … end of a tile's."""
        traits = self.traits
        k_bytes = traits.block * traits.width * 2
        v_bytes = traits.block * traits.dv * 2
        j = begin
        while j < end:
            start = row + inside(j, length, traits.block)
            stage = shared.keys.stage(i)
            shared.keys.await_empty(i)
            k_full = shared.keys.full_of(i)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(k_full, k_bytes)
            load_rows(*loads.k, batch, head, start, shared.k, stage, k_full)
            shared.values.await_empty(i)
            v_full = shared.values.full_of(i)
            if const_expr(traits.short):
                if length < traits.block:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(shared.landed, v_bytes)
                    load_rows(*loads.v, batch, head, start, shared.v, stage, shared.landed)
                    self.clear_rest(shared, stage, length, shorts)
                    shorts += 1
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(v_full)
                else:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(v_full, v_bytes)
                    load_rows(*loads.v, batch, head, start, shared.v, stage, v_full)
            else:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(v_full, v_bytes)
                load_rows(*loads.v, batch, head, start, shared.v, stage, v_full)
            i += 1
            j += traits.block
        return i, shorts

    @cute.jit
    def clear_rest(self, shared: Any, stage: Any, length: Any, shorts: Any) -> None:
        """Zeros behind a short document's values: what lies there may be NaN, and 0 · NaN is."""
        traits = self.traits
        cute.arch.mbarrier_wait(shared.landed, shorts & 1)
        lane = cute.arch.lane_idx()
        pairs = traits.dv // 2
        words = cute.recast_tensor(shared.v, Int32)
        for row in cutlass.range(length, traits.block, unroll=1):
            for n in cutlass.range_constexpr((pairs + 31) // 32):
                if lane + 32 * n < pairs:
                    words[row, lane + 32 * n, stage] = Int32(0)
        cute.arch.fence_view_async_shared()  # WGMMAs read it next
        cute.arch.sync_warp()

    @cute.jit
    def prefetch_state(self, output: Any, batch: Any, head: Any, row: Any, rows: Any) -> None:
        """Have a state in L2 before the consumers ask for it."""
        traits = self.traits
        lane = cute.arch.lane_idx()
        for n in cutlass.range(0, traits.consumers * ROWS // 32, unroll=1):
            mine = row + cutlass.min(lane + 32 * n, rows - 1)
            prefetch(at(output.lse, Float32, offset(output.lse_strides, batch, mine, head)))
            begin = offset(output.out_strides, batch, mine, head)
            for part in cutlass.range_constexpr((traits.dv + 31) // 32):
                column = cutlass.min(Int32(32 * part), output.dv - 1)
                prefetch(at(output.out, Float32, begin + column))
