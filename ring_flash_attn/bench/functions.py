"""The public functions: which there are, which a user means, and how each is called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ..plan.build import route_names
from ..plan.layout import layout_names
from .workload import Placement, Workload

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..api.families import Family

_SHOWN = 5  # documents in a message


@dataclass(frozen=True, slots=True)
class PublicFunction:
    """A function of the API."""

    family: Family  # functions that differ in form and kernel only
    form: str  # how q, k and v come; the end of the name
    prefix: str = ""  # kernel that the name fixes; "" if it is an argument

    @property
    def name(self) -> str:
        return "_".join(part for part in (self.prefix, self.family.name, self.form) if part)

    @property
    def signature(self) -> str:
        """Name of its list of arguments in `signatures.py`."""
        return self.family.signature.name

    @property
    def is_distributed(self) -> bool:
        return bool(self.family.layout) or self.signature == "anything"

    def points(self, layouts: Sequence[str], routes: Sequence[str]) -> list[tuple[str, str]]:
        """Every (layout, route) of these at which it can be called; of all if there are none."""
        if self.signature == "anything":
            layouts, routes = layouts or layout_names(), routes or route_names()
            return [(layout, route) for layout in layouts for route in routes]
        layout, route = self.family.layout, self.family.route
        wanted = (not layouts or layout in layouts) and (not routes or route in routes)
        return [(layout, route)] if wanted else []


def all_functions() -> Iterator[PublicFunction]:
    """Every public function; those that fix their kernel last."""
    from ..api.families import FAMILIES, PREFIXES  # which import torch

    for prefix in ("", *PREFIXES):
        for family in FAMILIES:
            for form in family.forms:
                yield PublicFunction(family, form, prefix)


def function_names(prefixes: bool = False) -> list[str]:
    """Public functions; with `prefixes`, also those that fix their kernel."""
    return [each.name for each in all_functions() if prefixes or not each.prefix]


def find_functions(names: Sequence[str]) -> list[PublicFunction]:
    """The functions that exact names, patterns or parts of names mean; ValueError if there is none.

    Without names, all that do not fix their kernel.
    """
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
    return [each for each in all_functions() if each.name in wanted]


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
    function: PublicFunction,
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
