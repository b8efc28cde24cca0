"""The tables of `rfa ring`, like those of the original documents, and how to read them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape

from ..bench.machine import device_name
from ..bench.ranks import Rows, Settings, Target
from ..bench.results import ON_CPU, Limits, Row, cell, make_table
from ..bench.workload import FORWARD
from ..comm import launch
from .console import FAILED, print_versus

_COLUMNS = ("theoretic iter/s", "iter/s", "ms", "eff. %", "GB")
_LABELS = {
    "function": lambda row: str(row.placement["function"]),
    "layout × route × kernel": lambda row: " × ".join(
        (row.placement["layout"], row.placement["route"], row.implementation)
    ),
}


def print_rows(
    console: Console,
    rows: Rows,
    settings: Settings,
    targets: Sequence[Target],
    versus: str,
    limits: Limits | None,
) -> bool:
    """Print what was run, a table for each passes, what failed, how to read it; the comparison.

    Returns:
        Whether the gate, if there is one, lets everything through.
    """
    for line in (*_explain(settings), *_sizes(rows), _rounds(settings)):
        console.print(line, markup=False)
    for passes in settings.passes:
        _print_table(console, [row for row in rows.values() if row.passes == passes], passes)
    failures = {name: row.failed for (name, _), row in rows.items() if row.failed is not None}
    for name, why in failures.items():
        console.print(f"{FAILED} {escape(name)}")
        console.print("  " + why.replace("\n", "\n  "), markup=False)
    for line in _notes(rows, settings, bool(versus)):
        console.print(line, markup=False)
    if not versus:
        return True
    groups = [
        (
            rows[base, passes],
            [rows[t.name, passes] for t in targets if t.name != t.baseline == base],
        )
        for passes in settings.passes
        for base in dict.fromkeys(target.baseline for target in targets)
    ]
    return print_versus(console, groups, versus, _LABELS, limits)


def _explain(settings: Settings) -> Iterator[str]:
    size, where = settings.world_size, device_name(settings.device)
    if settings.is_replay:
        yield (
            f"Replays of {size} ranks (the first, the last and the one with most pairs), one at a "
            f"time, on one device ({where}): no other is there, and what they receive is random "
            "data."
        )
        if settings.link is None:
            yield "Communication is removed: messages cost nothing. --link emulates one."
        else:
            yield f"Communication is emulated, {settings.link}. Other ranks never come late."
        return
    origin = "of torchrun" if launch.torchrun_rank() else "in new processes"
    yield f"{size} rank{'s' * (size > 1)} {origin} over {settings.used_backend}, {where}."
    if settings.device.type == "cuda" and settings.used_backend == "gloo":
        yield "gloo takes what GPUs send through the host: times say little about NCCL."


def _sizes(rows: Rows) -> Iterator[str]:
    """Each rank's shard; more lines where functions differ."""
    lines: dict[str, list[str]] = {}
    for (name, _), row in rows.items():
        w = row.workload
        documents = len(w.get("lengths", ()))
        line = (
            f"{w['seqlen']} tokens" + f" in {documents} documents" * (documents > 1) + f", batch "
            f"{w['batch']}, heads {w['nheads']}/{w['nheads_k']}, headdim {w['headdim']}, "
            f"{w['dtype']}, {'causal' if w['causal'] else 'full'}"
        )
        lines.setdefault(line, []).append(name)
    most = max(lines, key=lambda line: len(lines[line]))
    yield f"Each rank: {most}."
    for line, names in lines.items():
        if line != most:
            yield f"{', '.join(dict.fromkeys(names))}: {line}."


def _rounds(settings: Settings) -> str:
    rounds = f"{settings.repeats} interleaved rounds" if settings.repeats > 1 else "one round"
    slowest = "of each run the slowest rank counts"
    return (
        f"Medians of {rounds}; {'the slowest of them counts' if settings.is_replay else slowest}."
    )


def _print_table(console: Console, rows: list[Row], passes: str) -> None:
    title = "forward" if passes == FORWARD else "forward and backward"
    table = make_table(_LABELS, _COLUMNS, title)
    best = max((row.values["efficiency_percent"] for row in rows if row.values), default=None)
    for row in rows:
        table.add_row(*(label(row) for label in _LABELS.values()), *_cells(row, best))
    console.print(table)


def _cells(row: Row, best: float | None) -> list[str]:
    if row.ms is None:
        return [FAILED, "", "", "", ""]
    size, theoretic = row.placement["world_size"], 1e3 / row.values["theoretic_ms"]
    share = row.values["efficiency_percent"]
    return [
        f"{theoretic * size:.1f}/{size} = {theoretic:.1f}",
        f"{row.values['iterations_per_second']:.1f}",
        f"{row.ms:.3f}",
        f"[bold]{share:.1f}[/]" if share == best else f"{share:.1f}",
        cell(row.peak_bytes, per=1e9),
    ]


def _notes(rows: Rows, settings: Settings, several: bool) -> Iterator[str]:
    yield "theoretic: iter/s of the same kernel on one device, with one rank's tokens, / number of"
    yield "           ranks: each meets the keys of all. eff.: theoretic / measured time."
    yield "GB: most memory above inputs, outputs and gradients, of the rank that holds most."
    if any("qkvpacked" in name for name, _ in rows):
        yield "qkvpacked functions have as many KV heads as query heads."
    if several and settings.is_replay:
        yield "Kernels were replayed one after the other: clocks may have changed in between."
    if settings.device.type == "cpu":
        yield ON_CPU
        cores, ranks = os.cpu_count() or 1, settings.world_size
        if not settings.is_replay and cores < ranks:
            yield f"{ranks} ranks share this machine's {cores} core{'s' * (cores > 1)}."
