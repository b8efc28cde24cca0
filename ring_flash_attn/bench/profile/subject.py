"""What is profiled: a call on one device, or a rank of many, replayed without the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ...kernels.base import check_kernel
from ..implementations import find_implementation
from ..links import NONE, find_link, link_from_dict
from ..measure import Inputs, make_works
from ..replays.rank import LibraryRanks
from ..replays.run import busiest_rank, check_ranks, check_replay
from ..timing import Work
from ..workload import BOTH, FORWARD, Placement, Workload, resolve


@dataclass(frozen=True)
class Subject:
    """What is profiled."""

    workload: Workload  # of all ranks together where there are several
    placement: Placement  # with a world_size of 1 for a call on one device
    device: torch.device
    rank: int = 0  # the one that is replayed
    grad: bool = True  # gradients are computed as well

    def __str__(self) -> str:
        if not self.replayed:
            return f"one device × {self.placement.kernel}"
        return f"rank {self.rank} of {self.placement.world_size}, {self.placement}"

    @property
    def replayed(self) -> bool:
        """A rank of many rather than a call on one device."""
        return self.placement.world_size > 1

    @property
    def share(self) -> Workload:
        """What one device computes: the call, or a rank's own tokens."""
        return self.workload.share(self.placement.world_size)

    @property
    def passes(self) -> tuple[str, ...]:
        """Those that are timed; the last one is profiled."""
        return (FORWARD, BOTH) if self.grad else (FORWARD,)

    def work(self) -> Work:
        """What a user calls: the last of the passes."""
        call = self.workload, self.device
        if self.replayed:
            ranks = LibraryRanks(self.workload, self.placement, self.device)
            rank = ranks.rank(self.rank, self.placement.link)
            return rank.both if self.grad else rank.forward
        attention = find_implementation(self.placement.kernel, *call, self.grad).make(*call)
        return make_works(attention, Inputs(*call, self.grad))[self.passes[-1]]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for files and for another process."""
        link = self.placement.link
        more = {"link": link and asdict(link), "kernel": self.placement.kernel}
        where = {"rank": self.rank, "grad": self.grad, "device": str(self.device)}
        return {"workload": self.workload.to_dict(), **self.placement.to_dict(), **more, **where}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Subject:
        known = {name: values[name] for name in Placement.__dataclass_fields__ if name in values}
        placement = Placement(**{**known, "link": link_from_dict(values["link"])})
        workload, device = Workload.from_dict(values["workload"]), torch.device(values["device"])
        return cls(workload, placement, device, values["rank"], values["grad"])


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
    **numbers: Any,
) -> Subject:
    """The subject that a user describes, checked before anything runs.

    Of several ranks, the workload is one rank's own tokens. By default the rank is the one with
    most pairs to compute, the layout zigzag, the route ring, and communication is removed.
    `numbers` are those of `find_link`.
    """
    check_kernel(kernel)
    found = find_link(link or NONE, **numbers)
    placement = Placement(world_size, layout or "zigzag", route or "ring", kernel, link=found)
    if world_size == 1:
        spread = {"rank": rank, "layout": layout, "route": route, "link": link}
        spread |= {"link_gbps" if name == "gbps" else name: numbers[name] for name in numbers}
        for name, value in spread.items():
            if value is not None:
                raise ValueError(f"{name} {value!r} needs a world_size of 2 or more")
        return Subject(workload, resolve(workload, placement, device, grad), device, 0, grad)
    workload = replace(workload, seqlen=workload.seqlen * world_size)
    placement = check_replay(workload, placement, device)
    if rank is None:
        rank = busiest_rank(workload, placement)
    (rank,) = check_ranks([rank], world_size)
    return Subject(workload, placement, device, rank, grad)
