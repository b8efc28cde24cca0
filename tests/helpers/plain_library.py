"""Libraries of attention kernels in plain torch: what `kernels/native` asks of one, on a CPU.

`PlainLibrary` follows the protocol; the functions at the end have names and arguments of the real
libraries' functions, so that a wrapper (`WRAPPERS`) that passes a wrong one fails.
"""

from __future__ import annotations

import importlib
import sys
import types
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_flash_attn.kernels import base
from ring_flash_attn.kernels.base import Call
from ring_flash_attn.kernels.native import blocks
from ring_flash_attn.kernels.native.blocks import Block, LibraryKernel


def scores(q: Tensor, k: Tensor, window: tuple[int, int], scale: float) -> Tensor:
    """(nheads, rows, columns) of q (rows, nheads, d), the diagonal ending in the last corner."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    found = torch.einsum("qhd,khd->hqk", q, k) * scale
    distance = torch.arange(len(k)) - torch.arange(len(q))[:, None] - (len(k) - len(q))
    left, right = window
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    hidden |= (distance < -left) if left >= 0 else False
    hidden |= (distance > right) if right >= 0 else False
    return found.masked_fill(hidden, -torch.inf)


def one_forward(q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int], scale: float) -> Any:
    """out and lse of one block; rows without keys as FlashAttention-2 leaves them, or worse."""
    if len(k) == 0:
        out = q.new_full((*q.shape[:2], v.shape[2]), torch.nan)
        return out, q.new_full((q.shape[1], len(q)), torch.inf)
    s = scores(q, k, window, scale)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return torch.einsum("hqk,khd->qhd", s.softmax(-1), v), s.logsumexp(-1)


def one_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, window: Any, scale: Any
) -> Any:
    """dq, dk and dv of one block, from out and lse of a softmax over more keys than these."""
    group = q.shape[1] // k.shape[1]
    p = (scores(q, k, window, scale) - lse[..., None]).exp().to(q.dtype)
    wide_k, wide_v = (x.repeat_interleave(group, 1) for x in (k, v))
    ds = torch.einsum("qhd,khd->hqk", dout, wide_v) - (dout * out).sum(-1).T[..., None]
    ds = p * ds * scale
    dv = torch.einsum("hqk,qhd->khd", p, dout).unflatten(1, (-1, group)).sum(2)
    dk = torch.einsum("hqk,qhd->khd", ds, q).unflatten(1, (-1, group)).sum(2)
    return torch.einsum("hqk,khd->qhd", ds, wide_k), dk, dv


def cuts(cu_q: Tensor | None, cu_k: Tensor | None, q: Tensor, k: Tensor) -> Any:
    """Rows of the blocks, as slices."""
    offsets = ([0, len(x)] if cu is None else cu.tolist() for cu, x in ((cu_q, q), (cu_k, k)))
    both = [[slice(a, b) for a, b in pairwise(each)] for each in offsets]
    assert both[0][-1].stop == len(q)
    assert both[1][-1].stop == len(k)
    return zip(*both, strict=True)


def forward(q: Tensor, k: Tensor, v: Tensor, cu_q: Any, cu_k: Any, window: Any, scale: Any) -> Any:
    """(batch, rows, …) → out, lse (batch, nheads, rows)."""
    outs, lses = [], []
    for q1, k1, v1 in zip(q, k, v, strict=True):
        parts = [
            one_forward(q1[a], k1[b], v1[b], window, scale) for a, b in cuts(cu_q, cu_k, q1, k1)
        ]
        outs.append(torch.cat([part[0] for part in parts]))
        lses.append(torch.cat([part[1] for part in parts], -1))
    return torch.stack(outs), torch.stack(lses)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Any,
    cu_k: Any,
    window: Any,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv."""
    grads = []
    for b in range(len(q)):
        parts = []
        for i, j in cuts(cu_q, cu_k, q[b], k[b]):
            inputs = dout[b, i], q[b, i], k[b, j], v[b, j], out[b, i], lse[b, :, i]
            parts.append(one_backward(*inputs, window, scale))
        grads.append([torch.cat(each) for each in zip(*parts, strict=True)])
    dq, dk, dv = (torch.stack(each) for each in zip(*grads, strict=True))
    return dq, dk, dv


class PlainLibrary:
    """Any device, any dtype."""

    def __init__(self, packs: bool, square: bool) -> None:
        self.name = f"plain{'_packs' * packs}{'_square' * square}"
        self.packs, self.square = packs, square
        self.calls: list[Block] = []

    def why_not(self, call: Call) -> list[str]:
        return ["no softcap, ALiBi, dropout"] if call.softcap or call.dropout_p else []

    def _check(self, q: Tensor, k: Tensor, block: Block) -> None:
        assert block.cu_seqlens_q is None or (self.packs and len(q) == 1)
        assert q.stride(-1) == k.stride(-1) == 1
        if self.square and block.causal and block.cu_seqlens_q is None:
            assert q.shape[1] == k.shape[1]
        left, right = block.window
        assert right <= 0, "what FlashAttention-2 gets wrong"
        if left >= 0 and right < 0 and block.cu_seqlens_q is None:
            assert q.shape[1] <= k.shape[1], "likewise"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, call: Call) -> Any:
        self._check(q, k, block)
        self.calls.append(block)
        cu = block.cu_seqlens_q, block.cu_seqlens_k
        return forward(q, k, v, *cu, block.window, call.softmax_scale)

    def backward(self, dout: Tensor, *rest: Any) -> Any:
        *tensors, block, call = rest
        self._check(tensors[0], tensors[1], block)
        cu = block.cu_seqlens_q, block.cu_seqlens_k
        return backward(dout, *tensors, *cu, block.window, call.softmax_scale)


# Functions of the real libraries: their names, and of their arguments those that they must get.


def _window(causal: bool, left: int | None, right: int | None) -> tuple[int, int]:
    left, right = (-1 if side is None else side for side in (left, right))
    return (left, 0) if causal else (left, right)


def _batched(x: Tensor) -> Tensor:
    return x if x.dim() == 4 else x[None]


def _run_forward(
    q: Tensor, k: Tensor, v: Tensor, cu: Any, longest: Any, window: Any, s: Any
) -> Any:
    if cu[0] is not None:
        assert all(int(each.diff().max()) <= most for each, most in zip(cu, longest, strict=True))
        assert longest[0] > 1, "what FlashAttention-2 takes for one query in each block"
    found = forward(_batched(q), _batched(k), _batched(v), *cu, window, s)
    return tuple(x if q.dim() == 4 else x[0] for x in found)


def _run_backward(tensors: Any, lse: Tensor, grads: Any, cu: Any, window: Any, s: float) -> None:
    lse = lse if tensors[0].dim() == 4 else lse[None]
    found = backward(*(_batched(x) for x in tensors), lse, *cu, window, s)
    if cu[0] is None:
        for into, grad in zip(grads, found, strict=True):
            into.copy_(grad)
        return
    for (q, q_end), (k, k_end) in zip(*(pairwise(each.tolist()) for each in cu), strict=True):
        if q < q_end and k < k_end:  # other rows are left as they are
            for into, grad, rows in zip(grads, found, ((q, q_end), (k, k_end), (k, k_end))):
                into[slice(*rows)] = grad[0, slice(*rows)]


def flash_attn_2() -> Any:
    """The module flash_attn.flash_attn_interface of flash-attn 2.8."""

    def _flash_attn_forward(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        return_softmax,
    ):
        assert (dropout_p, alibi_slopes, return_softmax, softcap) == (0.0, None, False, 0.0)
        window = _window(causal, window_size_left, window_size_right)
        found = _run_forward(q, k, v, (None, None), None, window, softmax_scale)
        return *found, None, None

    def _flash_attn_varlen_forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        return_softmax=False,
    ):
        window = _window(causal, window_size_left, window_size_right)
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        return *_run_forward(q, k, v, cu, longest, window, softmax_scale), None, None

    def _flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        deterministic,
    ):
        window = _window(causal, window_size_left, window_size_right)
        tensors = (dout, q, k, v, out)
        _run_backward(tensors, softmax_lse, (dq, dk, dv), (None, None), window, softmax_scale)

    def _flash_attn_varlen_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        deterministic,
    ):
        window = _window(causal, window_size_left, window_size_right)
        tensors, cu = (dout, q, k, v, out), (cu_seqlens_q, cu_seqlens_k)
        _run_backward(tensors, softmax_lse, (dq, dk, dv), cu, window, softmax_scale)

    return SimpleNamespace(**locals())


def flash_attn_3() -> Any:
    """The module flash_attn_interface of FlashAttention-3."""

    def _flash_attn_forward(
        q,
        k,
        v,
        k_new=None,
        v_new=None,
        qv=None,
        out_=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        cu_seqlens_k_new=None,
        seqused_q=None,
        seqused_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        softmax_scale=None,
        causal=False,
        window_size_left=-1,
        window_size_right=-1,
        attention_chunk=0,
        softcap=0.0,
    ):
        window = _window(causal, window_size_left, window_size_right)
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        return *_run_forward(q, k, v, cu, longest, window, softmax_scale), None, None

    def _flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        sequed_q=None,
        sequed_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        dq=None,
        dk=None,
        dv=None,
        softmax_scale=None,
        is_causal=False,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        deterministic=False,
        sm_margin=0,
    ):
        window = _window(is_causal, window_size_left, window_size_right)
        tensors, cu = (dout, q, k, v, out), (cu_seqlens_q, cu_seqlens_k)
        _run_backward(tensors, softmax_lse, (dq, dk, dv), cu, window, softmax_scale)

    return SimpleNamespace(**locals())


def flash_attn_4() -> Any:
    """The module flash_attn.cute.interface of flash-attn-4."""

    def _flash_attn_fwd(
        q,
        k,
        v,
        qv=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        seqused_q=None,
        seqused_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        softmax_scale=None,
        causal=False,
        softcap=None,
        window_size_left=None,
        window_size_right=None,
        return_lse=False,
    ):
        assert return_lse
        window = _window(causal, window_size_left, window_size_right)
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        return *_run_forward(q, k, v, cu, longest, window, softmax_scale), None, None, None

    def _flash_attn_bwd(
        q,
        k,
        v,
        out,
        dout,
        lse,
        softmax_scale=None,
        causal=False,
        softcap=0.0,
        window_size_left=None,
        window_size_right=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        deterministic=False,
        dq=None,
        dk=None,
        dv=None,
    ):
        window = _window(causal, window_size_left, window_size_right)
        tensors, cu = (dout, q, k, v, out), (cu_seqlens_q, cu_seqlens_k)
        _run_backward(tensors, lse, (dq, dk, dv), cu, window, softmax_scale)

    return SimpleNamespace(**locals())


def register_plain(monkeypatch: pytest.MonkeyPatch, name: str = "plain") -> LibraryKernel:
    """A kernel on top of a `PlainLibrary`, by this name."""
    module = types.ModuleType("plain_kernel")
    kernel = LibraryKernel(PlainLibrary(True, False))
    vars(module)["KERNEL"] = kernel
    monkeypatch.setitem(sys.modules, "plain_kernel", module)
    entries = {**base._ENTRIES, name: base.Entry("plain_kernel", "")}
    monkeypatch.setattr(base, "_ENTRIES", entries)
    return kernel


def wrapper(
    monkeypatch: pytest.MonkeyPatch, file: str, parents: list[str], name: str, fake: Any
) -> Any:
    """The wrapper's kernel, imported afresh on top of a fake library."""
    for parent in parents:
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    module = types.ModuleType(name)
    vars(module).update(vars(fake))
    monkeypatch.setitem(sys.modules, name, module)
    if parents:
        monkeypatch.setattr(sys.modules[parents[-1]], name.rsplit(".", 1)[1], module, raising=False)
    ours = f"ring_flash_attn.kernels.native.{file}"
    sys.modules.pop(ours, None)
    loaded = importlib.import_module(ours)
    del sys.modules[ours]
    monkeypatch.setattr(blocks, "reasons", lambda *args, **kwargs: [])
    return loaded.KERNEL


WRAPPERS = {
    "flash_attn": ("flash_attn2", ["flash_attn"], "flash_attn.flash_attn_interface", flash_attn_2),
    "fa3": ("fa3", [], "flash_attn_interface", flash_attn_3),
    "fa4": ("fa4", ["flash_attn", "flash_attn.cute"], "flash_attn.cute.interface", flash_attn_4),
}
