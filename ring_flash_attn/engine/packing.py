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


def part_table(
    key: object,
    rows: int,
    parts: Sequence[tuple[int, int, Packing, Packing | None]],
    device: torch.device,
) -> Tensor:
    """(parts, rows) int64: where each row of a part begins, -1 where it has none; made once.

    Args:
        key: whose table it is.
        rows: how many rows there are to be added to.
        parts: of each where it begins, from row to row, which rows it belongs to, which are taken.
        device: for the current stream.
    """

    def make() -> Tensor:
        table = torch.full((len(parts), rows), -1, dtype=torch.int64, device="cpu")
        for line, (first, stride, at, taken) in zip(table, parts, strict=True):
            theirs = torch.arange(at.total, device="cpu") if taken is None else _numbers(taken)
            line[_numbers(at) if at.slice is None else at.slice] = theirs * stride + first
        return to_device(table, device)

    return _tables.get(key, device, None, make)


def _copied(packing: Packing, device: torch.device) -> Tensor:
    return to_device(_numbers(packing), device)


def _numbers(packing: Packing) -> Tensor:
    rows = packing.rows
    if isinstance(rows, Runs):
        return to_tensor(ranges(rows.starts, rows.lengths)[1])
    return numbers_of(rows)


def numbers_of(rows: Sequence[range]) -> Tensor:
    """All numbers of some ranges, range after range, on the CPU."""
    runs = [(each.start, each.step, len(each)) for each in rows]
    total = sum(count for _, _, count in runs)  # not asked of a tensor, which may be a fake one
    starts, steps, counts = torch.tensor(runs, dtype=torch.int64, device="cpu").reshape(-1, 3).T
    firsts = starts - steps * (counts.cumsum(0) - counts)
    firsts, steps = (each.repeat_interleave(counts, output_size=total) for each in (firsts, steps))
    return firsts + steps * torch.arange(total, device="cpu")
