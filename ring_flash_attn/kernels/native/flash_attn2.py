"""The package flash-attn, version 2.8 or later."""

from __future__ import annotations

from typing import Any

from flash_attn import flash_attn_interface as library
from torch import Tensor

from ..base import Call
from .blocks import Block, LibraryKernel, reasons, require

require(library._flash_attn_forward, ("window_size_left", "softcap"), "flash-attn 2.8")


class _FlashAttn:
    name = "flash_attn"
    packs = True
    square = False

    def why_not(self, call: Call) -> list[str]:
        return reasons(call, softcap=True, deterministic=True)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, call: Call
    ) -> tuple[Tensor, Tensor]:
        options = {**_options(block, call), "return_softmax": False}
        if block.cu_seqlens_q is None:
            out, lse, *_ = library._flash_attn_forward(q, k, v, **options)
            return out, lse
        out, lse, *_ = library._flash_attn_varlen_forward(
            *block.packed(q, k, v),
            block.cu_seqlens_q,
            block.cu_seqlens_k,
            block.max_seqlen_q,
            block.max_seqlen_k,
            **options,
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
        options = {**_options(block, call), "deterministic": call.deterministic}
        dq, dk, dv = block.for_gradients(q, k, v)
        if block.cu_seqlens_q is None:
            library._flash_attn_backward(dout, q, k, v, out, lse, dq, dk, dv, **options)
            return dq, dk, dv
        library._flash_attn_varlen_backward(
            *block.packed(dout, q, k, v, out, lse, dq, dk, dv),
            block.cu_seqlens_q,
            block.cu_seqlens_k,
            block.max_seqlen_q,
            block.max_seqlen_k,
            **options,
        )
        return dq, dk, dv


def _options(block: Block, call: Call) -> dict[str, Any]:
    left, right = block.window
    return {
        "dropout_p": 0.0,
        "softmax_scale": call.softmax_scale,
        "causal": block.causal,
        "window_size_left": left,
        "window_size_right": right,
        "softcap": call.softcap,
        "alibi_slopes": None,
    }


KERNEL = LibraryKernel(_FlashAttn())
