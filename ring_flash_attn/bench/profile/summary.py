"""The texts of a profile: SUMMARY.md, where to begin, and the measurements as plain lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from ..machine import POOR, versions
from ..results import ON_CPU, Results, cell, least, mib, run_times, speed_up
from .findings import Facts, TimedPass, find, passes_name, short, verdicts
from .nsight import METRICS
from .parts import PARTS
from .trace import Values

_KERNELS, _STALLS = 12, 3  # shown
_NONE = "–"
_WIDTHS = (28, 14, 14, 14)  # of columns of plain lines
_NOTES = """
## How it was measured

- Times: without any profiler, behind work that lasts while they are queued (GPU).
- Trace, memory and counters: runs of their own, which profilers slow down.
- The ranges of the trace are named by this library; RFA_NVTX=1 turns them on anywhere."""


def _percent(share: float | None) -> str:
    return cell(None if share is None else 100 * share, ".1f", _NONE)


_PASS: dict[str, Callable[[TimedPass], str]] = {  # columns of a pass
    "pass": lambda timed: passes_name(timed.passes),
    "ms": lambda timed: f"{timed.ms:.3f}",
    "host ms": lambda timed: f"{timed.host_ms:.3f}",
    "TFLOP/s": lambda timed: f"{timed.tflops:.4g}",
    "% of matmul": lambda timed: _percent(timed.compute_share),
    "GB/s": lambda timed: f"{timed.gbps:.4g}",
    "% of copy": lambda timed: _percent(timed.bandwidth_share),
    "FLOP/byte": lambda timed: f"{timed.intensity:.0f}",
    "bound by": lambda timed: timed.bound or _NONE,
    "least ms": lambda timed: cell(timed.least_ms, missing=_NONE),
    "exposed ms": lambda timed: cell(timed.exposed_ms, missing=_NONE),
    "MiB": lambda timed: mib(timed.peak_bytes, _NONE),
}


def summary(facts: Facts) -> str:
    sections = (_opening, _passes, _kernels, _overlap, _counters, _comparison, _files)
    return "\n".join(line for section in sections for line in section(facts)) + "\n"


def _table(
    head: Iterable[str], rows: Iterable[Sequence[str]], cells: str = "---:"
) -> Iterator[str]:
    titles = list(head)
    yield ""
    yield f"| {' | '.join(titles)} |"
    yield f"|{'|'.join(['---'] + [cells] * (len(titles) - 1))}|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def _opening(facts: Facts) -> Iterator[str]:
    subject = facts.subject
    yield from (f"# Profile of {subject}", "")
    tokens = " for each rank" if subject.replayed else ""
    yield f"{subject.share}{tokens}, on {facts.machine['device']}. Start here."
    if subject.replayed:
        link = "communication is removed"
        if subject.placement.link is not None:
            link = f"link {subject.placement.link_name}"
        yield f"A replay: no other rank was there, what it receives is random data, {link}."
    if facts.on_cpu:
        yield ON_CPU
    yield from ("", "## What is slow, and why", "")
    yield from (f"{number}. {finding}" for number, finding in enumerate(find(facts), 1))
    judged = list(verdicts(facts))
    if judged:
        yield from ("", "## Verdicts")
        rows = ([each.what, each.value, each.limits, each.word] for each in judged)
        yield from _table(("what", "measured", "limits", "verdict"), rows, "---")
        needed = [each for each in judged if each.word == POOR and each.advice]
        yield from ("", *(f"- {each.what}: try {each.advice}." for each in needed))


def _passes(facts: Facts) -> Iterator[str]:
    yield from ("", "## Passes and the roofline")
    yield from _table(_PASS, ([show(timed) for show in _PASS.values()] for timed in facts.timed))
    yield ""
    peak = facts.main.peak
    if peak is not None:
        yield (
            f"Measured peaks: {peak.tflops:.4g} TFLOP/s (product of large matrices), "
            f"{peak.gbps:.4g} GB/s (copy, bytes read and written). Above {facts.main.ridge:.0f} "
            "FLOP/byte arithmetic is the limit, below it memory; least ms is what the nearer "
            "limit allows."
        )
    yield (
        "GB/s is the least traffic that there can be (inputs read once, results written once) over "
        f"the time. Medians of {facts.repeats} rounds."
    )


def _kernels(facts: Facts) -> Iterator[str]:
    activity, what, runs = facts.activity, facts.kernel_word, facts.activity["runs"]
    total = sum(each["ms"] for each in activity["kernels"])

    def rows(used: Sequence[Values]) -> Iterator[list[str]]:
        for each in used[:_KERNELS]:
            calls, ms = each["calls"] / runs, each["ms"]
            name, share = f"`{short(each['name'])}`", 100 * ms / total
            yield [name, f"{calls:g}", f"{ms / runs:.3f}", f"{share:.1f}"]

    yield from ("", f"## {what.capitalize()}s", "")
    busy = ", ".join(f"{name}: {ms:.3f} ms" for name, ms in activity["streams"].items())
    yield (
        f"Of {passes_name(facts.main.passes)}, {runs} runs in a row under torch.profiler: busy "
        f"{activity['busy_ms']:.3f} of {activity['span_ms']:.3f} ms"
        + (f"; streams {busy}." if busy else ". Without what they call themselves.")
    )
    yield from _table((what, "calls a run", "ms a run", "%"), rows(activity["kernels"]))
    if activity["ranges"]:
        yield from ("", "Ranges of this library, host time with all that is inside:")
        named = (row[:3] for row in rows(activity["ranges"]))
        yield from _table(("range", "calls a run", "ms a run"), named)


def _overlap(facts: Facts) -> Iterator[str]:
    found = facts.overlap
    if found is not None:
        yield from ("", "## Communication and compute", "", "One run, forward and backward.")
        head = ("compute ms", "transfers ms", "at the same time", "hidden %", "from start to end")
        times = [f"{found[name]:.3f}" for name in ("compute", "transfers", "both", "span")]
        yield from _table(head, [[*times[:3], _percent(found["hidden_share"]), times[3]]])


def _counters(facts: Facts) -> Iterator[str]:
    if not facts.counters:
        return
    yield from ("", "## Hardware counters (Nsight Compute)")
    titles = (title for title, *_ in METRICS.values())
    rows = []
    for each in facts.counters[:_KERNELS]:
        values = (cell(each[name], ".4g", _NONE) for name in METRICS)
        stalls = ", ".join(f"{reason} {warps:.2f}" for reason, warps in each["stalls"][:_STALLS])
        first = f"`{short(each['name'])}`", str(each["launches"]), f"{each['ms']:.3f}"
        rows.append([*first, *values, stalls or _NONE])
    yield from _table(("kernel", "launches", "ms", *titles, "waits most for"), rows)


def _comparison(facts: Facts) -> Iterator[str]:
    yield from ("", "## Other implementations, on one device")
    if facts.subject.replayed:
        yield from ("", "A rank's own tokens alone, without the others' keys.")
    cells = (
        [row.implementation, f"{row.ms:.3f}", f"{row.tflops:.4g}", mib(row.peak_bytes, _NONE)]
        for row in sorted(facts.compared, key=lambda row: row.ms or 0.0)
        if row.ms is not None
    )
    yield from _table(("implementation", "ms", "TFLOP/s", "MiB"), cells)
    failed = (row for row in facts.compared if row.failed is not None)
    yield from ("", *(f"- {row.implementation}: {row.failed}" for row in failed))


def _files(facts: Facts) -> Iterator[str]:
    yield from ("", "## Files")
    rows = ([f"`{name}`", *part] for name, part in PARTS.items() if name not in facts.missing)
    yield from _table(("file", "what is in it", "how to open it"), rows, "---")
    if facts.missing:
        yield from ("", "## What is missing", "")
        yield from (f"- `{name}` ({PARTS[name][0]}): {why}." for name, why in facts.missing.items())
    yield _NOTES
    yield f"- Versions: {', '.join(map(' '.join, versions().items()))}."


def baseline_lines(results: Results) -> Iterator[str]:
    """Plain lines for one kernel: times, rates and memory of each pass."""
    yield f"{results.rows[0].implementation} on {results.device}"
    for row in results.rows:
        yield from ("", f"{row.passes.capitalize()}:")
        if row.ms is None or row.tflops is None:
            yield f"  failed: {row.failed}"
            continue
        times, work = run_times(row), row.tflops * row.ms
        values = {f"Time ({name})": f"{ms:.3f} ms" for name, ms in times.items()}
        for name, ms in (("peak", times["min"]), ("avg", times["avg"])):
            values[f"TFLOP/s ({name})"] = f"{work / ms:.4g} TFLOP/s"
        values["Memory (MiB)"] = mib(row.peak_bytes)
        yield from (f"  {f'{name}:':<20}{value}" for name, value in values.items())


def comparison_lines(results: Results, base: str) -> Iterator[str]:
    """Of each pass a table; speed-ups are against the implementation `base`."""
    yield f"On {results.device}; speed-up against {base}"
    for passes in dict.fromkeys(row.passes for row in results.rows):
        ran = [row for row in results.rows if row.passes == passes and row.ms is not None]
        own = next((row.ms for row in ran if row.implementation == base), None)
        table = [("Implementation", "Time (ms)", "Memory (MiB)", "Speed-up")]
        for row in ran:
            cells = (f"{row.ms:.3f}", mib(row.peak_bytes), speed_up(row, own))
            table.append((row.implementation, *cells))
        head, *lines = (
            name.ljust(_WIDTHS[0]) + "".join(map(str.rjust, cells, _WIDTHS[1:]))
            for name, *cells in table
        )
        yield from ("", f"{passes.capitalize()}:", head, "-" * sum(_WIDTHS), *lines)
        for what, name in (("Fastest", "ms"), ("Lowest memory", "peak_bytes")):
            best = least(ran, name)
            if best is not None:
                yield f"{what}: {best.implementation}"
    missing = {row.implementation: row.failed for row in results.rows if row.failed is not None}
    if missing:
        yield from ("", *(f"{name}: {why}" for name, why in missing.items()))
