"""FlashAttention-2 as it comes with torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base import Call
from .blocks import Block, LibraryKernel, reasons


class _Fa2:
    name = "fa2"
    packs = True
    square = False

    def why_not(self, call: Call) -> list[str]:
        # torch alone decides whether its gradients repeat; it has no argument for it.
        return reasons(call, deterministic=torch.are_deterministic_algorithms_enabled())

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, call: Call
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *block.packed(q, k, v),
            block.cu_seqlens_q,
            block.cu_seqlens_k,
            block.max_seqlen_q,
            block.max_seqlen_k,
            0.0,
            block.causal,
            False,
            **_options(block, call),
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
        unused = torch.empty(0, dtype=torch.int64, device=q.device)  # the state of dropout
        grads = torch.ops.aten._flash_attention_backward(
            *block.packed(dout, q, k, v, out, lse),
            block.cu_seqlens_q,
            block.cu_seqlens_k,
            block.max_seqlen_q,
            block.max_seqlen_k,
            0.0,
            block.causal,
            unused,
            unused,
            **_options(block, call),
        )
        dq, dk, dv = block.unpacked(*grads)
        return dq, dk, dv


def _options(block: Block, call: Call) -> dict[str, Any]:
    left, right = (-1, -1) if block.causal else block.window
    scale = call.softmax_scale
    return {"scale": scale, "window_size_left": left, "window_size_right": right}


KERNEL = LibraryKernel(_Fa2())
