"""Distributed functions on real ranks, or on one device by replay: timed beside one device."""

from .measure import Rows, Settings, time_targets
from .target import Target, choose_targets

__all__ = ["Rows", "Settings", "Target", "choose_targets", "time_targets"]
