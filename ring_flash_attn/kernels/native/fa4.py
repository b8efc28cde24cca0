"""FlashAttention-4: the package flash-attn-4, written in CuTe DSL, for Hopper and Blackwell."""

from __future__ import annotations

from typing import Any

import torch
from flash_attn.cute import interface as library
from torch import Tensor

from ..base import Call
from .blocks import MLA, Block, LibraryKernel, reasons, require

# flash-attn 2.8 has an older module of this name.
require(library._flash_attn_fwd, ("max_seqlen_q", "return_lse"), "flash-attn-4")
require(library._flash_attn_bwd, ("max_seqlen_q", "window_size_left"), "flash-attn-4")


class _Fa4:
    name = "fa4"
    packs = True
    square = False

    def why_not(self, call: Call) -> list[str]:
        found = reasons(call, softcap=True, deterministic=True, widths=[MLA])
        return found or _reasons_of_gpu(call, torch.cuda.get_device_capability(call.device)[0])

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, call: Call
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = library._flash_attn_fwd(
            *block.packed(q, k, v), return_lse=True, **_options(block, call)
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
        library._flash_attn_bwd(
            *block.packed(q, k, v, out, dout, lse),
            dq=dq,
            dk=dk,
            dv=dv,
            deterministic=call.deterministic,
            **_options(block, call),
        )
        return grads[0], grads[1], grads[2]


def _reasons_of_gpu(call: Call, generation: int) -> list[str]:
    found = []
    if generation < 9:
        found.append("it needs a Hopper GPU or a later one")
    if generation == 9 and call.needs_grad and 64 < call.headdim <= 80:
        found.append(
            f"its dQ is wrong with headdim {call.headdim} on Hopper (measured with 4.0.0b36)"
        )
    if generation >= 10 and call.headdim > 128 and (call.headdim != 256 or call.softcap):
        found.append(f"on this GPU it has no headdim {call.headdim}, or none with a softcap")
    if generation == 12 and (call.softcap or call.deterministic):
        found.append("on this GPU it has no gradients that repeat, and none with a softcap")
    return found


def _options(block: Block, call: Call) -> dict[str, Any]:
    left, right = (None if side < 0 else side for side in block.window)
    packed = block.cu_seqlens_q is not None
    return {
        "cu_seqlens_q": block.cu_seqlens_q,
        "cu_seqlens_k": block.cu_seqlens_k,
        "max_seqlen_q": block.max_seqlen_q if packed else None,
        "max_seqlen_k": block.max_seqlen_k if packed else None,
        "softmax_scale": call.softmax_scale,
        "causal": block.causal,
        "softcap": call.softcap,
        "window_size_left": None if block.causal else left,
        "window_size_right": None if block.causal else right,
    }


KERNEL = LibraryKernel(_Fa4())
