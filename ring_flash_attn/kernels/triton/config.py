"""Block sizes for each kernel, head dimension and kind of GPU: defaults that need no tuning run.

Those for Hopper were measured on an H200; the others follow from the size of shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from ..base import Call


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a launch is cut up.

    Attributes:
        rows: queries of a block.
        columns: keys of a block.
        stages: blocks of the inner loop that are loaded ahead.
        warps: of a program.
        registers: of a thread at most, so that more programs fit; 0 for no limit.
    """

    rows: int
    columns: int
    stages: int
    warps: int
    registers: int = 0


_INTERPRETED = Blocks(32, 32, 1, 4)
_HOPPER = {  # (kernel, head dimension up to) → blocks
    ("forward", 64): Blocks(64, 64, 3, 4, 168),
    ("forward", 128): Blocks(64, 64, 2, 4),
    ("forward", 256): Blocks(64, 64, 2, 8),
    ("keys", 64): Blocks(64, 64, 3, 4),
    ("keys", 128): Blocks(64, 64, 2, 4),
    ("keys", 256): Blocks(32, 64, 1, 8),
    ("queries", 64): Blocks(64, 64, 3, 4, 168),
    ("queries", 128): Blocks(128, 64, 3, 8),
    ("queries", 256): Blocks(64, 32, 1, 8),
}
_SMALL = {  # 64 to 100 KiB of shared memory
    ("forward", 64): Blocks(64, 64, 2, 4),
    ("forward", 128): Blocks(64, 32, 2, 4),
    ("forward", 256): Blocks(32, 32, 1, 4),
    ("keys", 64): Blocks(32, 64, 1, 4),
    ("keys", 128): Blocks(32, 32, 1, 4),
    ("keys", 256): Blocks(16, 32, 1, 4),
    ("queries", 64): Blocks(64, 32, 1, 4),
    ("queries", 128): Blocks(32, 32, 1, 4),
    ("queries", 256): Blocks(32, 16, 1, 4),
}


@cache
def _is_large(device: torch.device) -> bool:
    """Hopper and later have 227 KiB of shared memory for a program."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def blocks_for(kernel: str, call: Call) -> Blocks:
    """The block sizes of `kernel` ("forward", "keys" or "queries") for a call."""
    if call.device.type == "cpu":
        return _INTERPRETED
    depth = max(call.headdim, call.headdim_v)
    limit = next(size for size in (64, 128, 256) if depth <= size)
    if call.dtype is torch.float32 or not _is_large(call.device):
        return _SMALL[kernel, limit]
    return _HOPPER[kernel, limit]
