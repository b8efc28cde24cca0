"""From what a user asks for to what is profiled, checked before anything runs."""

from __future__ import annotations

import torch

from ...kernels.base import check_kernel, choose_kernel
from ..contenders import with_chosen_kernel
from ..inputs import call_of
from ..link import NONE, find_link
from ..pace import check_link
from ..workload import Workload
from .subject import Subject, scenario_of


def make_subject(
    workload: Workload,
    device: torch.device,
    kernel: str,
    *,
    grad: bool = True,
    world_size: int = 1,
    rank: int | None = None,
    layout: str | None = None,
    route: str | None = None,
    link: str | None = None,
) -> Subject:
    """The subject that a user describes.

    Args:
        workload, device, kernel, grad, world_size: as in `Subject`.
        rank: by default the one with most pairs to compute.
        layout, route, link: by default zigzag, ring, and none: communication is removed.

    Raises:
        ValueError: it makes no sense.
        NotImplementedError: the kernel cannot do it; with every reason.
    """
    check_kernel(kernel)
    if world_size < 1:
        raise ValueError(f"world_size must be positive, not {world_size}")
    if world_size == 1:
        given = {"rank": rank, "layout": layout, "route": route, "link": link}
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name} {value!r} needs a world_size of 2 or more")
        chosen = choose_kernel(kernel, call_of(workload, device)).name
        return Subject(workload, device, chosen, grad)
    if workload.window != (-1, -1):
        raise ValueError(f"window {workload.window}: replayed ranks have no windows")
    where = {"layout": layout or "zigzag", "route": route or "ring"}
    check_link(find_link(link or NONE), device)
    ranks = None if rank is None else [rank]
    scenario = scenario_of(workload, device, kernel, world_size, ranks=ranks, **where)
    scenario = with_chosen_kernel(scenario)
    busiest = scenario.busiest_rank if rank is None else rank
    return Subject(
        workload, device, scenario.kernel, grad, world_size, busiest, **where, link=link or NONE
    )
