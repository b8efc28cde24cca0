"""Checks of what users pass in: each raises an error that names the offending value."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

CuSeqlens = Tensor | Sequence[int]


# torch.compile cannot trace the question, so it is asked here once.
_AUTOCAST = {
    kind for kind in ("cpu", "cuda", "xpu", "mps", "hpu") if torch.amp.is_autocast_available(kind)
}


def autocast_dtype(kind: str) -> torch.dtype | None:
    """What autocast computes in on this kind of device, where it is on."""
    on = kind in _AUTOCAST and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


def check_tensor(name: str, value: object) -> None:
    """TypeError unless it is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(value).__name__}")


def check_tensors(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> None:
    """Shapes, dtypes and devices of q, k and v fit together."""
    form = "(total, nheads, headdim)" if packed else "(batch, seqlen, nheads, headdim)"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor)
        if tensor.dim() != (3 if packed else 4):
            raise ValueError(f"{name} must be {form}, but has shape {tuple(tensor.shape)}")
        if not tensor.dtype.is_floating_point:
            raise ValueError(f"{name} must be of a floating point dtype, not {tensor.dtype}")
    for what in ("dtype", "device"):
        kinds = [getattr(tensor, what) for tensor in (q, k, v)]
        if len(set(kinds)) > 1:
            raise ValueError(f"q, k and v must have one {what}, not {', '.join(map(str, kinds))}")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"k and v must agree in all but the last dimension: {shapes}")
    if not packed and q.shape[0] != k.shape[0]:
        raise ValueError(f"q and k must have one batch size: {shapes}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k must have one head dimension: {shapes}")
    if 0 in (q.shape[-1], v.shape[-1], q.shape[-2], k.shape[-2], *q.shape[: not packed]):
        raise ValueError(f"batch, heads and head dimensions must not be 0: {shapes}")
    if q.shape[-2] % k.shape[-2]:
        raise ValueError(
            f"the number of query heads must be a multiple of the number of KV heads, but q has "
            f"{q.shape[-2]} and k has {k.shape[-2]}"
        )


def unpack(tensor: Tensor, name: str, parts: int, packed: bool) -> tuple[Tensor, ...]:
    """The views q, k, v of a qkv tensor, or k, v of a kv tensor."""
    form = f"({'total' if packed else 'batch, seqlen'}, {parts}, nheads, headdim)"
    check_tensor(name, tensor)
    if tensor.dim() != (4 if packed else 5) or tensor.shape[-3] != parts:
        raise ValueError(f"{name} must be {form}, but has shape {tuple(tensor.shape)}")
    return tensor.unbind(-3)


def check_window(window_size: Sequence[int]) -> tuple[int, int]:
    """(left, right), each −1 (no limit) or more."""
    sides = tuple(window_size) if isinstance(window_size, (tuple, list)) else ()
    if len(sides) != 2 or not all(isinstance(side, int) and side >= -1 for side in sides):
        raise ValueError(f"window_size must be two integers of at least -1, not {window_size!r}")
    return sides[0], sides[1]


def check_dropout(dropout_p: float) -> float:
    """A probability below 1."""
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be at least 0 and below 1, not {dropout_p!r}")
    return float(dropout_p)


def check_softcap(softcap: float | None) -> float:
    """0 (or None) for none, or positive."""
    if softcap is None:
        return 0.0
    if not 0 <= softcap < math.inf:
        raise ValueError(f"softcap must be 0 (off) or positive, not {softcap!r}")
    return float(softcap)


def check_scale(softmax_scale: float | None, headdim: int) -> float:
    """The factor on the scores, 1 / sqrt(headdim) for None."""
    if softmax_scale is None:
        return float(headdim**-0.5)
    if not math.isfinite(softmax_scale):
        raise ValueError(f"softmax_scale must be a finite number, not {softmax_scale!r}")
    return float(softmax_scale)


def check_alibi(slopes: Tensor | None, q: Tensor) -> Tensor | None:
    """(nheads,) or (batch, nheads), on q's device, without gradient."""
    if slopes is None:
        return None
    nheads, batch = q.shape[2], q.shape[0]
    check_tensor("alibi_slopes", slopes)
    if tuple(slopes.shape) not in {(nheads,), (batch, nheads)}:
        raise ValueError(
            f"alibi_slopes must be ({nheads},) or ({batch}, {nheads}), not {tuple(slopes.shape)}"
        )
    if slopes.device != q.device:
        raise ValueError(f"alibi_slopes is on {slopes.device}, but q is on {q.device}")
    if slopes.requires_grad:
        raise ValueError("alibi_slopes.requires_grad: there is no gradient for alibi_slopes")
    return slopes


def check_sink(sink: Tensor | None, q: Tensor) -> Tensor | None:
    """(nheads,) floating point, on q's device."""
    if sink is None:
        return None
    check_tensor("sink", sink)
    if tuple(sink.shape) != (q.shape[2],) or not sink.dtype.is_floating_point:
        raise ValueError(
            f"sink must be ({q.shape[2]},) of floating point, not {tuple(sink.shape)} {sink.dtype}"
        )
    if sink.device != q.device:
        raise ValueError(f"sink is on {sink.device}, but q is on {q.device}")
    return sink


def check_max_seqlen(name: str, max_seqlen: int, lengths: Sequence[int]) -> None:
    """At least the longest document's length."""
    longest = max(lengths, default=0)
    if int(max_seqlen) < longest:
        raise ValueError(f"{name} = {int(max_seqlen)}, but the longest document has {longest}")


def check_heads_k_stride(stride: int, nheads_k: int) -> int:
    """A divisor of the number of KV heads."""
    if not isinstance(stride, int) or stride < 1 or nheads_k % stride:
        raise ValueError(f"heads_k_stride = {stride!r} must divide the {nheads_k} KV heads")
    return stride


def check_sources_per_launch(sources: int) -> int:
    """A positive number."""
    if not isinstance(sources, int) or sources < 1:
        raise ValueError(f"sources_per_launch must be a positive integer, not {sources!r}")
    return sources


def document_lengths(
    cu_seqlens: CuSeqlens, device: torch.device | None = None, name: str = "cu_seqlens"
) -> tuple[int, ...]:
    """Lengths of the documents that cu_seqlens delimits.

    A CUDA tensor is copied to the host once; as long as the same tensor comes back unchanged, so
    does the copy.

    Args:
        cu_seqlens: (documents + 1,) int32 or int64, or a sequence of ints; 0 first, never
            decreasing.
        device: where a tensor has to be.
        name: what the argument is called, for the error.
    """
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{name} must be one-dimensional and int32 or int64, not "
                f"{tuple(cu_seqlens.shape)} {cu_seqlens.dtype}"
            )
        if device is not None and cu_seqlens.device != device:
            raise ValueError(f"{name} is on {cu_seqlens.device}, but q is on {device}")
        return _tensor_lengths(cu_seqlens, name)
    return _lengths(list(cu_seqlens), name)


def document_pairs(
    q: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths of the documents' queries and keys, within the limits that the user gave."""
    lengths_q = document_lengths(cu_seqlens_q, q.device, "cu_seqlens_q")
    lengths_k = document_lengths(cu_seqlens_k, q.device, "cu_seqlens_k")
    check_max_seqlen("max_seqlen_q", max_seqlen_q, lengths_q)
    check_max_seqlen("max_seqlen_k", max_seqlen_k, lengths_k)
    return lengths_q, lengths_k


_copies: dict[int, tuple[weakref.ref[Tensor], int, tuple[int, ...]]] = {}


def _tensor_lengths(cu_seqlens: Tensor, name: str) -> tuple[int, ...]:
    if cu_seqlens.is_inference():  # has no version to tell whether it was changed
        return _lengths(cu_seqlens.tolist(), name)
    key = id(cu_seqlens)
    reference, version, lengths = _copies.get(key, (None, -1, ()))
    if reference is not None and reference() is cu_seqlens and version == cu_seqlens._version:
        return lengths
    lengths = _lengths(cu_seqlens.tolist(), name)
    alive = weakref.ref(cu_seqlens, lambda gone: _forget(key, gone))
    _copies[key] = alive, cu_seqlens._version, lengths
    return lengths


def _forget(key: int, gone: weakref.ref[Tensor]) -> None:
    if key in _copies and _copies[key][0] is gone:
        del _copies[key]


def _lengths(offsets: Sequence[int], name: str) -> tuple[int, ...]:
    if len(offsets) < 2:
        raise ValueError(f"{name} must have at least two entries, not {list(offsets)}")
    if offsets[0] != 0:
        raise ValueError(f"{name} must start at 0, not at {offsets[0]}")
    lengths = tuple(b - a for a, b in pairwise(offsets))
    for i, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"{name} decreases from {offsets[i]} to {offsets[i + 1]} at {i + 1}")
    return lengths


def check_total(lengths: Sequence[int], tensor: Tensor, name: str, cu_name: str) -> None:
    """The packed tensor has as many rows as cu_seqlens says."""
    if sum(lengths) != tensor.shape[0]:
        raise ValueError(
            f"{cu_name} ends at {sum(lengths)}, but {name} has {tensor.shape[0]} tokens "
            f"(shape {tuple(tensor.shape)})"
        )
