"""What torch records by itself: a trace of all kernels and ranges, and a history of the memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from ...trace import tracing
from ..timing import WARM_UP, Work
from .activity import Activity, read_trace

RUNS = 3  # in a trace
_EVENTS = 100_000  # of the memory that are kept


def record_trace(work: Work, device: torch.device, path: Path) -> Activity:
    """Write a trace of a few runs, and say what is in it."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    for _ in range(WARM_UP):
        work()
    _synchronize(device)
    with profile(activities=activities) as recorded, tracing():
        for _ in range(RUNS):
            work()
        _synchronize(device)
    recorded.export_chrome_trace(str(path))
    return read_trace(path, RUNS)


def record_memory(work: Work, device: torch.device, path: Path) -> None:
    """Write which memory was taken and given back in one run; for CUDA alone."""
    work()
    _synchronize(device)
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=_EVENTS)
    try:
        work()
        _synchronize(device)
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
