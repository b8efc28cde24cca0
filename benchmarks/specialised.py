"""What Triton's own warp specialisation would bring: a bare forward kernel against cuDNN and ours.

    python benchmarks/specialised.py results/specialised_h200.json [commit]

For Hopper and Triton 3.6 alone, and for these shapes: whole blocks, one sequence, no features. It
is not in the library because the compiler cannot be trusted with it: results/README.md.
"""

# fmt: off

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl
from kernels import CONTENDERS, current_commit, interleaved, versions
from triton.tools.tensor_descriptor import TensorDescriptor

SHAPES = {  # nheads, nheads_k, seqlen, causal
    "1, 32/8, 8192, 128, causal": (32, 8, 8192, True),
    "1, 16/16, 16384, 128, full": (16, 16, 16384, False),
}
HEADDIM = 128
VARIANTS = {  # BLOCK_N, DELAYED; 128 queries, two consumers of 64
    "128 x 64, p·v during the next softmax": (64, True),
    "128 x 128, p·v at once": (128, False),
    "128 x 128, p·v during the next softmax": (128, True),
}


@triton.jit
def kernel(
    q_ptr, k_mat, v_mat, out_ptr, factor, length, nheads, group, zero,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, DELAYED: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Output of BLOCK_M queries of one head. One loop: with two, the compiler gives up."""
    block, head = tl.program_id(0), tl.program_id(1)
    end = length
    if CAUSAL:
        block = tl.num_programs(0) - 1 - block
        end = (block + 1) * BLOCK_M
    # A descriptor that comes from the host hangs: only half of the rows it announces arrive.
    q_mat = tl.make_tensor_descriptor(q_ptr, [length, nheads * D], [nheads * D, 1], [BLOCK_M, D])
    q = q_mat.load([block * BLOCK_M, head * D])
    # Without `zero` this is the row above, to which the compiler adds the second consumer's offset.
    rows = (block + zero) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns, column = tl.arange(0, BLOCK_N), head // group * D
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    p = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    rescale = tl.full([BLOCK_M], 1.0, tl.float32)
    for j in tl.range(0, end, BLOCK_N, num_stages=2, warp_specialize=True):
        s = tl.dot(q, tl.trans(k_mat.load([j, column])))
        if DELAYED:
            v = v_mat.load([tl.maximum(j - BLOCK_N, 0), column])
            acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])
        if CAUSAL:
            s = tl.where(rows[:, None] >= (j + columns)[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * factor)
        p = tl.exp2(s * factor - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, 1)
        if not DELAYED:
            v = v_mat.load([j, column])
            acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])
        m = m_new
    if DELAYED:
        v = v_mat.load([end - BLOCK_N, column])
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])
    out_ptrs = out_ptr + rows[:, None].to(tl.int64) * (nheads * D) + head * D
    out_ptrs += tl.arange(0, D)[None, :]
    tl.store(out_ptrs, (acc / total[:, None]).to(out_ptr.dtype.element_ty))


def variant(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, block_n: int, delayed: bool
) -> Callable[[], torch.Tensor]:
    """A launch that is right, or an error."""
    _, seqlen, nheads, headdim = q.shape
    group, factor = nheads // k.shape[2], headdim**-0.5 * 1.4426950408889634
    block = [block_n, headdim]
    k_mat, v_mat = (TensorDescriptor.from_tensor(x.flatten(2)[0], block) for x in (k, v))
    out = torch.empty_like(q)

    def run() -> torch.Tensor:
        kernel[seqlen // 128, nheads](
            q, k_mat, v_mat, out, factor, seqlen, nheads, group, 0, 128, block_n, headdim, delayed,
            causal, num_warps=4, num_stages=2,
        )
        return out

    expected = CONTENDERS["cudnn"](q, k, v, causal).float()
    error = (run().float() - expected).abs().max()
    assert error < 0.02, (block_n, delayed, error)
    return run


def main(path: str, commit: str | None = None) -> None:
    triton.set_allocator(lambda size, _, __: torch.empty(size, dtype=torch.int8, device="cuda"))
    report = versions(commit or current_commit())
    for name, (nheads, nheads_k, seqlen, causal) in SHAPES.items():
        torch.manual_seed(0)
        q, k, v = (
            torch.randn(1, seqlen, h, HEADDIM, device="cuda", dtype=torch.bfloat16)
            for h in (nheads, nheads_k, nheads_k)
        )
        works = {each: partial(CONTENDERS[each], q, k, v, causal) for each in ("cudnn", "triton")}
        for each, (block_n, delayed) in VARIANTS.items():
            works[each] = variant(q, k, v, causal, block_n, delayed)
        times = interleaved(works)
        report[name] = {
            each: {"ms": round(t, 4), "times_cudnn": round(times["cudnn"] / t, 3)}
            for each, t in times.items()
        }
    Path(path).write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
