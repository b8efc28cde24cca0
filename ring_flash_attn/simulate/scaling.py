"""Predicted time per token, from 8 to 1,024 ranks, of schemes and of what the planner takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from itertools import accumulate
from typing import Any

from ..bench.documents import pack_of
from ..bench.links import TOPOLOGIES
from ..bench.workload import Placement, Workload
from .forecast import Forecast
from .gpus import INTERFERENCE, find_gpu
from .machine import Machine
from .planner import plan_workload, price_placement

GPU, KERNEL = "H200", "triton"
FABRICS = ("h200-ib400", "h200-ib200")
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
BEST = "rfa plan"
_TOKENS, _NODE = 8192, 8
_LARGE = 128  # ranks: from here on zigzag cuts packs into more crumbs than can be priced
_ROUTES = ("ring", "mesh", "double_ring", "all_to_all")


def _sequence(tokens: int, nheads: int, nheads_k: int, causal: bool = True) -> Workload:
    return Workload(1, tokens, nheads, nheads_k, 128, causal)


def _packed(tokens: int, **pack: Any) -> Workload:
    return Workload(1, tokens, 64, 8, 128, True, **pack)


# By name: the workload of so many ranks.
WORKLOADS = {
    "one document, 64/8 heads": lambda ranks: _sequence(_TOKENS * ranks, 64, 8),
    "1 M tokens in all, 32/8": lambda ranks: _sequence(1 << 20, 32, 8),
    "full attention, 24/24": lambda ranks: _sequence(_TOKENS * ranks, 24, 24, causal=False),
    "packs (magi), 64/8": lambda ranks: _packed(
        _TOKENS * ranks, **pack_of(_TOKENS * ranks, None, "magi", 42)
    ),
    "documents of 32 k, 64/8": lambda ranks: _packed(
        _TOKENS * ranks,
        cu_seqlens=tuple(accumulate([1 << 15] * (_TOKENS * ranks >> 15), initial=0)),
    ),
}


@dataclass(frozen=True, slots=True)
class SchemePoint:
    """A scheme at one size: µs of forward and backward a token of a rank."""

    workload: str
    fabric: str
    ranks: int
    scheme: str
    placement: str
    per_token: float

    def cells(self) -> list[str]:
        """As in the file."""
        return [
            f"{value:.4g}" if isinstance(value, float) else str(value) for value in astuple(self)
        ]

    @classmethod
    def from_cells(cls, cells: list[str]) -> SchemePoint:
        """What `cells` wrote."""
        workload, fabric, ranks, scheme, placement, per_token = cells
        return cls(workload, fabric, int(ranks), scheme, placement, float(per_token))


COLUMNS = [each.name for each in fields(SchemePoint)]


def schemes(workload: Workload, ranks: int) -> Iterator[tuple[str, Placement]]:
    """Those of the field, as routes of this library: by their names."""
    own = "flat_contiguous" if workload.packed else "zigzag"
    if not workload.packed or ranks < _LARGE:
        yield "zigzag ring", Placement(ranks, "zigzag", "ring", KERNEL)
        yield "double ring", Placement(ranks, "zigzag", "double_ring", KERNEL, ranks_per_node=_NODE)
    yield "llama3 all-gather", Placement(ranks, "flat_contiguous", "all_gather", KERNEL)
    yield "Ulysses", Placement(ranks, own, "all_to_all", KERNEL)
    yield "USP", Placement(ranks, own, "mesh", KERNEL, ranks_per_node=_NODE)


def price(name: str, fabric: str, ranks: int) -> list[SchemePoint]:
    """What the planner takes, of any layout for a pack, else of zigzag; and the schemes."""
    machine = Machine(find_gpu(GPU), TOPOLOGIES[fabric], INTERFERENCE)
    workload = WORKLOADS[name](ranks)
    layouts = () if workload.packed else ("zigzag",)
    plan = plan_workload(workload, ranks, machine, kernel=KERNEL, layouts=layouts, routes=_ROUTES)
    found: list[tuple[str, Forecast]] = [(BEST, plan.best)]
    for scheme, placement in schemes(workload, ranks):
        found.append((scheme, price_placement(workload, placement, machine)))
    return [
        SchemePoint(
            name,
            fabric,
            ranks,
            scheme,
            " ".join(
                [str(each.placement), *(f"{k}={v}" for k, v in each.placement.parameters.items())]
            ),
            each.seconds * 1e6 * ranks / workload.seqlen,
        )
        for scheme, each in found
    ]
