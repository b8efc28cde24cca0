"""What a rank of many GPUs costs, found out on one: `replay`."""

from .link import LINKS, Link, find_link
from .report import Replay
from .run import replay

__all__ = ["LINKS", "Link", "Replay", "find_link", "replay"]
