"""FlashAttention-3: the module flash_attn_interface, for Hopper."""

from __future__ import annotations

from typing import Any

import flash_attn_interface as library
import torch
from torch import Tensor

from ..base import Call
from .blocks import Block, LibraryKernel, reasons, require

require(library._flash_attn_backward, ("window_size_left", "is_causal"), "FlashAttention-3")


class _Fa3:
    name = "fa3"
    packs = True
    square = False

    def why_not(self, call: Call) -> list[str]:
        found = reasons(call, softcap=True, deterministic=True)
        if not found and torch.cuda.get_device_capability(call.device)[0] != 9:
            found.append("it needs a Hopper GPU")
        return found

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, call: Call
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = library._flash_attn_forward(
            *block.packed(q, k, v), causal=block.causal, **_options(block, call)
        )
        out, lse = block.unpacked(out, lse)
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        block: Block,
        call: Call,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = block.for_gradients(q, k, v)
        dq, dk, dv = block.packed(*grads)
        library._flash_attn_backward(
            *block.packed(dout, q, k, v, out, lse),
            dq=dq,
            dk=dk,
            dv=dv,
            is_causal=block.causal,
            deterministic=call.deterministic,
            **_options(block, call),
        )
        return grads[0], grads[1], grads[2]


def _options(block: Block, call: Call) -> dict[str, Any]:
    left, right = block.window
    packed = block.cu_seqlens_q is not None
    return {
        "cu_seqlens_q": block.cu_seqlens_q,
        "cu_seqlens_k": block.cu_seqlens_k,
        "max_seqlen_q": block.max_seqlen_q if packed else None,
        "max_seqlen_k": block.max_seqlen_k if packed else None,
        "softmax_scale": call.softmax_scale,
        "window_size_left": left,
        "window_size_right": right,
        "softcap": call.softcap,
    }


KERNEL = LibraryKernel(_Fa3())
