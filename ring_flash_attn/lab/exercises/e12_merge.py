"""Exercise 12. Two results over different keys become one result over all keys.

    L = log(exp(L₁) + exp(L₂))        out = exp(L₁ − L) out₁ + exp(L₂ − L) out₂

Each half has normalised its output by its own sum, exp(Lᵢ). Which sum should it have been?
"""

from __future__ import annotations

import torch  # noqa: F401
from torch import Tensor


def merge(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, lse) over the keys of both.

    Args:
        out1, out2: (..., rows, d), each normalised over its own keys.
        lse1, lse2: (..., rows), natural; −inf where a row sees no key, and out is 0 there.

    The values may be large: exp(lse) by itself overflows. A row that sees no key in either has
    out 0 and lse −inf.
    """
    raise NotImplementedError("the lse of both first; then one weight for each half")
