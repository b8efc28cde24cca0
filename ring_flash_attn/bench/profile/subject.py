"""What is profiled: a call on one device, or a rank of many, replayed without the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..contenders import OneRank, Stage
from ..holdings import walk_through
from ..implementations import find_implementation
from ..link import NONE, find_link
from ..results import BACKWARD, BOTH, FORWARD
from ..scenario import Scenario, make_scenario
from ..timing import Work
from ..workload import FLOPS, Workload


@dataclass(frozen=True)
class Subject:
    """What is profiled.

    Attributes:
        workload: the call; of a rank's own tokens where there are several.
        device: where it runs.
        kernel: the one that does it.
        grad: gradients are computed as well.
        world_size: 1 for a call on one device.
        rank, layout, route, link: of a replayed rank.
    """

    workload: Workload
    device: torch.device
    kernel: str
    grad: bool = True
    world_size: int = 1
    rank: int = 0
    layout: str = "zigzag"
    route: str = "ring"
    link: str = NONE

    def __str__(self) -> str:
        if self.world_size == 1:
            return f"one device × {self.kernel}"
        return (
            f"rank {self.rank} of {self.world_size}, {self.layout} × {self.route} × {self.kernel}"
        )

    @property
    def passes(self) -> tuple[str, ...]:
        """Those that are timed; the last one is profiled."""
        return (FORWARD, BOTH) if self.grad else (FORWARD,)

    @property
    def placement(self) -> dict[str, object]:
        """As in rows of results."""
        if self.world_size == 1:
            return {}
        names = ("world_size", "rank", "layout", "route", "link")
        return {name: getattr(self, name) for name in names}

    @cached_property
    def scenario(self) -> Scenario:
        """Of a rank of many."""
        return scenario_of(self.workload, self.device, self.kernel, self.world_size, **self._where)

    @property
    def _where(self) -> dict[str, Any]:
        return {"ranks": [self.rank], "layout": self.layout, "route": self.route}

    def one_rank(self, linked: bool, keeps_buffers: bool = True) -> OneRank:
        """The rank, with its link or with communication removed; see `Stage.rank`."""
        link = find_link(self.link) if linked else None
        return Stage(self.scenario).rank(self.rank, link, keeps_buffers)

    def works(self, linked: bool = True, keeps_buffers: bool = True) -> dict[str, Work]:
        """What a user calls, for each of `passes`; for memory, a rank must not keep buffers."""
        if self.world_size == 1:
            found = self._on_one_device()
        else:
            rank = self.one_rank(linked, keeps_buffers)
            found = {FORWARD: rank.forward, BOTH: rank.both}
        return {name: found[name] for name in self.passes}

    def _on_one_device(self) -> dict[str, Work]:
        (q, k, v), dout = self.workload.tensors(self.device)
        leaves = [x.requires_grad_(self.grad) for x in (q, k, v)]
        attention = find_implementation(self.kernel, self.workload, self.device).make(
            self.workload, self.device
        )

        def forward() -> object:
            with torch.no_grad():
                return attention(q, k, v)

        def both() -> object:
            out = attention(q, k, v)
            return out, torch.autograd.grad(out, leaves, dout)

        return {FORWARD: forward, BOTH: both}

    # What it comes to.

    def flops(self, passes: str) -> float:
        """Of one of the passes."""
        if self.world_size == 1:
            return self.workload.flops(passes)
        pairs = self.scenario.pairs(self._alone.prepared.ranks[0].forward.plan)
        return FLOPS[passes] * 4 * self.workload.batch * self.workload.headdim * pairs

    def least_bytes(self, passes: str) -> int:
        """Inputs read once and results written once; of a rank also what it receives, once."""
        forward, backward = self._received
        received = {FORWARD: forward, BACKWARD: backward, BOTH: forward + backward}
        return self.workload.bytes(passes) + received[passes]

    @cached_property
    def _alone(self) -> OneRank:
        return self.one_rank(linked=False)

    @cached_property
    def _received(self) -> tuple[int, int]:
        """Bytes, forward and backward."""
        if self.world_size == 1:
            return 0, 0
        forward, backward = walk_through(self._alone.prepared, self._alone.shard)
        return forward.received, backward.received

    # For another process.

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        names = ("kernel", "grad", "world_size", "rank", "layout", "route", "link")
        values = {name: getattr(self, name) for name in names}
        return {"workload": self.workload.to_dict(), "device": str(self.device), **values}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Subject:
        """What `to_dict` wrote."""
        workload = Workload.from_dict(values["workload"])
        return cls(**{**values, "workload": workload, "device": torch.device(values["device"])})


def scenario_of(
    workload: Workload,
    device: torch.device,
    kernel: str,
    world_size: int,
    *,
    ranks: list[int] | None,
    layout: str,
    route: str,
) -> Scenario:
    """One that replays some ranks of this workload."""
    return make_scenario(
        world_size=world_size,
        ranks=ranks,
        layout=layout,
        route=route,
        kernel=kernel,
        seqlen=workload.seqlen,
        cu_seqlens=None,
        batch=workload.batch,
        nheads=workload.nheads,
        nheads_k=workload.nheads_k,
        headdim=workload.headdim,
        dtype=workload.torch_dtype,
        causal=workload.causal,
        heads_k_stride=None,
        sources_per_launch=None,
        device=device,
    )
