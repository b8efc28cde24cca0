"""The GPUs that there are rates for: fitted from points, with the source of every number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from .fit import rate_of
from .machine import Gpu, RateKey
from .points import Point, read_points
from .rates import Rate

# Fitted constants, with those of `rates` and `meter`: no source states them. They are the same for
# all GPUs and kernels, and are fitted on half of the rows of the stored replays.
MOVED = 0.85  # share of the memory's nominal bandwidth that copies, sums and merges reach
LAUNCH = 4e-6  # seconds that a small launch takes, whatever its size
POST = 20e-6  # seconds that a post keeps the compute stream from its work
INTERFERENCE = 0.0  # share of its speed that compute loses while messages are under way
# Kernels whose longest programs begin first.
_ORDERED = ("triton", "cute", "fa3", "fa4", "ffa")


@dataclass(frozen=True, slots=True)
class _Card:
    """What the maker says of a GPU, and whose kernels stand for those that nobody measured."""

    sms: int
    bandwidth: float  # bytes in a second of its memory, nominal
    like: str = ""


_CARDS: Mapping[str, _Card] = {
    "H200": _Card(132, 4.8e12),
    "H100": _Card(132, 3.35e12, "H200"),
    "H800": _Card(132, 3.35e12, "H200"),
    "A100": _Card(108, 2.039e12, "H200"),
    "A800": _Card(108, 2.039e12, "A100"),
}
# Kernels that run on Hopper alone: nothing else can be measured with them, or estimated.
_HOPPER = ("triton", "cute", "fa3", "fa4", "cudnn", "ffa")
_NOMINAL = "the maker's data sheet"


def gpu_names() -> tuple[str, ...]:
    """All that there are rates for."""
    return tuple(_CARDS)


@cache
def find_gpu(name: str) -> Gpu:
    """A GPU by its name, in any case; ValueError that lists the choices."""
    known = {each.lower(): each for each in _CARDS}
    found = known.get(str(name).lower().removeprefix("nvidia "))
    if found is None:
        raise ValueError(f"unknown GPU {name!r}; choose one of {', '.join(_CARDS)}")
    card = _CARDS[found]
    rates = _rates(found, card)
    sources = {"SMs, memory bandwidth": _NOMINAL}
    sources |= {f"{kernel} {way} {dim}": rate.source for (kernel, way, dim), rate in rates.items()}
    estimated = frozenset(key for key, rate in rates.items() if rate.estimated)
    return Gpu(found, card.sms, card.bandwidth * MOVED, LAUNCH, POST, rates, sources, estimated)


def _rates(name: str, card: _Card) -> dict[RateKey, Rate]:
    """Fitted where there are points; else those of a GPU that is like it, as an estimate."""
    bandwidth = card.bandwidth * MOVED
    points: dict[RateKey, list[Point]] = {}
    for point in read_points():
        if point.gpu == name:
            key = (point.kernel, point.passes, max(point.headdim, point.headdim_v))
            points.setdefault(key, []).append(point)
    others: Mapping[RateKey, Rate] = find_gpu(card.like).rates if card.like else {}
    found: dict[RateKey, Rate] = {}
    for key in sorted(points, key=lambda key: -len(points[key])):  # the best known first
        kernel, way, _ = key
        like = next((r for (k, w, _), r in found.items() if (k, w) == (kernel, way)), None)
        like = like or others.get(key)
        ordered = kernel in _ORDERED
        rate = rate_of(points[key], card.sms, bandwidth, LAUNCH, ordered, like)
        if rate is not None:
            found[key] = rate
    for key, rate in others.items():
        kernel = key[0]
        if key not in found and (kernel not in _HOPPER or name.startswith("H")):
            found[key] = rate.estimate(f"estimate: that of {card.like}, {rate.source}")
    return found
