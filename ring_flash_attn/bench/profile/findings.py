"""What a profile has found: numbers, findings (what is slow and why, what to try) and verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...kernels.base import kernel_names
from ..machine import Verdict, judge, machine_verdicts, rate_verdict
from ..results import COMPARE, Peak, Row
from ..workload import BOTH
from .parts import NCU_COMPUTE, PARTS
from .subject import Subject
from .trace import Values

NEAR = 0.5  # of a limit: what is nearer to it is bound by it
COMPUTE, BANDWIDTH, NEITHER = "compute-bound", "bandwidth-bound", "neither"
_IDLE, _SMALL, _HIDDEN = 0.1, 15.0, 0.9  # shares that are worth a word
_MEASURABLE, _EXPOSED, _FASTER = 0.01, 0.05, 0.95
_TENSOR, _OCCUPANCY = 60.0, 25.0  # percent
_COPIES = ("memcpy", "memset", "copy", "fill")  # in names of kernels
_SHOWN = 60  # characters of a kernel's name
# Limits of the original documents.
_BUSY, _BANDWIDTH, _SMS, _SPEED_UP = (90.0, 70.0), 80.0, 90.0, (3.0, 2.0)
_PLAIN = "torch standard"
_HOST_BOUND = "larger calls, CUDA graphs, or torch.compile around the model"
Finding = tuple[str, str]  # a sentence with a number, and what to try, if anything


@dataclass
class TimedPass:
    """A pass that was timed, and how near it comes to the device's limits (the roofline)."""

    row: Row
    bytes: float  # the least that it has to read and write
    peak: Peak | None  # what the device does at best; None on the CPU, and so are shares of it

    def __post_init__(self) -> None:
        row, peak = self.row, self.peak
        if row.ms is None or row.tflops is None:
            raise RuntimeError(f"{row.implementation}, {row.passes}: {row.failed}")
        self.passes, self.ms, self.tflops = row.passes, row.ms, row.tflops
        self.peak_bytes = row.peak_bytes
        self.host_ms, self.exposed_ms = row.values["host_ms"], row.values.get("exposed_ms")
        self.flops, self.gbps = round(self.tflops * self.ms * 1e9), self.bytes / self.ms / 1e6
        self.intensity = self.flops / self.bytes  # FLOP for each byte
        self.compute_share = self.bandwidth_share = self.ridge = self.least_ms = self.bound = None
        if peak is not None:
            self.compute_share = self.tflops / peak.tflops
            self.bandwidth_share = self.gbps / peak.gbps
            # The intensity above which arithmetic is the limit; what the nearer limit would allow.
            self.ridge = peak.tflops * 1e3 / peak.gbps
            nearest = max(self.compute_share, self.bandwidth_share)
            self.least_ms = self.ms * nearest
            limit = COMPUTE if self.intensity >= self.ridge else BANDWIDTH
            self.bound = limit if nearest >= NEAR else NEITHER

    def to_dict(self) -> dict[str, float | str | None]:
        """Plain values, without the runs."""
        left_out = ("row", "passes", "peak")
        return {name: each for name, each in vars(self).items() if name not in left_out}


@dataclass(frozen=True)
class Facts:
    """Everything that was found."""

    subject: Subject
    machine: Mapping[str, object]
    repeats: int  # rounds of the medians
    timed: tuple[TimedPass, ...]  # the last one is what the files are about
    activity: Values  # of `read_trace`
    overlap: Values | None  # of a replayed rank with a link
    rows: tuple[Row, ...]  # of a replayed rank, this kernel alone, and all implementations
    counters: tuple[Values, ...]  # of `read_counters`, longest kernel first
    missing: Mapping[str, str]  # files that could not be written, and why

    @property
    def main(self) -> TimedPass:
        """The pass that the files are about."""
        return self.timed[-1]

    @property
    def compared(self) -> list[Row]:
        """All implementations on one device, in that pass."""
        return [r for r in self.rows if r.kind == COMPARE and r.passes == self.main.passes]

    @property
    def kernel_word(self) -> str:
        """What `activity` is of."""
        return "kernel" if self.activity["on_device"] else "operator"

    @property
    def on_cpu(self) -> bool:
        return self.subject.device.type == "cpu"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without the rows."""
        return {
            "subject": self.subject.to_dict(),
            "passes": {each.passes: each.to_dict() for each in self.timed},
            "activity": self.activity,
            "overlap": self.overlap,
            "counters": self.counters,
            "files": {name: self.missing.get(name, "written") for name in PARTS},
        }


def find(facts: Facts) -> list[str]:
    """All findings, the most important ones first."""
    makers = (_rate, _host, _kernels, _link, _counters, _others)
    found = [finding for make in makers for finding in make(facts)]
    return [f"{says} Try: {advice}." if advice else says for says, advice in found]


def verdicts(facts: Facts) -> Iterator[Verdict]:
    """What the original documents look at, beside their limits; nothing on the CPU."""
    if facts.on_cpu:
        return
    for timed in facts.timed:
        if timed.peak is not None:
            device = str(facts.machine["device"])
            yield rate_verdict(passes_name(timed.passes), timed.tflops, device, timed.peak)
    busy = 100 * facts.main.ms / max(facts.main.ms, facts.main.host_ms)
    yield judge("GPU busy, in calls one after the other", busy, *_BUSY, " %", _HOST_BOUND)
    for first in facts.counters[:1]:
        for what, value, good in (
            ("memory bandwidth", first["memory_percent"], _BANDWIDTH),
            ("SMs", first["sm_percent"], _SMS),
        ):
            if value is not None:
                yield judge(f"{what} of `{short(first['name'])}`", value, good, None, " %")
    times = _times(facts)
    if facts.subject.placement.kernel in times and _PLAIN in times:
        ratio = times[_PLAIN] / times[facts.subject.placement.kernel]
        yield judge(f"speed-up over {_PLAIN}", ratio, *_SPEED_UP, "x", "longer sequences")
    yield from machine_verdicts(facts.machine)


def passes_name(passes: str) -> str:
    return "forward and backward" if passes == BOTH else passes


def short(name: str) -> str:
    """A kernel's name, not longer than a table can bear."""
    return name if len(name) <= _SHOWN else name[: _SHOWN - 1] + "…"


def _rate(facts: Facts) -> Iterator[Finding]:
    roof, peak = facts.main, facts.main.peak
    who = "Forward and backward take" if roof.passes == BOTH else "Forward takes"
    says = f"{who} {roof.ms:.3f} ms: {roof.tflops:.4g} TFLOP/s"
    if peak is None or roof.bound is None:
        yield f"{says}.", ""
        return
    memory = f"{100 * roof.gbps / peak.gbps:.1f} %"
    why, advice = {
        COMPUTE: (
            "It is compute-bound.",
            "skip work that a mask makes useless, a faster kernel (`rfa compare`), or `rfa tune`",
        ),
        BANDWIDTH: (
            f"It is bandwidth-bound: {memory} of a copy's {peak.gbps:.4g} GB/s with the least "
            "traffic that there can be.",
            "fewer passes over memory: fewer KV heads, a larger head dimension for the same work",
        ),
        NEITHER: (
            f"Neither arithmetic nor memory is the limit (below {100 * NEAR:.0f} % of both; memory "
            f"{memory}), but launches, latency or occupancy.",
            "more work in a call: a larger batch, longer sequences, more heads",
        ),
    }[roof.bound]
    yield (
        f"{says}, {100 * roof.tflops / peak.tflops:.1f} % of the {peak.tflops:.4g} that a product "
        f"of large matrices reaches here. {why}",
        advice,
    )


def _host(facts: Facts) -> Iterator[Finding]:
    timed, activity = facts.main, facts.activity
    if not facts.on_cpu:
        share = timed.host_ms / timed.ms
        bound = f"a program that does nothing else is host-bound ({share:.1f} times as long)"
        yield (
            f"The host queues in {timed.host_ms:.3f} ms what the device does in {timed.ms:.3f} ms: "
            f"{bound if share > 1 else 'the host is not in the way'}.",
            _HOST_BOUND if share > 1 else "",
        )
    busy, span = activity["busy_ms"], activity["span_ms"]
    if activity["on_device"] and span - busy > _IDLE * span:
        yield (
            f"In the trace the device ran nothing for {100 * (1 - busy / span):.0f} % of the time "
            f"({busy:.3f} of {span:.3f} ms busy; the profiler slows the host down).",
            "look for the gaps in trace.json",
        )


def _kernels(facts: Facts) -> Iterator[Finding]:
    kernels, what = facts.activity["kernels"], facts.kernel_word
    total = sum(each["ms"] for each in kernels)
    name, share = short(kernels[0]["name"]), 100 * kernels[0]["ms"] / total
    yield (
        f"The longest {what} is `{name}`: {share:.0f} % of the time of all {what}s, in "
        f"{kernels[0]['calls'] // facts.activity['runs']} calls a run.",
        "speed this one up first",
    )
    copies = (each for each in kernels if any(word in each["name"].lower() for word in _COPIES))
    copied = 100 * sum(each["ms"] for each in copies) / total
    if copied > _SMALL:
        yield (
            f"Copies, fills and conversions take {copied:.0f} % of the time of all {what}s.",
            "inputs that are contiguous and have the dtype of the computation",
        )


def _link(facts: Facts) -> Iterator[Finding]:
    subject, timed, overlap = facts.subject, facts.main, facts.overlap
    if not subject.replayed:
        return
    if overlap is None or timed.exposed_ms is None:
        yield (
            "Communication was removed, so nothing is known about how well it is hidden.",
            "the same with `--link nvlink4`",
        )
        return
    hidden, share = overlap["hidden_share"], timed.exposed_ms / timed.ms
    advice = "`--sources-per-launch` of `rfa replay`, a faster link, or longer shards"
    yield (
        f"Of {overlap['transfers']:.3f} ms of transfers over {subject.placement.link_name}, "
        f"{100 * hidden:.0f} % ran beside kernels of the steps ({overlap['compute']:.3f} ms of "
        "compute).",
        "" if hidden > _HIDDEN else advice,
    )
    if share < _MEASURABLE:
        yield f"The link adds nothing that can be measured ({timed.exposed_ms:.3f} ms).", ""
        return
    yield (
        f"The link adds {timed.exposed_ms:.3f} ms to the time without communication, "
        f"{100 * share:.1f} % of all.",
        "another layout or route (`rfa replay`)" if share > _EXPOSED else "",
    )


def _counters(facts: Facts) -> Iterator[Finding]:
    if not facts.counters:
        return
    first = facts.counters[0]
    name, tensor, busy = f"`{short(first['name'])}`", first["tensor_percent"], first["sm_percent"]
    dram, occupancy = first["dram_percent"], first["occupancy_percent"]
    if tensor is not None and busy is not None:
        yield (
            f"{name} keeps the tensor cores {tensor:.0f} % busy, and the SMs {busy:.0f} %.",
            "other block sizes (`rfa tune`)" if tensor < _TENSOR else "",
        )
    if dram is not None:
        yield f"{name} uses {dram:.0f} % of the bandwidth of DRAM.", ""
    for reason, warps in first["stalls"][:1]:
        yield (
            f"Warps of {name} wait most for: {reason} ({warps:.2f} warps for each that issues).",
            f"the section Warp State Statistics in {NCU_COMPUTE}",
        )
    if occupancy is not None and occupancy < _OCCUPANCY:
        yield (
            f"{name} has {occupancy:.0f} % of the warps that a processor could hold (usual for "
            "attention on tensor cores).",
            "only if stalls are the problem: fewer registers or smaller blocks",
        )


def _times(facts: Facts) -> dict[str, float]:
    return {row.implementation: row.ms for row in facts.compared if row.ms is not None}


def _others(facts: Facts) -> Iterator[Finding]:
    """Memory, and times against the fastest other implementation on one device."""
    size, times, kernel = facts.main.peak_bytes, _times(facts), facts.subject.placement.kernel
    if size is not None:
        yield (
            f"It holds {size / 2**20:.1f} MiB beyond inputs, outputs and gradients, "
            f"{100 * size / facts.main.bytes:.0f} % of the least that it reads and writes.",
            "",
        )
    ours = times.pop(kernel, None)
    if ours is None or not times:
        return
    best = min(times, key=lambda name: times[name])
    instead = f"`--kernel {best}`" if best in kernel_names() else "`rfa compare` shows all of them"
    yield (
        f"The fastest other implementation on one device is {best}: {times[best]:.3f} ms; "
        f"{kernel} takes {ours:.3f} ms, {ours / times[best]:.2f} times as long.",
        instead if times[best] / ours < _FASTER else "",
    )
