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

# What helps where no mistake was recognised: what to print, what to do by hand, what is likely.
HINTS = {
    1: "Run your file by itself and print i, j and the mask of each program: `rows` and `d` cut "
    "off the last tile in both directions, in loads (w, too) and in stores. x may be a transpose "
    "and `grad` one number with stride 0: use the strides, and grad.contiguous(). Right with one "
    "tile, wrong with several? Then a sum over blocks is overwritten (`=` for `+=`), or programs "
    "share a row of parts.",
    2: "Print `total.dtype` after each line: `total = total + x` may change it, `total += x` does "
    "not. Make both scalar tensors, and convert the value once, before the loop. A Python float "
    "is not yet rounded: 0.01 in fp16 is 0.0100021.",
    3: "Take 1 query and 2 keys with q = 0: the weights are 1/2, out is the mean of v. Then print "
    "the mask for 2 queries and 4 keys: the rows should show 3 and 4 keys. Print the rows that "
    "are NaN: they see no key. `saved` has q, k, v as they were given, unscaled, and p.",
    4: "Take one row (0, 1, 5) in blocks of one, and do it by hand: m is 0, 1, 5, and total 1, "
    "e⁻¹ + 1, and then? Print m, alpha and total after each block. alpha must lie between 0 and "
    "1, and be used before m is replaced. Then let the first block be −inf.",
    5: "Use tiles of 1 × 2 on 2 queries and 4 keys, print m, total and acc after each tile, and "
    "compare with exercise 4. First tile right, then wrong: alpha. Wrong only if causal: print "
    "the position of each query, i + keys − queries, and remember that i begins at the tile's "
    "first row.",
    6: "First without tiles: print each row's sum of dS (0, or D is wrong) and of P (1, or lse or "
    "mask are). Only dV right: look at dP, D or dS. All right but for a factor √d: the scale. "
    "Then tiles of 2 on 4 queries and keys: a gradient that has only the last tile's part was "
    "assigned, not added to.",
    7: "Run your file by itself: without a GPU, print works in a kernel. Set all scores to 0 (q = "
    "0): out is the mean of v, lse the log of the number of keys. Too small in every row: keys "
    "beyond the end count, as score 0. Wrong from the second batch element on: its offset is "
    "batch · n · d. Wrong for transposed inputs: .contiguous().",
    8: "Run your file by itself, and print P and dS of the first tile: rows of P sum to 1 over "
    "all keys, rows of dS to 0. dV needs P alone, so begin with it. Shapes that fit by chance: "
    "use BLOCK_Q ≠ BLOCK_K, and a missing transpose fails. NaN: a row that sees nothing has lse "
    "−inf, mask after exp. dout may be one number with stride 0.",
    9: "Draw 3 queries and 5 keys in blocks of 2, and mark the pairs that count. A block is "
    "skipped if its last row does not see its first key; it needs no mask if its first row sees "
    "its last key. Both last ones are clipped: min(…, rows) − 1. Print your list for 5 queries "
    "and 3 keys.",
    10: "Solve it for as many KV heads as heads and no window; then add one feature at a time. "
    "heads 6, heads_k 2: print which KV head each query head reads (0 0 0 1 1 1). Window (1, 0): "
    "query 3 sees keys 2 and 3. dk too small: print its shape before the sum over the group.",
    11: "Take documents of 2, 0 and 3 tokens, and print the rows and keys of each block that you "
    "compute: no block has rows of two documents. Put NaN into the values of one document: where "
    "it shows up in another, keys have leaked, and a weight of 0 does not stop that.",
    12: "Cut keys with scores (0, 0 | 0) by hand: the weights are 2/3 and 1/3, lse is log 3. "
    "Print the two weights: they sum to 1. inf or NaN: exp(lse) was taken before anything was "
    "subtracted, or both halves are −inf.",
    13: "Write a table for 3 ranks: who holds whose keys in each step, and what is sent to whom. "
    "Let each rank print (rank, step, source). All wait: the numbers of sends and recvs to a "
    "neighbour differ, or come in another order. Right without a mask only: the source. dk of "
    "another rank: one hop is missing.",
    14: "Draw the 8 chunks of 4 ranks. For rank 1 and source 2 write down the four chunks in "
    "order (1, 2, 5, 6): who sees whom? Then source 0. Print lengths that do not divide: 37 "
    "tokens on 2 ranks have chunks of 9, 9, 9 and 10.",
    15: "Take 2 ranks and round numbers (rate 1, bandwidth 1, latency 0), and write a table of "
    "steps: work, bytes, and what is left over. Keys count heads_k, pairs count heads. Backward "
    "has one step more than there is work. Exposed is a sum of maxima, not the maximum of sums.",
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
