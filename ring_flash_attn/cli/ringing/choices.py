"""What `rfa ring` is asked for: functions at sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...bench.ranks import Finding, Size, Target, make_target, with_kernel
from ...bench.versus import refuse_kernels
from ...bench.workload import find_dtype
from ...kernels.base import AUTO, check_kernel
from ...plan.build import check_route
from ...plan.layout import FLAT_PREFIX, get_layout
from ...verify.cases import Choice, Named, chosen_functions, points
from ..groups import check_lengths
from .way import Way

_SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"seqlen": 8192, "nheads": 32, "nheads_k": 8, "headdim": 128, "dtype": "bfloat16"},
    "cpu": {"seqlen": 256, "nheads": 4, "nheads_k": 2, "headdim": 32, "dtype": "float32"},
}


@dataclass(frozen=True, slots=True)
class Asked:
    """Functions and sizes, as the user gave them."""

    names: tuple[str, ...]
    layouts: tuple[str, ...]
    routes: tuple[str, ...]
    batch: int
    seqlen: int | None
    cu_seqlens: str | None
    nheads: int | None
    nheads_k: int | None
    headdim: int | None
    dtype: str | None
    causal: bool
    heads_k_stride: int | None
    kernels: tuple[str, ...]
    versus: str  # kernel that the others are compared with; "" if there are no others


@dataclass(frozen=True, slots=True)
class Chosen:
    """What is to be timed.

    Attributes:
        targets: that can be tried.
        impossible: those that their kernel cannot do.
        versus: kernel that the others are compared with; "" if there are no others.
        baselines: the targets with it, by the names of those that are compared with them.
    """

    targets: tuple[Target, ...]
    impossible: tuple[Finding, ...]
    versus: str
    baselines: Mapping[str, str]


def choose_targets(asked: Asked, way: Way) -> Chosen:
    """Functions at sizes.

    Raises:
        ValueError: what there is not, or makes no sense.
        NotImplementedError: a kernel can do nothing of it.
    """
    for kernel in asked.kernels:
        check_kernel(kernel)
    for layout in asked.layouts:
        get_layout(layout)
    for route in asked.routes:
        check_route(route)
    size = _size(asked, way.device)
    places = _places(asked)
    if asked.cu_seqlens is not None and not any(packed for *_, packed in places):
        raise ValueError(f"--cu-seqlens {asked.cu_seqlens}: none of the functions is for documents")
    if asked.cu_seqlens is not None and all(packed for *_, packed in places):
        check_lengths(asked.seqlen, asked.cu_seqlens)
        if asked.batch != 1:
            raise ValueError(f"--batch {asked.batch}: --cu-seqlens says how many documents")
    if asked.heads_k_stride is not None and all(route != "all_gather" for _, _, route, _ in places):
        raise ValueError(f"--heads-k-stride {asked.heads_k_stride}: no function gathers keys")
    found: dict[str, Finding] = {}  # by name: two kernels may be the same one
    reasons: dict[str, list[str | None]] = {}  # None: it can
    baselines: dict[str, str] = {}
    for named, layout, route, packed in places:
        tried = [(named, kernel) for kernel in _kernels(named, asked)]
        if asked.versus:
            tried.insert(0, (Named(named.family, named.form), asked.versus))
        own = [_find(e, layout, route, packed, kernel, size, way) for e, kernel in tried]
        for (each, kernel), finding in zip(tried, own, strict=True):
            who = each.name if each.prefix else f"--kernel {kernel}"
            reasons.setdefault(who, []).append(finding.failed)
            found.setdefault(finding.target.name, finding)
            if asked.versus:
                baselines[finding.target.name] = own[0].target.name
    refused = {
        who: [why for why in all_of if why] for who, all_of in reasons.items() if None not in all_of
    }
    refuse_kernels(refused, way.device)
    return Chosen(
        tuple(each.target for each in found.values() if each.failed is None),
        tuple(each for each in found.values() if each.failed is not None),
        asked.versus,
        baselines,
    )


def _kernels(named: Named, asked: Asked) -> tuple[str, ...]:
    """Those that a function is to be timed with."""
    if not named.prefix:
        return asked.kernels
    if not {AUTO, named.prefix} & {*asked.kernels}:
        kernels = ", ".join(asked.kernels)
        raise ValueError(f"--kernel {kernels}: {named.name} always uses {named.prefix}")
    return (named.prefix,)


def _find(
    named: Named, layout: str, route: str, packed: bool, kernel: str, size: Size, way: Way
) -> Finding:
    """A target with the kernel that it gets, or why there is none; not timed yet."""
    target = _target(named, layout, route, packed, kernel, size, way)
    try:
        return Finding(with_kernel(target))
    except NotImplementedError as reason:
        return Finding(target, failed=str(reason))


def _places(asked: Asked) -> list[tuple[Named, str, str, bool]]:
    """Each function, its layout and route, and whether it gets packed documents."""
    choice = Choice(names=asked.names, layouts=asked.layouts, routes=asked.routes)
    spread = [each for each in chosen_functions(choice) if each.is_distributed]
    if not spread:
        raise ValueError(f"{', '.join(asked.names)}: on one device, and so not for this command")
    found = list(_points(_usual(spread) if not asked.names else spread, choice, asked))
    if not found and not asked.names:  # a layout and route that no function is named after
        found = list(_points([e for e in spread if not e.form and not e.prefix], choice, asked))
    if not found:
        layouts, routes = (" or ".join(each) or "any" for each in (asked.layouts, asked.routes))
        raise ValueError(f"no function has layout {layouts} and route {routes}")
    return found


def _usual(functions: Sequence[Named]) -> list[Named]:
    """The first form of each layout and route whose name says them."""
    return [e for e in functions if e.form and e.form == e.family.forms[0] and not e.prefix]


def _points(
    functions: Sequence[Named], choice: Choice, asked: Asked
) -> Iterator[tuple[Named, str, str, bool]]:
    for named in functions:
        for layout, route in points(named.family, choice):
            flat = layout.startswith(FLAT_PREFIX)
            anywhere = not named.form and (flat or asked.cu_seqlens is not None)
            yield named, layout, route, named.family.packed or anywhere


def _target(
    named: Named, layout: str, route: str, packed: bool, kernel: str, size: Size, way: Way
) -> Target:
    return make_target(
        named.name,
        named.form,
        named.family.signature.__name__,
        layout,
        route,
        packed=packed,
        kernel=kernel,
        takes_kernel=not named.prefix,
        size=size,
        world_size=way.world_size,
        device=way.device,
    )


def _size(asked: Asked, device: torch.device) -> Size:
    usual = _SIZES[device.type]

    def number(name: str) -> Any:
        given = getattr(asked, name)
        return usual[name] if given is None else given

    return Size(
        batch=asked.batch,
        seqlen=number("seqlen"),
        cu_seqlens=None if asked.cu_seqlens is None else _offsets(asked.cu_seqlens),
        nheads=number("nheads"),
        nheads_k=number("nheads_k"),
        headdim=number("headdim"),
        dtype=find_dtype(number("dtype")),
        causal=asked.causal,
        heads_k_stride=asked.heads_k_stride,
    )


def _offsets(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--cu-seqlens must be whole numbers and commas, not {text!r}") from None
