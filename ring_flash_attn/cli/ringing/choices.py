"""What `rfa ring` is asked for: functions at sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...bench.rings import Finding, Size, Target, make_target, with_kernel
from ...bench.workload import find_dtype
from ...kernels.base import AUTO, check_kernel
from ...layout import FLAT_PREFIX, get_layout
from ...plan import check_route
from ..groups import check_lengths
from ..verifying.cases import Choice, Named, chosen_functions, points
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
    kernel: str


@dataclass(frozen=True, slots=True)
class Chosen:
    """Targets that can be tried, and those that no kernel can do."""

    targets: tuple[Target, ...]
    impossible: tuple[Finding, ...]


def choose_targets(asked: Asked, way: Way) -> Chosen:
    """Functions at sizes.

    Raises:
        ValueError: what there is not, or makes no sense.
        NotImplementedError: no kernel can do any of it.
    """
    check_kernel(asked.kernel)
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
    targets, impossible = [], []
    for named, layout, route, packed in places:
        target = _target(named, layout, route, packed, asked.kernel, size, way)
        try:
            targets.append(with_kernel(target))
        except NotImplementedError as reason:
            impossible.append(Finding(target, failed=str(reason)))
    if not targets:
        raise NotImplementedError(impossible[0].failed)
    return Chosen(tuple(targets), tuple(impossible))


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
    if named.prefix and kernel not in (AUTO, named.prefix):
        raise ValueError(f"--kernel {kernel}: {named.name} always uses {named.prefix}")
    return make_target(
        named.name,
        named.form,
        named.family.signature.__name__,
        layout,
        route,
        packed=packed,
        kernel=named.prefix or kernel,
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
