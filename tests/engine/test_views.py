"""Buffers in which the fields of a row lie side by side, as kernels see them."""

from __future__ import annotations

import pytest
import torch

from ring_flash_attn.engine.executor import Field, _shape, _views

BF16 = torch.bfloat16


@pytest.mark.parametrize("headdims", [(8, 8), (24, 16), (6, 4, 10)])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("size", [0, 1, 5])
def test_fields_that_lie_side_by_side(size: int, batch: int, headdims: tuple[int, ...]) -> None:
    """Column after column of each row: where splitting the rows finds them, without a copy."""
    fields = tuple(Field(n + 1, headdim, BF16) for n, headdim in enumerate(headdims))
    heads = (2, 4)
    shape = _shape(fields, size, batch, heads)
    whole = torch.randn(size + 2, *shape[1:]).to(BF16)
    buffer = whole[2:]  # a part of a larger one
    found = _views(fields, (buffer,))
    column, rows = 0, buffer.flatten(2)
    for field, view in zip(fields, found, strict=True):
        assert field.headdim is not None
        nheads = 2 * field.heads
        width = nheads * field.headdim
        part = rows[:, :, column : column + width].unflatten(2, (nheads, field.headdim))
        expected = part.transpose(0, 1)
        assert view.shape == (batch, size, nheads, field.headdim)
        assert torch.equal(view, expected)
        strides = zip(view.shape, view.stride(), expected.stride(), strict=True)
        assert not size or all(n < 2 or ours == theirs for n, ours, theirs in strides)
        assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        column += width
    assert column == rows.shape[2]
