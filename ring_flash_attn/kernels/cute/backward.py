"""Backward on Hopper in CuTe DSL: one persistent kernel for dQ, dK and dV.

An item is 128 keys of one KV head, 64 for each of two consumer warpgroups, which go through the
blocks of queries that see them, of all query heads of the group or of a part of it: dK and dV stay
in registers. Scores are computed transposed, (keys, queries), so that p and ds are register
operands of the products of dV and dK. Only ds goes through shared memory, for dQ = ds' · k over the
keys of both consumers, of which each computes half of the columns, or of the rows where a block has
128 queries. A warp for each consumer has its half added to fp32 in memory by TMA, in no particular
order.

    producer      q, lse, dout, delta of block n + 1, n + 2 …
    consumer      S = k·q'  dP = v·dout'  ·p·  dV += p·dout  ·ds·  dQ of block n − 1   dK += ds·q
                                                                ↓       ↑      ↓
    shared memory                                    ds of block n   of n − 1  ↓
    adder                                                                   dQ of block n − 1 …

dQ of a block is computed one block later, so that no consumer waits for the other, and stored while
dK is computed. In an item's first block it is that of some other one, and nobody looks at it.

    mbarrier         who arrives            what it says
    item.full[b]     the producer           buffer b says what the next item is
    item.empty[b]    all others' warps      they have read that
    keys.full[b]     TMA                    the keys of that item are there; values.full: its values
    keys.empty[b]    every consumer's warp  it does not read them any more; values.empty
    queries.full[s]  TMA                    stage s holds queries and their lse; douts.full[s]: dout
                                            and delta (short documents: the producer arrives)
    queries.empty[s] every consumer's warp  it is done with stage s: ds of its block is in shared
                                            memory, and it reads ds of the block before no more
    douts.empty[s]   every consumer's warp  it has read dout, where that has stages of its own
    sums.full[c]     consumer c's warps     its half of dQ of a block is in shared memory
    sums.empty[c]    its adder              and has been read
    landed           TMA                    a short document's queries are there, to be cleared

    named barrier    threads                what it says
    OWN + c          consumer c             what lies behind the item's last key is cleared

Other launches of the same kernel compute less: dK and dV without dQ; one of them alone; or, with
queries and keys exchanged, dQ alone, in the order of the keys: then an item is 128 queries, blocks
are of keys, and "dK" in the code is dQ. See `sizes.backward_launches`.

Above head dimension 128, but for 192 with values of 128, dK and dV of 64 keys do not fit into a
consumer's registers together: one launch computes dK and dQ, another dV. In the first, ds has one
buffer, so dQ is that of the same block; a consumer's half of it goes to the adder in parts of 32
columns, the last ones while dP of the next block is computed.

    consumer      dP = v·dout'  S = k·q'  ·p·  ·ds·  dQ  dK += ds·q
                        ↓                        ↓  ↑  ↓
    shared memory       ↓                       ds     parts of dQ
    adder               parts of dQ of block n − 1

    mbarrier         who arrives            what it says
    ready.full       every consumer's warp  ds is in shared memory
    ready.empty      every consumer's warp  it does not read ds any more

Registers: with head dimension 128 a consumer's thread holds 128 of dK and dV, 64 of S and dP, and
32 of p and ds as operands, of 240.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync

from .backward_consumer import BackwardConsumer
from .backward_producer import Adder, BackwardProducer
from .primitives import (
    ROWS,
    WARPGROUP,
    Ring,
    Scheduler,
    adding_tma_of,
    init_ring,
    make_ring,
    smem_layout,
    tensor_of,
    tma_of,
)
from .scores import Dropout
from .traits import (
    CONSUMERS,
    ITEM,
    BackwardLoads,
    BackwardShared,
    BackwardTraits,
    Gradients,
)

REGISTERS = 240, 24  # of a consumer's thread, and of others: together what a program begins with


class Backward:
    """The kernel, for some `BackwardTraits`."""

    def __init__(self, traits: BackwardTraits) -> None:
        self.traits = traits

    @cute.jit
    def __call__(
        self,
        q: Int64, k: Int64, v: Int64, dout: Int64, lse: Int64, delta: Int64, dq: Int64, dk: Int64,
        dv: Int64, slopes: Int64, seed: Int64, counter: Int64, blocks: Int64, tiles: Int64,
        batch: Int32, rows_q: Int32, rows_k: Int32, nheads: Int32, nheads_k: Int32, d: Int32,
        dv_width: Int32, wide: Int32, count: Int32, section: Int32, programs: Int32, parts: Int32,
        slopes_batch: Int32,
        q_batch: Int64, q_row: Int64, q_head: Int64, k_batch: Int64, k_row: Int64, k_head: Int64,
        v_batch: Int64, v_row: Int64, v_head: Int64, o_batch: Int64, o_row: Int64, o_head: Int64,
        dq_batch: Int64, dq_row: Int64, dq_head: Int64, dk_batch: Int64, dk_row: Int64,
        dk_head: Int64, dv_batch: Int64, dv_row: Int64, dv_head: Int64,
        scale: Float32, softcap: Float32, threshold: Int32, keep_scale: Float32, head_start: Int32,
        stream: Any,
    ) -> None:  # fmt: skip
        """Describe the tensors to TMA, and launch."""
        traits = self.traits
        dtype, piece = traits.element, traits.piece
        layouts = (
            smem_layout(dtype, piece, traits.d, traits.stages),
            smem_layout(dtype, piece, traits.dv, traits.dout_stages),
            smem_layout(
                dtype, ROWS, traits.width, CONSUMERS * traits.items, traits.product_columns
            ),
            smem_layout(dtype, ROWS, traits.dv, CONSUMERS),
            smem_layout(dtype, ROWS, traits.ds_columns, traits.ds_buffers),
            smem_layout(Float32, traits.dq_rows, traits.dq_columns, CONSUMERS),
        )
        q_of = tensor_of(dtype, q, (rows_q, d, nheads, batch), (q_row, q_head, q_batch))
        o_of = tensor_of(dtype, dout, (rows_q, dv_width, nheads, batch), (o_row, o_head, o_batch))
        k_of = tensor_of(dtype, k, (rows_k, d, nheads_k, batch), (k_row, k_head, k_batch))
        v_of = tensor_of(dtype, v, (rows_k, dv_width, nheads_k, batch), (v_row, v_head, v_batch))
        dq_of = None
        if const_expr(traits.dq):
            dq_of = adding_tma_of(
                tensor_of(Float32, dq, (rows_q, d, nheads, batch), (dq_row, dq_head, dq_batch)),
                layouts[5],
                traits.dq_rows,
                traits.dq_columns,
            )
        loads = BackwardLoads(
            tma_of(q_of, layouts[0], piece, traits.d),
            tma_of(k_of, layouts[2], ROWS, traits.width),
            tma_of(v_of, layouts[3], ROWS, traits.dv),
            tma_of(o_of, layouts[1], piece, traits.dv),
            dq_of,
            lse, delta, wide,
        )  # fmt: skip
        heads = nheads_k * parts
        group = Int32(1) if const_expr(traits.exchanged) else nheads // heads
        schedule = Scheduler(blocks, tiles, counter, count, section, batch * heads, heads, group)
        gradients = Gradients(
            dk, dv, d, dv_width, (dk_batch, dk_row, dk_head),
            (dv_batch, dv_row, dv_head),
        )  # fmt: skip
        numbers = scale, softcap, slopes, slopes_batch, lse, delta, wide
        dropout = Dropout(seed, Uint32(threshold), keep_scale, head_start)
        self.kernel(
            loads, schedule, gradients, numbers, dropout, parts, nheads, layouts[0], layouts[1],
            layouts[2], layouts[3], layouts[4], layouts[5],
        ).launch(
            grid=(programs, 1, 1),
            block=((CONSUMERS + 1) * WARPGROUP, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, loads: Any, schedule: Any, gradients: Any, numbers: Any, dropout: Any, parts: Any,
        nheads: Any, q_layout: Any, do_layout: Any, k_layout: Any, v_layout: Any, ds_layout: Any,
        dq_layout: Any,
    ) -> None:  # fmt: skip
        """Share out the roles."""
        traits = self.traits
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom, _ in loads[:4]:
                cpasync.prefetch_descriptor(atom)
        shared = self.allocate(q_layout, do_layout, k_layout, v_layout, ds_layout, dq_layout)
        if warp == 0:
            with cute.arch.elect_one():
                self.init_barriers(shared)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        theirs, own = REGISTERS
        if warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(own)
            if warp == 0:
                BackwardProducer(traits).produce(loads, schedule, parts, nheads, shared)
            if const_expr(traits.dq):
                if (warp == 1) | (warp == 2):
                    Adder(traits).add(warp - 1, loads.dq, schedule, shared)
        else:
            cute.arch.setmaxregister_increase(theirs)
            BackwardConsumer(traits).consume(schedule, gradients, numbers, dropout, shared)

    def allocate(
        self, q_layout: Any, do_layout: Any, k_layout: Any, v_layout: Any, ds_layout: Any,
        dq_layout: Any,
    ) -> BackwardShared:  # fmt: skip
        """Shared memory."""
        traits = self.traits
        smem = cutlass.utils.SmemAllocator()
        item, keys, values, queries, sums = (
            make_ring(smem, stages) for stages in (2, traits.items, 1, traits.stages, CONSUMERS)
        )
        ready = make_ring(smem, 1) if traits.paired else None
        if traits.separate:
            douts = make_ring(smem, traits.dout_stages)
        else:
            douts = Ring(smem.allocate_array(Int64, traits.stages), queries.empty, traits.stages)
        landed = smem.allocate_array(Int64, 1)
        items = smem.allocate_tensor(Int32, cute.make_layout((ITEM, 2)), 16)
        q, dout, k, v, ds = (
            smem.allocate_tensor(traits.element, layout.outer, 1024, swizzle=layout.inner)
            if layout is not v_layout or traits.values
            else None
            for layout in (q_layout, do_layout, k_layout, v_layout, ds_layout)
        )
        dq = None
        if traits.dq:
            dq = smem.allocate_tensor(Float32, dq_layout.outer, 1024, swizzle=dq_layout.inner)
        lse, delta = (
            smem.allocate_tensor(Float32, cute.make_layout((traits.piece, stages)), 128)
            for stages in (traits.stages, traits.dout_stages)
        )
        return BackwardShared(
            q, dout, k, v, ds, dq, lse, delta, items, item, keys, values, queries, douts, ready,
            sums, landed,
        )  # fmt: skip

    @cute.jit
    def init_barriers(self, shared: Any) -> None:
        """By one thread."""
        traits = self.traits
        warps = CONSUMERS * WARPGROUP // 32
        init_ring(shared.item, 1, warps + (CONSUMERS if traits.dq else 0))
        init_ring(shared.keys, 1, warps)
        init_ring(shared.values, 1, warps)
        init_ring(shared.queries, 1, warps)
        init_ring(shared.sums, WARPGROUP // 32, 1)
        if const_expr(traits.paired):
            init_ring(shared.ready, warps, warps)
        if const_expr(traits.separate):
            init_ring(shared.douts, 1, warps)
        else:
            for stage in cutlass.range_constexpr(traits.stages):
                cute.arch.mbarrier_init(shared.douts.full + stage, 1)
        cute.arch.mbarrier_init(shared.landed, 1)
