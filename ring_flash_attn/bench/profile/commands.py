"""Commands of Nsight Systems and Nsight Compute, as lists of words."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from . import parts
from .subject import Subject

_LAUNCHES = 100  # of kernels that Nsight Compute looks at, some ten times each


def child_command(subject: Subject, runs: int) -> list[str]:
    """The process that the tools look at."""
    module = f"{__package__}.child"
    return [sys.executable, "-m", module, json.dumps(subject.to_dict()), str(runs)]


def nsys_command(folder: Path, child: Sequence[str]) -> list[str]:
    """Records between cudaProfilerStart and cudaProfilerStop."""
    return [
        "nsys",
        "profile",
        "--trace=cuda,nvtx,osrt",
        "--sample=none",
        "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--force-overwrite=true",
        f"--output={folder / parts.NSYS.removesuffix('.nsys-rep')}",
        *child,
    ]


def nsys_stats_command(folder: Path) -> list[str]:
    """All of its usual tables."""
    return ["nsys", "stats", "--force-export=true", str(folder / parts.NSYS)]


def ncu_command(folder: Path, child: Sequence[str]) -> list[str]:
    """All counters of each kernel between cudaProfilerStart and cudaProfilerStop."""
    options = {
        "--set": "full",
        "--profile-from-start": "off",
        "--target-processes": "all",
        "--clock-control": "none",
        "--launch-count": str(_LAUNCHES),
        "--export": str(folder / parts.NCU.removesuffix(".ncu-rep")),
    }
    words = [word for option in options.items() for word in option]
    return ["ncu", "--nvtx", "--force-overwrite", *words, *child]


def ncu_table_command(folder: Path, page: str) -> list[str]:
    """A page of the report as a table: "raw" has all counters, "details" sections and rules."""
    units = ["--print-units", "base"] if page == "raw" else []
    return ["ncu", "--import", str(folder / parts.NCU), "--page", page, "--csv", *units]
