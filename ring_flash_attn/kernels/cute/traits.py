"""What the forward kernel is compiled for, and what its warps share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int64

from .primitives import ROWS, Ring

TURN, OWN = 1, 4  # named barriers; 0 is the whole program's
ITEM = 32  # numbers of an item's buffer: the block's row of the table, batch, head, begin, end
BATCH, HEAD, BEGIN, END = 16, 17, 18, 19


@dataclass(frozen=True)
class Traits:
    """What a kernel is compiled for.

    Attributes:
        dtype: "bf16" or "fp16".
        d, dv: inner columns of q · k', and columns of the output.
        width: columns of q and k in shared memory, at least d: a multiple of 64 is swizzled best.
        consumers: warpgroups with 64 queries each.
        block: keys of a block, a multiple of 16.
        stages: blocks of keys and values in shared memory.
        items: whose queries are in shared memory.
        lazy: blocks without a mask are tried with the old maximum.
        late: a consumer passes its turn when its products are complete, not when they are issued:
            better where they are short.
        even: dv is the head dimension of the values.
        window, softcap, alibi, dropout: features.
        sink: a state marked FIRST still has an lse.
        result: rows marked LAST go to `result`, rounded.
        single: this launch is the only one: nothing is carried, and all goes to `result`.
        short: some key span is shorter than a block.
    """

    dtype: str = "bf16"
    d: int = 128
    dv: int = 128
    width: int = 128
    consumers: int = 2
    block: int = 128
    stages: int = 2
    items: int = 2
    lazy: bool = True
    late: bool = False
    even: bool = True
    window: bool = False
    softcap: bool = False
    alibi: bool = False
    dropout: bool = False
    sink: bool = False
    result: bool = True
    single: bool = True
    short: bool = False

    @property
    def element(self) -> Any:
        return cutlass.BFloat16 if self.dtype == "bf16" else cutlass.Float16

    @property
    def staged(self) -> int:
        """Columns of the output that go through the memory of the queries at a time.

        A row is 16 bytes longer there, so that its columns lie in other banks than the next one's.
        """
        return self.dv if self.dv + 8 <= self.width else self.dv // 2

    @property
    def shared(self) -> int:
        """Bytes of shared memory, mbarriers and alignment included."""
        queries = self.items * self.consumers * ROWS * self.width
        block = self.stages * self.block * (self.width + self.dv)
        return 2 * (queries + block) + self.items * ITEM * 4 + 2048


class Loads(NamedTuple):
    """What the producer loads: how TMA copies, and from what."""

    q: tuple[Any, Any]
    k: tuple[Any, Any]
    v: tuple[Any, Any]


class Output(NamedTuple):
    """Addresses, with strides (batch, row, head): the state (out, lse), and the final output."""

    out: Any
    lse: Any
    result: Any
    dv: Any
    out_strides: Any
    lse_strides: Any
    result_strides: Any


class Shared(NamedTuple):
    """Shared memory and its mbarriers."""

    q: Any  # (64, width, items · consumers)
    k: Any  # (block, width, stages)
    v: Any  # (block, dv, stages)
    items: Any  # (ITEM, items)
    item: Ring
    queries: Any
    keys: Ring
    values: Ring
    landed: Any


def offset(strides: Any, batch: Any, row: Any, head: Any) -> Any:
    """Of a row of one head, in elements."""
    return Int64(batch) * strides[0] + Int64(row) * strides[1] + Int64(head) * strides[2]


# The backward's


CONSUMERS = 2


@dataclass(frozen=True)
class BackwardTraits:
    """What a backward kernel is compiled for.

    Attributes:
        dtype: "bf16" or "fp16".
        d, dv: columns of products with q and k, and with v and dout.
        block: queries of a block: 64, or 128 of which each consumer computes half of dQ's rows;
            any multiple of 16 if dQ is not computed, or `swapped`.
        stages: pieces of queries in shared memory.
        items: whose keys are there.
        late: dV is computed behind dS: for blocks too large for both operands in registers.
        early_lse: lse is read before S is there, not behind it.
        early_delta: the same of delta and dP; and ds is computed before the other consumer is
            waited for.
        store_last: ds goes to shared memory behind the issue of dQ and dK, not before it.
        whole: with a head dimension above 128, too, scores of a block are computed at a time, not
            of half of it; dP begins when p is rounded, dQ when dK is complete; dout has one stage.
        folded: p and ds are rounded with the softmax scale in them, which comes with lse: so dQ and
            dK need it no more, and dV is divided by it.
        kept: parts of dQ of a block that the adder gets in the next one, where dV is not computed.
        swapped: dQ is computed transposed, (d, queries), with whole columns for each consumer.
        even: d and dv are the head dimensions.
        softcap, alibi, dropout: features.
        short: some span of queries is shorter than a block.
        fresh: dK and dV are written, else added to.
        rounded: dK and dV are in `dtype`, and the launch is the only one; else in fp32.
        dq: compute it, too.
        only: "dk" or "dv": leave out the other of these two.
        exchanged: items are queries and blocks are keys, and what is called dK is dQ.
    """

    dtype: str = "bf16"
    d: int = 128
    dv: int = 128
    block: int = 64
    stages: int = 2
    items: int = 1
    late: bool = False
    early_lse: bool = False
    early_delta: bool = False
    swapped: bool = False
    store_last: bool = False
    whole: bool = False
    folded: bool = False
    kept: int = 0
    even: bool = True
    softcap: bool = False
    alibi: bool = False
    dropout: bool = False
    short: bool = False
    fresh: bool = True
    rounded: bool = True
    dq: bool = True
    only: str = ""
    exchanged: bool = False

    def __post_init__(self) -> None:
        assert not self.dq or self.only in ("", "dk")
        assert not self.paired or (self.block == ROWS and self.stages == 1)
        assert not self.paired or not (self.whole or self.swapped or self.exchanged)
        assert 0 <= self.kept <= (self.dq_parts if self.paired else 0)
        assert not self.exchanged or self.only == "dk"
        assert not (self.late and (self.softcap or self.dropout)), "p is gone by then"
        assert not self.whole or (self.block == ROWS and self.dq and not self.swapped)
        assert not (self.whole and (self.late or self.early_delta or self.store_last))
        assert not (self.whole and (self.softcap or self.dropout)), "ds is of a rounded p"
        assert not self.swapped or (self.d == CONSUMERS * ROWS and self.pieces == 1)

    @property
    def element(self) -> Any:
        return cutlass.BFloat16 if self.dtype == "bf16" else cutlass.Float16

    @property
    def piece(self) -> int:
        """Queries of a stage, whose scores are computed at a time: a block, or half of one."""
        return 32 if self.d > 128 and not (self.only or self.whole) else self.block

    @property
    def dout_stages(self) -> int:
        return 1 if self.separate else self.stages

    @property
    def early_columns(self) -> int:
        """Of lse and delta that are read early: all, or as many as there are registers for."""
        return self.piece // 2 if self.whole else self.piece

    @property
    def by_rows(self) -> bool:
        """Consumers share out dQ's rows, not its columns."""
        return self.block > ROWS and not self.swapped

    @property
    def pieces(self) -> int:
        """Of a block; with each, as large a part of the last one's dQ is computed."""
        return self.block // self.piece

    @property
    def paired(self) -> bool:
        """dK and dQ are computed, and dV is not."""
        return self.dq and self.only == "dk"

    @property
    def separate(self) -> bool:
        """dout has stages of its own."""
        return self.whole or self.paired

    @property
    def dq_parts(self) -> int:
        """Of a consumer's dQ of a block, which the adder takes one by one."""
        return self.d // (32 * CONSUMERS) if self.paired else self.pieces

    @property
    def dq_columns(self) -> int:
        """Of a part; multiples of 16: TMA adds whole lines of 64 bytes."""
        parts = CONSUMERS * self.dq_parts
        return self.d if self.by_rows else -(-self.d // (16 * parts)) * 16

    @property
    def product_columns(self) -> int:
        """Of dQ, that a consumer computes at a time."""
        return self.dq_columns * (self.dq_parts if self.paired else 1)

    @property
    def dq_rows(self) -> int:
        """Queries that a consumer computes dQ of."""
        return self.block if self.swapped else ROWS

    @property
    def ds_columns(self) -> int:
        """Of ds in shared memory; where dQ is not computed, room for what is stored is left."""
        return self.block if self.dq else ROWS

    @property
    def ds_buffers(self) -> int:
        return 2 * CONSUMERS if self.dq and not self.paired else CONSUMERS

    @property
    def values(self) -> int:
        """Columns of values of an item, which dV alone needs none of."""
        return 0 if self.only == "dv" else self.dv

    @property
    def width(self) -> int:
        """Columns of keys in shared memory."""
        return self.d if self.by_rows else CONSUMERS * self.dq_parts * self.dq_columns

    @property
    def shared(self) -> int:
        """Bytes of shared memory, mbarriers and alignment included."""
        keys = CONSUMERS * ROWS * (self.items * self.width + self.values)
        queries = self.piece * (self.stages * self.d + self.dout_stages * self.dv)
        ds = self.ds_buffers * ROWS * self.ds_columns
        dq = CONSUMERS * self.dq_rows * self.dq_columns if self.dq else 0
        stats = (self.stages + self.dout_stages) * self.piece
        return 2 * (keys + queries + ds) + 4 * (dq + stats) + 1024


class BackwardLoads(NamedTuple):
    """What the producer loads: how TMA copies, and from what; addresses of lse and delta."""

    q: tuple[Any, Any]
    k: tuple[Any, Any]
    v: tuple[Any, Any]
    dout: tuple[Any, Any]
    dq: Any  # what the adders add to: how, and to what
    lse: Any
    delta: Any
    wide: Any  # numbers of a copy of these, of which there are four for each head


class Gradients(NamedTuple):
    """Addresses, with strides (batch, row, head)."""

    dk: Any
    dv: Any
    d: Any
    dv_width: Any
    dk_strides: Any
    dv_strides: Any


class BackwardShared(NamedTuple):
    """Shared memory and its mbarriers."""

    q: Any  # (piece, d, stages)
    dout: Any  # (piece, dv, dout_stages)
    k: Any  # (64, width, 2 · items): two consumers
    v: Any  # (64, dv, 2)
    ds: Any  # (64, ds_columns, ds_buffers): two blocks, or one, and two consumers
    dq: Any  # (dq_rows, dq_columns, 2): each consumer's part
    lse: Any  # (piece, stages)
    delta: Any  # (piece, dout_stages)
    items: Any  # (ITEM, 2)
    item: Ring
    keys: Ring
    values: Ring
    queries: Ring
    douts: Ring
    ready: Any  # of ds, where it has one buffer
    sums: Ring
    landed: Any
