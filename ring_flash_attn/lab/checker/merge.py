"""Step 12: two halves of the keys, one result."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from .compare import Compare
from .learner import Cases, Learner
from .setting import INF, LN2, PLAIN, Mistake, Suspect, random

MISTAKES = {
    "lse_max": Mistake(
        "lse merged by max",
        "the larger lse stands for both",
        "lse = log(exp(lse1) + exp(lse2)): the maximum is only the reference inside.",
    ),
    "carried": Mistake(
        "lse not carried",
        "the merged output goes with the lse of one part",
        "The merge changes both: out and lse. The next merge needs the lse of all parts so far.",
    ),
    "weights": Mistake(
        "wrong weights in the merge",
        "the two outputs are not weighted by their part of the sum",
        "Output i has the weight exp(lse_i − lse), with the merged lse.",
    ),
}

_LARGEST = 88.7  # beyond it exp is inf in fp32


def wrong_merges(
    out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each mistake with the output and the lse that it makes."""
    lse, top = torch.logaddexp(lse1, lse2), torch.maximum(lse1, lse2)

    def weigh(reference: Tensor, unit: float = 1.0) -> Tensor:
        one, two = ((each - reference).mul(unit).exp()[..., None] for each in (lse1, lse2))
        return one * out1 + two * out2

    larger = torch.where((lse1 >= lse2)[..., None], out1, out2)
    for wrong in (weigh(lse), weigh(top), larger):
        yield "lse_max", wrong, top
    in_two = torch.logaddexp(lse1 * LN2, lse2 * LN2) / LN2
    yield "base2", weigh(in_two, LN2), in_two
    yield "base2", weigh(lse), in_two
    yield "base2", weigh(lse), lse / LN2
    yield "weights", weigh(top), lse
    for wrong in ((out1 + out2) / 2, out1 + out2, weigh(lse).sub(out1 + out2).neg()):
        yield "weights", wrong, lse
    total = (lse1 + lse2)[..., None]
    yield "weights", (lse1[..., None] * out1 + lse2[..., None] * out2) / total, lse
    yield "weights", weigh(lse), lse1 + lse2
    yield "carried", weigh(lse), lse1
    yield "carried", weigh(lse), lse2
    overflow = (lse1 > _LARGEST) | (lse2 > _LARGEST)
    if overflow.any():
        lost = weigh(lse).masked_fill(overflow[..., None], INF)
        yield "no_maximum", lost, lse.masked_fill(overflow, INF)


def _suspects(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> Iterator[Suspect]:
    """Rows that one of them does not see are open."""
    open_rows, nothing = (lse1 == -INF) | (lse2 == -INF), float("nan")
    for mistake, out, lse in wrong_merges(out1, lse1, out2, lse2):
        out, lse = (
            out.masked_fill(open_rows[..., None], nothing),
            lse.masked_fill(open_rows, nothing),
        )
        yield mistake, {"out": PLAIN.ours("out", out), "lse": PLAIN.ours("lse", lse)}


def merge(learner: Learner) -> Cases:
    """Usual rows, large lse, and rows that one half does not see, or both."""
    for label in ("two halves", "a large lse", "one half sees nothing", "both see nothing"):
        outs = [random(2, 19, 24, seed=i) for i in range(2)]
        lses = [random(2, 19, seed=i) + 2 for i in range(2)]
        if label == "a large lse":
            lses[0][:, :8] += 200
            lses[1][:, 5:12] += 200
        if "nothing" in label:
            for which in (0, 1) if label.startswith("both") else (1,):
                lses[which][:, 3:6], outs[which][:, 3:6] = -INF, 0.0
        if label.startswith("one"):
            lses[0][:, 8], outs[0][:, 8] = -INF, 0.0
        given = (outs[0], lses[0], outs[1], lses[1])
        out1, lse1, out2, lse2 = wide = [x.double() for x in given]
        lse = torch.logaddexp(lse1, lse2)
        safe = lse.masked_fill(lse == -INF, 0.0)
        out = (lse1 - safe).exp()[..., None] * out1 + (lse2 - safe).exp()[..., None] * out2
        suspects = partial(_suspects, *wide)
        hidden = "nothing" in label
        judge = Compare({"out": out, "lse": lse}, PLAIN, None, suspects, hidden=hidden)
        yield learner.case("merge", label, judge, *given)
