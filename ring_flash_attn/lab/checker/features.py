"""Steps 10 and 11: GQA, windows and sinks; packed documents."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from .backward import backward_suspects, gradients, judge_backward
from .forward import finish, forward_suspects, judge_forward, with_sink
from .learner import Cases, Learner
from .masks import seen
from .setting import HEADS, PACKED, Mistake, Setting, Suspect, expand, random, scores_of
from .softmax import online

MISTAKES = {
    "sinks": Mistake(
        "the sink is not counted right",
        "the softmax without the sink, or with it in another place",
        "A sink is one more score for each row, once, unscaled, without a value: in the sum and "
        "in the lse.",
    ),
    "group": Mistake(
        "dK not summed over the GQA group",
        "dK and dV have the share of some query heads only",
        "All query heads of a group read the same KV head, so its gradient is the sum of theirs.",
    ),
    "head": Mistake(
        "wrong KV head",
        "query heads use the keys of another group",
        "Query head h uses KV head h // (heads / heads_k).",
    ),
}

_FEATURES: tuple[tuple[int, int, bool, tuple[int, int], bool], ...] = (
    # rows, keys, causal, window, sinks
    (32, 32, False, (-1, -1), False),
    (29, 29, False, (-1, -1), False),
    (29, 29, True, (-1, -1), False),
    (21, 37, True, (-1, -1), False),
    (29, 29, True, (5, 0), False),
    (37, 37, True, (18, 0), False),
    (29, 29, False, (4, 3), False),
    (21, 37, False, (6, 2), False),
    (37, 21, True, (9, 0), False),
    (29, 29, True, (-1, -1), True),
    (29, 29, True, (7, 0), True),
    (37, 21, True, (-1, -1), True),
)


def grouped_attention(learner: Learner) -> Cases:
    """Step 10: 3 query heads for each KV head, forward and backward."""
    heads, heads_k, d = 6, 2, 40
    for rows, keys, causal, window, has_sinks in _FEATURES:
        shapes = ((2, rows, heads, d), (2, keys, heads_k, d), (2, keys, heads_k, d))
        tensors = [random(*shape, seed=i) for i, shape in enumerate(shapes)]
        sinks = random(heads, seed=4) + 1 if has_sinks else None
        wide = None if sinks is None else sinks.double()
        setting = HEADS.setting(*tensors, causal=causal, window=window, sinks=wide)
        words = setting.describe(*(["sinks"] if has_sinks else []))
        judge = judge_forward(HEADS, setting, _wrong_forward)
        yield learner.case("grouped_forward", words, judge, *tensors, causal, window, sinks)
        judge, given = judge_backward(HEADS, tensors, setting, _wrong_backward)
        yield learner.case("grouped_backward", words, judge, *given, causal, window)


def _wrong_forward(setting: Setting) -> Iterator[Suspect]:
    yield from forward_suspects(setting)
    counts = seen(setting)
    v = expand(setting.v, setting.group, interleave=False)
    yield "head", finish(setting, scores_of(setting, counts, interleave=False), v)
    if setting.sinks is None:
        return
    scores, v = scores_of(setting, counts), expand(setting.v, setting.group)
    out, lse, _, _ = online(scores, v, setting.keys)
    sink = setting.sinks[:, None]
    yield "sinks", {"out": out, "lse": lse}
    blocks = dict.fromkeys(-(-setting.keys // tile) for tile in setting.key_tiles)
    for other in (sink * setting.scale, *(sink + math.log(n) for n in blocks)):  # one for each
        yield "sinks", dict(zip(("out", "lse"), with_sink(out, lse, other)))


def _wrong_backward(setting: Setting) -> Iterator[Suspect]:
    yield from backward_suspects(setting)
    counts = seen(setting)
    for pick in (lambda x: x[:, :, 0], lambda x: x[:, :, -1], lambda x: x.mean(2)):
        wrong = gradients(setting, counts, group=pick)
        yield "group", {"dk": wrong["dk"], "dv": wrong["dv"]}
    yield "head", {"dq": gradients(setting, counts, interleave=False)["dq"]}


def packed_attention(learner: Learner) -> Cases:
    """Step 11: documents of several lengths, one of them empty."""
    heads, d = 2, 48
    for offsets in ((0, 16, 32), (0, 7, 8, 21, 37), (0, 5, 5, 19), (0, 23)):
        for causal in (False, True):
            q, k, v = (random(offsets[-1], heads, d, seed=i) for i in range(3))
            setting = PACKED.setting(q, k, v, causal=causal, documents=offsets)
            words = setting.describe(f"cu_seqlens {', '.join(map(str, offsets))}")
            judge, given = judge_forward(PACKED, setting), torch.tensor(offsets, dtype=torch.int32)
            yield learner.case("packed_forward", words, judge, q, k, v, given, causal)
