"""Several kernels: the baseline of the others, its table, and the verdict of a gate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..bench.results import Row
from ..bench.versus import MEMORY, SPEED, THEORY, Limits, misses
from ..kernels.base import NATIVE
from .console import make_table

if TYPE_CHECKING:
    import torch

FAILED = "[bold red]failed[/]"
_ITERATIONS = 100  # of which the original documents give the seconds


def find_versus(kernels: Sequence[str], versus: str | None) -> tuple[tuple[str, ...], str]:
    """All kernels, the one that the others are compared with first, and it; "" without others."""
    found = dict.fromkeys(kernels)
    if versus is None and len(found) == 1:
        return tuple(found), ""
    baseline = versus or (NATIVE if NATIVE in found else kernels[0])
    return tuple(dict.fromkeys((baseline, *found))), baseline


def find_limits(
    gate: bool,
    min_speed: float | None,
    max_memory: float | None,
    versus: str,
    device: torch.device,
) -> Limits | None:
    """What the options say; None without a gate. ValueError where there is nothing to judge."""
    options = {"--min-speed": min_speed, "--max-memory": max_memory}
    used = [f"{name} {value:g}" for name, value in options.items() if value is not None]
    if not gate and not used:
        return None
    if not versus:
        raise ValueError(f"{used[0] if used else '--gate'}: say against what with --versus")
    if device.type == "cpu" and max_memory is not None:
        raise ValueError(f"{used[-1]}: memory is not measured on the CPU")
    usual = Limits()
    memory = None if device.type == "cpu" else usual.max_memory
    return Limits(
        usual.min_speed if min_speed is None else min_speed,
        memory if max_memory is None else max_memory,
    )


def compared(versus: str | None, limits: Limits | None) -> dict[str, Any]:
    """The same as settings in a file of results."""
    return {**({"versus": versus} if versus else {}), **(asdict(limits) if limits else {})}


def gigabytes(row: Row) -> str:
    """Peak memory in a table."""
    return "n/a" if row.peak_bytes is None else f"{row.peak_bytes / 1e9:.3f}"


def print_versus(
    console: Console,
    groups: Sequence[tuple[Row, Sequence[Row]]],
    versus: str,
    labels: Mapping[str, Callable[[Row], str]],
    limits: Limits | None,
) -> bool:
    """Print the table of the original documents; whether the gate lets everything through.

    Groups are rows of the baseline, each with those that are compared with it; `labels` make the
    first columns.
    """
    ranks = any("theoretic_ms" in base.values for base, _ in groups)
    shares = {THEORY: "rel. eff. %"} if ranks else {}
    shares |= {SPEED: f"vs {versus} %", MEMORY: "memory %"}
    columns = ("passes", "iter/s", "s", "GB", *shares.values())
    table = make_table(labels, columns, f"versus {versus}")
    if limits is not None:
        table.add_column("gate")
    complaints = []
    for base, others in groups:
        names = [label(base) for label in labels.values()]
        if "theoretic_ms" in base.values:
            theory = f"{1e3 / base.values['theoretic_ms']:.2f}"
            table.add_row(*names[:-1], f"{versus} on one device", base.passes, theory)
        table.add_row(*names, base.passes, *_cells(base, shares))
        for row in others:
            cells = [*(label(row) for label in labels.values()), row.passes]
            reasons = list(misses(row, limits)) if limits is not None else []
            if reasons:
                complaints.append(f"{', '.join(cells)}: {'; '.join(reasons)}")
            gate = "[bold red]miss[/]" if reasons else "[green]pass[/]"
            table.add_row(*cells, *_cells(row, shares), *([] if limits is None else [gate]))
    console.print(table)
    if ranks:
        console.print(
            f"{versus} on one device: its iter/s on a rank's own tokens / number of ranks.\n"
            f"rel. eff.: iter/s in percent of those of {versus} on one device.",
            markup=False,
        )
    console.print(
        "s: of 100 iterations, as in the original documents.\n"
        f"vs {versus}: iter/s in percent of {versus}'s. memory: GB in percent of {versus}'s.",
        markup=False,
    )
    if limits is None:
        return True
    return _print_verdict(console, sum(len(each) for _, each in groups), complaints, versus, limits)


def _print_verdict(
    console: Console, judged: int, complaints: Sequence[str], versus: str, limits: Limits
) -> bool:
    """Say which rows miss the gate; whether all pass."""
    memory = "memory is not measured on the CPU"
    if limits.max_memory is not None:
        memory = f"memory < {100 * limits.max_memory:g} %"
    verdict = f"all {judged} rows pass" if judged else "there is nothing to judge"
    if complaints:
        verdict = f"{len(complaints)} of {judged} rows miss it"
    console.print(f"gate: speed > {100 * limits.min_speed:g} % of {versus}'s, {memory}: {verdict}")
    for line in complaints:
        console.print(f"  {line}", style="bold red", markup=False, soft_wrap=True)
    return judged > len(complaints) == 0


def _cells(row: Row, shares: Iterable[str]) -> list[str]:
    if row.ms is None:
        return [FAILED, "", "", *("" for _ in shares)]
    percents = (row.values.get(name) for name in shares)
    return [
        f"{1e3 / row.ms:.2f}",
        f"{_ITERATIONS * row.ms / 1e3:.4f}",
        gigabytes(row),
        *("n/a" if percent is None else f"{percent:.1f}" for percent in percents),
    ]
