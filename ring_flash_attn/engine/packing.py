"""Row numbers of packings on a device, for the gathers and scatters that pack messages."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.device_cache import DeviceCache, to_device
from ..plan.rows import Packing

_tables: DeviceCache[Tensor] = DeviceCache()  # 8 bytes a row


def row_numbers(packing: Packing, device: torch.device) -> Tensor:
    """Of its rows, in the order of the messages; made once for a plan."""

    def make() -> Tensor:
        runs = [(rows.start, rows.step, len(rows)) for rows in packing.rows]
        starts, steps, counts = torch.tensor(runs, dtype=torch.int64, device="cpu").T
        firsts = starts - steps * (counts.cumsum(0) - counts)
        places = torch.arange(packing.total, device="cpu")
        numbers = firsts.repeat_interleave(counts) + steps.repeat_interleave(counts) * places
        return to_device(numbers, device)

    return _tables.get(packing, device, None, make)
