"""Judge tensors by their true values: which numbers are wrong, and after which mistake."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .setting import FLAT, INF, Form, Setting, Suspect
from .where import spans, tiles_in_words

_WORDS = {"dk": "keys", "dv": "keys"}  # what the rows of a tensor are; rows else


@dataclass(slots=True)
class Judgement:
    """What is wrong with one result, and which mistakes it agrees with."""

    lines: list[str] = field(default_factory=list)
    votes: Counter[str] = field(default_factory=Counter)
    named: Callable[[], Counter[str]] = Counter  # more votes; this takes a while


@dataclass(frozen=True, slots=True)
class Compare:
    """Judge tensors by their true values, and by what mistakes would give."""

    truth: dict[str, Tensor]  # as the learner should return them
    form: Form = FLAT
    setting: Setting | None = None
    suspects: Callable[[], Iterable[Suspect]] = tuple
    tolerance: float = 1e-4
    hidden: bool = False  # some row may see nothing, at first or at all
    lost: str = ""  # the mistake that brings NaN here, if no other does

    def __call__(self, result: Any) -> Judgement:
        """Shapes and dtypes first, then numbers."""
        values = result if isinstance(result, (tuple, list)) else (result,)
        judgement = Judgement()
        if len(values) != len(self.truth):
            names = ", ".join(self.truth)
            judgement.lines.append(f"{len(values)} values returned; expected {names}")
            return judgement
        found = dict(zip(self.truth, values))
        for name, value in found.items():
            problem = self._unlike(name, value)
            if problem:
                judgement.lines.append(problem)
                judgement.votes.update(self._of_shape(name, value))
        if judgement.lines:
            return judgement
        found = {name: value.detach().double().cpu() for name, value in found.items()}
        wrong = [name for name in found if self._wrong(name, found[name]).any()]
        for name in wrong:
            judgement.lines += self._words(name, found[name])
        if wrong:
            judgement.named = partial(self._named, found, wrong)
        return judgement

    def _unlike(self, name: str, value: Any) -> str:
        true = self.truth[name]
        if not isinstance(value, Tensor):
            return f"{name} is a {type(value).__name__}, not a tensor"
        if value.shape != true.shape:
            return f"{name} has shape {tuple(value.shape)}, expected {tuple(true.shape)}"
        if value.dtype != torch.float32:
            return f"{name} is {value.dtype}, expected torch.float32, as the inputs"
        return ""

    def _of_shape(self, name: str, value: Any) -> list[str]:
        """A gradient for each query head."""
        if self.setting is None or self.setting.group == 1 or name not in ("dk", "dv"):
            return []
        heads = self.setting.q.shape[1]
        return ["group"] if isinstance(value, Tensor) and heads in value.shape[1:3] else []

    def limit(self, name: str) -> float:
        """The largest error that rounding explains."""
        true = self.truth[name]
        size = true[true.isfinite()].abs().max().item() if true.isfinite().any() else 0.0
        return self.tolerance * max(size, 1.0 if name in ("lse", "m") else 1e-3)

    def _wrong(self, name: str, found: Tensor) -> Tensor:
        true = self.truth[name]
        return ~((found == true) | ((found - true).abs() <= self.limit(name)))

    def _words(self, name: str, found: Tensor) -> list[str]:
        true, wrong = self.truth[name], self._wrong(name, found)
        numbers = found[wrong]
        largest = true[true.isfinite()].abs().max().item() if true.isfinite().any() else 0.0
        count = f"{name}: {int(wrong.sum())} of {wrong.numel()} numbers are wrong"
        lost = int(numbers.isnan().sum())
        if lost:
            kept = (found - true)[wrong].abs()
            kept = kept[kept.isfinite()]
            count += f", {lost} of them NaN"
            if kept.numel():
                count += f", others by up to {kept.max():.3g}"
        elif not numbers.isfinite().all():
            count += ", by inf"
        else:
            off = (found - true)[wrong].abs()
            amount = "where −inf is right" if off.max() == INF else f"by up to {off.max():.3g}"
            count += f", {amount}"
        lines = [f"{count} (the largest true number: {largest:.3g})"]
        return lines + [f"  {line}" for line in self._where(name, found)]

    def _where(self, name: str, found: Tensor) -> Iterator[str]:
        ours, true = (self.form.ours(name, x) for x in (found, self.truth[name]))
        wrong = self.form.ours(name, self._wrong(name, found))
        wrong = wrong.any(-1) if wrong.dim() == 4 else wrong
        what = _WORDS.get(name, "rows")
        ranks = self.setting.world_size if self.setting is not None else 1
        where = [f"{what} {spans(wrong.any(0).any(0))} of {wrong.shape[2]}"]
        if wrong.shape[0] > 1:
            where.append(f"batch {spans(wrong.any(2).any(1))}")
        if wrong.shape[1] > 1:
            where.append(f"heads {spans(wrong.any(2).any(0))}")
        if ranks > 1:
            each = wrong.shape[2] // ranks
            of_rank = wrong.any(0).any(0).unflatten(0, (ranks, each)).any(1)
            where.insert(0, f"ranks {spans(of_rank)}")
        yield ", ".join(where)
        if self.setting is not None and ours.dim() == 4:
            yield from tiles_in_words(self.setting, name, ours, true, self.limit(name))

    def _named(self, found: dict[str, Tensor], wrong: Sequence[str]) -> Counter[str]:
        """Mistakes, with how many of the wrong tensors each explains."""
        masks = {name: self._wrong(name, found[name]) for name in wrong}
        lost = all(found[name][mask].isnan().all() for name, mask in masks.items())
        everywhere = lost and all(mask.all() for mask in masks.values())
        votes: Counter[str] = Counter()
        if lost and self.lost:
            votes[self.lost] = 1 if everywhere else 2 * len(wrong)  # loads beyond a tensor are few
        if self.hidden and self._only_lost_rows(found, masks) and not everywhere:
            return votes + Counter({"inf_rows": 2 * len(wrong)})
        for mistake, values in self.suspects():
            suspects = {
                name: self.form.learner(name, value).double().cpu()
                for name, value in values.items()
                if name in found and value.numel() == found[name].numel()
            }
            score = 0  # 2 for a tensor that is explained, −1 for one that should be wrong as well
            for name, suspect in suspects.items():
                if name in masks:
                    score += 2 * self._agrees(name, found[name], suspect, masks[name])
                else:
                    score -= bool((self._wrong(name, suspect) & ~suspect.isnan()).any())
            votes[mistake] = max(votes[mistake], score)
        votes = +votes
        if not votes and self.hidden and lost:
            votes["inf_rows"] = 2 * len(wrong)
        return votes

    def _only_lost_rows(self, found: dict[str, Tensor], masks: dict[str, Tensor]) -> bool:
        """Wrong numbers are all NaN, or all in rows that see nothing."""
        lost = all(found[name][mask].isnan().all() for name, mask in masks.items())
        lse = self.truth.get("lse", self.truth.get("m"))
        if lost or lse is None:
            return lost
        empty = self.form.ours("lse", lse == -INF)
        inside = []
        for name, mask in masks.items():
            rows = self.form.ours(name, mask)
            inside.append(not ((rows.any(-1) if rows.dim() == 4 else rows) & ~empty).any())
        return all(inside)

    def _agrees(self, name: str, found: Tensor, suspect: Tensor, wrong: Tensor) -> bool:
        """Much nearer to the suspect than to the truth; what the suspect leaves open, agrees."""
        if found.shape != suspect.shape:
            return False
        care = ~suspect.isnan()
        if not (care & wrong).any():
            return False
        lost = suspect.isinf() & ~(suspect == self.truth[name])
        if (lost & found.isfinite()).any():
            return False
        even = care & ~lost & ~(suspect == found)
        off = (found - suspect)[even].abs()
        if not off.numel():
            return True
        error = (found - self.truth[name])[care & wrong].abs()
        error = error[error.isfinite()]
        size = self.limit(name)
        size = max(2 * size, 0.02 * error.max().item()) if error.numel() else 2 * size
        return bool((off <= size).all())
