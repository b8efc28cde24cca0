"""What is profiled: a call on one device, or a rank of many, replayed without the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from ...kernels.base import check_kernel, choose_kernel
from ...plan.build import make_plan
from ..implementations import find_implementation
from ..inputs import call_of, problem_of
from ..measure import Inputs, make_works
from ..replays.rank import LibraryRanks, ReplayedRank
from ..replays.run import check_ranks, check_replay
from ..timing import Work
from ..workload import BACKWARD, BOTH, FLOPS, FORWARD, NONE, Placement, Workload, find_link


@dataclass(frozen=True)
class Subject:
    """What is profiled.

    Attributes:
        workload: the call; of all ranks together where there are several.
        placement: how it is spread; `world_size` is 1 for a call on one device.
        device: where it runs.
        rank: the one that is replayed.
        grad: gradients are computed as well.
    """

    workload: Workload
    placement: Placement
    device: torch.device
    rank: int = 0
    grad: bool = True

    def __str__(self) -> str:
        if self.world_size == 1:
            return f"one device × {self.kernel}"
        return f"rank {self.rank} of {self.world_size}, {self.placement}"

    @property
    def world_size(self) -> int:
        """1 for a call on one device."""
        return self.placement.world_size

    @property
    def kernel(self) -> str:
        """The one that does it."""
        return self.placement.kernel

    @property
    def share(self) -> Workload:
        """What one device computes: the call, or a rank's own tokens."""
        return self.workload.share(self.world_size)

    @property
    def passes(self) -> tuple[str, ...]:
        """Those that are timed; the last one is profiled."""
        return (FORWARD, BOTH) if self.grad else (FORWARD,)

    def one_rank(self, linked: bool, keep_buffers: bool = True) -> ReplayedRank:
        """The rank, with its link or with communication removed; see `LibraryRanks.rank`."""
        link = self.placement.link if linked else None
        return self._ranks.rank(self.rank, link, keep_buffers)

    @property
    def _ranks(self) -> LibraryRanks:
        return LibraryRanks(self.workload, self.placement, self.device)

    def works(self, linked: bool = True, keep_buffers: bool = True) -> dict[str, Work]:
        """What a user calls, for each of `passes`; for memory, a rank must not keep buffers."""
        if self.world_size == 1:
            implementation = find_implementation(self.kernel, self.workload, self.device)
            attention = implementation.make(self.workload, self.device)
            found = make_works(attention, Inputs(self.workload, self.device, self.grad))
        else:
            rank = self.one_rank(linked, keep_buffers)
            found = {FORWARD: rank.forward, BOTH: rank.both}
        return {name: found[name] for name in self.passes}

    # What it comes to.

    @cached_property
    def _rank_work(self) -> tuple[int, dict[str, int]]:
        """FLOPs of a rank's forward pass, and bytes that it receives in each of the passes."""
        ranks = self._ranks
        _, pairs, (forward, backward) = ranks.describe(self.rank)
        both = forward.received + backward.received
        received = {FORWARD: forward.received, BACKWARD: backward.received, BOTH: both}
        return pairs * ranks.flops_per_pair, received

    def flops(self, passes: str) -> float:
        """Of one of the passes."""
        if self.world_size == 1:
            return self.workload.flops(passes)
        return FLOPS[passes] * self._rank_work[0]

    def least_bytes(self, passes: str) -> int:
        """Inputs read once and results written once; of a rank also what it receives, once."""
        received = 0 if self.world_size == 1 else self._rank_work[1][passes]
        return self.share.bytes(passes) + received

    # As plain values, for files and for another process.

    def place(self) -> dict[str, Any]:
        """The placement of the rank, as in rows of results."""
        return {**self.placement.to_dict(), "rank": self.rank, "link": self.placement.link_name}

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        more = {"kernel": self.kernel, "grad": self.grad, "device": str(self.device)}
        return {"workload": self.workload.to_dict(), **self.place(), **more}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Subject:
        """What `to_dict` wrote."""
        known = {name: values[name] for name in Placement.__dataclass_fields__ if name in values}
        placement = Placement(**{**known, "link": find_link(values["link"])})
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
) -> Subject:
    """The subject that a user describes, checked before anything runs.

    Args:
        workload: the call; of several ranks, one rank's own tokens.
        device, kernel, grad, world_size: as in `Subject`.
        rank: by default the one with most pairs to compute.
        layout, route, link: by default zigzag, ring, and none: communication is removed.

    Raises:
        ValueError: it makes no sense.
        NotImplementedError: the kernel cannot do it; with every reason.
    """
    check_kernel(kernel)
    found = find_link(link or NONE)
    placement = Placement(world_size, layout or "zigzag", route or "ring", kernel, link=found)
    if world_size == 1:
        for name, value in (("rank", rank), ("layout", layout), ("route", route), ("link", link)):
            if value is not None:
                raise ValueError(f"{name} {value!r} needs a world_size of 2 or more")
        chosen = choose_kernel(kernel, call_of(workload, device)).name
        return Subject(workload, replace(placement, kernel=chosen), device, 0, grad)
    workload = replace(workload, seqlen=workload.seqlen * world_size)
    placement = check_replay(workload, placement, device)
    if rank is None:
        problem = problem_of(workload, placement)
        pairs = [make_plan(placement.route, problem, each).pairs for each in range(world_size)]
        rank = max(range(world_size), key=lambda each: (pairs[each], each))  # the last merges most
    (rank,) = check_ranks([rank], world_size)
    return Subject(workload, placement, device, rank, grad)
