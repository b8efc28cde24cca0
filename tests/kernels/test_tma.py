"""Which tensors TMA reads where they are, and which are copied first."""

from __future__ import annotations

import pytest
import torch

from ring_flash_attn.kernels.tma import fit, tma_strides

_HALF = torch.zeros(2 * 6 * 4 * 64 + 64, dtype=torch.bfloat16)


def _view(shape: tuple[int, ...], strides: tuple[int, ...], start: int = 0) -> torch.Tensor:
    return _HALF.as_strided(shape, strides, start)


@pytest.mark.parametrize(
    ("shape", "strides", "start", "fits"),
    [
        ((2, 6, 4, 64), (1536, 256, 64, 1), 0, True),
        ((2, 6, 4, 64), (1536, 256, 64, 1), 8, True),
        ((2, 6, 4, 64), (1536, 256, 64, 1), 1, False),  # 16 bytes
        ((2, 4, 6, 32), (1536, 64, 256, 1), 0, True),  # heads first, half of each
        ((2, 6, 4, 60), (1536, 256, 60, 1), 0, False),
        ((1, 6, 1, 60), (7, 256, 3, 1), 0, True),  # strides of single ones do not matter
        ((2, 6, 4, 32), (1536, 256, 64, 2), 0, False),
        ((2, 6, 4, 64), (0, 256, 64, 1), 0, False),
        ((2, 6, 4, 12), (288, 48, 12, 1), 0, False),  # contiguous, rows of 24 bytes
        ((1, 1, 1, 12), (12, 12, 12, 1), 0, True),
    ],
)
def test_fit(shape: tuple[int, ...], strides: tuple[int, ...], start: int, fits: bool) -> None:
    x = _view(shape, strides, start)
    found = fit(x)
    assert (found is x) is fits
    assert torch.equal(found, x)
    for length, stride in zip(found.shape[:-1], tma_strides(found), strict=True):
        assert stride == 64 if length == 1 else stride * 2 % 16 == 0 or not fits
