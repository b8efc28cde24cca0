"""Several kernels: which cannot run here, the baseline of the others, its table and gates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..bench.results import Row
from ..bench.versus import MEMORY, SPEED, THEORY, Limits, misses
from ..kernels.base import NATIVE

if TYPE_CHECKING:
    import torch

Versus = Annotated[
    str | None,
    typer.Option(help="Kernel to compare others with; native if it is one of them, or the first."),
]
Gate = Annotated[
    bool,
    typer.Option(
        "--gate",
        help="Exit code 1 unless every kernel is above --min-speed and below --max-memory.",
    ),
]
MinSpeed = Annotated[
    float | None,
    typer.Option(min=0, help="Gate: more than this part of the baseline's speed; 0.6."),
]
MaxMemory = Annotated[
    float | None,
    typer.Option(min=0, help="Gate: less than so many times the baseline's memory; 1.2."),
]
_GB = 1e9
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
    given = [f"--min-speed {min_speed:g}"] if min_speed is not None else []
    given += [f"--max-memory {max_memory:g}"] if max_memory is not None else []
    if not gate and not given:
        return None
    if not versus:
        raise ValueError(f"{given[0] if given else '--gate'}: say against what with --versus")
    usual = Limits()
    speed = usual.min_speed if min_speed is None else min_speed
    if device.type == "cpu":
        if max_memory is not None:
            raise ValueError(f"{given[-1]}: memory is not measured on the CPU")
        return Limits(speed, None)
    return Limits(speed, usual.max_memory if max_memory is None else max_memory)


def compared(versus: str | None, limits: Limits | None) -> dict[str, Any]:
    """The same as settings in a file of results."""
    return {**({"versus": versus} if versus else {}), **(asdict(limits) if limits else {})}


def print_versus(
    console: Console,
    groups: Sequence[tuple[Row, Sequence[Row]]],
    versus: str,
    labels: Mapping[str, Callable[[Row], str]],
    limits: Limits | None,
) -> bool:
    """The table of the original documents; whether the gate lets everything through.

    Args:
        console: where to print.
        groups: rows of the baseline, each with those that are compared with it.
        versus: name of the baseline.
        labels: the first columns.
        limits: of the gate, if there is one.
    """
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=f"versus {versus}", title_justify="left"
    )
    for name in labels:
        table.add_column(name, overflow="fold")
    spread = any("theoretic_ms" in base.values for base, _ in groups)
    shares = {THEORY: "rel. eff. %"} if spread else {}
    shares |= {SPEED: f"vs {versus} %", MEMORY: "memory %"}
    for name in ("passes", "iter/s", "s", "GB", *shares.values()):
        table.add_column(name, justify="right", no_wrap=True)
    if limits is not None:
        table.add_column("gate")
    judged, complaints = 0, []
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
            judged += 1
            gate = "[bold red]miss[/]" if reasons else "[green]pass[/]"
            table.add_row(*cells, *_cells(row, shares), *([] if limits is None else [gate]))
    console.print(table)
    for line in _notes(versus, spread):
        console.print(line, markup=False)
    if limits is None:
        return True
    memory = "memory is not measured on the CPU"
    if limits.max_memory is not None:
        memory = f"memory < {100 * limits.max_memory:g} %"
    missed = len(complaints)
    verdict = f"{missed} of {judged} rows miss it" if missed else f"all {judged} rows pass"
    verdict = verdict if judged else "there is nothing to judge"
    console.print(f"gate: speed > {100 * limits.min_speed:g} % of {versus}'s, {memory}: {verdict}")
    for line in complaints:
        console.print(f"  {line}", style="bold red", markup=False, soft_wrap=True)
    return judged > missed == 0


def _notes(versus: str, spread: bool) -> Iterator[str]:
    if spread:
        yield f"{versus} on one device: its iter/s on a rank's own tokens / number of ranks."
        yield f"rel. eff.: iter/s in percent of those of {versus} on one device."
    yield "s: of 100 iterations, as in the original documents."
    yield f"vs {versus}: iter/s in percent of {versus}'s. memory: GB in percent of {versus}'s."


def _cells(row: Row, shares: Iterable[str]) -> list[str]:
    if row.ms is None:
        return ["[bold red]failed[/]", "", "", *("" for _ in shares)]
    percents = (row.values.get(name) for name in shares)
    return [
        f"{1e3 / row.ms:.2f}",
        f"{_ITERATIONS * row.ms / 1e3:.4f}",
        "n/a" if row.peak_bytes is None else f"{row.peak_bytes / _GB:.3f}",
        *("n/a" if percent is None else f"{percent:.1f}" for percent in percents),
    ]
