"""GPUs of the published tables: the simulator's, with kernels at the speed that is published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from ..gpus import MOVED
from ..gpus import find_gpu as known
from ..machine import Gpu
from ..rates import Rate, causal, full, seconds
from .constants import Constants
from .launches import Launches
from .rows import PACKS, PublishedRow, read_rows


@dataclass(frozen=True, slots=True)
class _PublishedCard:
    sms: int
    memory: float  # bytes in a second, nominal
    nvlink: float  # each way, nominal; 0: none


# "A100": ring-flash-attn does not say which one; the memory of that with 40 GB fits its rows.
_CARDS = {
    "A100": _PublishedCard(108, 1555e9, 300e9),
    "A100-80GB": _PublishedCard(108, 2039e9, 300e9),
    "A800": _PublishedCard(108, 2039e9, 200e9),
    "H100": _PublishedCard(132, 3350e9, 450e9),
    "H800": _PublishedCard(132, 3350e9, 200e9),
    "L20": _PublishedCard(92, 864e9, 0.0),
}


class _Call(NamedTuple):
    """Of a profile: seconds of a call, and bytes of messages beside it, which make it slower."""

    seconds: float
    beside: float


# BurstEngine's profiles of 512 k tokens (plots/analysis), by scheme: a forward call of 8,192
# queries and 16,384 keys, a backward one of 16,384 and 8,192; 40 heads. Beside them: k and v;
# backward q, dout and dq, or k and v and their gradients, a quarter of these in single precision.
_SHARD = 16384 * 40 * 128 * 2  # bytes of a tensor
_PROFILES = {
    "burst": {
        "forward": _Call(13.73e-3, 2 * _SHARD),
        "backward": _Call(37.11e-3, 3 * _SHARD),
    },
    "double ring": {
        "forward": _Call(14.51e-3, 2 * _SHARD),
        "backward": _Call(37.45e-3, 4.5 * _SHARD),
    },
}
_SOURCE = "shape of the rates on an H100, speed of the same source's rows of one GPU"


def nvlink(name: str) -> float:
    """Bytes in a second, each way."""
    return _CARDS[name].nvlink


def find_gpu(
    name: str, constants: Constants, mask: str = "causal", scheme: str = "double ring"
) -> Gpu:
    """With FlashAttention at the speed that is published of it on this GPU.

    Raises:
        ValueError: nothing is published of it.
    """
    if name not in _CARDS:
        raise ValueError(f"unknown GPU {name!r}; there are rows of {', '.join(_CARDS)}")
    if name == "H100":
        return _make(name, 1.0, 1.0)
    if name == "L20":
        return _make(name, constants.l20_speed, constants.l20_speed)
    if name == "A800":
        return _make(name, *_profiled_speeds(constants, scheme))
    return _make(name, *_speeds(name, "packed" if mask == "packed" else "causal"))


@cache
def _speeds(name: str, mask: str) -> tuple[float, float]:
    forward = _solve(lambda speed: _alone(name, mask, "forward", speed, 1.0))
    return forward, _solve(lambda speed: _alone(name, mask, "both", forward, speed))


@cache
def _profiled_speeds(constants: Constants, scheme: str) -> tuple[float, float]:
    lost = constants.interference / constants.nvlink
    calls = _PROFILES["burst" if scheme.startswith("burst") else "double ring"]
    forward, backward = (_solve(_Profiled(lost, way, call)) for way, call in calls.items())
    return forward, backward


@cache
def _make(name: str, forward: float, backward: float) -> Gpu:
    """With an SM's FlashAttention so many times as fast as an H100's, at the clock of long work."""
    card, like = _CARDS[name], known("H100")
    rates = {}
    for (kernel, passes, dim), rate in like.rates.items():
        if dim == 128 and (kernel == "fa2" or name == "H100"):
            speed = forward if passes == "forward" else backward
            rates[kernel, passes, dim] = _sustained(rate).faster(speed, _SOURCE)
    return replace(like, name=name, sms=card.sms, bandwidth=card.memory * MOVED, rates=rates)


def _sustained(rate: Rate) -> Rate:
    return replace(rate, block=rate.block + rate.slower, slower=0.0)


def _solve(ratio: Callable[[float], float], low: float = 0.1, high: float = 10.0) -> float:
    """The speed at which predicted over published time is 1."""
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if ratio(middle) > 1 else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True, slots=True)
class _Profiled:
    lost: float  # seconds for each byte of a message
    passes: str
    call: _Call

    def __call__(self, speed: float) -> float:
        """Predicted over profiled time; backward programs own keys, 8,192 of them."""
        gpu = _make("A800", speed, speed)
        rate, shape = gpu.rate("fa2", self.passes, 128), full(8192, 16384)
        beside = self.lost * self.call.beside
        return (seconds(rate, [[shape]], 40, gpu.sms) + beside) / self.call.seconds


def _alone(name: str, mask: str, passes: str, forward: float, backward: float) -> float:
    row = next(
        row
        for row in read_rows("ring_flash_attention")
        if (row.scheme, row.passes, row.mask) == ("one GPU", passes, mask)
        and row.machine.startswith(name.split("-")[0])
    )
    return alone(_make(name, forward, backward), row) / row.seconds


def alone(gpu: Gpu, row: PublishedRow) -> float:
    """Seconds of one GPU's own attention."""
    launches = Launches(gpu, "fa2", row.nheads, row.nheads_k, row.headdim)
    packs = PACKS if row.mask == "packed" else ((row.tokens,),)
    total = 0.0
    for lengths in packs:
        bands = [causal(length, length) for length in lengths]
        total += launches.forward(bands)
        if row.passes == "both":
            total += launches.backward(bands)
    return total / len(packs)
