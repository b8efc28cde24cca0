"""Check a learner's file: in a fresh process, with a time limit, and say what is wrong in words.

Nothing here imports torch; `checker/run.py` runs in the other process.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .registry import LabStep, find_step

LIMIT = 120.0  # seconds for all cases of a step
_GRACE = 30.0  # until the process is killed, if it does not end by itself
_PRINTED = 20  # lines of the learner's own that are shown

# What helps where no mistake was recognised.
HINTS = {
    1: "Each program takes a tile of rows. The gradient of the weight is a sum over all rows.",
    2: "Make the sum a tensor of `dtype` and each value one of `value_dtype`, then add in a loop.",
    3: "s = q kᵀ / √d, mask, softmax, times v. Backward needs q, k, v and the probabilities.",
    4: "Carry two numbers for each row: the largest score so far, and the sum relative to it.",
    5: "For each tile of rows loop over tiles of keys; carry m, the sum and the accumulator.",
    6: "P = exp(s − lse), dP = dO vᵀ, D = rowsum(dO ∘ O), dS = P ∘ (dP − D); then three products.",
    7: "One program for each tile of rows. Print shapes with TRITON_INTERPRET=1 and plain print.",
    8: "One kernel owns tiles of keys and writes dK and dV, the other owns tiles of rows: dQ.",
    9: "Compare the first key of a block with the last row of the tile, and the other way round.",
    10: "Solve it for one head and no window first; each feature changes one line.",
    11: "The mask needs the document of each token: how many borders lie at or before it?",
    12: "Weights are exp(lse_i − lse). Start from two halves of the keys that you can compute.",
    13: "Write down for 3 ranks who holds whose keys at each step, then the code.",
    14: "Draw the 8 chunks of 4 ranks, and mark which pairs of chunks each step computes.",
    15: "Bytes over bandwidth, FLOPs over speed; exposed is what computing does not hide.",
}


@dataclass(slots=True)
class Report:
    """What the check of one file found."""

    number: int
    path: str
    passed: bool = False
    cases: int = 0
    lines: list[str] = field(default_factory=list)  # what is wrong
    mistakes: list[dict[str, str]] = field(default_factory=list)  # name, says, hint
    printed: list[str] = field(default_factory=list)  # what the learner's file printed

    @property
    def names(self) -> list[str]:
        """Of the mistakes that it looks like."""
        return [each["name"] for each in self.mistakes]

    @property
    def hints(self) -> list[str]:
        """For the mistakes; or for the step, where none was recognised."""
        return [each["hint"] for each in self.mistakes] or [HINTS[self.number]]

    def save(self, path: Path) -> None:
        """As the last line of a file."""
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"report": asdict(self)}) + "\n")


def exercise_path(step: LabStep, where: Path) -> Path:
    """The learner's file for a step, in a folder or itself; ValueError if there is none."""
    if not step.has_exercise:
        raise ValueError(f"step {step.number} ({step.title}) has no exercise: it is to be read")
    path = where if where.is_file() else where / step.exercise
    if not path.is_file():
        raise ValueError(
            f"there is no {path}; `rfa lab start {where}` writes the exercises that there are"
        )
    return path


def check(number: int, path: Path | str, limit: float = LIMIT) -> Report:
    """Run the cases of a step on the learner's file (or on the one in a folder).

    Raises:
        ValueError: there is no such step, it has no exercise, or there is no such file.
    """
    path = exercise_path(find_step(number), Path(path)).resolve()
    report = Report(number, str(path))
    with tempfile.TemporaryDirectory() as folder:
        news = Path(folder) / "news"
        news.touch()
        module = f"{__package__}.checker.run"
        command = [sys.executable, "-m", module, str(number), str(path), str(news), str(limit)]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=limit + _GRACE,
                stdin=subprocess.DEVNULL,
            )
            code, printed, said = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired as late:
            code, printed, said = None, _text(late.stdout), f"Timeout (\n{_text(late.stderr)}"
        lines = [json.loads(line) for line in news.read_text("utf-8").splitlines()]
    report.printed = printed.splitlines()[-_PRINTED:]
    if lines and "report" in lines[-1]:
        found = Report(**lines[-1]["report"])
        found.printed = report.printed
        return found
    begun = lines[-1]["case"] if lines else "while the file is imported"
    report.lines = _unfinished(path, code, said, begun, limit)
    return report


def _text(value: bytes | str | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""


def _unfinished(path: Path, code: int | None, said: str, begun: str, limit: float) -> list[str]:
    """Why there is no report: an endless loop, a crash, or an exit."""
    if "Timeout (" in said:
        found = re.findall(rf'File "{re.escape(str(path))}", line (\d+) in (\S+)', said)
        lines = [f"no result after {limit:g} s: a loop that does not end? ({begun})"]
        return lines + [f"  it was in line {line}, in {name}" for line, name in found[:1]]
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        words = "it reads or writes outside of a tensor?" if name == "SIGSEGV" else "it was killed"
        return [f"the process died of {name}: {words} ({begun})"]
    last = [line for line in said.splitlines() if line.strip()][-1:]
    return [f"the process ended with exit code {code} ({begun})", *(f"  {line}" for line in last)]
