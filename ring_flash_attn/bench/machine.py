"""What a measurement depends on: the device, its clocks and peaks, versions, and the commit."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .results import Peak, Results, Row

_PACKAGES = (
    "ring-flash-attn",
    "torch",
    "triton",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "xformers",
    "transformers",
    "typer",
    "rich",
    "plotly",
)
_COMMIT = "RFA_COMMIT"
_QUERIES = {  # of nvidia-smi
    "driver": "driver_version",
    "sm_clock_mhz": "clocks.sm",
    "sm_clock_max_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
}
GOOD, FAIR, POOR = "good", "fair", "needs work"
_A100, _A100_PEAK = "A100", 312.0  # TFLOP/s of its tensor cores in half precision
_RATES = (150.0, 100.0)  # TFLOP/s on it
_CLOCK = 0.9  # of the highest


def versions() -> dict[str, str]:
    """Versions of everything that a result may depend on; what is not there is left out."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def find_device(device: str | torch.device | None, what: str = "this") -> torch.device:
    """The device that a user names, by default the GPU; ValueError if it is not there."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device {device!r} does not exist; choose cpu or cuda") from None
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device {str(device)!r}: {what} runs on cpu or cuda")
    if found.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f"device {str(device)!r}: there is no GPU that torch can use")
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"device {str(device)!r}: there are {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", index)


def devices() -> list[str]:
    """The CPU and the GPUs, in words."""
    cpu = platform.processor() or platform.machine()
    found = [f"cpu: {cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = gpu.total_memory / 2**30
        found.append(
            f"cuda:{index}: {gpu.name}, sm_{gpu.major}{gpu.minor}, "
            f"{gpu.multi_processor_count} SMs, {memory:.0f} GiB"
        )
    return found


def variables() -> dict[str, str]:
    """Environment variables of this library that are set."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith("RFA_")}


def device_name(device: torch.device) -> str:
    """In words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.processor() or platform.machine()})"


def machine(device: torch.device, peak: Peak | None = None) -> dict[str, object]:
    """The device, its clocks now and its peak, as plain values."""
    found: dict[str, object] = {"device": device_name(device), "kind": device.type}
    found |= {"cpu_cores": os.cpu_count(), "cpu_threads": torch.get_num_threads()}
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        found |= {
            "compute_capability": f"{gpu.major}.{gpu.minor}",
            "processors": gpu.multi_processor_count,
            "memory_bytes": gpu.total_memory,
            **_from_nvidia_smi(str(gpu.uuid)),
        }
    return found if peak is None else {**found, "peak": asdict(peak)}


def _from_nvidia_smi(uuid: str) -> dict[str, object]:
    """What only the driver's tool knows; nothing where it is not installed or fails."""

    def ask(what: str) -> str:
        gpu, form = f"--id=GPU-{uuid.removeprefix('GPU-')}", "--format=csv,noheader,nounits"
        return _output_of(["nvidia-smi", gpu, what, form]).strip()

    values = map(str.strip, ask(f"--query-gpu={','.join(_QUERIES.values())}").split(","))
    found: dict[str, object] = {
        name: value if name == "driver" else float(value)
        for name, value in zip(_QUERIES, values)
        if value and (name == "driver" or value.replace(".", "", 1).isdigit())
    }
    processes = ask("--query-compute-apps=pid").split()
    if processes:  # ours is one of them; in a container it may have another number, or none is seen
        found["other_processes"] = len(processes) - 1
    return found


def _output_of(command: Sequence[str], folder: Path | None = None) -> str:
    """What it prints; nothing where it is not installed or fails."""
    try:
        return subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def commit() -> str | None:
    """Of the source tree that this package is run from; RFA_COMMIT where that is set."""
    if os.environ.get(_COMMIT):
        return os.environ[_COMMIT]
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    found = _output_of(["git", "describe", "--always", "--dirty", "--abbrev=7"], folder)
    return found.strip() or None


def command() -> str:
    """What the user typed."""
    return shlex.join(["rfa", *sys.argv[1:]])


def make_results(
    rows: Sequence[Row],
    device: torch.device,
    settings: Mapping[str, Any],
    peak: Peak | None = None,
    details: Mapping[str, Any] | None = None,
) -> Results:
    """For a file: what was run, where, with which versions."""
    where = machine(device, peak)
    return Results(command(), where, versions(), commit(), settings, tuple(rows), details or {})


# Verdicts on a GPU's numbers, by the limits of the original documents.


@dataclass(frozen=True, slots=True)
class Verdict:
    """One number, judged."""

    what: str  # was measured
    value: str
    limits: str  # what is good, and what needs work
    word: str  # GOOD, FAIR or POOR
    advice: str = ""  # what to try if it needs work

    def __str__(self) -> str:
        advice = f" Try: {self.advice}." if self.word == POOR and self.advice else ""
        return f"{self.what}: {self.value}: {self.word} ({self.limits}).{advice}"


def judge(
    what: str, value: float, good: float, poor: float | None, unit: str = "", advice: str = ""
) -> Verdict:
    """GOOD above `good`, POOR below `poor` if anything is, else FAIR."""
    limits, word = f"good: > {good:.4g}{unit}", GOOD if value > good else FAIR
    if poor is not None:
        limits += f", needs work: < {poor:.4g}{unit}"
        word = POOR if value < poor else word
    return Verdict(what, f"{value:.4g}{unit}", limits, word, advice)


def rate_verdict(what: str, tflops: float, device: str, peak: Peak) -> Verdict:
    """150 and 100 TFLOP/s on an A100 in half precision, elsewhere the same shares of the peak."""
    scale = 1.0
    if _A100 not in device or peak.dtype not in ("float16", "bfloat16"):
        scale = peak.tflops / _A100_PEAK
    good, poor = (rate * scale for rate in _RATES)
    advice = "a larger batch, longer sequences, fp16 or bf16, or another kernel (`rfa compare`)"
    return judge(what, tflops, good, poor, " TFLOP/s", advice)


def machine_verdicts(machine: Mapping[str, Any]) -> Iterator[Verdict]:
    """On what holds a GPU back: its clock and other processes; nothing where nobody knows."""
    now, most = machine.get("sm_clock_mhz"), machine.get("sm_clock_max_mhz")
    if now and most:
        advice = "find what limits it: `nvidia-smi -q -d CLOCK,PERFORMANCE`, power, temperature"
        word = GOOD if now >= _CLOCK * most else POOR
        limits = f"good: {100 * _CLOCK:.0f} % of {most:.0f} MHz or more"
        yield Verdict("GPU clock just after the last run", f"{now:.0f} MHz", limits, word, advice)
    others = machine.get("other_processes")
    if others is not None:
        word = POOR if others else GOOD
        advice = "end them; `nvidia-smi` lists them"
        yield Verdict("other processes on the GPU", str(others), "good: none", word, advice)
