"""A Triton kernel of one warp that waits by the GPU's clock, so that a stream takes its time."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit(do_not_specialize=["duration"])
def spin_kernel(duration):
    """End `duration` ns after the beginning."""
    end = globaltimer() + duration.to(tl.int64)
    now = globaltimer()
    while now < end:
        now = globaltimer()


def spin(seconds: float) -> None:
    """Hold the current stream for so long."""
    spin_kernel[(1,)](round(seconds * 1e9), num_warps=1)
