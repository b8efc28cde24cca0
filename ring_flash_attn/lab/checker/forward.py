"""Steps 3 and 5: forward passes in PyTorch, and what they give after each mistake."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..definition import attention
from .compare import Compare, Judgement
from .learner import Cases, CheckCase, Learner
from .masks import seen, wrong_masks
from .setting import (
    HEADS,
    INF,
    LN2,
    PACKED,
    PLAIN,
    Form,
    Mistake,
    Setting,
    Suspect,
    expand,
    random,
    scores_of,
)
from .softmax import online, wrong_sums

MISTAKES = {
    "lse_part": Mistake(
        "half of the lse",
        "lse is the maximum or the logarithm of the sum alone",
        "lse = m + log Σ exp(s − m) has both parts.",
    ),
    "scale_twice": Mistake(
        "scale applied twice",
        "scores or gradients have the factor 1/√d once too often",
        "Scale either q or the scores. In the backward pass each of dQ and dK gets 1/√d once.",
    ),
    "scale_missing": Mistake(
        "missing 1/√d in the scores",
        "scores are q kᵀ without the scale",
        "s = q kᵀ / √d.",
    ),
    "dimension": Mistake(
        "softmax over the wrong dimension",
        "the weights of a query do not add up to 1; those of a key do, or those of a batch",
        "Each query has its own softmax, over the keys: the last dimension of the scores.",
    ),
    "tail": Mistake(
        "unmasked tail block",
        "the last block reaches beyond the last key, and what lies there is counted",
        "Where the number of keys is no multiple of the tile, set scores of columns ≥ keys to "
        "−inf; loading zeros there is not enough, since exp(0) is 1.",
    ),
}

Size = tuple[int, int, int, bool]  # rows, keys, d, causal
Suspects = Callable[[Setting], Iterable[Suspect]]
SIZES: tuple[Size, ...] = (
    (32, 32, 32, False),
    (37, 37, 40, False),
    (32, 32, 32, True),
    (37, 37, 40, True),
    (21, 37, 40, True),
    (37, 21, 40, False),
    (37, 21, 40, True),
)
LONG: tuple[Size, ...] = ((150, 170, 16, False), (150, 170, 16, True))  # beyond any tile
LARGE: Size = (37, 37, 64, False)  # scores beyond ±88: exp overflows
HUGE: Size = (37, 37, 48, True)  # the score of one key is 300, also where it is hidden
_HUGE_KEY = 20


# Results of a setting, rightly or wrongly.


def forward(setting: Setting, counts: Tensor, factor: float = 1.0) -> dict[str, Tensor]:
    """Output and lse in one piece; rows that see nothing are open."""
    scores = scores_of(setting, counts) * factor
    return finish(setting, scores, expand(setting.v, setting.group))


def finish(setting: Setting, scores: Tensor, v: Tensor) -> dict[str, Tensor]:
    """Softmax, with sinks if there are any; rows that see nothing are open."""
    out, lse, m, _ = online(scores, v, scores.shape[-1])
    if setting.sinks is not None:
        out, lse = with_sink(out, lse, setting.sinks[:, None])
        m = torch.maximum(m, setting.sinks[:, None])
    empty = (scores == -INF).all(-1)
    nothing = float("nan")
    return {
        "out": out.masked_fill(empty[..., None], nothing),
        "lse": lse.masked_fill(empty, nothing),
        "m": m,
    }


def with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """One more score without a value."""
    both = torch.logaddexp(lse, sink)
    return out * (lse - both).exp()[..., None], both


def forward_suspects(setting: Setting) -> Iterator[Suspect]:
    """What (out, lse) looks like after each mistake."""
    counts = seen(setting)
    scores, v = scores_of(setting, counts), expand(setting.v, setting.group)
    right = finish(setting, scores, v)
    lse, m = right["lse"], right["m"]
    for mistake, mask in wrong_masks(setting):
        yield mistake, forward(setting, mask)
    if setting.masked:
        all_seen = forward(setting, torch.ones_like(counts))["lse"]
        share = (lse - all_seen).exp()[..., None]
        yield "mask_after", {"out": right["out"] * share, "lse": all_seen}
    yield from _tails(setting, counts, right)
    yield "scale_twice", forward(setting, counts, setting.scale)
    yield "scale_missing", forward(setting, counts, 1 / setting.scale)
    for factor in (LN2, 1 / LN2):  # exp2 of natural scores, exp of those in base 2
        wrong = forward(setting, counts, factor)
        for other_lse in (wrong["lse"], wrong["lse"] / factor, wrong["lse"] * factor):
            yield "base2", {"out": wrong["out"], "lse": other_lse}
    for other_lse in (lse / LN2, lse * LN2, m + (lse - m) / LN2, m / LN2 + (lse - m)):
        yield "base2", {"lse": other_lse}
    for other_lse in (m, lse - m, (lse - m).exp(), lse.exp()):
        yield "lse_part", {"lse": other_lse}
    yield "unnormalised", {"out": right["out"] * (lse - m).exp()[..., None]}
    yield from _late_masks(setting, counts, right)
    for mistake, result in wrong_sums(scores, v, setting.key_tiles):
        if setting.sinks is not None and "lse" in result:
            out, both = with_sink(result["out"], result["lse"], setting.sinks[:, None])
            result = {"out": out, "lse": both}
        yield mistake, result


def _tails(setting: Setting, counts: Tensor, right: dict[str, Tensor]) -> Iterator[Suspect]:
    """The last block counts rows of zeros, or of the next sequence, as keys."""
    if setting.causal or setting.world_size > 1:
        return
    out, lse = right["out"], right["lse"]
    for tile in setting.key_tiles:
        extra = -setting.keys % tile
        if not extra:
            continue
        both = torch.logaddexp(lse, torch.full_like(lse, math.log(extra)))
        yield "tail", {"out": out * (lse - both).exp()[..., None], "lse": both}
        yield "tail", {"out": out * (lse - both).exp()[..., None]}
        if extra <= setting.keys and setting.q.shape[0] > 1:
            k, v = (torch.cat([x, x.roll(-1, 0)[:, :, :extra]], 2) for x in (setting.k, setting.v))
            longer = Setting(setting.q, k, v)
            wrong = forward(longer, functional.pad(counts, (0, extra), value=1.0))
            wrong["out"][-1], wrong["lse"][-1] = float("nan"), float("nan")  # behind the tensor
            yield "tail", wrong


def _late_masks(setting: Setting, counts: Tensor, right: dict[str, Tensor]) -> Iterator[Suspect]:
    """A hidden score is the maximum, and all visible weights underflow: 0, or not a number."""
    top = scores_of(setting, counts).amax(-1, keepdim=True)
    above = scores_of(setting, torch.ones_like(counts)) - top > 120
    if not setting.causal or not above.any():
        return
    for tile in setting.all_tiles:
        visited = seen(setting, "whole_tiles", tile)
        lost = (above & (visited > counts)).any(-1)
        if lost.any():
            for out, lse in ((0.0, -INF), (INF, INF), (0.0, INF)):
                yield (
                    "mask_late",
                    {
                        "out": right["out"].masked_fill(lost[..., None], out),
                        "lse": right["lse"].masked_fill(lost, lse),
                    },
                )


# Cases.


def plain_inputs(
    rows: int, keys: int, d: int, causal: bool, large: bool = False
) -> tuple[list[Tensor], Setting]:
    """q, k, v (2, rows, d) and the same as a setting."""
    shapes = ((2, rows, d), (2, keys, d), (2, keys, d))
    q, k, v = (random(*shape, seed=i) for i, shape in enumerate(shapes))
    if large:  # whole numbers, so that TF32 is exact
        q, k = (16 * q).round(), (5 * k).round()
    if (rows, keys, d, causal) == HUGE:
        q[..., 0], k[:, _HUGE_KEY], k[:, _HUGE_KEY, 0] = 4.0, 0.0, 75 * d**0.5
    return [q, k, v], PLAIN.setting(q, k, v, causal=causal)


def truth_of(form: Form, setting: Setting) -> dict[str, Tensor]:
    """Output and lse by the definition."""
    q, k, v = (HEADS.learner("out", x) for x in (setting.q, setting.k, setting.v))
    options: dict[str, Any] = {"causal": setting.causal, "window": setting.window}
    if setting.documents is not None:
        out, lse = attention(q[0], k[0], v[0], cu_seqlens_q=setting.documents, **options)
        out, lse = PACKED.ours("out", out), PACKED.ours("lse", lse)
    else:
        out, lse = attention(q, k, v, sinks=setting.sinks, **options)
        out = HEADS.ours("out", out)
    return {"out": form.learner("out", out), "lse": form.learner("lse", lse)}


def judge_forward(
    form: Form,
    setting: Setting,
    suspects: Suspects = forward_suspects,
    tolerance: float = 1e-4,
    names: Sequence[str] = ("out", "lse"),
    lost: str = "",
) -> Compare:
    """Compare what a forward pass returns with the definition, and with suspects."""
    truth = truth_of(form, setting)
    truth = {name: truth[name] for name in names}
    wrong = partial(suspects, setting)
    return Compare(truth, form, setting, wrong, tolerance, setting.masked, lost)


def forward_cases(
    learner: Learner,
    name: str,
    sizes: Iterable[Size],
    tiles: Iterable[tuple[int, int]] | None = None,
    tolerance: float = 1e-4,
    causal_argument: bool = True,
    suspects: Suspects = forward_suspects,
) -> Cases:
    """Forward passes of (batch, rows, d), with each of the tiles if the learner takes them."""
    sizes = tuple(sizes)
    for tile in tiles or (None,):
        for size in sizes:
            large = size == LARGE
            tensors, setting = plain_inputs(*size, large=large)
            more = ["large scores"] if large else []
            more += [f"a score of 300 at key {_HUGE_KEY}"] if size == HUGE else []
            given: list[Any] = [*tensors, *([setting.causal] if causal_argument else [])]
            if tile is not None:
                setting = replace(setting, tiles=(tile,))
                more.append(f"tiles {tile[0]} × {tile[1]}")
                given += tile
            limit = max(tolerance, 1e-3 if large or size == HUGE else 0.0)
            lost = "outside" if learner.has_kernels else ""
            judge = judge_forward(PLAIN, setting, suspects, limit, lost=lost)
            yield learner.case(name, setting.describe(*more), judge, *given)


def _wrong_standard(setting: Setting) -> Iterator[Suspect]:
    yield from forward_suspects(setting)
    scores = scores_of(setting, seen(setting))
    for dim in (2, 0):
        yield "dimension", {"out": scores.softmax(dim).nan_to_num() @ setting.v}


def standard_attention(learner: Learner) -> Cases:
    """Step 3: the output, and what is kept for the backward pass."""
    words = {"p": "p, the probabilities"}
    for size in SIZES:
        tensors, setting = plain_inputs(*size)
        compare = judge_forward(PLAIN, setting, _wrong_standard, names=["out"])
        p = scores_of(setting, seen(setting)).softmax(-1)[:, 0].nan_to_num()
        needed = dict(zip("qkvp", [*tensors, p]))

        def judge(
            found: Any, compare: Compare = compare, needed: dict[str, Tensor] = needed
        ) -> Judgement:
            if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], dict):
                return Judgement(["expected (out, saved), with saved a dict of tensors"])
            out, saved = found
            judgement = compare(out)
            if judgement.lines:
                return judgement
            lines = []
            for name, true in needed.items():
                word, shape = words.get(name, name), tuple(true.shape)
                if name not in saved:
                    lines.append(f"saved lacks {word}, {shape}")
                elif not _near(saved[name], true, 1e-4):
                    lines.append(f"saved['{name}'] is not {word}, {shape}")
            more = [name for name in saved if name not in needed]
            if more:
                lines.append(f"saved holds more than backward needs: {', '.join(map(str, more))}")
            return Judgement(lines)

        yield learner.case("standard_attention", setting.describe(), judge, *tensors, size[3])


def _near(x: Any, true: Tensor, tolerance: float) -> bool:
    return (
        isinstance(x, Tensor)
        and x.shape == true.shape
        and torch.allclose(x.detach().double().cpu(), true.double(), 1e-3, tolerance)
    )


def tiled_attention(learner: Learner) -> Cases:
    """Step 5: tiles of several sizes; then the same as an autograd function."""
    tiles = ((16, 16), (8, 32), (37, 5))
    for sizes in ((*SIZES, LARGE), (HUGE,)):
        yield from forward_cases(learner, "tiled_forward", sizes, tiles)
    function = learner.get("TiledAttention")
    for size in (SIZES[1], SIZES[3]):
        tensors, setting = plain_inputs(*size)
        compare = judge_forward(PLAIN, setting, names=["out"])
        of_lse = judge_forward(PLAIN, setting, names=["lse"])

        def call(tensors: Sequence[Tensor] = tensors, causal: bool = size[3]) -> Any:
            return function.apply(*(learner.put(x).requires_grad_() for x in tensors), causal)

        def judge(found: Any, compare: Compare = compare, of_lse: Compare = of_lse) -> Judgement:
            judgement = compare(found)
            if judgement.lines:
                return judgement
            saved = getattr(found.grad_fn, "saved_tensors", ())
            shape = of_lse.truth["lse"].shape
            alike = [x for x in saved if isinstance(x, Tensor) and x.shape == shape]
            if len(alike) != 1:
                judgement.lines.append("save the lse, (batch, rows), for the backward pass, once")
                return judgement
            judgement = of_lse(alike[0])
            judgement.lines = (
                [f"what is saved as {judgement.lines[0]}", *judgement.lines[1:]]
                if judgement.lines
                else []
            )
            return judgement

        yield CheckCase("TiledAttention", setting.describe(), call, judge)
