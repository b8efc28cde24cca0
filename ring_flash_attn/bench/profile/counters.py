"""What Nsight Compute's tables say: the counters that matter, for each kernel."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Line = Mapping[str, str]
_FIRST, _KERNEL = "ID", "Kernel Name"
_TIME = "gpu__time_duration.sum"  # ns
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
_TENSOR = "pipe_tensor", ".pct_of_peak_sustained"

# By our name: the title of a column, and what Nsight Compute's versions call it.
METRICS: dict[str, tuple[str, ...]] = {
    "sm_percent": ("SMs %", "sm__throughput.avg.pct_of_peak_sustained_elapsed"),
    "tensor_percent": ("tensor cores %",),  # each GPU has other names
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


@dataclass(frozen=True, slots=True)
class Counters:
    """One kernel, over all of its launches.

    Attributes:
        name, launches: of the kernel.
        ms: of all launches together; slower than alone, because counters are read.
        values: by the names in METRICS; None where there is no such counter.
        stalls: warps that wait for each that issues, by reason, most first.
    """

    name: str
    launches: int
    ms: float
    values: Mapping[str, float | None]
    stalls: tuple[tuple[str, float], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        first = {"name": self.name, "launches": self.launches, "ms": self.ms}
        return {**first, **self.values, "stalls": self.stalls}


def read_lines(text: str) -> list[Line]:
    """The lines of a table that `ncu --csv` printed, whatever it printed before it."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line.startswith(f'"{_FIRST}",'):
            return list(csv.DictReader(lines[number:]))
    return []


def read_counters(text: str) -> tuple[Counters, ...]:
    """From `ncu --page raw --csv --print-units base`: kernels, longest first.

    Raises:
        ValueError: there is no kernel in it.
    """
    by_kernel: dict[str, list[Line]] = defaultdict(list)
    for line in read_lines(text):
        if line[_FIRST]:  # the first line below the names has their units
            by_kernel[line[_KERNEL]].append(line)
    if not by_kernel:
        raise ValueError("its table holds no kernel")
    found = [_counters(name, lines) for name, lines in by_kernel.items()]
    return tuple(sorted(found, key=lambda each: -each.ms))


def _counters(name: str, lines: Sequence[Line]) -> Counters:
    times = [_number(line.get(_TIME)) or 0.0 for line in lines]

    def mean(read: Callable[[Line], float | None]) -> float | None:
        """Weighted by time."""
        pairs = [(value, t) for line, t in zip(lines, times) if (value := read(line)) is not None]
        total = sum(t for _, t in pairs)
        return sum(value * t for value, t in pairs) / total if total else None

    def first(*names: str) -> float | None:
        return mean(lambda line: next(_numbers(line, names), None))

    values = {ours: first(*theirs) for ours, (_, *theirs) in METRICS.items()}
    if values["dram_gbps"] is not None:
        values["dram_gbps"] /= 1e9
    columns = dict.fromkeys(column for line in lines for column in line)
    stalls = {match[1]: first(match[0]) for match in map(_STALL.fullmatch, columns) if match}
    named = [(reason.replace("_", " "), value) for reason, value in stalls.items() if value]
    # Pipes of the tensor cores have other names on each GPU: the busiest counts.
    pipes = [column for column in columns if all(part in column for part in _TENSOR)]
    values["tensor_percent"] = mean(lambda line: max(_numbers(line, pipes), default=None))
    most_first = tuple(sorted(named, key=lambda pair: -pair[1]))
    return Counters(name, len(lines), sum(times) / 1e6, values, most_first)


def _numbers(line: Line, names: Iterable[str]) -> Iterator[float]:
    """Of these columns, those that there are."""
    found = (_number(line.get(name)) for name in names)
    return (value for value in found if value is not None)


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:  # "n/a", or a word
        return None


def sections_text(text: str, sections: Sequence[str]) -> str:
    """From `ncu --page details --csv`, of each launch the sections whose names begin so."""
    found: list[str] = []
    launch = section = ""
    for line in read_lines(text):
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
