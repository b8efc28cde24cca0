"""Nsight Systems and Nsight Compute: their commands, running them, and what they leave."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from . import parts
from .counters import Counters, read_counters, sections_text
from .subject import Subject

Missing = dict[str, str]  # files, and why they are missing
_LAUNCHES = 100  # of kernels that Nsight Compute looks at, some ten times each
_NSYS_RUNS, _NCU_RUNS = 3, 1
_SECONDS = 900.0
_LINES = 6  # of a tool's own words
_SECTIONS = {  # of Nsight Compute's report, by file
    parts.NCU_MEMORY: ("GPU Speed Of Light", "Memory Workload"),
    parts.NCU_COMPUTE: (
        "GPU Speed Of Light",
        "Compute Workload",
        "Warp State",
        "Scheduler",
        "Occupancy",
        "Launch",
    ),
}
_NO_REPORT = "there is no report"
_NO_PERMISSION = "ERR_NVGPUCTRPERM"
_PERMISSION = (
    "The driver lets administrators alone read the counters. Run as root, or let everybody: "
    "`options nvidia NVreg_RestrictProfilingToAdminUsers=0` in a file of /etc/modprobe.d, and "
    "restart; in a container add `--cap-add SYS_ADMIN`."
)


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


class ToolFailed(Exception):
    """A tool did not do what it should; the message has its own words."""


def run_tool(command: Sequence[str], report: Path | None = None) -> str:
    """What it prints; ToolFailed if it cannot be run, fails, takes too long or leaves no report.

    If we stop before its end, so do all processes that it started.
    """
    tool = command[0]
    try:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=_environment(),
            start_new_session=True,
        )
    except OSError as error:
        raise ToolFailed(f"{tool} cannot be run: {error.strerror}") from None
    try:
        text = process.communicate(timeout=_SECONDS)[0]
    except BaseException as error:  # Ctrl-C as well
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise ToolFailed(f"{tool} took more than {_SECONDS:g} s") from None
        raise
    if process.returncode:
        raise ToolFailed(f"{tool} failed ({process.returncode}): {own_words(text)}")
    if report is not None and not report.is_file():
        raise ToolFailed(f"{tool} left no report: {own_words(text)}")
    return text


def _environment() -> dict[str, str]:
    """Ours; the child finds this package even where it is not installed."""
    package = str(Path(__file__).resolve().parents[3])
    paths = [package, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def own_words(text: str) -> str:
    """The tool's lines about an error, or its last ones; and what to do about missing rights."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "ERR" in line or "error" in line.lower()]
    words = " / ".join((errors or lines)[-_LINES:]) or "it said nothing"
    return f"{words} {_PERMISSION}" if _NO_PERMISSION in text else words


def _why_not(tool: str, name: str, subject: Subject) -> str | None:
    if subject.device.type != "cuda":
        return f"{name} looks at NVIDIA GPUs; this ran on the CPU"
    return None if shutil.which(tool) else f"{tool} ({name}) is not installed or not on PATH"


def use_nsys(subject: Subject, folder: Path, report: Callable[[str], None]) -> Missing:
    """Run Nsight Systems, if it is there."""
    reason = _why_not("nsys", "Nsight Systems", subject)
    if reason is not None:
        return {parts.NSYS: reason, parts.NSYS_STATS: reason}
    report("Nsight Systems")
    try:
        run_tool(nsys_command(folder, child_command(subject, _NSYS_RUNS)), folder / parts.NSYS)
    except ToolFailed as error:
        return {parts.NSYS: str(error), parts.NSYS_STATS: _NO_REPORT}
    try:
        text = run_tool(nsys_stats_command(folder))
    except ToolFailed as error:
        return {parts.NSYS_STATS: str(error)}
    finally:
        (folder / parts.NSYS).with_suffix(".sqlite").unlink(missing_ok=True)
    (folder / parts.NSYS_STATS).write_text(text, encoding="utf-8")
    return {}


def use_ncu(
    subject: Subject, folder: Path, report: Callable[[str], None]
) -> tuple[Missing, tuple[Counters, ...]]:
    """Run Nsight Compute, if it is there; with the counters of kernels, longest first."""
    reason = _why_not("ncu", "Nsight Compute", subject)
    if reason is not None:
        return dict.fromkeys((parts.NCU, *_SECTIONS), reason), ()
    report("Nsight Compute, which runs each kernel many times")
    try:
        run_tool(ncu_command(folder, child_command(subject, _NCU_RUNS)), folder / parts.NCU)
    except ToolFailed as error:
        return {parts.NCU: str(error), **dict.fromkeys(_SECTIONS, _NO_REPORT)}, ()
    try:
        counters = read_counters(run_tool(ncu_table_command(folder, "raw")))
        details = run_tool(ncu_table_command(folder, "details"))
    except (ToolFailed, ValueError) as error:
        return dict.fromkeys(_SECTIONS, f"the report cannot be read: {error}"), ()
    missing = {}
    for name, sections in _SECTIONS.items():
        text = sections_text(details, sections)
        if text:
            (folder / name).write_text(text, encoding="utf-8")
        else:
            missing[name] = "ncu's table has none of these sections"
    return missing, counters
