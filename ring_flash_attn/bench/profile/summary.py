"""The texts of a profile: SUMMARY.md, where to begin, and the measurements as plain lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..machine import POOR, versions
from ..results import ON_CPU, Results, cell, least, mib, run_times, speed_up
from .counters import METRICS, Counters
from .facts import Facts, TimedPass
from .findings import find, passes_name, short, verdicts
from .parts import PARTS
from .trace import Used

_KERNELS, _RANGES, _STALLS = 12, 12, 3
_NONE = "–"
_WIDTHS = (28, 14, 14, 14)  # of columns of plain lines


def summary(facts: Facts) -> str:
    """The whole text."""
    opening = (_head, _findings, _verdicts, _passes, _kernels)
    sections = (*opening, _overlap, _counters, _comparison, _files, _notes)
    return "\n".join(line for section in sections for line in section(facts)) + "\n"


def _head(facts: Facts) -> Iterator[str]:
    subject = facts.subject
    yield f"# Profile of {subject}"
    yield ""
    tokens = "" if subject.world_size == 1 else " for each rank"
    yield f"{subject.share}{tokens}, on {facts.machine['device']}. Start here."
    if subject.world_size > 1:
        link = "communication is removed"
        if subject.placement.link is not None:
            link = f"link {subject.placement.link_name}"
        yield f"A replay: no other rank was there, what it receives is random data, {link}."
    if facts.on_cpu:
        yield ON_CPU


def _findings(facts: Facts) -> Iterator[str]:
    yield from ("", "## What is slow, and why", "")
    for number, finding in enumerate(find(facts), 1):
        yield f"{number}. {finding}"


def _table(
    head: Sequence[str], rows: Iterable[Sequence[str]], cells: str = "---:"
) -> Iterator[str]:
    yield ""
    yield f"| {' | '.join(head)} |"
    yield f"|{'|'.join(['---'] + [cells] * (len(head) - 1))}|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def _verdicts(facts: Facts) -> Iterator[str]:
    found = list(verdicts(facts))
    if not found:
        return
    yield from ("", "## Verdicts")
    rows = ([each.what, each.value, each.limits, each.word] for each in found)
    yield from _table(("what", "measured", "limits", "verdict"), rows, "---")
    needed = [each for each in found if each.word == POOR and each.advice]
    yield from ("", *(f"- {each.what}: try {each.advice}." for each in needed))


def _passes(facts: Facts) -> Iterator[str]:
    yield from ("", "## Passes and the roofline")
    head = ("pass", "ms", "host ms", "TFLOP/s", "% of matmul", "GB/s", "% of copy")
    more = ("FLOP/byte", "bound by", "least ms", "exposed ms", "MiB")
    yield from _table((*head, *more), map(_pass, facts.timed))
    yield ""
    peak, ridge = facts.main.peak, facts.main.ridge
    if peak is not None and ridge is not None:
        yield (
            f"Measured peaks: {peak.tflops:.4g} TFLOP/s (product of large matrices), "
            f"{peak.gbps:.4g} GB/s (copy, bytes read and written). Above {ridge:.0f} "
            "FLOP/byte arithmetic is the limit, below it memory; least ms is what the nearer "
            "limit allows."
        )
    yield (
        "GB/s is the least traffic that there can be (inputs read once, results written once) over "
        f"the time. Medians of {facts.repeats} rounds."
    )


def _pass(timed: TimedPass) -> list[str]:
    return [
        passes_name(timed.passes),
        f"{timed.ms:.3f}",
        f"{timed.host_ms:.3f}",
        f"{timed.tflops:.4g}",
        _percent(timed.compute_share),
        f"{timed.gbps:.4g}",
        _percent(timed.bandwidth_share),
        f"{timed.intensity:.0f}",
        timed.bound or _NONE,
        cell(timed.least_ms, missing=_NONE),
        cell(timed.exposed_ms, missing=_NONE),
        mib(timed.peak_bytes, _NONE),
    ]


def _percent(share: float | None) -> str:
    return cell(None if share is None else 100 * share, ".1f", _NONE)


def _kernels(facts: Facts) -> Iterator[str]:
    activity, runs = facts.activity, facts.activity.runs
    what = "kernel" if activity.on_device else "operator"

    def rows(used: Sequence[Used], most: int) -> Iterator[list[str]]:
        for each in used[:most]:
            share = 100 * each.ms / activity.kernels_ms
            name, calls = f"`{short(each.name)}`", f"{each.calls / runs:g}"
            yield [name, calls, f"{each.ms / runs:.3f}", f"{share:.1f}"]

    yield from ("", f"## {what.capitalize()}s", "")
    busy = ", ".join(f"{name}: {ms:.3f} ms" for name, ms in activity.streams.items())
    yield (
        f"Of {passes_name(facts.main.passes)}, {runs} runs in a row under torch.profiler: busy "
        f"{activity.busy_ms:.3f} of {activity.span_ms:.3f} ms"
        + (f"; streams {busy}." if activity.on_device else ". Without what they call themselves.")
    )
    yield from _table((what, "calls a run", "ms a run", "%"), rows(activity.kernels, _KERNELS))
    if activity.ranges:
        yield from ("", "Ranges of this library, host time with all that is inside:")
        named = ([r[0], r[1], r[2]] for r in rows(activity.ranges, _RANGES))
        yield from _table(("range", "calls a run", "ms a run"), named)


def _overlap(facts: Facts) -> Iterator[str]:
    overlap = facts.overlap
    if overlap is None:
        return
    yield from ("", "## Communication and compute", "", "One run, forward and backward.")
    head = ("compute ms", "transfers ms", "at the same time", "hidden %", "from start to end")
    values = (overlap.compute, overlap.transfers, overlap.both)
    cells = [*(f"{each:.3f}" for each in values), f"{100 * overlap.hidden_share:.1f}"]
    yield from _table(head, [[*cells, f"{overlap.span:.3f}"]])


def _counters(facts: Facts) -> Iterator[str]:
    if not facts.counters:
        return
    yield from ("", "## Hardware counters (Nsight Compute)")
    head = (
        "kernel",
        "launches",
        "ms",
        *(title for title, *_ in METRICS.values()),
        "waits most for",
    )
    yield from _table(head, map(_counter, facts.counters[:_KERNELS]))


def _counter(each: Counters) -> list[str]:
    values = (cell(each.values[name], ".4g", _NONE) for name in METRICS)
    stalls = ", ".join(f"{reason} {warps:.2f}" for reason, warps in each.stalls[:_STALLS])
    return [f"`{short(each.name)}`", str(each.launches), f"{each.ms:.3f}", *values, stalls or _NONE]


def _comparison(facts: Facts) -> Iterator[str]:
    yield from ("", "## Other implementations, on one device")
    if facts.subject.world_size > 1:
        yield from ("", "A rank's own tokens alone, without the others' keys.")
    rows = [row for row in facts.comparison if row.passes == facts.main.passes]
    able = sorted((row for row in rows if row.ms is not None), key=lambda row: row.ms or 0.0)
    cells = (
        [row.implementation, f"{row.ms:.3f}", f"{row.tflops:.4g}", mib(row.peak_bytes, _NONE)]
        for row in able
    )
    yield from _table(("implementation", "ms", "TFLOP/s", "MiB"), cells)
    yield ""
    for row in rows:
        if row.failed is not None:
            yield f"- {row.implementation}: {row.failed}"


def _files(facts: Facts) -> Iterator[str]:
    yield from ("", "## Files")
    rows = ([f"`{name}`", *part] for name, part in PARTS.items() if name not in facts.missing)
    yield from _table(("file", "what is in it", "how to open it"), rows, "---")
    if facts.missing:
        yield from ("", "## What is missing", "")
        for name, why in facts.missing.items():
            yield f"- `{name}` ({PARTS[name][0]}): {why}."


def _notes(facts: Facts) -> Iterator[str]:
    yield from ("", "## How it was measured", "")
    yield "- Times: without any profiler, behind work that lasts while they are queued (GPU)."
    yield "- Trace, memory and counters: runs of their own, which profilers slow down."
    yield "- The ranges of the trace are named by this library; RFA_NVTX=1 turns them on anywhere."
    yield f"- Versions: {', '.join(map(' '.join, versions().items()))}."


# Plain lines: one kernel alone, and all implementations.


def baseline_lines(results: Results) -> Iterator[str]:
    """Times, rates and memory of each pass."""
    yield f"{results.rows[0].implementation} on {results.machine['device']}"
    for row in results.rows:
        yield from ("", f"{row.passes.capitalize()}:")
        if row.ms is None or row.tflops is None:
            yield f"  failed: {row.failed}"
            continue
        times, work = run_times(row), row.tflops * row.ms
        for name, ms in times.items():
            yield f"  {f'Time ({name}):':<20}{ms:.3f} ms"
        for name, ms in (("peak", times["min"]), ("avg", times["avg"])):
            yield f"  {f'TFLOP/s ({name}):':<20}{work / ms:.4g} TFLOP/s"
        yield f"  {'Memory (MiB):':<20}{mib(row.peak_bytes)}"


def comparison_lines(results: Results, base: str) -> Iterator[str]:
    """Of each pass a table; speed-ups are against the implementation `base`."""
    yield f"On {results.machine['device']}; speed-up against {base}"
    for passes in dict.fromkeys(row.passes for row in results.rows):
        rows = [row for row in results.rows if row.passes == passes]
        yield from (
            "",
            f"{passes.capitalize()}:",
            _line("Implementation", "Time (ms)", "Memory (MiB)", "Speed-up"),
        )
        yield "-" * sum(_WIDTHS)
        own = next((row.ms for row in rows if row.implementation == base), None)
        ran = [row for row in rows if row.ms is not None]
        for row in ran:
            cells = (f"{row.ms:.3f}", mib(row.peak_bytes), speed_up(row, own))
            yield _line(row.implementation, *cells)
        for what, name in (("Fastest", "ms"), ("Lowest memory", "peak_bytes")):
            best = least(ran, name)
            if best is not None:
                yield f"{what}: {best.implementation}"
    missing = {row.implementation: row.failed for row in results.rows if row.failed is not None}
    if missing:
        yield ""
        yield from (f"{name}: {why}" for name, why in missing.items())


def _line(name: str, *cells: str) -> str:
    first, *others = _WIDTHS
    return name.ljust(first) + "".join(c.rjust(w) for c, w in zip(cells, others, strict=True))
