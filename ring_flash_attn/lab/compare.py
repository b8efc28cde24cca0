"""Judge tensors by their true values: which numbers are wrong, where, and after which mistake.

Where the head dimension is at least the number of keys, out = P v can be solved for P. So the
checker sees for each query and key what the learner's code made of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import suspects as sus
from .suspects import INF, Setting

_WORDS = {"dk": "keys", "dv": "keys"}  # what the rows of a tensor are; rows else


@dataclass(slots=True)
class Judgement:
    """What is wrong with one result, and which mistakes it agrees with."""

    lines: list[str] = field(default_factory=list)
    votes: Counter[str] = field(default_factory=Counter)
    named: Callable[[], Counter[str]] = Counter  # more votes; this takes a while


@dataclass(frozen=True, slots=True)
class Form:
    """How an exercise lays out (batch, heads, rows, d) and (batch, heads, rows), and back."""

    wide: Callable[[Tensor], Tensor]
    narrow: Callable[[Tensor], Tensor]
    wide_back: Callable[[Tensor], Tensor]
    narrow_back: Callable[[Tensor], Tensor]

    def learner(self, name: str, x: Tensor) -> Tensor:
        """As the learner returns it."""
        return (self.narrow if name in ("lse", "m", "total") else self.wide)(x)

    def ours(self, name: str, x: Tensor) -> Tensor:
        """As suspects have it."""
        return (self.narrow_back if name in ("lse", "m", "total") else self.wide_back)(x)


def same(x: Tensor) -> Tensor:
    """Unchanged."""
    return x


PLAIN = Form(lambda x: x[:, 0], lambda x: x[:, 0], lambda x: x[:, None], lambda x: x[:, None])
HEADS = Form(lambda x: x.transpose(1, 2), same, lambda x: x.transpose(1, 2), same)
PACKED = Form(
    lambda x: x[0].transpose(0, 1),
    lambda x: x[0],
    lambda x: x.transpose(0, 1)[None],
    lambda x: x[None],
)
FLAT = Form(lambda x: x[0, 0], lambda x: x[0, 0], lambda x: x[None, None], lambda x: x[None, None])


@dataclass(frozen=True, slots=True)
class Compare:
    """Judge tensors by their true values, and by what mistakes would give."""

    truth: dict[str, Tensor]  # as the learner should return them
    form: Form = FLAT
    setting: Setting | None = None
    suspects: Callable[[], Iterable[sus.Suspect]] = tuple
    tolerance: float = 1e-4
    hidden: bool = False  # some row may see nothing, at first or at all

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
            yield from tiles_in_words(self.setting, name, ours, true)

    def _named(self, found: dict[str, Tensor], wrong: Sequence[str]) -> Counter[str]:
        """Mistakes, with how many of the wrong tensors each explains."""
        masks = {name: self._wrong(name, found[name]) for name in wrong}
        if self.hidden and self._only_lost_rows(found, masks):
            return Counter({"inf_rows": len(wrong)})
        votes: Counter[str] = Counter()
        for mistake, values in self.suspects():
            explained = 0
            for name in wrong:
                if name in values:
                    suspect = self.form.learner(name, values[name]).double().cpu()
                    explained += self._agrees(name, found[name], suspect, masks[name])
            votes[mistake] = max(votes[mistake], explained)
        return +votes

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


def spans(which: Tensor) -> str:
    """Indices as 0–3, 7."""
    found = which.nonzero().flatten().tolist()
    parts: list[list[int]] = []
    for i in found:
        if parts and parts[-1][-1] == i - 1:
            parts[-1].append(i)
        else:
            parts.append([i])
    words = [f"{p[0]}–{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in parts]
    return ", ".join(words) if len(words) <= 4 else ", ".join([*words[:3], "…", words[-1]])


def by_pair(setting: Setting, name: str, x: Tensor) -> Tensor | None:
    """Solve a result for what each (row, key) gave; None where it cannot be told."""
    other = {"out": setting.v, "dq": setting.k, "dk": setting.q, "dv": setting.dout}.get(name)
    if other is None or other.shape[-1] < other.shape[2] or not x.isfinite().all():
        return None
    if name in ("dk", "dv"):
        if setting.group > 1:
            return None
        return (x @ torch.linalg.pinv(other)).transpose(-1, -2)
    return x @ torch.linalg.pinv(sus.expand(other, setting.group))


def tiles_in_words(setting: Setting, name: str, found: Tensor, true: Tensor) -> Iterator[str]:
    """Which tiles of rows × keys are wrong, and which pair shows it best."""
    lost = ~found.isfinite()
    error = by_pair(setting, name, (found - true).masked_fill(lost, 0.0))
    if error is None or not error.any():
        return
    if name in ("dq", "dk"):
        error = error / setting.scale
    ranks = setting.world_size
    each = setting.rows // ranks
    tile = (each, each) if ranks > 1 else setting.tiles[0] if setting.tiles else (16, 16)
    grid = [range(0, n, size) for n, size in zip((setting.rows, setting.keys), tile)]
    worst: dict[tuple[int, int], float] = {}
    for i in grid[0]:
        for j in grid[1]:
            part = error[:, :, i : i + tile[0], j : j + tile[1]]
            worst[i, j] = part.abs().max().item()
    i, j = max(worst, key=lambda each: worst[each])
    wrong = [place for place, size in worst.items() if size > 0.1 * worst[i, j]]
    rows = f"rows {i}–{min(i + tile[0], setting.rows) - 1}"
    keys = f"keys {j}–{min(j + tile[1], setting.keys) - 1}"
    what = "dS" if name in ("dq", "dk") else "P"
    where = f"{rows} × {keys}"
    if ranks > 1:
        rank, source = i // each, j // each
        where += f": rank {rank}, ring step {(rank - source) % ranks} (keys of rank {source})"
    count = f"{len(wrong)} of {len(worst)} tiles" if len(worst) > 1 else "the tile"
    yield f"{count}; the worst: {where}: {what} is off by up to {worst[i, j]:.3g}"
    if name == "out":
        yield from _pairs(setting, error)


def _pairs(setting: Setting, error: Tensor) -> Iterator[str]:
    """A query that sees what is hidden from it, or does not see what it should."""
    counts = sus.seen(setting)
    true = sus.scores_of(setting, counts).softmax(-1).nan_to_num()
    extra = (error * (counts == 0)).clamp(min=0)
    if extra.max() > 0.02:
        b, h, i, j = _place(extra)
        yield f"query {i} sees key {j}, which is hidden from it (weight {extra[b, h, i, j]:.2g})"
    unseen = true * ((true + error).abs() < 0.02 * true)
    if unseen.max() > 0.02:
        b, h, i, j = _place(unseen)
        yield f"query {i} does not see key {j}, which has the weight {true[b, h, i, j]:.2g}"


def _place(x: Tensor) -> list[int]:
    return [int(i) for i in torch.unravel_index(x.argmax(), x.shape)]
