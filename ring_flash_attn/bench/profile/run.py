"""`profile`: measure, record, ask the tools, and write everything into a folder."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..implementations import implementation_names
from ..machine import Peak, commit, machine, measure_peak, versions
from ..measure import measure
from ..results import BENCH, COMPARE, REPLAY, Results, Row
from ..timing import WARM_UP, Stopwatch, interleaved, on_device, peak_bytes
from . import parts
from .facts import Facts, Roofline, Timed
from .nsight import use_ncu, use_nsys
from .parts import PARTS, Part
from .subject import Subject
from .summary import baseline_lines, comparison_lines, summary
from .trace import Activity, Overlap, overlap, record_memory, record_trace

Report = Callable[[str], None]
_MEASURED = {  # files of rows of this kind
    BENCH: (parts.BASELINE, parts.BASELINE_TEXT),
    COMPARE: (parts.COMPARISON, parts.COMPARISON_TEXT),
}


@dataclass(frozen=True)
class Context:
    """Where a profile is made, and for which command.

    Attributes:
        folder: for the files; it is there.
        repeats: rounds of the medians.
        command: that the user typed.
        report: is told what is being done.
    """

    folder: Path
    repeats: int
    command: str
    report: Report


def profile(subject: Subject, context: Context) -> Facts:
    """Find out everything about the subject, and write it into the folder."""
    device, report = subject.device, context.report
    with on_device(device):
        report("measuring the peak")
        peak = measure_peak(device, subject.workload.dtype)
        where = machine(device, peak)
        files = [*_write_machine(where, context.folder)]
        timed = _time(subject, peak, context)
        activity, recorded = _record(subject, context)
        found_overlap = _overlap(subject, timed[-1], context)
        baseline, comparison = _measure(subject, where, context)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the tools' processes need room
        nsys = use_nsys(subject, context.folder, report)
        ncu = use_ncu(subject, context.folder, report)
    files += [*recorded, *nsys.parts, *ncu.parts]
    files += [PARTS[name] for names in _MEASURED.values() for name in names]
    order = list(PARTS)
    facts = Facts(
        subject,
        where,
        versions(),
        context.repeats,
        peak,
        timed,
        activity,
        found_overlap,
        baseline,
        comparison,
        ncu.counters,
        tuple(sorted(files, key=lambda part: order.index(part.name))),
    )
    (context.folder / parts.SUMMARY).write_text(summary(facts), encoding="utf-8")
    return facts


def results(facts: Facts, command: str) -> Results:
    """For one file: all rows, and everything else as details."""
    return _results(
        command, facts.machine, facts.repeats, _rows(facts), {"profile": facts.to_dict()}
    )


def _rows(facts: Facts) -> tuple[Row, ...]:
    """Those of the comparison have our kernel too; a replayed rank has rows of its own."""
    subject, own = facts.subject, []
    if subject.world_size > 1:
        own = [
            Row(
                REPLAY,
                subject.kernel,
                each.passes,
                subject.workload.to_dict(),
                subject.placement,
                each.samples_ms,
                each.roofline.tflops,
                each.peak_bytes,
                {"host_ms": each.host_ms},
            )
            for each in facts.timed
        ]
    return (*own, *facts.baseline, *facts.comparison)


def _results(
    command: str,
    where: Mapping[str, object],
    repeats: int,
    rows: tuple[Row, ...],
    details: Mapping[str, Any] | None = None,
) -> Results:
    return Results(command, where, versions(), commit(), {"repeats": repeats}, rows, details or {})


def _time(subject: Subject, peak: Peak | None, context: Context) -> tuple[Timed, ...]:
    """Each pass, and of a rank with a link also without it."""
    works: dict[tuple[str, bool], Any] = {
        (name, True): work for name, work in subject.works().items()
    }
    linked = subject.link != "none"
    if linked:
        works |= {(name, False): work for name, work in subject.works(linked=False).items()}
    watch = Stopwatch(subject.device)
    samples = interleaved(works, watch, context.repeats, context.report)
    bare = subject.works(keeps_buffers=False)
    found = []
    for name in subject.passes:
        runs = samples[name, True]
        ms = runs.median.device
        roof = Roofline(ms, subject.flops(name), subject.least_bytes(name), peak)
        memory = peak_bytes(bare[name], subject.device)
        exposed = ms - samples[name, False].median.device if linked else None
        found.append(Timed(name, runs.device, runs.median.host, roof, memory, exposed))
    return tuple(found)


def _record(subject: Subject, context: Context) -> tuple[Activity, tuple[Part, ...]]:
    work = subject.works()[subject.passes[-1]]
    context.report("a trace")
    activity = record_trace(work, subject.device, context.folder / parts.TRACE)
    memory = PARTS[parts.MEMORY]
    if subject.device.type != "cuda":
        return activity, (
            PARTS[parts.TRACE],
            memory.without("torch records the memory of GPUs; this ran on the CPU"),
        )
    context.report("a history of the memory")
    record_memory(work, subject.device, context.folder / parts.MEMORY)
    return activity, (PARTS[parts.TRACE], memory)


def _overlap(subject: Subject, timed: Timed, context: Context) -> Overlap | None:
    """Of a rank with a link, in the passes that are profiled."""
    if subject.world_size == 1 or subject.link == "none":
        return None
    context.report("when transfers and kernels ran")
    rank, watch = subject.one_rank(linked=True), Stopwatch(subject.device)
    for _ in range(WARM_UP):
        rank.recorded(subject.grad)
    watch.lead(timed.host_ms)
    return overlap(rank.recorded(subject.grad))


def _measure(
    subject: Subject, where: Mapping[str, object], context: Context
) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Our kernel, and all implementations, on one device."""
    found = {}
    for kind, names in ((BENCH, [subject.kernel]), (COMPARE, implementation_names())):
        rows = measure(
            names,
            subject.workload,
            subject.device,
            kind=kind,
            repeats=context.repeats,
            grad=subject.grad,
            report=context.report,
        )
        saved = _results(context.command, where, context.repeats, tuple(rows))
        file, text = (context.folder / name for name in _MEASURED[kind])
        saved.save(file)
        lines = baseline_lines(saved) if kind == BENCH else comparison_lines(saved, subject.kernel)
        text.write_text("\n".join(lines) + "\n", encoding="utf-8")
        found[kind] = saved.rows
    return found[BENCH], found[COMPARE]


def _write_machine(where: Mapping[str, object], folder: Path) -> tuple[Part, Part]:
    values = {"machine": where, "versions": versions(), "commit": commit()}
    text = json.dumps(values, indent=1)
    (folder / parts.MACHINE).write_text(text + "\n", encoding="utf-8")
    lines = [f"{name}: {value}" for group in (where, versions()) for name, value in group.items()]
    (folder / parts.MACHINE_TEXT).write_text(
        "\n".join([*lines, "", _nvidia_smi()]) + "\n", encoding="utf-8"
    )
    return PARTS[parts.MACHINE], PARTS[parts.MACHINE_TEXT]


def _nvidia_smi() -> str:
    """All that the driver's tool tells, or why it does not."""
    try:
        return subprocess.run(
            ["nvidia-smi", "-q"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi -q says nothing here: {error}"
