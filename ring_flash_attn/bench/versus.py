"""Rows beside those of a baseline: speed and memory, and the limits that gates set."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .results import Row

if TYPE_CHECKING:
    import torch

SPEED, MEMORY, THEORY = "versus_percent", "versus_memory_percent", "versus_theory_percent"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a gate lets through.

    Attributes:
        min_speed: the part of the baseline's iterations a second that must be exceeded.
        max_memory: times the baseline's memory, to stay below; None where it is not measured.
    """

    min_speed: float = 0.6
    max_memory: float | None = 1.2


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
        share = 100 * row.peak_bytes / base.peak_bytes if base.peak_bytes else nothing
        values[MEMORY] = share
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


def refuse_kernels(reasons: Mapping[str, Sequence[str]], device: torch.device) -> None:
    """NotImplementedError if there are any: of each kernel, what `choose_kernel` says each time."""
    import torch

    if not reasons:
        return
    lines = []
    for name, why in reasons.items():
        shortest = min((text.splitlines()[1:] for text in why), key=len)
        lines += [f"{name} can do none of this on {device.type}:", *shortest]
    if device.type == "cpu" and torch.cuda.is_available():
        lines.append("There is a GPU here: --device cuda takes it.")
    lines.append(
        "Choose other kernels (--kernel, --versus) or functions; `rfa info` says what can run here."
    )
    raise NotImplementedError("\n".join(lines))
