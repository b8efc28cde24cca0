"""Implementations that can be compared on one device: our kernels, torch's own, other libraries.

Importing it loads no torch, so that commands know their names.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..kernels.base import AUTO, NATIVE, choose_kernels, kernel_names, why_not
from .workload import Workload, call_of, size_of_workload

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # (batch, seqlen, nheads, headdim)

_NO_WINDOW = (-1, -1)
_BLOCK = 128  # FlexAttention's


@dataclass(frozen=True)
class Implementation:
    """Something that computes attention: what `make` prepares for a workload is not timed.

    `why_not` has every reason why it cannot do it: forward and, if the flag is true, backward.
    """

    name: str
    why_not: Callable[[Workload, torch.device, bool], list[str]]
    make: Callable[[Workload, torch.device], Attention]


def implementation_names() -> tuple[str, ...]:
    """Our kernels and other libraries."""
    return (*kernel_names(), *_LIBRARIES)


def find_implementation(
    name: str, workload: Workload, device: torch.device, grad: bool = True
) -> Implementation:
    """By its name, else ValueError; "auto" and "native" are the kernels that they pick."""
    kernel = name
    if name in (AUTO, NATIVE):
        call, size = call_of(workload, device, grad=grad), size_of_workload(workload)
        kernels = choose_kernels(name, call, size)
        if kernels.forward is not kernels.backward:
            make = functools.partial(_ours, name)
            return Implementation(f"{name} ({kernels.name})", lambda *_: [], make)
        kernel = kernels.name
    if kernel in _LIBRARIES:
        return _LIBRARIES[kernel]
    if kernel not in kernel_names():
        names = (AUTO, NATIVE, *implementation_names())
        raise ValueError(f"unknown implementation {name!r}; choose one of {', '.join(names)}")
    make = functools.partial(_ours, kernel)
    return Implementation(kernel, functools.partial(_kernel_why, kernel), make)


def _ours(kernel: str, workload: Workload, device: torch.device) -> Attention:
    from .. import api

    options = {"softcap": workload.softcap, "kernel": kernel}
    return _called(api, workload, device, workload.window, options)


def _called(
    library: Any,
    workload: Workload,
    device: torch.device,
    window: tuple[int | None, int | None],
    options: dict[str, Any],
) -> Attention:
    """flash-attn's function for a batch, or the one for packed documents."""
    import torch

    packed = workload.packed
    function = library.flash_attn_varlen_func if packed else library.flash_attn_func
    options = {"causal": workload.causal, "window_size": window, **options}
    if packed:
        offsets = torch.tensor(workload.cu_seqlens, dtype=torch.int32, device=device)
        options |= {f"cu_seqlens_{side}": offsets for side in "qk"}
        options |= {f"max_seqlen_{side}": max(workload.lengths) for side in "qk"}

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        tensors = (x.squeeze(0) for x in (q, k, v)) if packed else (q, k, v)
        found = function(*tensors, **options)
        out = found[0] if isinstance(found, tuple) else found
        return out[None] if packed else out

    return run


def _kernel_why(kernel: str, workload: Workload, device: torch.device, grad: bool) -> list[str]:
    return why_not(kernel, call_of(workload, device, grad=grad))


# Torch.


def _seen(distance: Tensor, left: int | None, right: int | None) -> Tensor:
    """Whether a query sees the key that comes so far after it; one side has a limit, or both."""
    sides = [] if left is None else [distance >= -left]
    if right is not None:
        sides.append(distance <= right)
    return sides[0] if len(sides) == 1 else sides[0] & sides[1]


def _allowed(workload: Workload, device: torch.device) -> Tensor | None:
    """(seqlen, seqlen), True where a query sees a key; None if all see all."""
    import torch

    mask = workload.mask
    if mask.left is None and mask.right is None:
        return None
    rows = torch.arange(workload.seqlen, device=device)
    return _seen(rows - rows[:, None], mask.left, mask.right)


def _for_each_query_head(x: Tensor, workload: Workload) -> Tensor:
    return x.repeat_interleave(workload.nheads // workload.nheads_k, dim=2)


def _standard(workload: Workload, device: torch.device) -> Attention:
    seen = _allowed(workload, device)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (_for_each_query_head(x, workload) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = q @ k.transpose(2, 3) * workload.headdim**-0.5
        if workload.softcap:
            scores = workload.softcap * (scores / workload.softcap).tanh()
        if seen is not None:
            scores = scores.masked_fill(~seen, -math.inf)
        return (scores.softmax(dim=-1) @ v).transpose(1, 2)

    return run


def _sdpa(name: str, backend: str, *, masks: bool, groups: bool, cpu: bool) -> Implementation:
    """torch's function with one of its backends.

    Whether it takes `masks`, and thus windows; lets query heads share a KV head by itself
    (`groups`); runs on a `cpu`.
    """

    def why(workload: Workload, device: torch.device, grad: bool) -> list[str]:
        found = [] if cpu else _gpu_only(workload, device, grad)
        found += _plain(workload)
        if backend == "FLASH_ATTENTION" and workload.headdim_v is not None:
            found.append("its values are as wide as its keys")
        if not masks and workload.window != _NO_WINDOW:
            found.append("it has no sliding windows")
        if device.type == "cuda" and backend != "MATH":
            half = workload.dtype in ("float16", "bfloat16")
            if not half and not (masks and workload.dtype == "float32"):
                found.append(f"it does not take {workload.dtype}")
        return found

    def make(workload: Workload, device: torch.device) -> Attention:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        chosen = getattr(SDPBackend, backend)
        windowed = workload.window != _NO_WINDOW
        options: dict[str, Any] = {"is_causal": workload.causal and not windowed}
        options["attn_mask"] = _allowed(workload, device) if windowed else None
        options["enable_gqa"] = groups and workload.nheads != workload.nheads_k

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if not groups:
                k, v = (_for_each_query_head(x, workload) for x in (k, v))
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel(chosen):
                return scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

        return run

    return Implementation(name, why, make)


def _flex_mask(workload: Workload, device: torch.device) -> Any:
    """FlexAttention's mask of blocks.

    FlexAttention's own function looks at every pair, and takes a minute to compile.
    """
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    seqlen, left, right = workload.seqlen, workload.mask.left, workload.mask.right
    if left is None and right is None:
        return None
    first = torch.arange(0, seqlen, _BLOCK)
    last = (first + _BLOCK).clamp(max=seqlen) - 1
    nearest, farthest = first - last[:, None], last - first[:, None]  # key - query
    inside = first + _BLOCK <= seqlen
    some = torch.ones_like(nearest, dtype=torch.bool)  # some pair of the blocks is seen
    whole = inside & inside[:, None]  # all are
    if left is not None:
        some, whole = some & (farthest >= -left), whole & (nearest >= -left)
    if right is not None:
        some, whole = some & (nearest <= right), whole & (farthest <= right)
    lists = [  # how many each row has, and which; those it has not come last
        part.int().to(device)[None, None]
        for blocks in (some & ~whole, whole)
        for part in (blocks.sum(1), (~blocks).int().argsort(dim=1, stable=True))
    ]

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return _seen(key - query, left, right)

    make: Any = BlockMask.from_kv_blocks
    return make(*lists, _BLOCK, sees, seq_lengths=(seqlen, seqlen))


def _flex(workload: Workload, device: torch.device) -> Attention:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    mask = _flex_mask(workload, device)
    torch.compiler.reset()  # after 8 shapes torch would give up, and run it uncompiled
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    groups = workload.nheads != workload.nheads_k

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, block_mask=mask, enable_gqa=groups).transpose(1, 2)

    return run


# Libraries.


def _gpu_only(workload: Workload, device: torch.device, grad: bool) -> list[str]:
    return [] if device.type == "cuda" else [f"it is compared on GPUs, not on {device}"]


def _plain(workload: Workload) -> list[str]:
    found = ["it is compared without softcap only"] if workload.softcap else []
    return [*found, *_no_documents(workload)]


def _no_documents(workload: Workload) -> list[str]:
    return ["it is compared without packed documents only"] if workload.packed else []


def _flex_why(workload: Workload, device: torch.device, grad: bool) -> list[str]:
    return [*_gpu_only(workload, device, grad), *_plain(workload)]


def _xformers_why(workload: Workload, device: torch.device, grad: bool) -> list[str]:
    found = [*_gpu_only(workload, device, grad), *_plain(workload)]
    if workload.window != _NO_WINDOW:
        found.append("it is compared without windows only")
    try:
        import_module("xformers.ops")
    except ImportError as error:
        found.append(f"xFormers cannot be imported: {error}")
    return found


def _xformers(workload: Workload, device: torch.device) -> Attention:
    ops = import_module("xformers.ops")
    bias = ops.LowerTriangularMask() if workload.causal else None

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        k, v = (_for_each_query_head(x, workload) for x in (k, v))
        return ops.memory_efficient_attention(q, k, v, attn_bias=bias)

    return run


def _flash_attn(
    name: str, module: str, kernel: str, no_limit: int | None, *, widths: bool = False
) -> Implementation:
    """A release of flash-attn, called as its own users do.

    `kernel` is ours on it, and knows what it can do, but for values of another width, which the
    library may take by itself (`widths`); `no_limit` is a side of a window without one.
    """

    def why(workload: Workload, device: torch.device, grad: bool) -> list[str]:
        same = replace(workload, headdim_v=None) if widths else workload
        return _kernel_why(kernel, same, device, False)  # wrong gradients are shown as errors

    def make(workload: Workload, device: torch.device) -> Attention:
        library = import_module(module)
        left, right = (no_limit if side < 0 else side for side in workload.window)
        options = {"softcap": workload.softcap} if workload.softcap else {}
        return _called(library, workload, device, (left, right), options)

    return Implementation(name, why, make)


_LIBRARIES = {
    each.name: each
    for each in (
        Implementation(
            "torch standard", lambda workload, device, grad: _no_documents(workload), _standard
        ),
        _sdpa("SDPA flash", "FLASH_ATTENTION", masks=False, groups=True, cpu=True),
        _sdpa("SDPA efficient", "EFFICIENT_ATTENTION", masks=True, groups=False, cpu=False),
        _sdpa("SDPA cuDNN", "CUDNN_ATTENTION", masks=False, groups=True, cpu=False),
        _sdpa("SDPA math", "MATH", masks=True, groups=True, cpu=True),
        Implementation("FlexAttention", _flex_why, _flex),
        Implementation("xFormers", _xformers_why, _xformers),
        _flash_attn("flash-attn 2", "flash_attn", "flash_attn", -1),
        _flash_attn("flash-attn 3", "flash_attn_interface", "fa3", -1),
        _flash_attn("flash-attn 4", "flash_attn.cute", "fa4", None, widths=True),
    )
}
