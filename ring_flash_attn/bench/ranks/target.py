"""What is timed: public functions, each with a workload and a placement, and how to choose them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ...api.families import Function
from ...kernels.base import AUTO
from ...plan.build import BY_HEADS
from ...plan.layout import FLAT_PREFIX
from ..documents import Drawn
from ..functions import find_functions, own_arguments
from ..workload import Placement, Workload, refuse_kernels, resolve

_Point = tuple[Function, str, str, bool]  # layout, route, whether documents are packed


@dataclass(frozen=True)
class Target:
    """A public function, what it computes over all ranks, and how that is spread."""

    function: Function
    workload: Workload
    placement: Placement
    baseline: str = ""  # name of the target that it is compared with
    refused: str = ""  # why it cannot run

    @property
    def name(self) -> str:
        point = str(self.placement) if not self.function.form else self.placement.kernel
        return f"{self.function.name} ({point})"

    @property
    def share(self) -> Workload:
        """What one device computes to compare with: a rank's own tokens."""
        return self.workload.share(self.placement.world_size)

    @property
    def single(self) -> str:
        """The function that computes it on one device."""
        form = (self.function.form or "func").removesuffix("_v2")
        return f"flash_attn{'_varlen' if self.workload.packed else ''}_{form}"

    @property
    def base(self) -> str:
        """The same for targets that are compared with the same run on one device."""
        heads = f"{self.workload.nheads_k} KV heads"
        return f"{self.single}, {self.placement.kernel}, {self.share.lengths}, {heads}"

    def flops(self, passes: str) -> float:
        """Of a rank, on average."""
        return self.workload.flops(passes) / self.placement.world_size


def choose_targets(
    names: Sequence[str],
    workload: Workload,
    placement: Placement,
    device: torch.device,
    *,
    cu_seqlens: tuple[int, ...] | None = None,
    drawn: Drawn | None = None,
    layouts: Sequence[str] = (),
    routes: Sequence[str] = (),
    kernels: Sequence[str] = (AUTO,),
    versus: str = "",
    grad: bool = True,
) -> list[Target]:
    """Functions, each with its workload, and its placement with the kernel that it gets.

    By default one for each layout and route; those that cannot run come last. The workload is of
    functions for batches; packed ones get as many documents, or `cu_seqlens`, which may have been
    `drawn`. The others are compared with the kernel `versus`, if there is one. `grad`: kernels
    have to do the backward pass, too.

    Raises:
        ValueError: an unknown name, an option without effect, or documents that no function takes.
        NotImplementedError: a kernel can do nothing of it.
    """
    points = _find_points(names, layouts, routes, cu_seqlens is not None)
    if cu_seqlens is not None:
        option, text = "--cu-seqlens", ",".join(map(str, cu_seqlens))
        if drawn is not None:
            option, text = "--documents", drawn.documents
        if not any(packed for *_, packed in points):
            raise ValueError(f"{option} {text}: none of the functions is for documents")
        if workload.batch != 1 and all(packed for *_, packed in points):
            raise ValueError(f"--batch {workload.batch}: {option} says how many documents")
    stride = placement.heads_k_stride
    if stride is not None and not any(route in BY_HEADS for _, _, route, _ in points):
        raise ValueError(f"--heads-k-stride {stride}: no function goes by head groups")
    offsets = cu_seqlens or tuple(workload.seqlen * i for i in range(workload.batch + 1))
    documents = replace(workload, batch=1, cu_seqlens=offsets, drawn=drawn)
    found: dict[str, Target] = {}  # by name: two kernels may be the same one
    reasons: dict[str, list[str]] = {}  # by kernel; "": it can
    for function, layout, route, packed in points:
        own = documents if packed else workload
        if function.form.startswith("qkv"):
            own = replace(own, nheads_k=own.nheads)
        heads = stride or own.nheads_k if route in BY_HEADS else None
        point = replace(placement, layout=layout, route=route, heads_k_stride=heads)
        tried = [(function, kernel) for kernel in _kernels_of(function, kernels)]
        if versus:
            tried.insert(0, (replace(function, prefix=""), versus))
        baseline = ""
        for each, kernel in tried:
            target = Target(each, own, replace(point, kernel=kernel))
            try:
                target = replace(target, placement=resolve(own, target.placement, device, grad))
            except NotImplementedError as error:
                target = replace(target, refused=str(error))
            who = each.name if each.prefix else f"--kernel {kernel}"
            reasons.setdefault(who, []).append(target.refused)
            if versus:
                baseline = baseline or target.name
            refused = target.refused
            try:
                own_arguments(each, own, target.placement, 0, torch.device("cpu"))
            except ValueError as error:  # documents that the function cannot take
                refused = refused or str(error)
            found.setdefault(target.name, replace(target, baseline=baseline, refused=refused))
    refuse_kernels({who: why for who, why in reasons.items() if all(why)}, device)
    if all(target.refused for target in found.values()):
        raise ValueError("\n".join(f"{name}: {each.refused}" for name, each in found.items()))
    return sorted(found.values(), key=lambda target: bool(target.refused))


def _find_points(
    names: Sequence[str], layouts: Sequence[str], routes: Sequence[str], documents: bool
) -> list[_Point]:
    functions = [each for each in find_functions(names) if each.is_distributed]
    if not functions:
        raise ValueError(f"{', '.join(names)}: on one device, and so not for this command")

    def points(of: Sequence[Function]) -> list[_Point]:
        return [
            (each, layout, route, each.family.packed or (not each.form and packs))
            for each in of
            for layout, route in each.points(layouts, routes)
            for packs in (documents or layout.startswith(FLAT_PREFIX),)
        ]

    if names:
        found = points(functions)
    else:  # the first form of each layout and route; any other by the function that takes both
        first = [each for each in functions if each.form and each.form == each.family.forms[0]]
        found = points(first) or points([each for each in functions if not each.form])
    if not found:
        chosen = (" or ".join(each) or "any" for each in (layouts, routes))
        raise ValueError("no function has layout {} and route {}".format(*chosen))
    return found


def _kernels_of(function: Function, kernels: Sequence[str]) -> tuple[str, ...]:
    if not function.prefix:
        return tuple(kernels)
    if not {AUTO, function.prefix} & {*kernels}:
        message = f"{function.name} always uses {function.prefix}"
        raise ValueError(f"--kernel {', '.join(kernels)}: {message}")
    return (function.prefix,)
