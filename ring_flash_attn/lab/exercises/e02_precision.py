"""Exercise 2. Add a small number many times, and see what each dtype makes of it.

Before you run it, write down what you expect of (fp32, fp32), (fp16, fp16), (fp32, fp16) without
and with a cast first. Then: where does a sum of 0.01s in bf16 stop growing, and why just there?
"""

from __future__ import annotations

import torch


def accumulate(
    dtype: torch.dtype,
    value_dtype: torch.dtype,
    cast_first: bool,
    n: int = 1000,
    value: float = 0.01,
) -> float:
    """Add `value`, stored as value_dtype, n times to a sum of type dtype, one after the other.

    With cast_first the value is cast to dtype before it is added; else `+=` does what it does.
    """
    raise NotImplementedError("a scalar tensor of type dtype, n additions in place, then .item()")
