"""Results: rows of measurements, their files (docs/benchmarks.md has the format), their tables."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

FORMAT = "ring_flash_attn results"
VERSION = 1
BENCH, COMPARE, RING, REPLAY, VERIFY = ("bench", "compare", "ring", "replay", "verify")  # kinds
SPEED, MEMORY, THEORY = "versus_percent", "versus_memory_percent", "versus_theory_percent"
ON_CPU = "On the CPU these are times of the host, and say little about GPUs."
MISSING = "n/a"
CANNOT = "cannot: "  # begins the reasons of an implementation that was not tried
_NAMED = (  # fields that hold values by name
    "machine", "versions", "settings", "details", "workload", "placement", "values", "errors",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Peak:
    """What the device does at best, measured."""

    tflops: float  # of a product of large square matrices
    gbps: float  # of a copy within the device: 10⁹ bytes a second, read and written
    dtype: str = "bfloat16"  # of the matrices


@dataclass(frozen=True)
class Row:
    """One thing that was measured, in `kind`, or why it `failed`."""

    kind: str
    implementation: str
    passes: str
    workload: Mapping[str, Any]
    placement: Mapping[str, Any] = field(default_factory=dict)
    samples_ms: tuple[float, ...] = ()
    tflops: float | None = None
    peak_bytes: int | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    failed: str | None = None
    note: str | None = None

    @property
    def ms(self) -> float | None:
        """Median of the runs."""
        return statistics.median(self.samples_ms) if self.samples_ms else None

    @property
    def key(self) -> tuple[str, ...]:
        """The same for the same thing measured again."""
        parts = (json.dumps(each, sort_keys=True) for each in (self.workload, self.placement))
        return (self.kind, self.implementation, self.passes, *parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; what is empty is left out."""
        values = {**vars(self), "samples_ms": list(self.samples_ms)}
        return {name: each for name, each in values.items() if each not in (None, {}, [])}


@dataclass(frozen=True)
class Results:
    """All that one command measured."""

    command: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    commit: str | None
    settings: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    created: str = field(
        default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds")
    )

    @property
    def device(self) -> str:
        """Where it was measured, in words."""
        return str(self.machine.get("device") or "unknown device")

    @property
    def peak(self) -> Mapping[str, Any]:
        """What the device does at best; empty if nobody measured it."""
        found = self.machine.get("peak")
        return found if isinstance(found, Mapping) else {}

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        rows = [row.to_dict() for row in self.rows]
        return {"format": FORMAT, "version": VERSION, **vars(self), "rows": rows}

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        save(self, path)


# Files.


def plain_json(value: Any) -> Any:
    """What JSON can hold: it has no NaN and no infinity, which become words."""
    if isinstance(value, Mapping):
        return {name: plain_json(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def number(value: Any) -> float | None:
    """A finite number of a file, or None: NaN and infinity are words there."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) else None


def save(value: Any, path: Path) -> None:
    """Write a text as it is; results and plain values as JSON."""
    if not isinstance(value, str):
        plain = value.to_dict() if isinstance(value, Results) else value
        value = json.dumps(plain_json(plain), indent=1, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value, encoding="utf-8", newline="\n")


def load(path: Path) -> Results:
    """Read a file; ValueError that names it if it cannot be read."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # not text, or not JSON
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no results")
    if values.pop("format", None) != FORMAT:
        raise ValueError(f"{path}: not in the format {FORMAT!r}")
    version = values.pop("version", None)
    if version != VERSION:
        raise ValueError(f"{path}: version {version!r} of the format; this release reads {VERSION}")
    try:
        for index, row in enumerate(values["rows"]):
            _check_names(row, f"{{}} of row {index}")
            errors = row.get("errors", {})
            _check_names(errors, f"error {{}} of row {index}", errors)
            row["samples_ms"] = tuple(row.get("samples_ms", ()))
        _check_names(values)
        return Results(**{**values, "rows": tuple(Row(**row) for row in values["rows"])})
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: damaged: {error}") from None


def _check_names(values: Any, what: str = "{}", names: Iterable[str] = _NAMED) -> None:
    """TypeError for values of the wrong kind."""
    for name in names:
        if name in values and not isinstance(values[name], Mapping):
            raise TypeError(f"{what.format(repr(name))} holds no names, but {values[name]!r}")


def check_output(path: Path | None) -> None:
    """ValueError now rather than after minutes if the file cannot be written."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error}") from None
    there = path if path.exists() else path.parent
    if path.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"cannot write {path}")


# Rows beside those of a baseline, and in tables.


@dataclass(frozen=True, slots=True)
class Limits:
    """What a gate lets through: more of the baseline's speed, and less of its memory."""

    min_speed: float = 0.6
    max_memory: float | None = 1.2  # None where it is not measured


def beside(row: Row, base: Row) -> Row:
    """The row with its speed and memory in percent of the baseline's.

    Where the baseline has a theoretic time (one device, times ranks), with its efficiency against
    that, too. A row has none of this if it or the baseline failed.
    """
    if row.ms is None or base.ms is None:
        return row
    values = {SPEED: 100 * base.ms / row.ms}
    if "theoretic_ms" in base.values:
        values[THEORY] = 100 * base.values["theoretic_ms"] / row.ms
    if row.peak_bytes is not None and base.peak_bytes is not None:
        nothing = math.inf if row.peak_bytes else 100.0  # beside a baseline that takes none
        values[MEMORY] = 100 * row.peak_bytes / base.peak_bytes if base.peak_bytes else nothing
    return replace(row, values={**row.values, **values})


def misses(row: Row, limits: Limits) -> Iterator[str]:
    """Every reason why the gate does not let a row through."""
    if row.failed is not None:
        yield row.failed.splitlines()[0]
    elif SPEED not in row.values:
        yield "the baseline failed"
    else:
        if not row.values[SPEED] > 100 * limits.min_speed:
            yield f"speed {row.values[SPEED]:.1f} %, not > {100 * limits.min_speed:g} %"
        if limits.max_memory is None:
            return
        if MEMORY not in row.values:
            yield "memory was not measured"
        elif not row.values[MEMORY] < 100 * limits.max_memory:
            yield f"memory {row.values[MEMORY]:.1f} %, not < {100 * limits.max_memory:g} %"


def make_table(texts: Iterable[str], numbers: Iterable[str], title: str | None = None) -> Table:
    """A table without columns' lines; numbers come last, to the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title)
    table.title_justify = "left"
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def cell(
    value: float | None,
    form: str = ".3f",
    missing: str = MISSING,
    unit: str = "",
    per: float = 1,
) -> str:
    """A number, `per` so many, with its unit; or what stands for none."""
    return missing if value is None else format(value / per, form) + unit


def mib(size: int | None, missing: str = MISSING) -> str:
    """Bytes in MiB."""
    return cell(size, ".1f", missing, per=2**20)


HOST_WAITS = "*: the host takes longer than the device, which waits for it where it has no lead."


def host_cell(host_ms: float, ms: float) -> str:
    """The host's time beside the device's, marked where it is the limit."""
    return f"{host_ms:.3f}{host_mark(host_ms, ms)}"


def host_mark(host_ms: float, ms: float, share: float = 1.0) -> str:
    """Marks a time of the device if the host took more than this share of it to queue its work."""
    return "*" if host_ms > share * ms else ""


def run_times(row: Row) -> dict[str, float]:
    """The fastest, mean, median and slowest run of a row that was timed, in ms."""
    runs = row.samples_ms
    middle = statistics.median(runs)
    return {"min": min(runs), "avg": statistics.fmean(runs), "median": middle, "max": max(runs)}


def speed_up(row: Row, base_ms: float | None) -> str:
    """Against a baseline, if that ran."""
    return MISSING if base_ms is None or not row.ms else f"{base_ms / row.ms:.2f}x"


def least(rows: Iterable[Row], what: str) -> Row | None:
    """The row with the shortest time (`ms`) or the least memory (`peak_bytes`), if there is one."""
    found = (row for row in rows if getattr(row, what) is not None)
    return min(found, key=attrgetter(what), default=None)
