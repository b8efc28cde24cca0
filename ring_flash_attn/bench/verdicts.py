"""Verdicts on a GPU's numbers, by the limits of the original documents: good, fair, needs work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .machine import Peak

GOOD, FAIR, POOR = "good", "fair", "needs work"
_A100, _A100_PEAK = "A100", 312.0  # TFLOP/s of its tensor cores in half precision
_RATES = (150.0, 100.0)  # TFLOP/s on it
_CLOCK = 0.9  # of the highest


@dataclass(frozen=True, slots=True)
class Verdict:
    """One number, judged.

    Attributes:
        what: was measured.
        value: of it, in words.
        limits: what is good, and what needs work.
        word: GOOD, FAIR or POOR.
        advice: what to try if it needs work.
    """

    what: str
    value: str
    limits: str
    word: str
    advice: str = ""

    def __str__(self) -> str:
        advice = f" Try: {self.advice}." if self.word == POOR and self.advice else ""
        return f"{self.what}: {self.value}: {self.word} ({self.limits}).{advice}"


def judge(
    what: str, value: float, good: float, poor: float | None, unit: str = "", advice: str = ""
) -> Verdict:
    """GOOD above `good`, POOR below `poor` if anything is, else FAIR."""
    below = poor is not None and value < poor
    limits = f"good: > {good:.4g}{unit}"
    if poor is not None:
        limits += f", needs work: < {poor:.4g}{unit}"
    word = GOOD if value > good else POOR if below else FAIR
    return Verdict(what, f"{value:.4g}{unit}", limits, word, advice)


def rate_verdict(what: str, tflops: float, device: str, peak: Peak) -> Verdict:
    """On TFLOP/s: 150 and 100 on an A100 in half precision, elsewhere the same shares of the peak.

    The peak is that of the device in the dtype of the inputs.
    """
    scale = 1.0
    if _A100 not in device or peak.dtype not in ("float16", "bfloat16"):
        scale = peak.tflops / _A100_PEAK
    good, poor = (rate * scale for rate in _RATES)
    advice = "a larger batch, longer sequences, fp16 or bf16, or another kernel (`rfa compare`)"
    return judge(what, tflops, good, poor, " TFLOP/s", advice)


def machine_verdicts(machine: Mapping[str, Any]) -> Iterator[Verdict]:
    """On what holds a GPU back: its clock and other processes; nothing where nobody knows."""
    now, most = machine.get("sm_clock_mhz"), machine.get("sm_clock_max_mhz")
    if now and most:
        advice = "find what limits it: `nvidia-smi -q -d CLOCK,PERFORMANCE`, power, temperature"
        word = GOOD if now >= _CLOCK * most else POOR
        limits = f"good: {100 * _CLOCK:.0f} % of {most:.0f} MHz or more"
        yield Verdict("GPU clock just after the last run", f"{now:.0f} MHz", limits, word, advice)
    others = machine.get("other_processes")
    if others is not None:
        word = POOR if others else GOOD
        advice = "end them; `nvidia-smi` lists them"
        yield Verdict("other processes on the GPU", str(others), "good: none", word, advice)
