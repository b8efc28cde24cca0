"""Findings: what is slow and why, each a sentence with its number, and what to try."""

from __future__ import annotations

from collections.abc import Iterator

from ...kernels.base import kernel_names
from ..machine import Verdict, judge, machine_verdicts, rate_verdict
from ..workload import BOTH
from .facts import COMPUTE, NEAR, NEITHER, Facts
from .parts import NCU_COMPUTE

_IDLE, _SMALL, _HIDDEN = 0.1, 0.15, 0.9  # shares that are worth a word
_MEASURABLE, _EXPOSED, _FASTER = 0.01, 0.05, 0.95
_TENSOR, _OCCUPANCY = 60.0, 25.0  # percent
_COPIES = ("memcpy", "memset", "copy", "fill")  # in names of kernels
_SHOWN = 60  # characters of a kernel's name
# Limits of the original documents.
_BUSY, _BANDWIDTH, _SMS, _SPEED_UP = (90.0, 70.0), 80.0, 90.0, (3.0, 2.0)
_PLAIN = "torch standard"
Finding = tuple[str, str]  # a sentence with a number, and what to try, if anything


def find(facts: Facts) -> list[str]:
    """All of them, the most important ones first."""
    makers = (_rate, _host, _idle, _kernels, _link, _counters, _memory, _others)
    return [
        f"{says} Try: {advice}." if advice else says
        for make in makers
        for says, advice in make(facts)
    ]


def verdicts(facts: Facts) -> Iterator[Verdict]:
    """What the original documents look at, beside their limits; nothing on the CPU."""
    if facts.on_cpu:
        return
    device = str(facts.machine["device"])
    for timed in facts.timed:
        if timed.peak is not None:
            yield rate_verdict(passes_name(timed.passes), timed.tflops, device, timed.peak)
    busy = 100 * facts.main.ms / max(facts.main.ms, facts.main.host_ms)
    advice = "larger calls, CUDA graphs, or torch.compile around the model"
    yield judge("GPU busy, in calls one after the other", busy, *_BUSY, " %", advice)
    if facts.counters:
        first = facts.counters[0]
        for what, value, good in (
            ("memory bandwidth", first.values["memory_percent"], _BANDWIDTH),
            ("SMs", first.values["sm_percent"], _SMS),
        ):
            if value is not None:
                yield judge(f"{what} of `{short(first.name)}`", value, good, None, " %")
    times = _times(facts)
    if facts.subject.kernel in times and _PLAIN in times:
        ratio = times[_PLAIN] / times[facts.subject.kernel]
        yield judge(f"speed-up over {_PLAIN}", ratio, *_SPEED_UP, "x", "longer sequences")
    yield from machine_verdicts(facts.machine)


def passes_name(passes: str) -> str:
    """In words."""
    return "forward and backward" if passes == BOTH else passes


def short(name: str) -> str:
    """A kernel's name, not longer than a table can bear."""
    return name if len(name) <= _SHOWN else name[: _SHOWN - 1] + "…"


def _rate(facts: Facts) -> Iterator[Finding]:
    roof, peak = facts.main, facts.main.peak
    who = "Forward and backward take" if facts.main.passes == BOTH else "Forward takes"
    says = f"{who} {roof.ms:.3f} ms: {roof.tflops:.4g} TFLOP/s"
    if peak is None or roof.compute_share is None or roof.bandwidth_share is None:
        yield f"{says}.", ""
        return
    says += (
        f", {100 * roof.compute_share:.1f} % of the {peak.tflops:.4g} that a product of large "
        "matrices reaches here."
    )
    if roof.bound == COMPUTE:
        yield (
            f"{says} It is compute-bound.",
            "skip work that a mask makes useless, a faster kernel (`rfa compare`), or `rfa tune`",
        )
    elif roof.bound != NEITHER:
        yield (
            f"{says} It is bandwidth-bound: {100 * roof.bandwidth_share:.1f} % of a copy's "
            f"{peak.gbps:.4g} GB/s with the least traffic that there can be.",
            "fewer passes over memory: fewer KV heads, a larger head dimension for the same work",
        )
    else:
        yield (
            f"{says} Neither arithmetic nor memory is the limit (below {100 * NEAR:.0f} % of both; "
            f"memory {100 * roof.bandwidth_share:.1f} %), but launches, latency or occupancy.",
            "more work in a call: a larger batch, longer sequences, more heads",
        )


def _host(facts: Facts) -> Iterator[Finding]:
    timed = facts.main
    if facts.on_cpu:
        return
    share = timed.host_ms / timed.ms
    says = f"The host queues in {timed.host_ms:.3f} ms what the device does in {timed.ms:.3f} ms"
    if share > 1:
        yield (
            f"{says}: a program that does nothing else is host-bound ({share:.1f} times as long).",
            "larger calls, CUDA graphs, or torch.compile around the model",
        )
    else:
        yield f"{says}: the host is not in the way.", ""


def _idle(facts: Facts) -> Iterator[Finding]:
    activity = facts.activity
    if activity.on_device and activity.idle_share > _IDLE:
        yield (
            f"In the trace the device ran nothing for {100 * activity.idle_share:.0f} % of the "
            f"time ({activity.busy_ms:.3f} of {activity.span_ms:.3f} ms busy; the profiler slows "
            "the host down).",
            "look for the gaps in trace.json",
        )


def _kernels(facts: Facts) -> Iterator[Finding]:
    kernels, total = facts.activity.kernels, facts.activity.kernels_ms
    what = "kernel" if facts.activity.on_device else "operator"
    first = kernels[0]
    yield (
        f"The longest {what} is `{short(first.name)}`: {100 * first.ms / total:.0f} % of the time "
        f"of all {what}s, in {first.calls // facts.activity.runs} calls a run.",
        "speed this one up first",
    )
    copies = sum(each.ms for each in kernels if any(word in each.name.lower() for word in _COPIES))
    if copies / total > _SMALL:
        yield (
            f"Copies, fills and conversions take {100 * copies / total:.0f} % of the time of all "
            f"{what}s.",
            "inputs that are contiguous and have the dtype of the computation",
        )


def _link(facts: Facts) -> Iterator[Finding]:
    subject, timed, overlap = facts.subject, facts.main, facts.overlap
    if subject.world_size == 1:
        return
    if overlap is None or timed.exposed_ms is None:
        yield (
            "Communication was removed, so nothing is known about how well it is hidden.",
            "the same with `--link nvlink4`",
        )
        return
    yield (
        f"Of {overlap.transfers:.3f} ms of transfers over {subject.placement.link_name}, "
        f"{100 * overlap.hidden_share:.0f} % ran beside kernels of the steps "
        f"({overlap.compute:.3f} ms of compute).",
        ""
        if overlap.hidden_share > _HIDDEN
        else "`--sources-per-launch` of `rfa replay`, a faster link, or longer shards",
    )
    share = timed.exposed_ms / timed.ms
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
    name, values = f"`{short(first.name)}`", first.values
    busy, tensor = values["sm_percent"], values["tensor_percent"]
    dram, occupancy = values["dram_percent"], values["occupancy_percent"]
    if tensor is not None and busy is not None:
        yield (
            f"{name} keeps the tensor cores {tensor:.0f} % busy, and the SMs {busy:.0f} %.",
            "other block sizes (`rfa tune`)" if tensor < _TENSOR else "",
        )
    if dram is not None:
        yield f"{name} uses {dram:.0f} % of the bandwidth of DRAM.", ""
    if first.stalls:
        reason, warps = first.stalls[0]
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


def _memory(facts: Facts) -> Iterator[Finding]:
    size = facts.main.peak_bytes
    if size is not None:
        inputs = facts.main.bytes
        yield (
            f"It holds {size / 2**20:.1f} MiB beyond inputs, outputs and gradients, "
            f"{100 * size / inputs:.0f} % of the least that it reads and writes.",
            "",
        )


def _times(facts: Facts) -> dict[str, float]:
    """Of all implementations that ran on one device, in the pass that is profiled."""
    rows = (row for row in facts.comparison if row.passes == facts.main.passes)
    return {row.implementation: row.ms for row in rows if row.ms is not None}


def _others(facts: Facts) -> Iterator[Finding]:
    """Against the fastest other implementation, on one device."""
    others, kernel = _times(facts), facts.subject.kernel
    ours = others.pop(kernel, None)
    if ours is None or not others:
        return
    best = min(others, key=lambda name: others[name])
    ratio = others[best] / ours
    instead = f"`--kernel {best}`" if best in kernel_names() else "`rfa compare` shows all of them"
    yield (
        f"The fastest other implementation on one device is {best}: {others[best]:.3f} ms; "
        f"{kernel} takes {ours:.3f} ms, {1 / ratio:.2f} times as long.",
        instead if ratio < _FASTER else "",
    )
