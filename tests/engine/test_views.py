"""Buffers whose fields lie side by side, as messages take them and as kernels see them."""

from __future__ import annotations

import pytest
import torch

from ring_flash_attn.engine.lowering import Buffer, Field

BF16 = torch.bfloat16


@pytest.mark.parametrize("headdims", [(8, 8), (24, 16), (6, 4, 10), (8, 1)])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("rows", [range(0), range(1, 2), range(5), range(2, 5)])
def test_fields_that_lie_side_by_side(rows: range, batch: int, headdims: tuple[int, ...]) -> None:
    """Column after column of each row: where splitting the rows finds them."""
    fields = tuple(Field(n + 1, headdim, BF16) for n, headdim in enumerate(headdims))
    buffer = Buffer(0, tuple(range(len(fields))), fields, 5, batch, (2, 4))
    memory = torch.arange(5 * batch * buffer.width)
    whole = memory.view(5, batch, buffer.width)
    stored = memory.as_strided(*buffer.stored(rows))
    assert stored.is_contiguous()
    assert torch.equal(stored.flatten(2), whole[rows.start : rows.stop])
    column = 0
    for number, field in enumerate(fields):
        assert field.headdim is not None
        nheads = 2 * field.heads
        width = nheads * field.headdim
        part = whole[rows.start : rows.stop, :, column : column + width]
        expected = part.unflatten(2, (nheads, field.headdim)).transpose(0, 1)
        seen = memory.as_strided(*buffer.seen(number, rows))
        assert seen.shape == (batch, len(rows), nheads, field.headdim)
        assert torch.equal(seen, expected)
        column += width
    assert column == buffer.width


def test_a_number_for_each_row() -> None:
    buffer = Buffer(0, (2,), (Field(3, None, torch.float32),), 5, 2, (1, 3))
    memory = torch.arange(5 * 2 * 6)
    seen = memory.as_strided(*buffer.seen(0, range(1, 4)))
    assert torch.equal(seen, memory.view(5, 2, 6)[1:4].permute(1, 2, 0))
    assert memory.as_strided(*buffer.stored(range(1, 4))).shape == (3, 2, 6)


def test_two_numbers_for_each_row() -> None:
    """Those of one dtype lie side by side, as vectors do."""
    row = Field(3, None, torch.float32)
    buffer = Buffer(0, (2, 3), (row, row), 5, 2, (1, 3))
    memory = torch.arange(5 * 2 * 12)
    for number in range(2):
        seen = memory.as_strided(*buffer.seen(number, range(1, 4)))
        part = memory.view(5, 2, 12)[1:4, :, 6 * number : 6 * number + 6]
        assert torch.equal(seen, part.permute(1, 2, 0))
    assert memory.as_strided(*buffer.stored(range(1, 4))).shape == (3, 2, 12)
