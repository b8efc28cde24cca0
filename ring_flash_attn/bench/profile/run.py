"""`profile`: measure, record, ask the tools, and write everything into a folder."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..implementations import implementation_names
from ..machine import Peak, commit, machine, make_results, measure_peak, versions
from ..measure import measure
from ..results import BENCH, COMPARE, REPLAY, Results, Row
from ..timing import WARM_UP, Stopwatch, interleaved, on_device, peak_bytes
from . import parts
from .facts import Facts, TimedPass
from .nsight import Missing, use_ncu, use_nsys
from .subject import Subject
from .summary import baseline_lines, comparison_lines, summary
from .trace import Activity, Overlap, overlap, record_memory, record_trace

Report = Callable[[str], None]


def profile(subject: Subject, folder: Path, repeats: int, report: Report) -> Facts:
    """Find out everything about the subject, and write it into a folder that exists.

    Medians are of `repeats` rounds; `report` is called with what is being done.
    """
    device = subject.device
    with on_device(device):
        report("measuring the peak")
        peak = measure_peak(device, subject.workload.dtype)
        where = machine(device, peak)
        _write_machine(where, folder)
        timed = _time(subject, peak, repeats, report)
        activity, missing = _record(subject, folder, report)
        found_overlap = _overlap(subject, timed[-1], report)
        measured = {}
        for kind, names, file in (
            (BENCH, [subject.kernel], parts.BASELINE),
            (COMPARE, implementation_names(), parts.COMPARISON),
        ):
            options: Any = {"repeats": repeats, "grad": subject.grad, "report": report}
            rows = measure(names, subject.share, device, kind=kind, **options)
            found = make_results(rows, device, {"repeats": repeats}, peak)
            found.save(folder / file)
            alone = kind == BENCH
            lines = baseline_lines(found) if alone else comparison_lines(found, subject.kernel)
            _write_lines((folder / file).with_suffix(".txt"), lines)
            measured[kind] = found.rows
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the tools' processes need room
        missing |= use_nsys(subject, folder, report)
        no_ncu, counters = use_ncu(subject, folder, report)
    facts = Facts(
        subject,
        where,
        repeats,
        timed,
        activity,
        found_overlap,
        measured[BENCH],
        measured[COMPARE],
        counters,
        missing | no_ncu,
    )
    (folder / parts.SUMMARY).write_text(summary(facts), encoding="utf-8")
    return facts


def results(facts: Facts) -> Results:
    """For one file: all rows, and everything else as details.

    Those of the comparison have our kernel too; a replayed rank has rows of its own.
    """
    subject, own = facts.subject, []
    if subject.world_size > 1:
        own = [
            Row(
                REPLAY,
                subject.kernel,
                each.passes,
                subject.share.to_dict(),
                subject.place(),
                each.samples_ms,
                each.tflops,
                each.peak_bytes,
                {"host_ms": each.host_ms},
            )
            for each in facts.timed
        ]
    rows = (*own, *facts.baseline, *facts.comparison)
    details, settings = {"profile": facts.to_dict()}, {"repeats": facts.repeats}
    return make_results(rows, subject.device, settings, facts.main.peak, details)


def _time(
    subject: Subject, peak: Peak | None, repeats: int, report: Report
) -> tuple[TimedPass, ...]:
    """Each pass, and of a rank with a link also without it."""
    works: dict[tuple[str, bool], Any] = {
        (name, True): work for name, work in subject.works().items()
    }
    linked = subject.placement.link is not None
    if linked:
        works |= {(name, False): work for name, work in subject.works(linked=False).items()}
    samples = interleaved(works, Stopwatch(subject.device), repeats, report)
    bare = subject.works(keep_buffers=False)
    found = []
    for name in subject.passes:
        runs = samples[name, True]
        ms, host_ms = runs.median.device, runs.median.host
        exposed = ms - samples[name, False].median.device if linked else None
        work, memory = subject.flops(name), peak_bytes(bare[name], subject.device)
        least = subject.least_bytes(name)
        found.append(TimedPass(name, runs.device, host_ms, work, least, peak, memory, exposed))
    return tuple(found)


def _record(subject: Subject, folder: Path, report: Report) -> tuple[Activity, Missing]:
    work = subject.works()[subject.passes[-1]]
    report("a trace")
    activity = record_trace(work, subject.device, folder / parts.TRACE)
    if subject.device.type != "cuda":
        return activity, {parts.MEMORY: "torch records the memory of GPUs; this ran on the CPU"}
    report("a history of the memory")
    record_memory(work, subject.device, folder / parts.MEMORY)
    return activity, {}


def _overlap(subject: Subject, timed: TimedPass, report: Report) -> Overlap | None:
    """Of a rank with a link, in the passes that are profiled."""
    if subject.placement.link is None:
        return None
    report("when transfers and kernels ran")
    rank, watch = subject.one_rank(linked=True), Stopwatch(subject.device)
    for _ in range(WARM_UP):
        rank.recorded(subject.grad)
    watch.lead(timed.host_ms)
    return overlap(rank.recorded(subject.grad))


def _write_lines(file: Path, lines: Iterable[str]) -> None:
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write_machine(where: Mapping[str, object], folder: Path) -> None:
    found = versions()
    plain = {"machine": where, "versions": found, "commit": commit()}
    _write_lines(folder / parts.MACHINE, [json.dumps(plain, indent=1)])
    lines = [f"{name}: {value}" for group in (where, found) for name, value in group.items()]
    try:
        query = subprocess.run(
            ["nvidia-smi", "-q"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        query = f"nvidia-smi -q says nothing here: {error}"
    _write_lines(folder / parts.MACHINE_TEXT, [*lines, "", query])
