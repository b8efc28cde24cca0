"""Forward on Hopper in CuTe DSL: persistent, warp-specialised, with ping-pong scheduling.

    producer      Q  K0  V0   K1     V1   K2     V2 …               (TMA; waits for "empty")
    consumer 0        S0 ·softmax0· S1 P0·V0 ·softmax1· S2 P1·V1 ·softmax2· …
    consumer 1            S0 ·softmax0· S1 P0·V0 ·softmax1· S2 P1·V1 …
    (consumer 2)              S0 …

An item is 64 queries for each consumer warpgroup, of one head. A consumer goes through the tiles of
their span, in blocks of keys. It issues two products, S = q · k' of the next block and p · v of
this one, waits for S alone, and computes the next softmax while p · v is under way. Only one
consumer at a time issues products (ping-pong): while it computes its softmax, the others multiply.

A block without a mask is first tried with the maximum that its rows have (`Traits.lazy`): powers
above it are right as long as their sums stay below LIMIT, and then nothing is scaled. Such a block
needs both its scores and its rounded powers in registers. Without `lazy` powers replace scores.

    mbarrier         who arrives            what it says
    item.full[b]     the producer           buffer b says what the next item is
    item.empty[b]    every consumer's warp  it has read that, and its queries, and written its rows
    queries[b]       TMA                    the queries of that item are there
    k.full[s]        TMA                    stage s holds a block of keys; v.full[s]: of values (for
                                            short documents the producer arrives: `clear_rest`)
    k.empty[s]       every consumer's warp  it does not read stage s any more; v.empty[s]
    landed           TMA                    a short document's values are there, to be cleared

    named barrier    threads                what it says
    TURN + c         consumer c, and the    consumer c may issue products
                     one before it
    OWN + c          consumer c             none of its warps reads the item's queries any more

Registers: the producer's warpgroup gives its own away. Two consumers have 240 a thread, three 160.
With head dimension 128 and blocks of 128 keys a thread holds 64 of the output, 64 scores, 32 of
rounded powers which a product may still read, and 32 of the next ones.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync

from .consumer import Consumer
from .primitives import (
    ROWS,
    WARPGROUP,
    Scheduler,
    init_ring,
    make_ring,
    smem_layout,
    tensor_of,
    tma_of,
)
from .producer import Producer
from .scores import Dropout
from .traits import ITEM, Loads, Output, Shared, Traits

# Consumers → registers of a thread of theirs, and of the producer. Together not more than a program
# begins with: 168 a thread with three warpgroups, 128 with four.
REGISTERS = {1: (240, 40), 2: (232, 40), 3: (160, 32)}


class Forward:
    """The kernel, for some `Traits`."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits

    @cute.jit
    def __call__(
        self,
        q: Int64, k: Int64, v: Int64, out: Int64, lse: Int64, result: Int64, slopes: Int64,
        seed: Int64, counter: Int64, blocks: Int64, tiles: Int64,
        batch: Int32, rows_q: Int32, rows_k: Int32, nheads: Int32, nheads_k: Int32, d: Int32,
        dv: Int32, count: Int32, section: Int32, programs: Int32, slopes_batch: Int32,
        q_batch: Int64, q_row: Int64, q_head: Int64, k_batch: Int64, k_row: Int64, k_head: Int64,
        v_batch: Int64, v_row: Int64, v_head: Int64, o_batch: Int64, o_row: Int64, o_head: Int64,
        l_batch: Int64, l_row: Int64, l_head: Int64, r_batch: Int64, r_row: Int64, r_head: Int64,
        scale: Float32, softcap: Float32, threshold: Int32, keep_scale: Float32, head_start: Int32,
        stream: Any,
    ) -> None:  # fmt: skip
        """Describe the tensors to TMA, and launch."""
        traits = self.traits
        dtype = traits.element
        layouts = (
            smem_layout(dtype, ROWS, traits.width, traits.items * traits.consumers),
            smem_layout(dtype, traits.block, traits.width, traits.stages),
            smem_layout(dtype, traits.block, traits.dv, traits.stages),
        )
        q_of = tensor_of(dtype, q, (rows_q, d, nheads, batch), (q_row, q_head, q_batch))
        k_of = tensor_of(dtype, k, (rows_k, d, nheads_k, batch), (k_row, k_head, k_batch))
        v_of = tensor_of(dtype, v, (rows_k, dv, nheads_k, batch), (v_row, v_head, v_batch))
        loads = Loads(
            tma_of(q_of, layouts[0], ROWS, traits.width),
            tma_of(k_of, layouts[1], traits.block, traits.width),
            tma_of(v_of, layouts[2], traits.block, traits.dv),
        )
        schedule = Scheduler(
            blocks, tiles, counter, count, section, batch * nheads, nheads, nheads // nheads_k
        )
        output = Output(
            out, lse, result, dv, (o_batch, o_row, o_head), (l_batch, l_row, l_head),
            (r_batch, r_row, r_head),
        )  # fmt: skip
        numbers = scale, softcap, slopes, slopes_batch
        dropout = Dropout(seed, Uint32(threshold), keep_scale, head_start)
        self.kernel(
            loads, schedule, output, numbers, dropout, layouts[0], layouts[1], layouts[2]
        ).launch(
            grid=(programs, 1, 1),
            block=((traits.consumers + 1) * WARPGROUP, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self, loads: Any, schedule: Any, output: Any, numbers: Any, dropout: Any, q_layout: Any,
        k_layout: Any, v_layout: Any,
    ) -> None:  # fmt: skip
        """Share out the roles."""
        traits = self.traits
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom, _ in loads:
                cpasync.prefetch_descriptor(atom)
        shared = self.allocate(q_layout, k_layout, v_layout)
        if warp == 0:
            with cute.arch.elect_one():
                self.init_barriers(shared)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        theirs, own = REGISTERS[traits.consumers]
        if warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(own)
            if warp == 0:
                Producer(traits).produce(loads, schedule, output, shared)
        else:
            cute.arch.setmaxregister_increase(theirs)
            Consumer(traits).consume(schedule, output, numbers, dropout, shared)

    def allocate(self, q_layout: Any, k_layout: Any, v_layout: Any) -> Shared:
        """Shared memory."""
        traits = self.traits
        smem = cutlass.utils.SmemAllocator()
        item, keys, values = (
            make_ring(smem, stages) for stages in (traits.items, traits.stages, traits.stages)
        )
        queries, landed = smem.allocate_array(Int64, traits.items), smem.allocate_array(Int64, 1)
        items = smem.allocate_tensor(Int32, cute.make_layout((ITEM, traits.items)), 16)
        q, k, v = (
            smem.allocate_tensor(traits.element, layout.outer, 1024, swizzle=layout.inner)
            for layout in (q_layout, k_layout, v_layout)
        )
        return Shared(q, k, v, items, item, queries, keys, values, landed)

    @cute.jit
    def init_barriers(self, shared: Any) -> None:
        """By one thread."""
        traits = self.traits
        warps = traits.consumers * WARPGROUP // 32
        init_ring(shared.item, 1, warps)
        init_ring(shared.keys, 1, warps)
        init_ring(shared.values, 1, warps)
        for b in cutlass.range_constexpr(traits.items):
            cute.arch.mbarrier_init(shared.queries + b, 1)
        cute.arch.mbarrier_init(shared.landed, 1)
