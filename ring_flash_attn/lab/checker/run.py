"""Run the cases of an exercise, in a process of its own: `python -m … NUMBER FILE NEWS LIMIT`."""

from __future__ import annotations

import faulthandler
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from ..check import Report
from ..device import device
from ..registry import find_step
from ..virtual import Stuck
from . import (
    arithmetic,
    backward,
    causal,
    features,
    forward,
    kernels,
    masks,
    memory,
    merge,
    ring,
    softmax,
    zigzag,
)
from .learner import Cases, InputChanged, Learner, hole_in, in_file
from .memory import WroteOutside

CASES: dict[int, Callable[[Learner], Cases]] = {
    1: kernels.weighted_sum,
    2: arithmetic.accumulate,
    3: forward.standard_attention,
    4: softmax.online_softmax,
    5: forward.tiled_attention,
    6: backward.tiled_backward,
    7: kernels.triton_forward,
    8: kernels.triton_backward,
    9: causal.causal_attention,
    10: features.grouped_attention,
    11: features.packed_attention,
    12: merge.merge,
    13: ring.ring_attention,
    14: zigzag.zigzag,
    15: arithmetic.predict,
}

# Of mistakes that cannot be told apart, the first is named: the most usual one.
_SUBJECTS = (softmax, forward, masks, features, backward, merge, ring, memory, kernels, zigzag)
MISTAKES = {key: each for subject in _SUBJECTS for key, each in subject.MISTAKES.items()}

_MOST = 2  # mistakes that are named
_NAMED = 3  # wrong cases of a function that are compared with suspects


@dataclass(slots=True)
class Tally:
    """What became of the cases of one function."""

    cases: int = 0
    wrong: list[tuple[str, list[str]]] = field(default_factory=list)  # label, lines
    hole: str | None = None

    def summary(self, name: str) -> Iterator[str]:
        """In words; nothing if all is right."""
        if self.hole is not None:
            yield f"{name} is not filled in yet: {self.hole}"
        if self.wrong:
            label, lines = self.wrong[0]
            yield f"{name} is wrong in {len(self.wrong)} of {self.cases} cases; the first: {label}"
            yield from (f"  {line}" for line in lines)


def run_cases(number: int, path: Path, tell: Callable[[str], None]) -> Report:
    """Everything that there is to say about a file."""
    report = Report(number, str(path))
    try:
        learner = Learner(path)
    except Exception as error:
        report.lines = [f"{path.name} does not import: {in_file(error, path)}"]
        return report
    if find_step(number).is_triton and not learner.has_kernels:
        report.lines = [f"{path.name} has no Triton kernel: this exercise asks for @triton.jit"]
        return report
    tallies: dict[str, Tally] = {}
    votes: list[Counter[str]] = []
    for case in CASES[number](learner):
        tally = tallies.setdefault(case.function, Tally())
        tally.cases += 1
        report.cases += 1
        if tally.hole is not None or case.function in learner.missing:
            continue
        tell(f"{case.function}: {case.label}")
        try:
            with torch.enable_grad():
                judgement = case.judge(case.call())
        except Exception as error:
            tally.hole = hole_in(error)
            if tally.hole is None:
                plain = isinstance(error, (Stuck, InputChanged, WroteOutside))
                said = str(error) if plain else in_file(error, path)
                tally.wrong.append((case.label, [said]))
                votes.append(Counter(outside=2) if isinstance(error, WroteOutside) else Counter())
            continue
        if judgement.lines:
            tally.wrong.append((case.label, judgement.lines))
            votes.append(judgement.votes)
            if len(tally.wrong) <= _NAMED:
                votes.append(judgement.named())
    report.lines = [f"{path.name} has no {name}" for name in learner.missing]
    report.lines += [line for name, tally in tallies.items() for line in tally.summary(name)]
    report.mistakes = [asdict(MISTAKES[name]) for name in explain(votes)]
    report.passed = not report.lines
    return report


def explain(votes: Sequence[Counter[str]]) -> Iterator[str]:
    """The mistake that explains most; then, for the cases that it does not, another."""
    for _ in range(_MOST):
        total = sum(votes, Counter())
        if not total:
            return
        best = max(total.values())
        name = next(name for name in MISTAKES if total[name] == best)
        yield name
        votes = [each for each in votes if not each[name]]


def main(number: str, path: str, news: str, limit: str) -> None:
    """Tell which case begins, then the report."""
    faulthandler.dump_traceback_later(float(limit), exit=True)
    file = Path(news)

    def tell(case: str) -> None:
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"case": case}) + "\n")

    torch.manual_seed(0)
    if device().type == "cpu":
        torch.set_num_threads(1)
    run_cases(int(number), Path(path), tell).save(file)


if __name__ == "__main__":
    main(*sys.argv[1:])
