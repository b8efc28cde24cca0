"""`profile`: measure, record, ask the tools, and write everything into a folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..implementations import implementation_names
from ..machine import make_results
from ..measure import Report, measure
from ..replays.results import Bar, replay_rows
from ..replays.run import replay_ranks
from ..results import BENCH, COMPARE, Peak, Results, Row
from ..timing import measure_peak, on_device
from ..workload import BOTH, FORWARD
from . import parts
from .findings import Facts, TimedPass
from .nsight import ToolFailed, run_tool, use_ncu, use_nsys
from .subject import Subject
from .summary import baseline_lines, comparison_lines, summary
from .trace import overlap, record_memory, record_trace


def profile(subject: Subject, folder: Path, repeats: int, report: Report) -> Facts:
    """Find out everything about the subject, and write it into a folder that exists.

    Medians are of `repeats` rounds; `report` is called with what is being done.
    """
    device, kernel, missing = subject.device, subject.placement.kernel, dict[str, str]()
    with on_device(device):
        report("measuring the peak")
        peak = measure_peak(device, subject.workload.dtype)

        def save(rows: Sequence[Row], file: str) -> Results:
            found = make_results(rows, device, {"repeats": repeats}, peak)
            found.save(folder / file)
            return found

        where = save((), parts.MACHINE)
        _write_lines(folder / parts.MACHINE_TEXT, _machine_lines(where))
        call = (subject.share, device)
        options: Any = {"repeats": repeats, "grad": subject.grad, "report": report}
        alone = save(measure([kernel], *call, kind=BENCH, **options), parts.BASELINE)
        _write_lines(folder / parts.BASELINE_TEXT, baseline_lines(alone))
        timed, bars = _time(subject, alone.rows, peak, repeats, report)
        work = subject.work()
        report("a trace")
        activity = record_trace(work, device, folder / parts.TRACE)
        if device.type == "cuda":
            report("a history of the memory")
            record_memory(work, device, folder / parts.MEMORY)
        else:
            missing[parts.MEMORY] = "torch records the memory of GPUs; this ran on the CPU"
        del work  # with its tensors: others need the room
        names = implementation_names()
        compared = save(measure(names, *call, kind=COMPARE, **options), parts.COMPARISON)
        _write_lines(folder / parts.COMPARISON_TEXT, comparison_lines(compared, kernel))
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the tools' processes need room
        missing |= use_nsys(subject, folder, report)
        no_ncu, counters = use_ncu(subject, folder, report)
    rows = (*(each.row for each in timed if subject.replayed), *alone.rows, *compared.rows)
    found = (timed, activity, overlap(bars) if bars else None, rows, counters, missing | no_ncu)
    facts = Facts(subject, where.machine, repeats, *found)
    (folder / parts.SUMMARY).write_text(summary(facts), encoding="utf-8")
    return facts


def _time(
    subject: Subject, rows: Iterable[Row], peak: Peak | None, repeats: int, report: Report
) -> tuple[tuple[TimedPass, ...], Sequence[Bar]]:
    """Each pass, by rows of one device or of a replay, which has a timeline over a link."""
    received, bars = {FORWARD: 0, BOTH: 0}, list[Bar]()
    if subject.replayed:
        replay = replay_ranks(
            subject.workload,
            subject.placement,
            device=subject.device,
            ranks=[subject.rank],
            repeats=repeats,
            timeline=subject.placement.link is not None,
            report=report,
        )
        rows = replay_rows(replay)
        forward, backward = (each.received for each in replay.ours.ranks[0].costs)
        received = {FORWARD: forward, BOTH: forward + backward}
        bars = [bar for bar in replay.timeline if subject.grad or bar.direction == FORWARD]
    least = {name: subject.share.bytes(name) + received[name] for name in subject.passes}
    timed = (TimedPass(row, least[row.passes], peak) for row in rows if row.passes in least)
    return tuple(timed), bars


def results(facts: Facts) -> Results:
    """For one file: all rows, and everything else as details."""
    details, settings = {"profile": facts.to_dict()}, {"repeats": facts.repeats}
    return make_results(facts.rows, facts.subject.device, settings, facts.main.peak, details)


def _write_lines(file: Path, lines: Iterable[str]) -> None:
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _machine_lines(where: Results) -> Iterator[str]:
    for group in (where.machine, where.versions):
        yield from (f"{name}: {value}" for name, value in group.items())
    try:
        yield f"\n{run_tool(['nvidia-smi', '-q'], seconds=60)}"
    except ToolFailed as error:
        yield f"\nnvidia-smi -q says nothing here: {error}"
