"""The tables of `rfa ring`, like those of the original documents, and how to read them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...bench.machine import device_name
from ...bench.ranks import Target
from ...bench.results import FORWARD, Row
from ...bench.workload import dtype_name
from ...comm import launch
from ..versus import print_versus
from .run import Found

_GB = 1e9
_POINT = "layout × route × kernel"
_COLUMNS = ("theoretic iter/s", "iter/s", "ms", "eff. %", "GB")


def print_findings(console: Console, found: Found) -> bool:
    """What was run, a table for each way, what failed, and how to read it; then the comparison.

    Returns:
        Whether a gate, if there is one, lets everything through.
    """
    for line in _explain(found):
        console.print(line, markup=False)
    rows = found.rows()
    for passes in found.passes:
        console.print(_table([row for row in rows if row.passes == passes], passes))
    for finding in found.findings:
        if finding.failed is not None:
            console.print(f"[bold red]failed[/] {escape(finding.target.name)}")
            console.print("  " + finding.failed.replace("\n", "\n  "), markup=False)
    for line in _notes(found):
        console.print(line, markup=False)
    if not found.versus:
        return True
    labels = {"function": _function, _POINT: _point}
    return print_versus(console, found.groups(), found.versus, labels, found.limits)


def _explain(found: Found) -> Iterator[str]:
    way, size = found.way, found.way.world_size
    where = device_name(way.device)
    if way.is_replay:
        yield (
            f"Replays of {size} ranks (the first, the last and the one with most pairs), one at a "
            f"time, on one device ({where}): no other is there, and what they receive is random "
            "data."
        )
        if way.link is None:
            yield "Communication is removed: messages cost nothing. --link emulates one."
        else:
            yield f"Communication is emulated, {way.link}. Other ranks never come late."
    else:
        origin = "of torchrun" if launch.torchrun_rank() else "in new processes"
        yield f"{size} rank{'s' * (size > 1)} {origin} over {way.used_backend}, {where}."
        if way.device.type == "cuda" and way.used_backend == "gloo":
            yield "gloo takes what GPUs send through the host: times say little about NCCL."
    yield from _sizes([finding.target for finding in found.findings])
    rounds = f"{found.repeats} interleaved rounds" if found.repeats > 1 else "one round"
    counts = (
        "the slowest of them counts" if way.is_replay else "of each run the slowest rank counts"
    )
    yield f"Medians of {rounds}; {counts}."


def _sizes(targets: Sequence[Target]) -> Iterator[str]:
    """Each rank's shard; more lines where functions differ."""
    lines: dict[str, list[str]] = {}
    for target in targets:
        s = target.scenario
        documents = len(s.lengths)
        what = f"{s.tokens} tokens" + (f" in {documents} documents" if documents > 1 else "")
        line = (
            f"{what}, batch {s.batch}, heads {s.nheads}/{s.nheads_k}, headdim {s.headdim}, "
            f"{dtype_name(s.dtype)}, {'causal' if s.causal else 'full'}"
        )
        lines.setdefault(line, []).append(target.name)
    most = max(lines, key=lambda line: len(lines[line]))
    yield f"Each rank: {most}."
    for line, names in lines.items():
        if line != most:
            yield f"{', '.join(names)}: {line}."


def _table(rows: Sequence[Row], passes: str) -> Table:
    title = "forward" if passes == FORWARD else "forward and backward"
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    shown.add_column("function", overflow="fold")
    shown.add_column(_POINT, overflow="fold")
    for name in _COLUMNS:
        shown.add_column(name, justify="right", no_wrap=True)
    best = max((row.values["efficiency_percent"] for row in rows if row.values), default=None)
    for row in rows:
        shown.add_row(_function(row), _point(row), *_cells(row, best))
    return shown


def _function(row: Row) -> str:
    return str(row.placement["function"])


def _point(row: Row) -> str:
    return f"{row.placement['layout']} × {row.placement['route']} × {row.implementation}"


def _cells(row: Row, best: float | None) -> list[str]:
    if row.ms is None:
        return ["[bold red]failed[/]", "", "", "", ""]
    size, theoretic = row.placement["world_size"], 1e3 / row.values["theoretic_ms"]
    share = row.values["efficiency_percent"]
    return [
        f"{theoretic * size:.1f}/{size} = {theoretic:.1f}",
        f"{row.values['iterations_per_second']:.1f}",
        f"{row.ms:.3f}",
        f"[bold]{share:.1f}[/]" if share == best else f"{share:.1f}",
        "n/a" if row.peak_bytes is None else f"{row.peak_bytes / _GB:.3f}",
    ]


def _notes(found: Found) -> Iterator[str]:
    yield "theoretic: iter/s of the same kernel on one device, with one rank's tokens, / number of"
    yield "           ranks: each meets the keys of all. eff.: theoretic / measured time."
    yield "GB: most memory above inputs, outputs and gradients, of the rank that holds most."
    if any(finding.target.form.startswith("qkv") for finding in found.findings):
        yield "qkvpacked functions have as many KV heads as query heads."
    if found.versus and found.way.is_replay:
        yield "Kernels were replayed one after the other: clocks may have changed in between."
    if found.way.device.type == "cpu":
        yield "On the CPU these are times of the host, and say little about GPUs."
        cores, ranks = os.cpu_count() or 1, found.way.world_size
        if not found.way.is_replay and cores < ranks:
            yield f"{ranks} ranks share this machine's {cores} core{'s' * (cores > 1)}."
