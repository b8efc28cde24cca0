"""`profile`: measure, record, ask the tools, and write everything into a folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..implementations import implementation_names
from ..machine import Peak, commit, machine, make_results, measure_peak, versions
from ..measure import Report, measure
from ..results import BENCH, COMPARE, REPLAY, Results, Row
from ..timing import WARM_UP, Stopwatch, interleaved, on_device, peak_bytes
from . import parts
from .findings import Facts, TimedPass
from .nsight import ToolFailed, run_tool, use_ncu, use_nsys
from .subject import Subject
from .summary import baseline_lines, comparison_lines, summary
from .trace import Overlap, overlap, record_memory, record_trace


def profile(subject: Subject, folder: Path, repeats: int, report: Report) -> Facts:
    """Find out everything about the subject, and write it into a folder that exists.

    Medians are of `repeats` rounds; `report` is called with what is being done.
    """
    device, missing = subject.device, dict[str, str]()
    with on_device(device):
        report("measuring the peak")
        peak = measure_peak(device, subject.workload.dtype)
        where = machine(device, peak)
        _write_machine(where, folder)
        timed = _time(subject, peak, repeats, report)
        work = subject.works()[subject.passes[-1]]
        report("a trace")
        activity = record_trace(work, device, folder / parts.TRACE)
        if device.type == "cuda":
            report("a history of the memory")
            record_memory(work, device, folder / parts.MEMORY)
        else:
            missing[parts.MEMORY] = "torch records the memory of GPUs; this ran on the CPU"
        found_overlap = _overlap(subject, timed[-1], report)
        options: Any = {"repeats": repeats, "grad": subject.grad, "report": report}

        def measured(kind: str, names: Iterable[str], file: str) -> Results:
            rows = measure(list(names), subject.share, device, kind=kind, **options)
            found = make_results(rows, device, {"repeats": repeats}, peak)
            found.save(folder / file)
            return found

        alone = measured(BENCH, [subject.kernel], parts.BASELINE)
        _write_lines(folder / parts.BASELINE_TEXT, baseline_lines(alone))
        compared = measured(COMPARE, implementation_names(), parts.COMPARISON)
        _write_lines(folder / parts.COMPARISON_TEXT, comparison_lines(compared, subject.kernel))
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the tools' processes need room
        missing |= use_nsys(subject, folder, report)
        no_ncu, counters = use_ncu(subject, folder, report)
    own = _rank_rows(subject, timed) if subject.world_size > 1 else ()
    rows = (*own, *alone.rows, *compared.rows)
    found = (timed, activity, found_overlap, rows, counters, missing | no_ncu)
    facts = Facts(subject, where, repeats, *found)
    (folder / parts.SUMMARY).write_text(summary(facts), encoding="utf-8")
    return facts


def results(facts: Facts) -> Results:
    """For one file: all rows, and everything else as details."""
    details, settings = {"profile": facts.to_dict()}, {"repeats": facts.repeats}
    return make_results(facts.rows, facts.subject.device, settings, facts.main.peak, details)


def _rank_rows(subject: Subject, timed: Iterable[TimedPass]) -> Iterator[Row]:
    share, place = subject.share.to_dict(), subject.place()
    for each in timed:
        found = (each.samples_ms, each.tflops, each.peak_bytes, {"host_ms": each.host_ms})
        yield Row(REPLAY, subject.kernel, each.passes, share, place, *found)


def _time(
    subject: Subject, peak: Peak | None, repeats: int, report: Report
) -> tuple[TimedPass, ...]:
    """Each pass, and of a rank with a link also without it."""
    linked = subject.placement.link is not None
    works = {
        (name, link): work
        for link in ((True, False) if linked else (True,))
        for name, work in subject.works(linked=link).items()
    }
    samples = interleaved(works, Stopwatch(subject.device), repeats, report)
    bare = subject.works(keep_buffers=False)

    def timed(name: str) -> TimedPass:
        runs = samples[name, True]
        work, memory = subject.flops(name), peak_bytes(bare[name], subject.device)
        least, found = subject.least_bytes(name), (name, runs.device, runs.median.host)
        exposed = runs.median.device - samples[name, False].median.device if linked else None
        return TimedPass(*found, work, least, peak, memory, exposed)

    return tuple(map(timed, subject.passes))


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
        query = run_tool(["nvidia-smi", "-q"], seconds=60)
    except ToolFailed as error:
        query = f"nvidia-smi -q says nothing here: {error}"
    _write_lines(folder / parts.MACHINE_TEXT, [*lines, "", query])
