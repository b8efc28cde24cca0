"""What a rank of many GPUs costs, found out on one: `replay`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .link import LINKS, Link, find_link

if TYPE_CHECKING:
    from .report import Replay
    from .run import replay

__all__ = ["LINKS", "Link", "Replay", "find_link", "replay"]


def __getattr__(name: str) -> Any:
    """Import torch when something is measured, not for the names of links."""
    homes = {"Replay": ".report", "replay": ".run"}
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(homes[name], __name__), name)
