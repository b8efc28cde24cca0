"""cuDNN's attention as it comes with torch. It takes tensors as (batch, nheads, rows, headdim)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..base import Call
from .blocks import MLA, Block, LibraryKernel, reasons


class _Cudnn:
    name = "cudnn"
    packs = False
    square = True

    def why_not(self, call: Call) -> list[str]:
        found = reasons(call, window=False, widths=[MLA])
        if call.packed:
            found.append("it has no form for packed documents")
        if call.device.type == "cuda" and not torch.backends.cudnn.is_available():
            found.append("this torch has no cuDNN")
        differ = call.headdim != call.headdim_v
        if not found and differ and torch.cuda.get_device_capability(call.device)[0] != 9:
            found.append("values of another width were tried on Hopper GPUs alone")
        return found

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, call: Call
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(x.transpose(1, 2) for x in (q, k, v)),
            None,
            True,
            0.0,
            block.causal,
            False,
            scale=call.softmax_scale,
        )
        return out.transpose(1, 2), lse.view(lse.shape[:3])

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
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(x.transpose(1, 2) for x in (dout, q, k, v, out)),
            lse[..., None],
            unused,
            unused,
            None,  # bias
            None,
            None,
            block.max_seqlen_q,
            block.max_seqlen_k,
            0.0,
            block.causal,
            scale=call.softmax_scale,
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


KERNEL = LibraryKernel(_Cudnn())
