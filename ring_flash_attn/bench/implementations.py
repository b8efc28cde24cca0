"""Implementations that can be compared on one device: our kernels, torch's own, other libraries."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .. import api
from ..kernels.base import AUTO, NATIVE, choose_kernel, kernel_names, why_not
from .results import implementation_names as implementation_names
from .workload import Workload, call_of

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # all (batch, seqlen, nheads, headdim)
_NO_WINDOW = (-1, -1)
_HALF = ("float16", "bfloat16")
_BLOCK = 128  # FlexAttention's


@dataclass(frozen=True)
class Implementation:
    """Something that computes attention.

    Attributes:
        name: in tables and files.
        why_not: every reason why it cannot do a workload on a device; empty if it can.
        make: returns a function of (q, k, v) for it; what it prepares is not timed.
    """

    name: str
    why_not: Callable[[Workload, torch.device], list[str]]
    make: Callable[[Workload, torch.device], Attention]


def find_implementation(name: str, workload: Workload, device: torch.device) -> Implementation:
    """By its name; "auto" and "native" are the kernels that they pick for this workload.

    Raises:
        ValueError: there is none of this name.
        NotImplementedError: "auto" or "native" finds no kernel.
    """
    if name in (AUTO, NATIVE):
        return _ours(choose_kernel(name, call_of(workload, device)).name)
    if name in _LIBRARIES:
        return _LIBRARIES[name]
    if name in kernel_names():
        return _ours(name)
    names = (AUTO, NATIVE, *implementation_names())
    raise ValueError(f"unknown implementation {name!r}; choose one of {', '.join(names)}")


def _ours(kernel: str) -> Implementation:
    def make(workload: Workload, device: torch.device) -> Attention:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = api.flash_attn_func(
                q, k, v, causal=workload.causal, window_size=workload.window, kernel=kernel
            )
            assert isinstance(out, Tensor), "no lse was asked for"
            return out

        return run

    return Implementation(kernel, lambda w, device: why_not(kernel, call_of(w, device)), make)


# Torch.


def _allowed(workload: Workload, device: torch.device) -> Tensor | None:
    """(seqlen, seqlen), True where a query sees a key; None if all see all."""
    left, right = workload.mask.left, workload.mask.right
    if left is None and right is None:
        return None
    rows = torch.arange(workload.seqlen, device=device)
    distance = rows - rows[:, None]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen


def _for_each_query_head(x: Tensor, workload: Workload) -> Tensor:
    return x.repeat_interleave(workload.nheads // workload.nheads_k, dim=2)


def _standard(workload: Workload, device: torch.device) -> Attention:
    seen = _allowed(workload, device)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (_for_each_query_head(x, workload) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = q @ k.transpose(2, 3) * workload.headdim**-0.5
        if seen is not None:
            scores = scores.masked_fill(~seen, -torch.inf)
        return (scores.softmax(dim=-1) @ v).transpose(1, 2)

    return run


def _sdpa(
    name: str, backend: SDPBackend, *, masks: bool, groups: bool, cpu: bool
) -> Implementation:
    """torch's function with one of its backends.

    Args:
        name, backend: which.
        masks: it takes a mask of booleans, and thus windows.
        groups: it lets query heads share a KV head by itself.
        cpu: it runs on a CPU.
    """

    def why(workload: Workload, device: torch.device) -> list[str]:
        found = []
        if not cpu and device.type != "cuda":
            found.append(f"it needs a GPU, not {device}")
        if not masks and workload.window != _NO_WINDOW:
            found.append("it has no sliding windows")
        if device.type == "cuda" and backend is not SDPBackend.MATH:
            half = workload.dtype in _HALF
            if not half and not (masks and workload.dtype == "float32"):
                found.append(f"it does not take {workload.dtype}")
        return found

    def make(workload: Workload, device: torch.device) -> Attention:
        windowed = workload.window != _NO_WINDOW
        options: dict[str, Any] = {"is_causal": workload.causal and not windowed}
        options["attn_mask"] = _allowed(workload, device) if windowed else None
        options["enable_gqa"] = groups and workload.nheads != workload.nheads_k

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if not groups:
                k, v = (_for_each_query_head(x, workload) for x in (k, v))
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

        return run

    return Implementation(name, why, make)


def _flex_why(workload: Workload, device: torch.device) -> list[str]:
    return [] if device.type == "cuda" else [f"it is compared on GPUs, not on {device}"]


def _flex_blocks(seqlen: int, left: int | None, right: int | None) -> tuple[Tensor, Tensor]:
    """Of blocks of queries and keys: whether some pair is seen, and whether all are.

    FlexAttention's own function looks at every pair, and takes a minute to compile.
    """
    first = torch.arange(0, seqlen, _BLOCK)
    last = (first + _BLOCK).clamp(max=seqlen) - 1
    nearest, farthest = first - last[:, None], last - first[:, None]  # key - query
    inside = first + _BLOCK <= seqlen
    some = torch.ones_like(nearest, dtype=torch.bool)
    whole = inside & inside[:, None]
    if left is not None:
        some, whole = some & (farthest >= -left), whole & (nearest >= -left)
    if right is not None:
        some, whole = some & (nearest <= right), whole & (farthest <= right)
    return some, whole


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many each row has, and which; those it has not come last."""
    order = (~blocks).int().argsort(dim=1, stable=True)
    return blocks.sum(1).int(), order.int()


def _flex_mask(workload: Workload, device: torch.device) -> Any:
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    left, right = workload.mask.left, workload.mask.right

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= 0
        if left is not None:
            seen = seen & (key - query >= -left)
        if right is not None:
            seen = seen & (key - query <= right)
        return seen

    if left is None and right is None:
        return None
    some, whole = _flex_blocks(workload.seqlen, left, right)
    lists = (x.to(device)[None, None] for x in (*_listed(some & ~whole), *_listed(whole)))
    lengths = (workload.seqlen, workload.seqlen)
    return flex.BlockMask.from_kv_blocks(*lists, _BLOCK, sees, seq_lengths=lengths)


def _flex(workload: Workload, device: torch.device) -> Attention:
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    mask = _flex_mask(workload, device)
    torch.compiler.reset()  # after 8 shapes torch would give up, and run it uncompiled
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    groups = workload.nheads != workload.nheads_k

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, block_mask=mask, enable_gqa=groups).transpose(1, 2)

    return run


# Libraries.


def _xformers_why(workload: Workload, device: torch.device) -> list[str]:
    found = [] if device.type == "cuda" else [f"it needs a GPU, not {device}"]
    if workload.window != _NO_WINDOW:
        found.append("it is compared without windows only")
    try:
        importlib.import_module("xformers.ops")
    except ImportError as error:
        found.append(f"xFormers cannot be imported: {error}")
    return found


def _xformers(workload: Workload, device: torch.device) -> Attention:
    ops = importlib.import_module("xformers.ops")
    bias = ops.LowerTriangularMask() if workload.causal else None

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (_for_each_query_head(x, workload) for x in (k, v))
        found: Tensor = ops.memory_efficient_attention(q, k, v, attn_bias=bias)
        return found

    return run


def _flash_attn(name: str, module: str, kernel: str, no_limit: int | None) -> Implementation:
    """A release of flash-attn, called as its own users do.

    Args:
        name, module: of the library, and where its `flash_attn_func` is.
        kernel: ours on the same library, which knows what it can do.
        no_limit: how it calls a side of a window without a limit.
    """

    def make(workload: Workload, device: torch.device) -> Attention:
        function = importlib.import_module(module).flash_attn_func
        window = tuple(no_limit if side < 0 else side for side in workload.window)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found = function(q, k, v, causal=workload.causal, window_size=window)
            out: Tensor = found[0] if isinstance(found, tuple) else found
            return out

        return run

    return Implementation(name, lambda w, device: why_not(kernel, call_of(w, device)), make)


_FLASH, _EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
_LIBRARIES = {
    each.name: each
    for each in (
        Implementation("torch standard", lambda workload, device: [], _standard),
        _sdpa("SDPA flash", _FLASH, masks=False, groups=True, cpu=True),
        _sdpa("SDPA efficient", _EFFICIENT, masks=True, groups=False, cpu=False),
        _sdpa("SDPA cuDNN", SDPBackend.CUDNN_ATTENTION, masks=False, groups=True, cpu=False),
        _sdpa("SDPA math", SDPBackend.MATH, masks=True, groups=True, cpu=True),
        Implementation("FlexAttention", _flex_why, _flex),
        Implementation("xFormers", _xformers_why, _xformers),
        _flash_attn("flash-attn 2", "flash_attn", "flash_attn", -1),
        _flash_attn("flash-attn 3", "flash_attn_interface", "fa3", -1),
        _flash_attn("flash-attn 4", "flash_attn.cute", "fa4", None),
    )
}
