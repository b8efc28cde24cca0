"""Nsight Systems and Nsight Compute: running them, what they leave, and the counters in it.

As a module it is the process that they look at, with a subject as JSON and a number of runs. They
record what lies between the calls of cudaProfilerStart and cudaProfilerStop.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from ..measure import Report
from ..results import number
from . import parts
from .subject import Subject
from .trace import Values, run_under

Missing = dict[str, str]  # files, and why they are missing
Line = Mapping[str, str]
_SECONDS = 900.0
_LINES = 6  # of a tool's own words
NSYS = shlex.split(
    "nsys profile --trace=cuda,nvtx,osrt --sample=none --cpuctxsw=none --force-overwrite=true "
    "--capture-range=cudaProfilerApi --capture-range-end=stop"
)
_NCU = shlex.split(  # of 100 launches, each of which it repeats some ten times
    "ncu --nvtx --force-overwrite --set full --profile-from-start off --target-processes all "
    "--clock-control none --launch-count 100"
)
_SECTIONS = {  # of Nsight Compute's report, by file: how their names begin
    parts.NCU_MEMORY: ("GPU Speed", "Memory Workload"),
    parts.NCU_COMPUTE: ("GPU Speed", "Compute", "Warp", "Scheduler", "Occupancy", "Launch"),
}
_TOOLS = {  # runs that they look at, and files: a report, and what is read from it
    "nsys": ("Nsight Systems", 3, (parts.NSYS, parts.NSYS_STATS)),
    "ncu": ("Nsight Compute", 1, (parts.NCU, *_SECTIONS)),
}
_NO_PERMISSION = "ERR_NVGPUCTRPERM"
_PERMISSION = (
    "The driver lets administrators alone read the counters. Run as root, or let everybody: "
    "`options nvidia NVreg_RestrictProfilingToAdminUsers=0` in a file of /etc/modprobe.d, and "
    "restart; in a container add `--cap-add SYS_ADMIN`."
)
_FIRST, _KERNEL = "ID", "Kernel Name"
_TIME = "gpu__time_duration.sum"  # ns
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
_TENSOR = re.compile(r".*pipe_tensor.*\.pct_of_peak_sustained.*")  # each GPU has other names

# By our name: the title of a column, and what Nsight Compute's versions call it.
METRICS: dict[str, tuple[str, ...]] = {
    "sm_percent": ("SMs %", "sm__throughput.avg.pct_of_peak_sustained_elapsed"),
    "tensor_percent": ("tensor cores %",),
    "memory_percent": (
        "memory %",
        "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    ),
    "dram_percent": (
        "DRAM %",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    ),
    "dram_gbps": ("DRAM GB/s", "dram__bytes.sum.per_second"),
    "l1_hit_percent": ("L1 hits %", "l1tex__t_sector_hit_rate.pct"),
    "l2_hit_percent": ("L2 hits %", "lts__t_sector_hit_rate.pct"),
    "occupancy_percent": ("occupancy %", "sm__warps_active.avg.pct_of_peak_sustained_active"),
    "registers": ("registers", "launch__registers_per_thread"),
}


def use_nsys(subject: Subject, folder: Path, report: Report) -> Missing:
    """Run Nsight Systems, if it is there."""
    path = folder / parts.NSYS
    output = f"--output={path.with_suffix('')}"
    missing = _record([*NSYS, output], subject, folder, report)
    if missing:
        return missing
    try:
        text = run_tool(["nsys", "stats", "--force-export=true", str(path)])
    except ToolFailed as error:
        return {parts.NSYS_STATS: str(error)}
    finally:
        path.with_suffix(".sqlite").unlink(missing_ok=True)
    (folder / parts.NSYS_STATS).write_text(text, encoding="utf-8")
    return {}


def use_ncu(subject: Subject, folder: Path, report: Report) -> tuple[Missing, tuple[Values, ...]]:
    """Run Nsight Compute, if it is there; with the counters of kernels, longest first."""
    path = folder / parts.NCU
    output = ["--export", str(path.with_suffix(""))]
    missing = _record([*_NCU, *output], subject, folder, report)
    if missing:
        return missing, ()
    table = ["ncu", "--import", str(path), "--csv", "--page"]
    try:
        counters = read_counters(run_tool([*table, "raw", "--print-units", "base"]))
        details = run_tool([*table, "details"])
    except (ToolFailed, ValueError) as error:
        return dict.fromkeys(_SECTIONS, f"the report cannot be read: {error}"), ()
    for file, sections in _SECTIONS.items():
        text = sections_text(details, sections)
        if text:
            (folder / file).write_text(text, encoding="utf-8")
        else:
            missing[file] = "ncu's table has none of these sections"
    return missing, counters


def _record(command: Sequence[str], subject: Subject, folder: Path, report: Report) -> Missing:
    """Run a tool, if it is there."""
    tool = command[0]
    name, runs, files = _TOOLS[tool]
    if subject.device.type != "cuda":
        return dict.fromkeys(files, f"{name} looks at NVIDIA GPUs; this ran on the CPU")
    if not shutil.which(tool):
        return dict.fromkeys(files, f"{tool} ({name}) is not installed or not on PATH")
    report(f"{name}, which runs each kernel many times" if tool == "ncu" else name)
    try:
        run_tool([*command, *child_command(subject, runs)], folder / files[0])
    except ToolFailed as error:
        return {**dict.fromkeys(files, "there is no report"), files[0]: str(error)}
    return {}


class ToolFailed(Exception):
    """A tool did not do what it should; the message has its own words."""


def run_tool(
    command: Sequence[str], report: Path | None = None, seconds: float | None = None
) -> str:
    """What it prints; ToolFailed if it cannot be run, fails, takes too long or leaves no report.

    If we stop before its end, so do all processes that it started. The child finds this package
    even where it is not installed.
    """
    tool, most = command[0], seconds or _SECONDS
    package = str(Path(__file__).resolve().parents[3])
    paths = filter(None, (package, os.environ.get("PYTHONPATH")))
    try:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )
    except OSError as error:
        raise ToolFailed(f"{tool} cannot be run: {error.strerror}") from None
    try:
        text = process.communicate(timeout=most)[0]
    except BaseException as error:  # Ctrl-C as well
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise ToolFailed(f"{tool} took more than {most:g} s") from None
        raise
    if process.returncode:
        raise ToolFailed(f"{tool} failed ({process.returncode}): {_own_words(text)}")
    if report is not None and not report.is_file():
        raise ToolFailed(f"{tool} left no report: {_own_words(text)}")
    return text


def _own_words(text: str) -> str:
    """The tool's lines about an error, or its last ones; and what to do about missing rights."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "ERR" in line or "error" in line.lower()]
    words = " / ".join((errors or lines)[-_LINES:]) or "it said nothing"
    return f"{words} {_PERMISSION}" if _NO_PERMISSION in text else words


def read_counters(text: str) -> tuple[Values, ...]:
    """From `ncu --page raw --csv --print-units base`: kernels, longest first; ValueError if none.

    Each has its name, launches, ms, all of METRICS, and stalls: warps that wait for each that
    issues, by reason, most first. It is slower than alone, because counters are read.
    """
    by_kernel: dict[str, list[Line]] = defaultdict(list)
    for line in _read_lines(text):
        if line[_FIRST]:  # the first line below the names has their units
            by_kernel[line[_KERNEL]].append(line)
    if not by_kernel:
        raise ValueError("its table holds no kernel")
    found = [_counters(name, lines) for name, lines in by_kernel.items()]
    return tuple(sorted(found, key=lambda each: -each["ms"]))


def _read_lines(text: str) -> list[Line]:
    """The lines of a table that `ncu --csv` printed, whatever it printed before it."""
    lines = text.splitlines()
    heads = [place for place, line in enumerate(lines) if line.startswith(f'"{_FIRST}",')]
    return list(csv.DictReader(lines[heads[0] :])) if heads else []


def _counters(name: str, lines: Sequence[Line]) -> dict[str, Any]:
    numbers = [
        {
            column: value
            for column, cell in line.items()  # a word, or with commas between thousands
            if (value := number((cell or "").replace(",", ""))) is not None
        }
        for line in lines
    ]

    def mean(columns: Iterable[str], pick: Callable[[list[float]], float]) -> float | None:
        """Of what each launch has of these columns, weighted by time."""
        found = [
            (pick(values), line.get(_TIME, 0.0))
            for line in numbers
            if (values := [line[column] for column in columns if column in line])
        ]
        total = sum(time for _, time in found)
        return sum(value * time for value, time in found) / total if total else None

    first = itemgetter(0)
    values = {ours: mean(theirs, first) for ours, (_, *theirs) in METRICS.items()}
    if values["dram_gbps"] is not None:
        values["dram_gbps"] /= 1e9
    columns = dict.fromkeys(column for line in numbers for column in line)
    values["tensor_percent"] = mean(list(filter(_TENSOR.fullmatch, columns)), max)  # the busiest
    reasons = filter(None, map(_STALL.fullmatch, columns))
    stalls = [(match[1].replace("_", " "), mean([match[0]], first) or 0.0) for match in reasons]
    return {
        "name": name,
        "launches": len(lines),
        "ms": sum(line.get(_TIME, 0.0) for line in numbers) / 1e6,
        **values,
        "stalls": tuple(sorted(filter(itemgetter(1), stalls), key=lambda pair: -pair[1])),
    }


def sections_text(text: str, sections: Sequence[str]) -> str:
    """From `ncu --page details --csv`, of each launch the sections whose names begin so."""
    found: list[str] = []
    launch = section = ""
    for line in _read_lines(text):
        name = line.get("Section Name") or ""
        if not name.startswith(tuple(sections)):
            continue
        if line[_FIRST] != launch:
            launch, section = line[_FIRST], ""
            found += ["", f"== launch {launch}: {line[_KERNEL]}"]
        if name != section:
            section = name
            found += ["", section]
        if line.get("Metric Name"):
            value = f"{line['Metric Value']} {line.get('Metric Unit') or ''}".strip()
            found.append(f"  {line['Metric Name']:<44} {value}")
        if line.get("Rule Description"):
            found.append(f"  {line.get('Rule Type') or 'rule'}: {line['Rule Description']}")
    return "\n".join(found).lstrip("\n") + "\n" if found else ""


def child_command(subject: Subject, runs: int) -> list[str]:
    """The process that the tools look at."""
    return [sys.executable, "-m", f"{__package__}.nsight", json.dumps(subject.to_dict()), str(runs)]


def main(arguments: Sequence[str]) -> None:
    """Run the last of the subject's passes."""
    subject, runs = Subject.from_dict(json.loads(arguments[0])), int(arguments[1])
    cuda = subject.device.type == "cuda"
    if cuda:
        torch.cuda.set_device(subject.device)
    profiler = torch.cuda.profiler.profile() if cuda else nullcontext()
    run_under(profiler, subject.work(), subject.device, runs)
    print(f"{runs} runs of {subject}")


if __name__ == "__main__":
    main(sys.argv[1:])
