"""Distributed functions on real ranks, or on one device by replay: timed beside one device."""

from .measure import Settings, measure_rings
from .replays import replay_rings
from .rows import ring_rows
from .target import Finding, Size, Target, Timed, make_target, with_kernel

__all__ = [
    "Finding",
    "Settings",
    "Size",
    "Target",
    "Timed",
    "make_target",
    "measure_rings",
    "replay_rings",
    "ring_rows",
    "with_kernel",
]
