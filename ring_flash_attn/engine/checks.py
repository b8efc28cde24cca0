"""Checks of what users pass in: each raises an error that names the offending value."""

from __future__ import annotations

import functools
import math
import numbers
import operator
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .host_copy import host_values

CuSeqlens = Tensor | Sequence[int]

_LARGEST = 2**63 - 1  # of tensors' sizes
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# torch.compile cannot trace the question, so it is asked here once.
_AUTOCAST = {
    kind for kind in ("cpu", "cuda", "xpu", "mps", "hpu") if torch.amp.is_autocast_available(kind)
}


def autocast_dtype(kind: str) -> torch.dtype | None:
    """What autocast computes in on this kind of device, where it is on."""
    on = kind in _AUTOCAST and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


# One checker for each kind of argument. Each returns the value as the kind of Python object that it
# means, or raises a TypeError or ValueError that starts with the argument's name.


def check_tensor(name: str, value: object) -> None:
    """TypeError unless it is a tensor whose elements lie in this process's memory."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(value).__name__}")
    if type(value) is not Tensor and any(
        kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed")
        for kind in type(value).__mro__  # by name: its module is slow to import
    ):
        raise TypeError(f"{name} must be a local tensor, not a DTensor: pass {name}.to_local()")
    if value.layout is not torch.strided or value.is_nested or value.is_quantized:
        kind = "nested" if value.is_nested else "quantized" if value.is_quantized else value.layout
        raise TypeError(f"{name} must be a dense tensor, but it is {kind}")


def check_values(name: str, tensor: Tensor) -> None:
    """ValueError unless kernels can compute with the tensor's dtype."""
    if tensor.dtype not in DTYPES:
        raise ValueError(
            f"{name} must be of a floating point dtype (float16, bfloat16, float32 or float64), "
            f"not {tensor.dtype}"
        )


def check_flag(name: str, value: Any) -> bool:
    """A bool; 0 and 1 will do, and what NumPy or a 0-dim tensor makes of them."""
    value = _plain(name, value)
    if not isinstance(value, int) or value not in (0, 1):
        raise TypeError(f"{name} must be True or False, not {_shown(value)}")
    return bool(value)


def check_integer(name: str, value: Any, least: int | None = None) -> int:
    """An int, at least `least`; NumPy's and 0-dim tensors will do, bools and floats will not."""
    if type(value) is not int:
        value = _plain(name, value)
        try:
            if isinstance(value, bool) or hasattr(value, "shape"):
                raise TypeError
            value = operator.index(value)
        except TypeError:
            kind = _an_integer(least)
            raise TypeError(f"{name} must be {kind}, not {_shown(value)}") from None
    if (least is not None and value < least) or value > _LARGEST:
        raise ValueError(f"{name} must be {_an_integer(least)} of 64 bits, not {value}")
    return int(value)


def _an_integer(least: int | None) -> str:
    if least is None:
        return "an integer"
    return "a positive integer" if least == 1 else f"an integer of at least {least}"


def check_number(
    name: str,
    value: Any,
    least: float = -sys.float_info.max,
    below: float = math.inf,
    rule: str = "a finite number",
) -> float:
    """A float in a range; ints, NumPy's and 0-dim tensors will do, bools and NaN will not."""
    value = _plain(name, value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, not {_shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not least <= number < below:
        raise ValueError(f"{name} must be {rule}, not {number}")
    return number


def _plain(name: str, value: Any) -> Any:
    """The Python object in a NumPy scalar, or in a tensor or array without dimensions."""
    if isinstance(value, Tensor):
        check_tensor(name, value)
        if value.device.type == "meta":
            raise ValueError(f"{name} is on meta: it has no value")
        if value.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}.requires_grad: there is no gradient for {name}")
    is_scalar = hasattr(value, "item") and getattr(value, "shape", None) == ()
    return value.item() if is_scalar else value


def _shown(value: object) -> str:
    """A value in an error: short, and never a tensor's elements."""
    if isinstance(value, Tensor):
        return "a nested tensor" if value.is_nested else f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    short = len(text) <= 80 and "\n" not in text
    return text if short else f"{text[:77].splitlines()[0]}… ({type(value).__name__})"


def check_rank(rank: Any, world_size: Any) -> tuple[int, int]:
    """A rank, and the number of ranks that it is one of."""
    world_size = check_integer("world_size", world_size, 1)
    rank = check_integer("rank", rank)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank = {rank} is not a rank of {world_size}")
    return rank, world_size


def check_slice(name: str, value: Any) -> slice:
    """A slice of integers or None."""
    if not isinstance(value, slice):
        raise TypeError(f"{name} must be a slice, not {_shown(value)}")
    parts = (
        None if part is None else check_integer(f"{name}.{end}", part)
        for end, part in (("start", value.start), ("stop", value.stop), ("step", value.step))
    )
    value = slice(*parts)
    if value.step == 0:
        raise ValueError(f"{name} = {value} has a step of 0")
    return value


def check_device(name: str, value: Any) -> torch.device | None:
    """A device that is there, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int, torch.device)):
        raise TypeError(f"{name} must be a torch.device, its name or None, not {_shown(value)}")
    try:
        return torch.empty(0, device=value).device
    except (RuntimeError, AssertionError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} = {value!r}: {str(error).splitlines()[0]}") from None


def check_tensors(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> None:
    """Shapes, dtypes and devices of q, k and v fit together."""
    form = "(total, nheads, headdim)" if packed else "(batch, seqlen, nheads, headdim)"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != (3 if packed else 4):
            raise ValueError(f"{name} must be {form}, but has shape {tuple(tensor.shape)}")
        check_values(name, tensor)
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


def unpack(tensor: Tensor, name: str, packed: bool) -> tuple[Tensor, ...]:
    """The views q, k, v of a tensor called qkv, or k, v of one called kv."""
    check_tensor(name, tensor)
    if tensor.dim() != (4 if packed else 5) or tensor.shape[-3] != len(name):
        form = f"({'total' if packed else 'batch, seqlen'}, {len(name)}, nheads, headdim)"
        raise ValueError(f"{name} must be {form}, but has shape {tuple(tensor.shape)}")
    check_values(name, tensor)
    return tensor.unbind(-3)


def check_window(window_size: Any) -> tuple[int, int]:
    """(left, right), each −1 (no limit) or more."""
    try:
        left, right = window_size if isinstance(window_size, (tuple, list)) else ()
        return check_integer("left", left, -1), check_integer("right", right, -1)
    except (TypeError, ValueError):
        raise ValueError(
            f"window_size must be two integers of at least -1, not {_shown(window_size)}"
        ) from None


def check_for_heads(name: str, tensor: Tensor | None, q: Tensor, *shapes: tuple[int, ...]) -> None:
    """Floating point numbers in one of these shapes, on q's device; or None."""
    if tensor is None:
        return
    if tuple(tensor.shape) not in shapes:
        choices = " or ".join(map(str, shapes))
        raise ValueError(f"{name} must be {choices}, not {tuple(tensor.shape)}")
    check_values(name, tensor)
    if tensor.device != q.device:
        raise ValueError(f"{name} is on {tensor.device}, but q is on {q.device}")


def check_max_seqlen(name: str, max_seqlen: Any, lengths: Sequence[int]) -> None:
    """At least the longest document's length."""
    limit, longest = check_integer(name, max_seqlen), max(lengths, default=0)
    if limit < longest:
        raise ValueError(f"{name} = {limit}, but the longest document has {longest}")


def check_heads_k_stride(stride: Any, nheads_k: int) -> int:
    """A divisor of the number of KV heads."""
    stride = check_integer("heads_k_stride", stride)
    if stride < 1 or nheads_k % stride:
        raise ValueError(f"heads_k_stride = {stride} must divide the {nheads_k} KV heads")
    return stride


def document_lengths(
    cu_seqlens: CuSeqlens,
    device: torch.device | None = None,
    name: str = "cu_seqlens",
    fresh: bool = False,
) -> tuple[int, ...]:
    """Lengths of the documents that cu_seqlens delimits; a tensor is on the CPU or on `device`.

    Sequences and CPU tensors are read at every call. A CUDA tensor is copied to the host once, and
    again when it has changed (see `host_copy`); if `fresh`, which is for what is called once for a
    batch, in any case.
    """
    if not isinstance(cu_seqlens, Tensor):
        return _lengths(_offsets(cu_seqlens, name), name)
    check_tensor(name, cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name} must be one-dimensional and int32 or int64, not "
            f"{tuple(cu_seqlens.shape)} {cu_seqlens.dtype}"
        )
    if device is not None and cu_seqlens.device != device and cu_seqlens.device.type != "cpu":
        raise ValueError(f"{name} is on {cu_seqlens.device}, but q is on {device}")
    if cu_seqlens.device.type == "meta":
        raise ValueError(f"{name} is on meta: it has no values")
    return _lengths(host_values(cu_seqlens, name, fresh), name)


def document_pairs(
    q: Tensor,
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths of the documents' queries and keys, within the limits that the user gave."""
    lengths_k = lengths_q = document_lengths(cu_seqlens_q, q.device, "cu_seqlens_q")
    if cu_seqlens_k is not cu_seqlens_q:
        lengths_k = document_lengths(cu_seqlens_k, q.device, "cu_seqlens_k")
    check_max_seqlen("max_seqlen_q", max_seqlen_q, lengths_q)
    check_max_seqlen("max_seqlen_k", max_seqlen_k, lengths_k)
    return lengths_q, lengths_k


def _offsets(values: Any, name: str) -> tuple[int, ...]:
    """What a sequence or a NumPy array holds."""
    elements = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(elements, Sequence) or isinstance(elements, (str, bytes)):
        raise TypeError(f"{name} must be a tensor or a sequence of integers, not {_shown(values)}")
    if {*map(type, elements)} == {int} and max(elements) <= _LARGEST:
        return tuple(elements)
    return tuple(check_integer(name, element) for element in elements)


@functools.lru_cache(maxsize=64)  # layers ask for the same
def _lengths(offsets: tuple[int, ...], name: str) -> tuple[int, ...]:
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


def check_shard(x: Tensor, dim: int, size: int, layout: str, rank: int, world_size: int) -> None:
    """The shard has as many rows as the layout gives the rank."""
    if x.shape[dim] != size:
        raise ValueError(
            f"rank {rank} of {world_size} holds {size} tokens in layout {layout!r} by seqlen or "
            f"cu_seqlens, but its shard x has {x.shape[dim]} in dim = {dim}"
        )
