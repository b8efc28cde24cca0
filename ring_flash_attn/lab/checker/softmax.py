"""Step 4: online softmax over blocks, and what it gives after each of its mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from .compare import Compare
from .learner import Cases, Learner
from .setting import FLAT, INF, LN2, Mistake, Suspect, random

MISTAKES = {
    "rescale": Mistake(
        "forgot to rescale",
        "what was summed before the maximum moved keeps its old reference",
        "When the maximum goes from m to m', every exp(x − m) summed so far must become "
        "exp(x − m'): multiply the accumulator and the sum by the same factor.",
    ),
    "inverted": Mistake(
        "correction inverted",
        "the factor is exp(new − old), not exp(old − new)",
        "The factor makes exp(x − m') of exp(x − m): exp(m − m'), at most 1. At first m is −inf "
        "and the factor 0; the other way round it is infinite.",
    ),
    "maximum": Mistake(
        "maximum not carried",
        "each block is taken relative to its own maximum, not to the largest so far",
        "The running maximum is max(old, this block's). Keep it for the next block, and rescale "
        "by the old one.",
    ),
    "no_maximum": Mistake(
        "no maximum subtracted",
        "exp of large scores overflows",
        "Subtract the running maximum before exp; the quotient does not change.",
    ),
    "unnormalised": Mistake(
        "not divided by the sum",
        "the output is the accumulator, Σ exp(s − m) v, without the division",
        "After the last block, divide the accumulator by the running sum.",
    ),
    "base2": Mistake(
        "base 2 against natural lse",
        "powers of 2 and powers of e are mixed",
        "exp(x) = exp2(x · log2(e)). If you compute with exp2, convert once on the way in, and "
        "multiply the lse by ln 2 on the way out: callers expect the natural one.",
    ),
}

_SWITCHES = {
    "keep_acc": "rescale",
    "keep_sum": "rescale",
    "keep_both": "rescale",
    "inverse_alpha": "inverted",
    "inverse_lost": "inverted",
    "own": "maximum",
    "own_unscaled": "maximum",
    "not_stored": "maximum",
    "block_alpha": "maximum",
    "no_maximum": "no_maximum",
}


def online(
    scores: Tensor, values: Tensor, tile: int, switch: str = ""
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, lse, maximum and sum after an online softmax with one mistake, or with none."""
    m = torch.full_like(scores[..., 0], -INF)
    total, last = torch.zeros_like(m), m
    acc = torch.zeros_like(scores[..., :1] * values[..., :1, :])
    for start in range(0, scores.shape[-1], tile):
        s = scores[..., start : start + tile]
        top = s.amax(-1)
        last = torch.maximum(m, top)
        if switch in ("own", "own_unscaled"):
            last = top
        if switch == "no_maximum":
            last = torch.zeros_like(top)
        safe = last.masked_fill(last == -INF, 0.0)
        p = (s - safe[..., None]).exp()
        alpha = (m - safe).exp()
        if switch == "block_alpha":
            alpha = (top - safe).exp()
        if switch == "inverse_alpha":
            alpha = torch.where(m == -INF, 0.0, (safe - m).exp())
        if switch == "inverse_lost":
            alpha = (safe - m).exp()
        kept = torch.ones_like(alpha)
        of_sum = kept if switch in ("keep_sum", "keep_both", "own_unscaled") else alpha
        of_acc = kept if switch in ("keep_acc", "keep_both", "own_unscaled") else alpha
        total = total * of_sum + p.sum(-1)
        acc = acc * of_acc[..., None] + p @ values[..., start : start + tile, :]
        if switch != "not_stored":
            m = last
    out = acc / total.masked_fill(total == 0, 1.0)[..., None]
    return out, last + total.log(), last, total


def wrong_sums(scores: Tensor, values: Tensor, tiles: tuple[int, ...]) -> Iterator[Suspect]:
    """Online softmax with each of its mistakes; those that show where exp overflows, in fp32."""
    for tile in tiles:
        for switch, mistake in _SWITCHES.items():
            dtype = (
                torch.float32 if switch in ("own", "no_maximum", "inverse_lost") else torch.float64
            )
            out, lse, m, total = online(scores.to(dtype), values.to(dtype), tile, switch)
            lost = ~out.isfinite().all(-1) | ~total.isfinite()  # not numbers: +inf
            out = out.double().masked_fill(lost[..., None], INF)
            lse, total = (x.double().masked_fill(lost, INF) for x in (lse, total))
            if switch == "inverse_lost":  # all of it is lost; −inf would agree with such an lse
                yield mistake, {"out": out, "total": total}
            else:
                yield mistake, {"out": out, "lse": lse, "m": m.double(), "total": total}


def _suspects(scores: Tensor, values: Tensor, width: int) -> Iterator[Suspect]:
    yield from wrong_sums(scores, values, (width,))
    m = scores.amax(-1, keepdim=True)
    total = (scores - m).exp().sum(-1, keepdim=True)
    yield "unnormalised", {"out": scores.softmax(-1) @ values * total}
    in_two = (LN2 * (scores - m)).exp().sum(-1)
    yield "base2", {"total": in_two, "out": (LN2 * scores).softmax(-1) @ values}


def online_softmax(learner: Learner) -> Cases:
    """Maximum and sum; then the product with the values."""
    labels = ("small scores", "large scores", "the first block hidden", "a row hidden")
    for width, d in ((16, 48), (11, 40)):
        for label in labels:
            rows, keys = 24, 37
            scores, v = random(rows, keys), random(keys, d, seed=1)
            if label == "large scores":
                scores = 100 * scores
                scores[3, :width] += 400
            if label == "the first block hidden":
                scores[5:9, :width] = -INF
            if label == "a row hidden":
                scores[2] = -INF
            blocks, values = list(scores.split(width, 1)), list(v.split(width, 0))
            wide, of_v = scores.double()[None, None], v.double()[None, None]
            m = wide.amax(-1)
            total = (wide - m.masked_fill(m == -INF, 0.0)[..., None]).exp().sum(-1)
            out = wide.softmax(-1).nan_to_num() @ of_v
            suspects = partial(_suspects, wide, of_v, width)
            hidden = "hidden" in label
            words = f"{label}, blocks of {width}, {keys} columns"
            pair = {"m": m[0, 0], "total": total[0, 0]}
            judge = Compare(pair, FLAT, None, suspects, hidden=hidden)
            yield learner.case("online_softmax", words, judge, blocks)
            tolerance = 1e-3 if "large" in label else 1e-4
            judge = Compare({"out": out[0, 0]}, FLAT, None, suspects, tolerance, hidden)
            yield learner.case("softmax_dot", f"{words}, d {d}", judge, blocks, values)
