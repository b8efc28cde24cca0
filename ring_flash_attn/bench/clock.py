"""Waiting on a GPU: tiny Triton kernels that read its clock, so that a stream takes its time."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer


@triton.jit
def note_kernel(start_ptr):
    """The GPU's time in ns, to memory."""
    tl.store(start_ptr, globaltimer())


@triton.jit(do_not_specialize=["duration"])
def spin_kernel(start_ptr, duration):
    """End when `duration` ns have passed since what `note_kernel` wrote down."""
    end = tl.load(start_ptr) + duration
    now = globaltimer()
    while now < end:
        now = globaltimer()


def note(start: Tensor) -> None:
    """Write the time at which the current stream gets here to `start`, (1,) int64."""
    note_kernel[(1,)](start, num_warps=1)


def spin(start: Tensor, seconds: float) -> None:
    """Hold the current stream until `seconds` after `start`."""
    spin_kernel[(1,)](start, round(seconds * 1e9), num_warps=1)
