"""Measuring: one device, ranks, and `replay`: what a rank of many GPUs costs, found on one."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .links import LINKS, Link, Topology, find_link

if TYPE_CHECKING:
    from .replays.results import Replay
    from .replays.run import replay

__all__ = ["LINKS", "Link", "Replay", "Topology", "find_link", "replay"]


def __getattr__(name: str) -> Any:
    """Import torch when something is measured, not for the names of links."""
    homes = {"Replay": ".replays.results", "replay": ".replays.run"}
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(homes[name], __name__), name)
