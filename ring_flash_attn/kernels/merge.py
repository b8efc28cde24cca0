"""The fp32 merge: two softmax results over different keys become one over both."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import State


def merge(state: State, out: Tensor, lse: Tensor) -> None:
    """Merge a block into `state`, in place.

    Rows that saw no key on either side stay (out 0, lse −inf), without a NaN.

    Args:
        state: what the keys so far gave.
        out: (batch, seqlen_q, nheads, headdim_v), the block's normalised output.
        lse: (batch, nheads, seqlen_q), natural logarithm.
    """
    both = torch.logaddexp(state.lse, lse.to(state.lse.dtype))
    finite = torch.where(both == -torch.inf, 0.0, both)  # −inf − 0 = −inf: weight 0, not NaN
    ours, theirs = ((part - finite).exp().transpose(1, 2)[..., None] for part in (state.lse, lse))
    state.out.mul_(ours).add_(out * theirs)
    state.lse.copy_(both)
