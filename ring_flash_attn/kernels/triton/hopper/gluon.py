"""Gluon's names, which move from one version of Triton to the next, in one place."""

# fmt: off

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "TensorDescriptor",
    "add_tile",
    "await_turn",
    "declare_vote",
    "declare_warp_barriers",
    "fence_async_shared",
    "gl",
    "gluon",
    "load_numbers",
    "load_tile",
    "mbarrier",
    "pass_turn",
    "prefetch",
    "thread_barrier",
    "vote_above",
    "wait_for_adds",
    "wait_for_warps",
    "warp_arrives",
    "warp_barriers",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # of one group of warps
copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def as_block(desc, smem):
    """Shared memory with the dimensions of a descriptor's block."""
    return smem._reinterpret(desc.dtype, desc.block_type.shape, desc.layout)


@gluon.jit
def load_tile(desc, batch, head, row, full, smem, EXPECT: gl.constexpr = True):
    """Begin to copy rows of one head into shared memory; TMA arrives at `full`.

    Without EXPECT somebody else has said how many bytes it expects.
    """
    if EXPECT:
        mbarrier.expect(full, desc.block_type.nbytes)
    copy_in(desc, [batch, head, row, 0], full, as_block(desc, smem))


@gluon.jit
def load_numbers(desc, batch, head, which, row, full, smem):
    """Begin to copy numbers, one for each row; not from any row, but a multiple of 16 bytes."""
    copy_in(desc, [batch, head, which, row], full, smem)


@gluon.jit
def prefetch(ptrs):
    """Begin to fetch what lies there, with the line around it, from memory into the cache."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptrs],
        dtype=gl.int32, is_pure=False, pack=1,
    )


@builtin
def _reduce_add(desc, coord, src, _semantic=None):
    """Gluon has no function for this, but its builder has the operation."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle
    )


@gluon.jit
def add_tile(desc, batch, head, row, column, smem):
    """Begin to add rows in shared memory to those of one head."""
    _reduce_add(desc, [batch, head, row, column], as_block(desc, smem))


@gluon.jit
def wait_for_adds():
    """Until what was added has been read out of shared memory."""
    tma.store_wait(0)


@gluon.jit
def _named_barrier(ASM: gl.constexpr):
    """Gluon has no function for the barriers that have a number; Triton's own begin with 0."""
    gl.inline_asm_elementwise(ASM, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_turn(C: gl.constexpr):
    """Until the other one of two groups of warps has passed the turn to group C."""
    if C == 0:
        _named_barrier("bar.sync 8, 256; mov.u32 $0, 0;")
    else:
        _named_barrier("bar.sync 9, 256; mov.u32 $0, 0;")


@gluon.jit
def pass_turn(C: gl.constexpr):
    """Group C passes the turn to the other one."""
    if C == 0:
        _named_barrier("bar.arrive 9, 256; mov.u32 $0, 0;")
    else:
        _named_barrier("bar.arrive 8, 256; mov.u32 $0, 0;")


@gluon.jit
def declare_warp_barriers():
    """Where a kernel that uses barriers for warps begins: the memory that they need.

    Gluon has the warps of a group wait for each other before one thread arrives at a barrier for
    all of them. At these every warp arrives for itself; they have numbers, up to 128. TMA
    wants what follows to begin at a multiple of 1024 bytes.
    """
    gl.inline_asm_elementwise(
        ".shared .align 1024 .b64 rfa_barriers[128]; mov.u32 $0, 0;",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )


@gluon.jit
def warp_barriers(FIRST: gl.constexpr, NUMBER: gl.constexpr, WARPS: gl.constexpr):
    """Make barriers at which so many warps have to arrive, numbered from FIRST on."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred some;
        .reg .u32 i, at;
        mov.u32 i, %tid.x;
        setp.lt.u32 some, i, $2;
        add.u32 i, i, $1;
        mov.u32 at, rfa_barriers;
        mad.lo.u32 at, i, 8, at;
        @some mbarrier.init.shared.b64 [at], $3;
        mov.u32 $0, 0;
        }""",
        "=r,r,r,r", [gl.to_tensor(FIRST), gl.to_tensor(NUMBER), gl.to_tensor(WARPS)],
        dtype=gl.int32, is_pure=False, pack=1,
    )


@gluon.jit
def warp_arrives(i):
    """Each warp of this group arrives at barrier i."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred one;
        .reg .u32 at;
        mov.u32 at, rfa_barriers;
        mad.lo.u32 at, $1, 8, at;
        elect.sync _|one, 0xffffffff;
        @one mbarrier.arrive.shared.b64 _, [at];
        mov.u32 $0, 0;
        }""",
        "=r,r", [gl.to_tensor(i)], dtype=gl.int32, is_pure=False, pack=1,
    )


@gluon.jit
def wait_for_warps(i, phase):
    """Until the phase of this parity of barrier i has ended."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred ended;
        .reg .u32 at;
        mov.u32 at, rfa_barriers;
        mad.lo.u32 at, $1, 8, at;
        again:
        mbarrier.try_wait.parity.shared.b64 ended, [at], $2;
        @!ended bra again;
        mov.u32 $0, 0;
        }""",
        "=r,r,r", [gl.to_tensor(i), gl.to_tensor(phase)], dtype=gl.int32, is_pure=False, pack=1,
    )


@gluon.jit
def declare_vote():
    """Where a kernel that uses `vote_above` begins: the register that it needs."""
    gl.inline_asm_elementwise(
        ".reg .pred rfa_vote; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def vote_above(x, limit):
    """Whether any number of x in this warp is above the limit, or NaN; x has four in each thread.

    Gluon has nothing that turns numbers of threads into one of their warp: here a register takes it
    from an operation on x to one that is not on any.
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred a, b, c, d;
        setp.gtu.f32 a, $4, $8;
        setp.gtu.or.f32 b, $5, $9, a;
        setp.gtu.or.f32 c, $6, $10, b;
        setp.gtu.or.f32 d, $7, $11, c;
        vote.sync.any.pred rfa_vote, d, 0xffffffff;
        mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;
        }""",
        "=r,=r,=r,=r,f,f,f,f,f,f,f,f", [x, limit], dtype=gl.int32, is_pure=False, pack=4,
    )
    found = gl.inline_asm_elementwise(
        "selp.u32 $0, 1, 0, rfa_vote;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    return found != 0
