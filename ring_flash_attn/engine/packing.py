"""Row numbers of packings on a device, for the gathers and scatters that pack messages."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.device_cache import DeviceCache, to_device
from ..plan.arrays import to_tensor
from ..plan.columns import ranges
from ..plan.rows import Packing, Runs

_MOST = 1 << 25  # row numbers in all tables, of 8 bytes; a pack on 8 ranks has 18 for each token
_tables: DeviceCache[Tensor] = DeviceCache(weigh=Tensor.numel, heaviest=_MOST)


def row_numbers(packing: Packing, device: torch.device) -> Tensor:
    """Of its rows, in the order of the messages; made once for a plan."""
    make = functools.partial(_copied, packing, device)
    return _tables.get(packing, device, None, make)


def _copied(packing: Packing, device: torch.device) -> Tensor:
    rows = packing.rows
    if isinstance(rows, Runs):
        _, numbers = ranges(rows.starts, rows.lengths)
        return to_device(to_tensor(numbers), device)
    return to_device(numbers_of(rows), device)


def numbers_of(rows: Sequence[range]) -> Tensor:
    """All numbers of some ranges, range after range, on the CPU."""
    runs = [(each.start, each.step, len(each)) for each in rows]
    total = sum(count for _, _, count in runs)  # not asked of a tensor, which may be a fake one
    starts, steps, counts = torch.tensor(runs, dtype=torch.int64, device="cpu").reshape(-1, 3).T
    firsts = starts - steps * (counts.cumsum(0) - counts)
    firsts, steps = (each.repeat_interleave(counts, output_size=total) for each in (firsts, steps))
    return firsts + steps * torch.arange(total, device="cpu")
