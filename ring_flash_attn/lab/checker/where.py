"""Where a result is wrong: which rows, which tiles, which query and key.

Where the head dimension is at least the number of keys, out = P v can be solved for P. So the
checker sees for each query and key what the learner's code made of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .masks import seen
from .setting import Setting, expand, scores_of

_NOTHING = 2e-5  # a weight that is 0, up to rounding


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
    return x @ torch.linalg.pinv(expand(other, setting.group))


def tiles_in_words(
    setting: Setting, name: str, found: Tensor, true: Tensor, limit: float
) -> Iterator[str]:
    """Which tiles of rows × keys are wrong, and which pair shows it best; NaN first."""
    lost = ~found.isfinite()
    if lost.any():
        rows = lost.any(-1).any(0).any(0)
        what = "keys" if name in ("dk", "dv") else "rows"
        yield f"NaN or inf in {what} {spans(rows)}"
        found = found.masked_fill(lost, 0.0)
        if not ((found - true).masked_fill(lost, 0.0).abs() > limit).any():
            return
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
    wrong = [at for at, size in worst.items() if size > 0.1 * worst[i, j]]
    place = f"rows {i}–{min(i + tile[0], setting.rows) - 1}"
    place += f" × keys {j}–{min(j + tile[1], setting.keys) - 1}"
    what = "dS" if name in ("dq", "dk") else "P"
    if ranks > 1:
        rank, source = i // each, j // each
        place += f": rank {rank}, ring step {(rank - source) % ranks} (keys of rank {source})"
    count = f"{len(wrong)} of {len(worst)} tiles" if len(worst) > 1 else "the tile"
    yield f"{count}; the worst: {place}: {what} is off by up to {worst[i, j]:.3g}"
    if name == "out":
        yield from _pairs(setting, error)


def _pairs(setting: Setting, error: Tensor) -> Iterator[str]:
    """A query that sees what is hidden from it, or does not see what it should."""
    counts = seen(setting)
    true = scores_of(setting, counts).softmax(-1).nan_to_num()
    extra = (error * (counts == 0)).clamp(min=0)
    if extra.max() > 0.02:
        b, h, i, j = _place(extra)
        yield f"query {i} sees key {j}, which is hidden from it (weight {extra[b, h, i, j]:.2g})"
    weight = true + error
    little = (true - weight) * ((weight < 0.5 * true) & (counts > 0))
    if little.max() > 0.02:
        b, h, i, j = _place(little)
        has = f"the weight {true[b, h, i, j]:.2g}"
        if weight[b, h, i, j].abs() < _NOTHING:
            yield f"query {i} does not see key {j}, which has {has}"
        else:
            yield f"query {i} sees too little of key {j}: {weight[b, h, i, j]:.2g}, not {has}"


def _place(x: Tensor) -> list[int]:
    return [int(i) for i in torch.unravel_index(x.argmax(), x.shape)]
