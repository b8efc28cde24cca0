"""The fused merge beside the plain one, with every kind of row."""

from __future__ import annotations

import torch
from torch import Tensor

from ring_flash_attn.kernels.base import BLOCK, FIRST, LAST, Rows, State
from ring_flash_attn.kernels.merge import merge_rows

ROWS = (
    Rows(10, 33, BLOCK),
    Rows(33, 40, FIRST | BLOCK),
    Rows(40, 41, FIRST),
    Rows(50, 60, BLOCK | LAST),
    Rows(60, 70, LAST),
)


def fused_and_plain(device: str) -> list[tuple[Tensor, Tensor]]:
    """What the two leave, in fp64: out where it is not final, lse, and the result."""
    from ring_flash_attn.kernels.fused_merge import fused_merge

    generator = torch.Generator(device).manual_seed(0)
    out = torch.randn(2, 70, 3, 40, device=device, generator=generator)
    block = torch.randn(2, 60, 3, 40, device=device, generator=generator).bfloat16()
    lse, block_lse = (torch.randn(2, 3, n, device=device, generator=generator) for n in (70, 60))
    block_lse[..., 3], block[:, 3] = torch.inf, torch.nan
    block_lse[..., 4], lse[..., 14] = -torch.inf, -torch.inf
    out[:, 14] = 0
    out[:, 33:41], lse[..., 34] = torch.nan, 3.0  # not there yet; a sink
    found = []
    for sink, final in ((False, False), (True, True)):
        states = []
        for merge, dtype in ((fused_merge, torch.float32), (merge_rows, torch.float64)):
            result = torch.zeros_like(out, dtype=dtype) if final else None
            state = State(out.to(dtype, copy=True), lse.to(dtype, copy=True), result)
            merge(state, block, block_lse, 10, ROWS, sink)
            states.append(state)
        fused, plain = states
        kept = slice(0, 50 if final else 70)
        found += [(fused.out[:, kept].double(), plain.out[:, kept])]
        found += [(fused.lse.double(), plain.lse)]
        if fused.result is not None and plain.result is not None:
            found += [(fused.result.double(), plain.result)]
    return found
