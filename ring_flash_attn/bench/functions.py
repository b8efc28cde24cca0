"""The public functions: which there are, which a user means, and how each is called."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from .workload import Placement, Workload

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..api.families import Function

_SHOWN = 5  # documents in a message


def function_names(prefixes: bool = False) -> list[str]:
    """Public functions; with `prefixes`, also those that fix their kernel."""
    from ..api.families import FUNCTIONS  # which imports torch

    return [name for name, each in FUNCTIONS.items() if prefixes or not each.prefix]


def find_functions(names: Sequence[str]) -> list[Function]:
    """The functions that exact names, patterns or parts of names mean; ValueError if there is none.

    Without names, all that do not fix their kernel.
    """
    from ..api.families import FUNCTIONS

    everything = function_names(prefixes=True)
    wanted: set[str] = set() if names else set(function_names())
    for name in names:
        if name in everything:
            found = [name]
        elif any(sign in name for sign in "*?["):
            found = [each for each in everything if fnmatch(each, name)]
        else:
            found = [each for each in function_names() if name in each]
        if not found:
            raise ValueError(f"no function {name!r}; choose from {', '.join(function_names())}")
        wanted.update(found)
    return [each for name, each in FUNCTIONS.items() if name in wanted]


def packed_leaves(form: str, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """The tensors that a function of this form takes, each a leaf that wants a gradient."""
    import torch

    leaves = {"q": q, "k": k, "v": v}
    if form.startswith("kv"):
        leaves = {"q": q, "kv": torch.stack([k, v], -3)}
    elif form.startswith("qkv"):
        leaves = {"qkv": torch.stack([q, k, v], -3)}
    return {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}


def own_arguments(
    function: Function,
    workload: Workload,
    placement: Placement,
    rank: int,
    device: torch.device,
) -> dict[str, Any]:
    """What a function takes besides q, k, v and common options.

    Raises:
        ValueError: the function needs documents, or all tokens, that divide by the ranks.
    """
    import torch

    from ..api.llama3 import llama3_flash_attn_prepare_cu_seqlens

    lengths, lengths_k, world_size = workload.lengths, workload.lengths_k, placement.world_size
    if function.signature == "local_documents":
        uneven = [str(length) for length in lengths if length % world_size]
        if uneven:
            shown = ", ".join(uneven[:_SHOWN]) + ", …" * (len(uneven) > _SHOWN)
            raise ValueError(
                f"every document of cu_seqlens must divide by {world_size} ranks; "
                f"{len(uneven)} of {len(lengths)} do not: {shown} tokens"
            )
        lengths = tuple(length // world_size for length in lengths)
    cu_seqlens, cu_seqlens_k = (
        torch.tensor([0, *accumulate(of)], dtype=torch.int32, device=device)
        for of in (lengths, lengths_k)
    )
    values: dict[str, Any] = {
        "layout": placement.layout,
        "route": placement.route,
        "heads_k_stride": placement.heads_k_stride,
        "ranks_per_node": placement.ranks_per_node,
    }
    if function.signature == "anything" and not workload.packed:
        return {**values, "seqlen": lengths[0], "seqlen_k": lengths_k[0]}
    values |= {
        "cu_seqlens": cu_seqlens,
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen": max(lengths),
        "max_seqlen_q": max(lengths),
        "max_seqlen_k": max(lengths_k),
    }
    if function.signature == "llama3":
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")
        found = llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, workload.causal, rank, world_size)
        values.update(zip(names, found, strict=True))
    elif function.signature == "anything" and lengths_k == lengths:
        del values["cu_seqlens_k"]
    return {
        name: values[name] for name in function.family.signature.order.split() if name in values
    }
