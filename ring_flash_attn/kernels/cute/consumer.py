"""The forward kernel's consumers: warpgroups of 64 queries each."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from ..tables import BlockEntry, TileEntry
from . import scores as softmax_of
from .primitives import (
    BLOCK_NUMBERS,
    FIRST,
    GMEM,
    LAST,
    LOG2E,
    ROWS,
    SMEM,
    TILE_COLUMNS,
    WARPGROUP,
    KeyRange,
    Scheduler,
    accumulators,
    as_a,
    as_c,
    at,
    await_turn,
    blocks_in,
    edges,
    inside,
    keys_of,
    multiply,
    needs_mask,
    number,
    operand,
    pack,
    pass_turn,
    product_of,
    round_into,
    settled,
    tile_entry,
    transposed,
    uniform_again,
    vector,
)
from .scores import Dropout, RunningSoftmax, Scores, ThreadRows
from .traits import BATCH, BEGIN, END, HEAD, OWN, TURN, Output, Shared, Traits, offset


class ForwardLaunch(NamedTuple):
    """What is the same for all items."""

    schedule: Scheduler
    output: Output
    scores: Scores
    slopes: Any  # ALiBi's: address, and what it grows by for each batch
    dropout: Dropout
    shared: Shared


class Me(NamedTuple):
    """Who a thread is, and what it multiplies with.

    Attributes:
        number: of its consumer.
        warp, lane: in that.
        turn, next_turn: named barriers.
        qk, pv: the products.
        q, k, v: what they read of shared memory.
    """

    number: Any
    warp: Any
    lane: Any
    turn: Any
    next_turn: Any
    qk: Any
    pv: Any
    q: Any
    k: Any
    v: Any


class Place(NamedTuple):
    """Where an item is: its block of the table, and the head."""

    own: BlockEntry
    batch: Any
    head: Any


class ForwardItem(NamedTuple):
    """An item under way.

    Attributes:
        launch, me: see there.
        q: number of its queries in shared memory.
        rows: a thread's own two.
        row: the consumer's first, in the span.
        out: registers; not normalised.
        p: registers: rounded powers of the last block, which wait for their product with its
            values.
        softmax: maximum and sums.
    """

    launch: ForwardLaunch
    me: Me
    q: Any
    rows: ThreadRows
    row: Any
    out: Any
    p: Any
    softmax: RunningSoftmax


class Consumer:
    """Its phases, in order; `i` always counts blocks of keys, over all items."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits

    @cute.jit
    def consume(self, schedule: Any, output: Any, numbers: Any, dropout: Any, shared: Any) -> None:
        """Output and lse of 64 queries of each item."""
        traits = self.traits
        scale, softcap, slopes, slopes_batch = numbers
        scores = softmax_of.scores_of(scale, softcap, traits)
        launch = ForwardLaunch(schedule, output, scores, (slopes, slopes_batch), dropout, shared)
        me = self.who(shared)
        if me.number == traits.consumers - 1:
            pass_turn(TURN)  # consumer 0 begins
        item = Int32(0)
        i = Int32(0)
        shared.item.await_full(item)
        rows = shared.items[1, shared.item.stage(item)]
        while rows > 0:
            if rows > me.number * ROWS:
                i = self.attend(launch, me, item, i)
            else:
                i = self.skip(launch, me, item, i)
            shared.item.release(item)
            item += 1
            shared.item.await_full(item)
            rows = shared.items[1, shared.item.stage(item)]
        if me.number == 0:
            await_turn(TURN)  # as often as it was passed

    def who(self, shared: Shared) -> Me:
        """This thread."""
        traits = self.traits
        thread, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(thread // WARPGROUP) - 1
        warp = cute.arch.make_warp_uniform(thread // 32) % (WARPGROUP // 32)
        qk = product_of(traits.element, traits.block, False, False)
        pv = product_of(traits.element, traits.dv, True, True)
        qk_of, pv_of = qk.get_slice(0), pv.get_slice(0)
        return Me(
            group,
            warp,
            cute.arch.lane_idx(),
            TURN + group,
            TURN + (group + 1) % traits.consumers,
            qk,
            pv,
            qk_of.make_fragment_A(qk_of.partition_A(shared.q)),
            qk_of.make_fragment_B(qk_of.partition_B(shared.k)),
            pv_of.make_fragment_B(pv_of.partition_B(transposed(shared.v))),
        )

    # What an item is

    def read_item(self, shared: Shared, slot: Any) -> tuple[Place, KeyRange]:
        """The compiler drops loads of what is not used."""
        numbers = [shared.items[n, slot] for n in range(END + 1)]
        own = BlockEntry(*numbers[:BLOCK_NUMBERS])
        tile = TileEntry(*numbers[BLOCK_NUMBERS : BLOCK_NUMBERS + len(TileEntry._fields)])
        keys = KeyRange(*tile, numbers[BEGIN], numbers[END])
        return Place(own, numbers[BATCH], numbers[HEAD]), keys

    def later_keys(self, schedule: Scheduler, tile: Any, own: BlockEntry) -> KeyRange:
        """Of a tile that is not an item's first."""
        entry = tile_entry(at(schedule.tiles, Int32, Int64(tile) * TILE_COLUMNS, 16))
        return keys_of(entry, own.first, own.rows)

    def rows_of(self, launch: ForwardLaunch, me: Me, place: Place) -> ThreadRows:
        """A thread's rows."""
        traits, own = self.traits, place.own
        row = me.number * ROWS + me.warp * 16 + me.lane // 4  # in the item
        slope, hashes = None, None
        if traits.alibi:
            slopes, slopes_batch = launch.slopes
            slope = number(at(slopes, Float32, Int64(place.batch * slopes_batch + place.head)))
            slope = slope * LOG2E
        if traits.dropout:
            tokens = [own.token + (row + 8 * r) * own.stride for r in range(2)]
            head = place.batch, place.head
            hashes = [softmax_of.row_hash(launch.dropout, *head, token) for token in tokens]
        origin = own.position - own.first * own.stride  # own.position is of the item's first row
        return ThreadRows(own.first + row, me.lane % 4 * 2, origin, own.stride, slope, hashes)

    # An item

    @cute.jit
    def skip(self, launch: Any, me: Any, item: Any, i: Any) -> Any:
        """What a consumer does for an item that has no queries for it: take and pass its turns."""
        shared, block = launch.shared, self.traits.block
        place, keys = self.read_item(shared, shared.item.stage(item))
        count = blocks_in(keys.begin, keys.end, block)
        tile = place.own.tile + 1
        while tile < place.own.last_tile:
            later = self.later_keys(launch.schedule, tile, place.own)
            count += blocks_in(later.begin, later.end, block)
            tile += 1
        for _n in cutlass.range(0, count, unroll=1):
            shared.keys.await_full(i)
            await_turn(me.turn)
            pass_turn(me.next_turn)
            shared.keys.release(i)
            shared.values.await_full(i)
            shared.values.release(i)
            i += 1
        return i

    @cute.jit
    def attend(self, launch: Any, me: Any, item: Any, i: Any) -> Any:
        """Output and lse of 64 queries."""
        traits, shared = self.traits, launch.shared
        slot = shared.item.stage(item)
        place, keys = self.read_item(shared, slot)
        own = place.own
        out, softmax = self.start(launch, me, place)
        work = ForwardItem(
            launch,
            me,
            self.uniform(slot * traits.consumers + me.number),
            self.rows_of(launch, me, place),
            own.first + me.number * ROWS,
            out,
            operand(traits.block, traits.element),
            softmax,
        )
        cute.arch.mbarrier_wait(shared.queries + slot, shared.item.phase(item))
        self.first_block(work, keys, i)
        i += 1
        j = keys.begin + traits.block

        # The rest of the first tile, and later tiles; of `keys`, what changes is carried by name.
        _, length, low, high, position, token, begin, end = keys
        tile = own.tile
        while tile < own.last_tile:
            keys = KeyRange(0, length, low, high, position, token, begin, end)
            i = self.walk(work, keys, i, j)
            tile += 1
            if tile < own.last_tile:
                later = self.later_keys(launch.schedule, tile, own)
                _, length, low, high, position, token, begin, end = later
            j = begin

        shared.values.await_full(i - 1)
        self.add_values(work, i - 1)
        warpgroup.wait_group(0)
        shared.values.release(i - 1)
        self.finish(work, slot)
        return i

    # Its beginning: the state

    @cute.jit
    def start(self, launch: Any, me: Any, place: Any) -> Any:
        """Go on from the state (out, lse), on the first launch from a sink or from nothing."""
        traits, output = self.traits, launch.output
        out = accumulators(traits.dv)
        softmax = RunningSoftmax(
            cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(4, Float32)
        )
        lse = cute.make_rmem_tensor(2, Float32)
        lse.fill(-Float32.inf)
        out.fill(0.0)
        if const_expr(traits.sink or not traits.single):
            is_first = Boolean(True)
            if const_expr(not traits.single):
                is_first = (place.own.flags & FIRST) != 0
            wanted = not is_first
            if const_expr(traits.sink):
                wanted = Boolean(True)
            if wanted:
                for r in cutlass.range_constexpr(2):
                    row = self.row_there(me, place, r)
                    there = offset(output.lse_strides, place.batch, row, place.head)
                    lse[r] = number(at(output.lse, Float32, there))
            if const_expr(not traits.single):
                if not is_first:
                    self.load_out(launch, me, place, out)
        softmax_of.begin(softmax, lse)
        return out, softmax

    def row_there(self, me: Me, place: Place, r: int) -> Any:
        """A row of this thread's in memory; the last one there is, if it has none."""
        row = me.number * ROWS + me.warp * 16 + me.lane // 4 + 8 * r
        return place.own.row + cutlass.min(row, place.own.rows - 1)

    @cute.jit
    def load_out(self, launch: Any, me: Any, place: Any, out: Any) -> None:
        """The output so far, as often as its weight says."""
        traits, output = self.traits, launch.output
        weight = Float32(2.0**softmax_of.CARRY)
        if const_expr(traits.dropout):
            weight = weight / launch.dropout.keep_scale  # the output is scaled once, at the end
        for r in cutlass.range_constexpr(2):
            row = self.row_there(me, place, r)
            begin = offset(output.out_strides, place.batch, row, place.head) + me.lane % 4 * 2
            for g in cutlass.range_constexpr(traits.dv // 8):
                if const_expr(traits.even):
                    self.load_pair(output.out, begin, out, g, r, weight)
                else:
                    if 8 * g < output.dv:
                        self.load_pair(output.out, begin, out, g, r, weight)

    @cute.jit
    def load_pair(
        self, address: Any, begin: Any, out: Any, g: cutlass.Constexpr, r: cutlass.Constexpr,
        weight: Any,
    ) -> None:  # fmt: skip
        """Two columns of a row."""
        there = vector(at(address, Float32, begin + 8 * g, 8), 2).load()
        out[4 * g + 2 * r] = there[0] * weight
        out[4 * g + 2 * r + 1] = there[1] * weight

    # Its blocks of keys

    def scores_of(self, work: ForwardItem, i: Any) -> Any:
        """Issue S = q · k' of a block."""
        traits, me = self.traits, work.me
        s = accumulators(traits.block)
        mine, stage = self.uniform(work.q), self.uniform(work.launch.shared.keys.stage(i))
        steps = traits.d // 16
        q = [me.q[None, None, n, mine] for n in range(steps)]
        k = [me.k[None, None, n, stage] for n in range(steps)]
        multiply(me.qk, as_c(s, traits.block), q, k, steps, False)
        return s

    def add_values(self, work: ForwardItem, i: Any) -> None:
        """Issue out += p · v of a block."""
        traits, me = self.traits, work.me
        stage = self.uniform(work.launch.shared.values.stage(i))
        steps = traits.block // 16
        p = [as_a(work.p, n) for n in range(steps)]
        v = [me.v[None, None, n, stage] for n in range(steps)]
        multiply(me.pv, as_c(work.out, traits.dv), p, v, steps, True)

    def uniform(self, stage: Any) -> Any:
        """A stage, so that descriptors are computed in uniform registers.

        With fewer columns they are anyway, and with 256 ptxas has them in vector registers still.
        """
        return uniform_again(stage) if 128 < self.traits.d < 256 else stage

    @cute.jit
    def first_block(self, work: Any, keys: Any, i: Any) -> None:
        """Of an item: there is no product with values yet."""
        traits, me, launch = self.traits, work.me, work.launch
        launch.shared.keys.await_full(i)
        await_turn(me.turn)
        s = self.scores_of(work, i)
        pass_turn(me.next_turn)
        warpgroup.wait_group(0)
        launch.shared.keys.release(i)
        start = inside(keys.begin, keys.length, traits.block)
        softmax_of.finish(s, launch.scores, work.rows, keys, start, traits)
        if needs_mask(keys.begin, keys, work.row, traits.block):
            softmax_of.mask(s, work.rows, keys, keys.begin, start)
        self.new_maximum(work, s, keys, start)

    @cute.jit
    def walk(self, work: Any, keys: Any, i: Any, j: Any) -> Any:
        """Advance by the keys j … end of a tile: an edge on the left, whole blocks, the right."""
        left, right = edges(keys, work.row, self.traits.block)
        if const_expr(self.traits.window):
            i, j = self.blocks(work, keys, i, j, left, True)
        i, j = self.blocks(work, keys, i, j, right, False)
        i, j = self.blocks(work, keys, i, j, keys.end, True)
        return i

    @cute.jit
    def blocks(
        self, work: Any, keys: Any, i: Any, j: Any, limit: Any, masked: cutlass.Constexpr
    ) -> Any:
        """All blocks from j on that begin before a limit."""
        while j < limit:
            self.block(work, keys, i, j, masked)
            i += 1
            j += self.traits.block
        return i, j

    @cute.jit
    def block(self, work: Any, keys: Any, i: Any, j: Any, masked: cutlass.Constexpr) -> None:
        """One block of keys, and the values of the one before."""
        traits, me, launch = self.traits, work.me, work.launch
        shared = launch.shared
        shared.keys.await_full(i)
        await_turn(me.turn)
        s = self.scores_of(work, i)
        shared.values.await_full(i - 1)
        self.add_values(work, i - 1)
        if const_expr(not traits.late):
            pass_turn(me.next_turn)
        warpgroup.wait_group(1)
        shared.keys.release(i)
        start = inside(j, keys.length, traits.block) if const_expr(masked) else j
        softmax_of.finish(s, launch.scores, work.rows, keys, start, traits)
        if const_expr(masked):
            softmax_of.mask(s, work.rows, keys, j, start)
        if const_expr(masked or not traits.lazy):
            rescale = self.powers(work, s, keys, start)
            self.await_values(work, i)
            softmax_of.scaled(work.out, rescale)
            round_into(work.p, s)
        else:
            self.old_maximum(work, s, keys, start, i)

    @cute.jit
    def await_values(self, work: Any, i: Any) -> None:
        """Until the product with the values before block i is complete."""
        warpgroup.wait_group(0)
        if const_expr(self.traits.late):
            pass_turn(work.me.next_turn)
        work.launch.shared.values.release(i - 1)

    @cute.jit
    def powers(self, work: Any, s: Any, keys: Any, start: Any) -> Any:
        """s becomes p for the new maximum; returns what to scale the output with."""
        rescale = cute.make_rmem_tensor(2, Float32)
        softmax_of.powers(s, work.softmax, work.launch.scores, rescale)
        if const_expr(self.traits.dropout):
            softmax_of.drop(s, work.rows, keys, start, work.launch.dropout)
        return rescale

    @cute.jit
    def new_maximum(self, work: Any, s: Any, keys: Any, start: Any) -> None:
        """Softmax where no product is under way."""
        rescale = self.powers(work, s, keys, start)
        softmax_of.scaled(work.out, rescale)
        round_into(work.p, s)

    @cute.jit
    def old_maximum(self, work: Any, s: Any, keys: Any, start: Any, i: Any) -> None:
        """Softmax with the maximum that there is, if that will do."""
        traits, launch = self.traits, work.launch
        p = operand(traits.block, traits.element)
        sums = cute.make_rmem_tensor(4, Float32)
        above = softmax_of.powers_of_old_maximum(
            p, s, work.softmax, launch.scores, sums, work.rows, keys, start, launch.dropout, traits
        )
        self.await_values(work, i)
        pairs, found = cute.recast_tensor(work.p, Int32), cute.recast_tensor(p, Int32)
        for n in cutlass.range_constexpr(traits.block // 4):
            pairs[n] = settled(found[n])
        if above:
            self.new_maximum(work, s, keys, start)
        else:
            for n in cutlass.range_constexpr(4):
                work.softmax.sums[n] = work.softmax.sums[n] + sums[n]

    # Its end

    @cute.jit
    def finish(self, work: Any, slot: Any) -> None:
        """Normalise and store; a row that saw no key is (0, −inf)."""
        traits, me, launch = self.traits, work.me, work.launch
        output = launch.output
        place, _ = self.read_item(launch.shared, slot)  # again: it need not stay in registers
        own = place.own
        lse = cute.make_rmem_tensor(2, Float32)
        inverses = cute.make_rmem_tensor(2, Float32)
        softmax_of.end(work.softmax, lse, inverses)
        if const_expr(traits.dropout):
            for r in cutlass.range_constexpr(2):
                inverses[r] = inverses[r] * launch.dropout.keep_scale
        softmax_of.normalised(work.out, inverses)
        row = me.number * ROWS + me.warp * 16 + me.lane // 4
        for r in cutlass.range_constexpr(2):
            if (row + 8 * r < own.rows) & (me.lane % 4 == 0):
                there = offset(output.lse_strides, place.batch, own.row + row + 8 * r, place.head)
                vector(at(output.lse, Float32, there), 1)[0] = lse[r]
        if const_expr(traits.single):
            self.store_result(work, place, slot)
        elif const_expr(traits.result):
            if (own.flags & LAST) != 0:
                self.store_result(work, place, slot)
            else:
                self.store_out(work, place)
        else:
            self.store_out(work, place)

    @cute.jit
    def store_out(self, work: Any, place: Any) -> None:
        """The state, in fp32; four threads write 32 bytes of a row."""
        traits, me, output, own = self.traits, work.me, work.launch.output, place.own
        row = me.number * ROWS + me.warp * 16 + me.lane // 4
        pair = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            if row + 8 * r < own.rows:
                there = offset(output.out_strides, place.batch, own.row + row + 8 * r, place.head)
                begin = there + me.lane % 4 * 2
                for g in cutlass.range_constexpr(traits.dv // 8):
                    pair[0] = work.out[4 * g + 2 * r]
                    pair[1] = work.out[4 * g + 2 * r + 1]
                    to = vector(at(output.out, Float32, begin + 8 * g, 8), 2)
                    if const_expr(traits.even):
                        cute.autovec_copy(pair, to)
                    else:
                        if 8 * g < output.dv:
                            cute.autovec_copy(pair, to)

    @cute.jit
    def store_result(self, work: Any, place: Any, slot: Any) -> None:
        """The output, rounded; through the queries' memory, so that a warp writes whole rows."""
        traits, me, output, own = self.traits, work.me, work.launch.output, place.own
        queries = work.launch.shared.q
        columns = traits.staged
        pitch = columns * 2 + 16  # bytes of a row
        chunks = columns // 8  # of 16 bytes, in a row
        cute.arch.barrier(barrier_id=OWN + me.number, number_of_threads=WARPGROUP)
        mine = queries[None, None, slot * traits.consumers + me.number].iterator.toint()
        staged = Int32(mine) + me.warp * (16 * pitch)
        for part in cutlass.range_constexpr(traits.dv // columns):
            for g in cutlass.range_constexpr(chunks):
                for r in cutlass.range_constexpr(2):
                    n = 4 * (part * chunks + g) + 2 * r
                    word = pack(work.out[n], work.out[n + 1], traits.element)
                    to = staged + (me.lane // 4 + 8 * r) * pitch + g * 16 + me.lane % 4 * 4
                    vector(cute.make_ptr(Int32, to, SMEM, assumed_align=4), 1)[0] = word
            cute.arch.sync_warp()
            for n in cutlass.range_constexpr((16 * chunks + 31) // 32):
                chunk = me.lane + 32 * n
                row, column = chunk // chunks, chunk % chunks
                here = me.number * ROWS + me.warp * 16 + row
                first = 8 * column + part * columns
                if (row < 16) & (here < own.rows) & (first < output.dv):
                    words = cute.make_rmem_tensor(4, Int32)
                    source = staged + row * pitch + column * 16
                    source = cute.make_ptr(Int32, source, SMEM, assumed_align=16)
                    cute.autovec_copy(vector(source, 4), words)
                    there = offset(output.result_strides, place.batch, own.row + here, place.head)
                    target = output.result + (there + first) * 2
                    target = cute.make_ptr(Int32, target, GMEM, assumed_align=16)
                    cute.autovec_copy(words, vector(target, 4))
            cute.arch.sync_warp()
        cute.arch.fence_view_async_shared()  # TMA writes there next
