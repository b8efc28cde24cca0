"""The kernels that move and add rows beside plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ring_flash_attn.engine.packing import part_table
from ring_flash_attn.kernels.rows import Part, add_from_arena, add_parts
from ring_flash_attn.plan.rows import Packing

_ROWS = 37
_PARTS: list[tuple[tuple[range, ...], tuple[range, ...] | None]] = [  # rows of ours, those taken
    ((range(30),), None),
    ((range(3, 9), range(20, 37)), None),
    ((range(0, 11, 2),), (range(50, 53), range(7, 10))),
    ((), None),
]
# Batch, heads, two widths.
SHAPES = [(2, 3, 24, 24), (1, 1, 8, 16), (1, 5, 40, 40), (1, 2, 7, 3), (1, 3, 8, 5)]


def added(device: str, shape: tuple[int, int, int, int]) -> list[tuple[Tensor, Tensor]]:
    """Two fields side by side in an arena, added to ours by the kernel, and by plain torch."""
    batch, heads, *widths = shape
    size, columns = 60, heads * sum(widths)
    generator = torch.Generator(device).manual_seed(0)
    arena = torch.randn(
        len(_PARTS) * size * batch * columns + 4, device=device, generator=generator
    )
    ours = [torch.randn(batch, _ROWS, heads, d, device=device) for d in widths]
    expected = [each.clone() for each in ours]
    runs, parts = [], []
    for number, (at, taken) in enumerate(_PARTS):
        begin = 4 + number * size * batch * columns
        firsts = [begin, begin + heads * widths[0]]
        theirs = [
            arena.as_strided((batch, size, heads, d), (columns, batch * columns, d, 1), first)
            for d, first in zip(widths, firsts, strict=True)
        ]
        packed = Packing(at), None if taken is None else Packing(taken)
        runs.append((begin, batch * columns, *packed))
        rows = torch.tensor([n for run in at for n in run], dtype=torch.int64, device=device)
        these = torch.tensor(
            [n for run in taken or (range(len(rows)),) for n in run],
            dtype=torch.int64,
            device=device,
        )
        parts.append(Part(theirs, rows, these))
    add_parts(expected, parts)
    table = part_table(object(), _ROWS, runs, arena.device)
    add_from_arena(ours, arena, table, [0, heads * widths[0]], columns)
    return list(zip(ours, expected, strict=True))


def copied(device: str, shape: tuple[int, int, int, int]) -> list[tuple[Tensor, Tensor]]:
    """Rows to their places, stored rows first and as kernels see them, some of them or all."""
    from ring_flash_attn.kernels.fused_rows import fused_copy

    batch, heads, d, _ = shape
    at = torch.tensor([5, 2, 33, 7], device=device)
    taken = torch.tensor([1, 1, 9, 0], device=device)
    found = []
    for dim in (0, 1):
        for dtype in (torch.float32, torch.bfloat16):
            sizes = [(n, batch) if dim == 0 else (batch, n) for n in (_ROWS, 10, 4)]
            target, more, just = (
                torch.randn(*size, heads, d, device=device).to(dtype) for size in sizes
            )
            for source, which in ((more, taken), (just, None)):
                ours, expected = target.clone(), target.clone()
                fused_copy(ours, source, at, which, dim)
                rows = source if which is None else source.index_select(dim, which)
                found.append((ours, expected.index_copy_(dim, at, rows)))
    return found
