"""The cases of each exercise; runs in a process of its own: `python -m … NUMBER FILE NEWS LIMIT`.

A case calls one function of the learner's file and judges what it returns. Head dimensions are at
least as large as the number of keys, so that `compare.py` can say which pair is wrong.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import linecache
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from .check import Report
from .device import device  # turns the interpreter on before the learner imports triton

HERE = device()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from . import suspects as sus  # noqa: E402
from .compare import FLAT, HEADS, PACKED, PLAIN, Compare, Form, Judgement, same  # noqa: E402
from .definition import attention  # noqa: E402
from .registry import find_step  # noqa: E402
from .suspects import INF, MISTAKES, Setting  # noqa: E402
from .virtual import Stuck, run_ranks  # noqa: E402

_MISTAKES = 2  # named at most
_NAMED = 3  # wrong cases of a function that are compared with suspects


class InputChanged(RuntimeError):
    """A function has written to a tensor that it was given."""


@dataclass(frozen=True, slots=True)
class CheckCase:
    """One call of one function; `judge` looks at what it returned."""

    function: str
    label: str
    call: Callable[[], Any]
    judge: Callable[[Any], Judgement]


# Inputs.


def random(*shape: int, seed: int = 0) -> Tensor:
    """fp32, on the device, always the same."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return made.to(HERE)


def doubles(form: Form, *tensors: Tensor) -> list[Tensor]:
    """As suspects have them."""
    return [form.ours("out", x.double().cpu()) for x in tensors]


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


def describe(setting: Setting, *more: str) -> str:
    """A call in words."""
    words = ["causal" if setting.causal else "full"]
    words.append(f"{setting.rows} queries × {setting.keys} keys, d {setting.q.shape[-1]}")
    if setting.window != (-1, -1):
        words.append(f"window {setting.window}")
    if setting.group > 1:
        words.append(f"{setting.q.shape[1]} heads, {setting.k.shape[1]} KV heads")
    return ", ".join([*words, *more])


# rows, keys, d, causal
_SIZES = (
    (32, 32, 32, False),
    (37, 37, 40, False),
    (32, 32, 32, True),
    (37, 37, 40, True),
    (21, 37, 40, True),
    (37, 21, 40, False),
    (37, 21, 40, True),
)
_LARGE = (37, 37, 64, False)  # scores beyond ±88: exp overflows


def plain_inputs(
    rows: int, keys: int, d: int, causal: bool, large: bool = False, batch: int = 2
) -> tuple[list[Tensor], Setting]:
    """q, k, v (batch, rows, d) and the same as a setting."""
    shapes = ((batch, rows, d), (batch, keys, d), (batch, keys, d))
    tensors = [random(*shape, seed=i) for i, shape in enumerate(shapes)]
    if large:  # whole numbers, so that TF32 is exact
        tensors[0], tensors[1] = (16 * tensors[0]).round(), (5 * tensors[1]).round()
    q, k, v = doubles(PLAIN, *tensors)
    return tensors, Setting(q, k, v, causal=causal)


def _loose(number: int) -> float:
    """Tensor cores round fp32 to TF32 unless told otherwise."""
    return 1e-2 if HERE.type == "cuda" and number in (7, 8) else 1e-4


def forward_cases(
    name: str,
    function: Callable[..., Any],
    sizes: Iterable[tuple[int, int, int, bool]],
    tiles: Sequence[tuple[int, int]] = (),
    number: int = 5,
    causal_argument: bool = True,
) -> Iterator[CheckCase]:
    """Forward passes of (batch, rows, d), with each of the tiles if the learner takes them."""
    sizes = tuple(sizes)
    for tile in tiles or (None,):
        for size in sizes:
            large = size == _LARGE
            tensors, setting = plain_inputs(*size, large=large)
            more = ["large scores"] if large else []
            arguments: list[Any] = [*tensors, *([size[3]] if causal_argument else [])]
            if tile is not None:
                setting = replace(setting, tiles=(tile,))
                more.append(f"tiles {tile[0]} × {tile[1]}")
                arguments += tile
            judge = Compare(
                truth_of(PLAIN, setting),
                PLAIN,
                setting,
                partial(sus.forward_suspects, setting),
                max(_loose(number), 1e-3 if large else 0.0),
                hidden=size[3],
            )
            call = _later(function, *arguments)
            yield CheckCase(name, describe(setting, *more), call, judge)


def _later(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """Call it with copies, and see whether it leaves them alone."""

    def call() -> Any:
        copies = [_copy(each) for each in arguments]
        result = function(*copies)
        for i, (before, after) in enumerate(zip(map(_tensors, arguments), map(_tensors, copies))):
            if not all(map(torch.equal, before, after)):
                raise InputChanged(f"{function.__name__} changes its argument {i + 1} in place")
        return result

    return call


def _copy(x: Any) -> Any:
    if isinstance(x, list):
        return [_copy(each) for each in x]
    return x.clone() if isinstance(x, Tensor) else x


def _tensors(x: Any) -> list[Tensor]:
    return x if isinstance(x, list) else [x] if isinstance(x, Tensor) else []


def backward_inputs(
    form: Form, tensors: Sequence[Tensor], setting: Setting, rounded: bool = False
) -> tuple[list[Tensor], Setting, dict[str, Tensor]]:
    """q, k, v, out, lse, dout; the setting with them; and the true gradients."""
    truth = truth_of(form, setting)
    out, lse = (x.float().to(HERE) for x in truth.values())
    dout = random(*out.shape, seed=7)
    if rounded:
        out = out.to(torch.float8_e4m3fn).float()
    wide = doubles(form, out, dout)
    narrow = form.ours("lse", lse.double().cpu())
    setting = replace(setting, out=wide[0], dout=wide[1], lse=narrow)
    right = sus.gradients(setting, sus.seen(setting))
    gradients = {name: form.learner(name, x) for name, x in right.items()}
    return [*tensors, out, lse, dout], setting, gradients


def backward_cases(name: str, function: Callable[..., Any], number: int) -> Iterator[CheckCase]:
    """Backward passes of (batch, rows, d)."""
    for size in _SIZES:
        for rounded in (False, True) if size == _SIZES[0] else (False,):
            made, plain = plain_inputs(*size)
            tensors, setting, truth = backward_inputs(PLAIN, made, plain, rounded)
            more = ("out rounded to fp8 by the forward pass",) if rounded else ()
            judge = Compare(
                truth,
                PLAIN,
                setting,
                partial(sus.backward_suspects, setting),
                2 * _loose(number),
                hidden=size[3],
            )
            call = _later(function, *tensors, size[3])
            yield CheckCase(name, describe(setting, *more), call, judge)


# The exercises.


def cases_1(get: Callable[[str], Any]) -> Iterator[CheckCase]:
    """A weighted sum and its gradients."""
    function = get("WeightedSum")
    for rows, d in ((32, 16), (33, 20), (1, 7), (70, 5)):
        x, w, g = random(rows, d), random(d, seed=1), random(rows, seed=2)

        def call(x: Tensor = x, w: Tensor = w, g: Tensor = g) -> Any:
            x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
            y = function.apply(x, w)
            if not isinstance(y, Tensor) or y.shape != g.shape:
                return y, x, w
            y.backward(g)
            return y, x.grad, w.grad

        wide = [t.double().cpu() for t in (x, w, g)]
        truth = {
            "y": wide[0] @ wide[1],
            "the gradient of x": wide[2][:, None] * wide[1],
            "the gradient of weight": wide[2] @ wide[0],
        }
        yield CheckCase("WeightedSum", f"x ({rows}, {d})", call, _by_numbers(truth))


def _by_numbers(truth: dict[str, Tensor]) -> Compare:
    """Of vectors and matrices whose rows are nothing special."""
    back = Form(same, same, _matrix, _matrix)
    return Compare(truth, back)


def _matrix(x: Tensor) -> Tensor:
    return x[None, None] if x.dim() == 2 else x[None, None, :, None]


def cases_2(get: Callable[[str], Any]) -> Iterator[CheckCase]:
    """Sums in several precisions."""
    half, single = torch.float16, torch.float32
    pairs = ((single, single), (half, half), (single, half), (torch.bfloat16, torch.bfloat16))
    for dtype, value_dtype in pairs:
        for cast_first in (False, True):
            for n, value in ((1000, 0.01), (300, 0.1)):
                total = torch.zeros((), dtype=dtype)
                one = torch.tensor(value, dtype=value_dtype)
                for _ in range(n):
                    total += one.to(dtype) if cast_first else one

                def judge(found: Any, true: float = total.item()) -> Judgement:
                    if not isinstance(found, (int, float)):
                        return Judgement([f"a {type(found).__name__} returned, not a float"])
                    near = abs(found - true) <= 1e-6 * abs(true)
                    return Judgement(
                        [] if near else [f"the sum is {found:.6g}, expected {true:.6g}"]
                    )

                words = f"{value} as {value_dtype} {n} times to {dtype}"
                cast = ", cast first" if cast_first else ""
                call = _later(get("accumulate"), dtype, value_dtype, cast_first, n, value)
                yield CheckCase("accumulate", words + cast, call, judge)


def cases_3(get: Callable[[str], Any]) -> Iterator[CheckCase]:
    """Standard attention and what it keeps."""
    for size in _SIZES:
        (q, k, v), setting = plain_inputs(*size)
        truth = truth_of(PLAIN, setting)
        compare = Compare(
            {"out": truth["out"]},
            PLAIN,
            setting,
            partial(sus.forward_suspects, setting),
        )
        p = sus.scores_of(setting, sus.seen(setting)).softmax(-1)[:, 0].nan_to_num()
        needed = {"q": q, "k": k, "v": v, "the probabilities": p}

        def judge(
            found: Any, compare: Compare = compare, needed: dict[str, Tensor] = needed
        ) -> Judgement:
            if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], dict):
                return Judgement(["expected (out, saved), with saved a dict of tensors"])
            judgement = compare(found[0])
            kept = [x for x in found[1].values() if isinstance(x, Tensor)]
            for name, true in needed.items():
                true = true.double().cpu()
                same = (
                    x.shape == true.shape
                    and torch.allclose(x.detach().double().cpu(), true, 1e-3, 1e-4)
                    for x in kept
                )
                if not any(same) and not judgement.lines:
                    judgement.lines.append(f"saved lacks {name}, {tuple(true.shape)}")
            return judgement

        call = _later(get("standard_attention"), q, k, v, size[3])
        yield CheckCase("standard_attention", describe(setting), call, judge)


def cases_4(get: Callable[[str], Any]) -> Iterator[CheckCase]:
    """Online softmax over blocks."""
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
            wide, of_v = scores.double().cpu()[None, None], v.double().cpu()[None, None]
            m = wide.amax(-1)
            total = (wide - m.masked_fill(m == -INF, 0.0)[..., None]).exp().sum(-1)
            probabilities = wide.softmax(-1).nan_to_num()
            hidden = "hidden" in label
            words = f"{label}, blocks of {width}, {keys} columns"

            def wrong(
                wide: Tensor = wide, of_v: Tensor = of_v, width: int = width
            ) -> Iterator[sus.Suspect]:
                yield from sus.wrong_sums(wide, of_v, (width,))
                m = wide.amax(-1)
                total = (wide - m[..., None]).exp().sum(-1)
                right = wide.softmax(-1) @ of_v
                yield "unnormalised", {"out": right * total[..., None]}
                in_two = (sus.LN2 * (wide - m[..., None])).exp()
                yield "base2", {"total": in_two.sum(-1), "out": (sus.LN2 * wide).softmax(-1) @ of_v}

            pair = {"m": m[0, 0], "total": total[0, 0]}
            judge = Compare(pair, FLAT, None, wrong, hidden=hidden)
            yield CheckCase("online_softmax", words, _later(get("online_softmax"), blocks), judge)
            out = {"out": (probabilities @ of_v)[0, 0]}
            judge = Compare(out, FLAT, None, wrong, 1e-3 if "large" in label else 1e-4, hidden)
            call = _later(get("softmax_dot"), blocks, values)
            yield CheckCase("softmax_dot", f"{words}, d {d}", call, judge)


def cases_5(get: Callable[[str], Any]) -> Iterator[CheckCase]:
    """Tiled attention in PyTorch, and as an autograd function."""
    sizes = (*_SIZES, _LARGE)
    tiles = ((16, 16), (8, 32), (37, 5))
    yield from forward_cases("tiled_forward", get("tiled_forward"), sizes, tiles)
    function = get("TiledAttention")
    for size in (_SIZES[1], _SIZES[3]):
        tensors, setting = plain_inputs(*size)
        truth = truth_of(PLAIN, setting)
        compare = Compare(
            {"out": truth["out"]},
            PLAIN,
            setting,
            partial(sus.forward_suspects, setting),
            hidden=size[3],
        )

        def call(tensors: Sequence[Tensor] = tensors, causal: bool = size[3]) -> Any:
            return function.apply(*(x.clone().requires_grad_() for x in tensors), causal)

        def judge(found: Any, compare: Compare = compare, lse: Tensor = truth["lse"]) -> Judgement:
            judgement = compare(found)
            if judgement.lines:
                return judgement
            saved = getattr(found.grad_fn, "saved_tensors", ())
            near = (
                x.shape == lse.shape and torch.allclose(x.double().cpu(), lse, 1e-3, 1e-3)
                for x in saved
            )
            if sum(near) != 1:
                judgement.lines.append("save the lse, (batch, rows), for the backward pass, once")
            return judgement

        yield CheckCase("TiledAttention", describe(setting), call, judge)


def cases_6(get: Callable[[str], Any]) -> Iterator[CheckCase]:
    """Backward by recomputation."""
    yield from backward_cases("tiled_backward", get("tiled_backward"), 6)


def cases_7(get: Callable[[str], Any]) -> Iterator[CheckCase]:
    """Forward in Triton."""
    sizes = (*_SIZES, _LARGE)
    function = get("triton_forward")
    yield from forward_cases("triton_forward", function, sizes, number=7)
    tensors, setting = plain_inputs(*_SIZES[1])
    wrong = _read_as_contiguous(setting)
    found = ("strides", sus.forward(wrong, sus.seen(wrong)))
    judge = Compare(truth_of(PLAIN, setting), PLAIN, setting, lambda: [found], _loose(7))
    call = _later(function, *map(_strided, tensors), False)
    yield CheckCase("triton_forward", describe(setting, "not contiguous"), call, judge)


def _strided(x: Tensor) -> Tensor:
    """The same numbers, the other way round in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _read_as_contiguous(setting: Setting) -> Setting:
    """What a kernel gets that takes q, k and v for contiguous."""
    q, k, v = (x.transpose(2, 3).reshape(x.shape) for x in (setting.q, setting.k, setting.v))
    return replace(setting, q=q, k=k, v=v)


def cases_8(get: Callable[[str], Any]) -> Iterator[CheckCase]:
    """Backward in Triton."""
    function = get("triton_backward")
    yield from backward_cases("triton_backward", function, 8)
    made, plain = plain_inputs(*_SIZES[1])
    tensors, setting, truth = backward_inputs(PLAIN, made, plain)
    wrong = _read_as_contiguous(setting)
    found = ("strides", sus.gradients(wrong, sus.seen(wrong)))
    judge = Compare(truth, PLAIN, setting, lambda: [found], 2 * _loose(8))
    call = _later(function, *map(_strided, tensors[:3]), *tensors[3:], False)
    yield CheckCase("triton_backward", describe(setting, "not contiguous"), call, judge)


def cases_9(get: Callable[[str], Any]) -> Iterator[CheckCase]:
    """Which blocks a causal kernel visits, and what it computes then."""
    function = get("visible_blocks")
    shapes: tuple[tuple[int, int, int, int], ...]  # rows, keys, tile
    shapes = ((32, 32, 8, 8), (37, 37, 16, 8), (21, 37, 8, 16), (37, 21, 8, 8))
    shapes += ((20, 22, 4, 4), (20, 23, 4, 4), (16, 48, 16, 16))
    for rows, keys, block_q, block_k in shapes:
        for causal in (True, False):
            words = f"{'causal' if causal else 'full'}, {rows} queries × {keys} keys"
            judge = _blocks(rows, keys, block_q, block_k, causal)
            call = _later(function, rows, keys, block_q, block_k, causal)
            yield CheckCase("visible_blocks", f"{words}, tiles {block_q} × {block_k}", call, judge)
    sizes = [size for size in _SIZES if size[3]]
    tiles = ((16, 16), (8, 32), (13, 5))
    function = get("causal_forward")
    yield from forward_cases("causal_forward", function, sizes, tiles, 9, causal_argument=False)


def _blocks(
    rows: int, keys: int, block_q: int, block_k: int, causal: bool
) -> Callable[[Any], Judgement]:
    def judge(found: Any) -> Judgement:
        try:
            blocks = {(int(i), int(j)): bool(mask) for i, j, mask in found}
        except (TypeError, ValueError):
            return Judgement(["expected a list of (i, j, needs_mask)"])
        if len(blocks) != len(found):
            return Judgement(["a block is listed twice"])
        nothing = torch.zeros(1, 1)
        k = nothing.expand(1, 1, keys, 1)
        empty = Setting(nothing.expand(1, 1, rows, 1), k, k, causal=causal)

        def parts(kind: str) -> dict[tuple[int, int], Tensor]:
            counts = sus.seen(empty, kind)
            return {
                (i, j): counts[i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k]
                for i in range(-(-rows // block_q))
                for j in range(-(-keys // block_k))
            }

        def wanted(kind: str = "") -> dict[tuple[int, int], bool]:
            return {at: not bool(x.all()) for at, x in parts(kind).items() if x.any()}

        true = wanted()
        if blocks == true:
            return Judgement()
        judgement = Judgement()

        def place(at: tuple[int, int]) -> str:
            i, j = at
            last = min((i + 1) * block_q, rows) - 1, min((j + 1) * block_k, keys) - 1
            return f"block {at}: rows {i * block_q}–{last[0]} × keys {j * block_k}–{last[1]}"

        kinds = {
            "needs to be visited and is not": [at for at in true if at not in blocks],
            "is visited, though all of it is hidden": [at for at in blocks if at not in true],
            "needs a mask": [at for at in true if true[at] and blocks.get(at) is False],
            "needs no mask": [at for at in true if not true[at] and blocks.get(at)],
        }
        for what, places in kinds.items():
            if places:
                more = f" ({len(places)} such blocks)" if len(places) > 1 else ""
                judgement.lines.append(f"{place(sorted(places)[0])} {what}{more}")
        for kind, mistake in (("offset", "offset"), ("edge-", "edge"), ("edge+", "edge")):
            if blocks == wanted(kind):
                judgement.votes[mistake] += 1
        missing, _, unmasked, _ = kinds.values()
        if missing and not judgement.votes:
            judgement.votes["skipped"] += 1
        if unmasked and not judgement.votes:
            judgement.votes["edge"] += 1
        return judgement

    return judge


# rows, keys, causal, window, sinks
_FEATURES: tuple[tuple[int, int, bool, tuple[int, int], bool], ...] = (
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


def cases_10(get: Callable[[str], Any]) -> Iterator[CheckCase]:
    """GQA, windows and sinks."""
    heads, heads_k, d = 6, 2, 40
    for rows, keys, causal, window, has_sinks in _FEATURES:
        shapes = ((2, rows, heads, d), (2, keys, heads_k, d), (2, keys, heads_k, d))
        tensors = [random(*shape, seed=i) for i, shape in enumerate(shapes)]
        sinks = random(heads, seed=4) + 1 if has_sinks else None
        q, k, v = doubles(HEADS, *tensors)
        wide = None if sinks is None else sinks.double().cpu()
        setting = Setting(q, k, v, causal=causal, window=window, sinks=wide)
        more = ["sinks"] if has_sinks else []
        judge = Compare(
            truth_of(HEADS, setting),
            HEADS,
            setting,
            partial(sus.forward_suspects, setting),
            hidden=causal or window != (-1, -1),
        )
        call = _later(get("grouped_forward"), *tensors, causal, window, sinks)
        yield CheckCase("grouped_forward", describe(setting, *more), call, judge)
        given, setting, truth = backward_inputs(HEADS, tensors, setting)
        judge = Compare(
            truth,
            HEADS,
            setting,
            partial(sus.backward_suspects, setting),
            2e-4,
            hidden=causal or window != (-1, -1),
        )
        call = _later(get("grouped_backward"), *given, causal, window)
        yield CheckCase("grouped_backward", describe(setting, *more), call, judge)


def cases_11(get: Callable[[str], Any]) -> Iterator[CheckCase]:
    """Packed documents."""
    heads, d = 2, 48
    for offsets in ((0, 16, 32), (0, 7, 8, 21, 37), (0, 5, 5, 19), (0, 23)):
        for causal in (False, True):
            tensors = [random(offsets[-1], heads, d, seed=i) for i in range(3)]
            q, k, v = doubles(PACKED, *tensors)
            setting = Setting(q, k, v, causal=causal, documents=offsets)
            words = describe(setting, f"cu_seqlens {', '.join(map(str, offsets))}")
            given = torch.tensor(offsets, dtype=torch.int32, device=HERE)
            judge = Compare(
                truth_of(PACKED, setting),
                PACKED,
                setting,
                partial(sus.forward_suspects, setting),
                hidden=True,
            )
            call = _later(get("packed_forward"), *tensors, given, causal)
            yield CheckCase("packed_forward", words, call, judge)


def cases_12(get: Callable[[str], Any]) -> Iterator[CheckCase]:
    """Two halves of the keys."""
    for label in ("two halves", "a large lse", "one half sees nothing", "both see nothing"):
        outs = [random(2, 19, 24, seed=i) for i in range(2)]
        lses = [random(2, 19, seed=i) + 2 for i in range(2)]
        if label == "a large lse":
            lses[0][:, :8] += 200
            lses[1][:, 5:12] += 200
        if label != "two halves" and label != "a large lse":
            hidden = (0, 1) if label.startswith("both") else (1,)
            for which in hidden:
                lses[which][:, 3:6] = -INF
                outs[which][:, 3:6] = 0.0
            if label.startswith("one"):
                lses[0][:, 8], outs[0][:, 8] = -INF, 0.0
        wide = [outs[0], lses[0], outs[1], lses[1]]
        out1, lse1, out2, lse2 = (x.double().cpu() for x in wide)
        lse = torch.logaddexp(lse1, lse2)
        safe = lse.masked_fill(lse == -INF, 0.0)
        out = (lse1 - safe).exp()[..., None] * out1 + (lse2 - safe).exp()[..., None] * out2
        judge = Compare(
            {"out": out, "lse": lse},
            PLAIN,
            None,
            partial(_wrong_merges, out1, lse1, out2, lse2),
            hidden="nothing" in label,
        )
        yield CheckCase("merge", label, _later(get("merge"), *wide), judge)


def _wrong_merges(*given: Tensor) -> Iterator[sus.Suspect]:
    for name, values in sus.merge_suspects(*given):
        yield name, {key: PLAIN.ours(key, x) for key, x in values.items()}


def cases_13(get: Callable[[str], Any]) -> Iterator[CheckCase]:
    """The ring, all ranks at once."""
    for ranks, each, d in ((4, 6, 24), (3, 5, 20), (1, 5, 8)):
        for causal in (False, True):
            tensors = [random(ranks * each, d, seed=i) for i in range(3)]
            q, k, v = doubles(FLAT, *tensors)
            setting = Setting(q, k, v, causal=causal, world_size=ranks)
            words = f"{ranks} ranks, {each} rows each, d {d}, {'causal' if causal else 'full'}"
            judge = Compare(
                truth_of(FLAT, setting),
                FLAT,
                setting,
                partial(sus.ring_forward_suspects, setting),
                hidden=causal,
            )
            call = _ring(get("ring_forward"), ranks, tensors, causal, ("out", "lse"))
            yield CheckCase("ring_forward", words, call, _by_rank(judge, each))
            given, setting, truth = backward_inputs(FLAT, tensors, setting)
            judge = Compare(
                truth,
                FLAT,
                setting,
                partial(sus.ring_backward_suspects, setting),
                2e-4,
                hidden=causal,
            )
            call = _ring(get("ring_backward"), ranks, given, causal, ("dq", "dk", "dv"))
            yield CheckCase("ring_backward", words, call, _by_rank(judge, each))


def _ring(
    function: Callable[..., Any],
    ranks: int,
    tensors: Sequence[Tensor],
    causal: bool,
    names: Sequence[str],
) -> Callable[[], list[tuple[Any, ...]]]:
    shards = [x.chunk(ranks) for x in tensors]

    def body(rank: int, send: Any, recv: Any) -> Any:
        mine = (shard[rank].clone() for shard in shards)
        found = function(rank, ranks, *mine, send, recv, causal)
        return found if isinstance(found, tuple) else (found,)

    return lambda: run_ranks(ranks, body)


def _by_rank(compare: Compare, each: int) -> Callable[[Any], Judgement]:
    """Judge shards of all ranks as one tensor."""

    def judge(found: list[tuple[Any, ...]]) -> Judgement:
        for rank, values in enumerate(found):
            if len(values) != len(compare.truth):
                return Judgement(
                    [f"rank {rank}: {len(values)} values; not {', '.join(compare.truth)}"]
                )
            for (name, true), value in zip(compare.truth.items(), values):
                shape = (each, *true.shape[1:])
                if not isinstance(value, Tensor):
                    return Judgement([f"rank {rank}: {name} is a {type(value).__name__}"])
                if tuple(value.shape) != shape:
                    got = tuple(value.shape)
                    return Judgement([f"rank {rank}: {name} has shape {got}, expected {shape}"])
        return compare(tuple(torch.cat(values) for values in zip(*found)))

    return judge


def cases_14(get: Callable[[str], Any]) -> Iterator[CheckCase]:
    """Zigzag shards, and the steps of a ring over them."""
    for ranks in (4, 3, 2, 1):
        for length in (10 * ranks, 2 * ranks, 10 * ranks + 3):
            for rank in range(ranks):
                call = _later(get("zigzag_shard"), length, rank, ranks)
                words = f"{length} tokens, rank {rank} of {ranks}"
                yield CheckCase("zigzag_shard", words, call, _zigzag_shard(length, rank, ranks))
    for ranks in (4, 3, 2, 1):
        for rank in range(ranks):
            call = _later(get("zigzag_steps"), rank, ranks)
            judge = _zigzag_steps(rank, ranks)
            yield CheckCase("zigzag_steps", f"rank {rank} of {ranks}", call, judge)


def _chunks(rank: int, ranks: int) -> tuple[int, int]:
    return rank, 2 * ranks - 1 - rank


def _zigzag_shard(length: int, rank: int, ranks: int) -> Callable[[Any], Judgement]:
    borders = [chunk * length // (2 * ranks) for chunk in range(2 * ranks + 2)]

    def positions(chunks: Iterable[int]) -> list[int]:
        return [i for c in chunks for i in range(borders[c], borders[c + 1])]

    def judge(found: Any) -> Judgement:
        if not isinstance(found, Tensor) or found.dim() != 1 or found.is_floating_point():
            return Judgement(["expected a LongTensor of positions"])
        got, true = found.tolist(), positions(_chunks(rank, ranks))
        if got == true:
            return Judgement()
        wrong = [(rank, ranks + rank), (2 * rank, 2 * rank + 1), (2 * ranks - 1 - rank, rank)]
        wrong += [(rank, 2 * ranks - rank), (rank, 2 * ranks - 2 - rank)]
        votes = Counter({"zigzag": 1} if any(got == positions(c) for c in wrong) else {})
        if len(got) != len(true):
            words = f"rank {rank} has {len(got)} positions, expected {len(true)}"
            return Judgement([words], votes)
        first = next(i for i in range(len(got)) if got[i] != true[i])
        words = f"rank {rank}: row {first} is position {got[first]}, expected {true[first]}"
        half = "early" if first < borders[rank + 1] - borders[rank] else "late"
        return Judgement([f"{words} ({half} half)"], votes)

    return judge


def _zigzag_steps(rank: int, ranks: int) -> Callable[[Any], Judgement]:
    """The pairs of chunks that the steps cover, with how often; a diagonal pair is half."""
    queries = {"all": (0, 1), "late": (1,), "early": (0,)}

    def covered(steps: Any) -> Counter[tuple[int, int, str]]:
        counts: Counter[tuple[int, int, str]] = Counter()
        mine = _chunks(rank, ranks)
        for source, of_q, of_k, causal in steps:
            theirs = _chunks(source, ranks)
            for a in queries[of_q]:
                for b in queries[of_k]:
                    if not causal or mine[a] > theirs[b]:
                        counts[mine[a], theirs[b], "whole"] += 1
                    elif mine[a] == theirs[b]:
                        counts[mine[a], theirs[b], "half"] += 1
        return counts

    def right(sign: int) -> list[tuple[int, str, str, bool]]:
        steps = [(rank, "all", "all", True)]
        for t in range(1, ranks):
            source = (rank - sign * t) % ranks
            halves = ("all", "early") if source < rank else ("late", "all")
            steps.append((source, *halves, False))
        return steps

    def judge(found: Any) -> Judgement:
        try:
            steps = [(int(s), str(a), str(b), bool(c)) for s, a, b, c in found]
        except (TypeError, ValueError):
            return Judgement(["expected a list of (source, query half, key half, causal)"])
        for t, (source, of_q, of_k, _) in enumerate(steps):
            if not 0 <= source < ranks:
                return Judgement([f"rank {rank}, ring step {t}: there is no rank {source}"])
            if of_q not in queries or of_k not in queries:
                halves = '"all", "late" or "early"'
                return Judgement([f"rank {rank}, ring step {t}: halves are {halves}"])
        if covered(steps) == covered(right(1)) and any(
            [s[0] for s in steps] == [s[0] for s in right(sign)] for sign in (1, -1)
        ):
            return Judgement()
        judgement = Judgement()
        for t, true in enumerate(right(1)):
            got = steps[t] if t < len(steps) else None
            if got != true:
                words = (
                    f"rank {rank}, ring step {t}: {got}" if got else f"rank {rank} has no step {t}"
                )
                judgement.lines.append(f"{words}; keys of rank {true[0]} are due")
                break
        sources = [s[0] for s in steps]
        if sorted(sources) != list(range(ranks)):
            missing = len(sources) < ranks
            judgement.votes["missing_step" if missing else "source"] += 1
        elif all(sources != [s[0] for s in right(sign)] for sign in (1, -1)):
            judgement.votes["source"] += 1
        else:
            judgement.votes["zigzag"] += 1
        have, want = covered(steps), covered(right(1))
        for (a, b, _), count in (have - want).items():
            words = f"queries of chunk {a} meet keys of chunk {b}"
            often = (
                "once too often" if want[a, b, "whole"] else "which are hidden, or hidden in part"
            )
            judgement.lines.append(
                f"{words} {often} ({count})" if count > 1 else f"{words}, {often}"
            )
            break
        for a, b, _ in want - have:
            judgement.lines.append(
                f"queries of chunk {a} never meet keys of chunk {b}, or not right"
            )
            break
        return judgement

    return judge


def cases_15(get: Callable[[str], Any]) -> Iterator[CheckCase]:
    """Work and messages of one rank of a ring."""
    fast, slow = (8e14, 4e11, 5e-6), (4e14, 2e10, 2e-5)
    for tokens, ranks, rates in ((65536, 8, fast), (8192, 4, slow), (1 << 20, 16, slow)):
        pairs, heads, heads_k, d = tokens * (tokens + 1) // 2, 32, 8, 128
        for backward in (False, True):
            true = _prediction(pairs, tokens, ranks, heads, heads_k, d, *rates, backward)

            def judge(found: Any, true: dict[str, float] = true) -> Judgement:
                if not isinstance(found, dict):
                    return Judgement([f"a {type(found).__name__} returned, not a dict"])
                lines = [f"{name} is missing" for name in true if name not in found]
                for name in (name for name in true if name in found):
                    if not abs(found[name] - true[name]) <= 1e-3 * true[name]:
                        times = (
                            f", {found[name] / true[name]:.3g} times as much" if true[name] else ""
                        )
                        right = f"expected {true[name]:.4g} s{times}"
                        lines.append(f"{name}: {found[name]:.4g} s, {right}")
                return Judgement(lines)

            words = f"{'backward' if backward else 'forward'}, {tokens} tokens on {ranks} ranks"
            words += f", {rates[0]:.3g} FLOP/s, {rates[1]:.3g} bytes/s, latency {rates[2]:.3g} s"
            given = (pairs, tokens, ranks, heads, heads_k, d, *rates, backward)
            yield CheckCase("predict", words, _later(get("predict"), *given), judge)


def _prediction(
    pairs: int,
    tokens: int,
    ranks: int,
    heads: int,
    heads_k: int,
    d: int,
    rate: float,
    bandwidth: float,
    latency: float,
    backward: bool,
) -> dict[str, float]:
    """By arithmetic; k and v are 2 bytes a number, dk and dv 4."""
    step = pairs * 4 * heads * d * (2.5 if backward else 1) / ranks**2 / rate
    numbers = 2 * tokens // ranks * heads_k * d
    sent = [
        2 * numbers * (t < ranks - 1) + 4 * numbers * (backward and t > 1) for t in range(ranks)
    ]
    sent.append(4 * numbers * backward)
    times = [latency + size / bandwidth if size else 0.0 for size in sent]
    works = [*[step] * ranks, 0.0]
    exposed = sum(max(0.0, time - work) for time, work in zip(times, works))
    return {"compute": step * ranks, "communication": sum(times), "exposed": exposed}


CASES: dict[int, Callable[[Callable[[str], Any]], Iterator[CheckCase]]] = {
    1: cases_1,
    2: cases_2,
    3: cases_3,
    4: cases_4,
    5: cases_5,
    6: cases_6,
    7: cases_7,
    8: cases_8,
    9: cases_9,
    10: cases_10,
    11: cases_11,
    12: cases_12,
    13: cases_13,
    14: cases_14,
    15: cases_15,
}


# The learner's file.


def load(path: Path) -> ModuleType:
    """Import it, with its folder on the path."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def in_file(error: BaseException, path: Path) -> str:
    """What went wrong, with the line of the learner's file."""
    name, words = type(error).__name__, " ".join(str(error).split()) or "no message"
    said = f"{name}: {words}"
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {name}: {error.msg}"
    line, why = compiler_says(error)
    if line:
        return f"{name}: {why} (in the kernel: {line})"
    inner: BaseException | None = error
    while inner is not None:  # Triton's interpreter wraps what happens in a kernel
        frames = traceback.extract_tb(inner.__traceback__)
        own = [frame.lineno for frame in frames if frame.filename == str(path)]
        if own and own[-1] is not None:
            line = linecache.getline(str(path), own[-1]).strip()
            return f"{said} (line {own[-1]}: {line})"
        inner = inner.__cause__ or inner.__context__
    return said


def compiler_says(error: BaseException) -> tuple[str, str]:
    """Of an error of Triton's compiler the line, above a caret, and the reason, below it."""
    source, caret, why = str(error).rpartition("^")
    if not caret or not type(error).__module__.startswith("triton.compiler"):
        return "", ""
    return source.rstrip().rpartition("\n")[2].strip(), " ".join(why.split())


def root(error: BaseException) -> BaseException:
    """A hole inside of a kernel, whatever wraps it."""
    hole = re.fullmatch(r"raise NotImplementedError\((.*)\)", compiler_says(error)[0])
    if hole:
        return NotImplementedError(hole[1].strip("'\""))
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, NotImplementedError):
            return inner
        inner = inner.__cause__ or inner.__context__
    return error


@dataclass(slots=True)
class Tally:
    """What became of the cases of one function."""

    cases: int = 0
    wrong: list[tuple[str, list[str]]] = field(default_factory=list)  # label, lines
    hole: str | None = None


def run_cases(number: int, path: Path, tell: Callable[[str], None]) -> Report:
    """Everything that there is to say about a file; on the GPU only if it has kernels."""
    global HERE
    report = Report(number, str(path))
    try:
        module = load(path)
    except Exception as error:
        report.lines = [f"{path.name} does not import: {in_file(error, path)}"]
        return report
    kernels = [x for x in vars(module).values() if type(x).__module__.startswith("triton.runtime")]
    if find_step(number).is_triton and not kernels:
        report.lines = [f"{path.name} has no Triton kernel: this exercise asks for @triton.jit"]
        return report
    HERE = device() if kernels else torch.device("cpu")
    missing: list[str] = []

    def get(name: str) -> Any:
        if not hasattr(module, name) and name not in missing:
            missing.append(name)
        return getattr(module, name, None)

    tallies: dict[str, Tally] = {}
    votes: list[Counter[str]] = []
    for case in CASES[number](get):
        tally = tallies.setdefault(case.function, Tally())
        tally.cases += 1
        report.cases += 1
        if tally.hole is not None or case.function in missing:
            continue
        tell(f"{case.function}: {case.label}")
        try:
            with torch.enable_grad():
                judgement = case.judge(case.call())
        except Exception as error:
            hole = root(error)
            if isinstance(hole, NotImplementedError):
                tally.hole = str(hole) or "no hint"
            else:
                plain = isinstance(error, (Stuck, InputChanged))
                said = str(error) if plain else in_file(error, path)
                tally.wrong.append((case.label, [said]))
            continue
        if judgement.lines:
            tally.wrong.append((case.label, judgement.lines))
            votes.append(judgement.votes)
            if len(tally.wrong) <= _NAMED:
                votes.append(judgement.named())
    report.lines = [f"{path.name} has no {name}" for name in missing]
    report.lines += [line for name, tally in tallies.items() for line in _summary(name, tally)]
    report.mistakes = [asdict(MISTAKES[name]) for name in explain(votes)]
    report.passed = not report.lines
    return report


def explain(votes: Sequence[Counter[str]]) -> Iterator[str]:
    """The mistake that explains most; then, for the cases that it does not, another."""
    for _ in range(_MISTAKES):
        total = sum(votes, Counter())
        if not total:
            return
        best = max(total.values())  # of those that cannot be told apart, the most usual one
        name = next(name for name in MISTAKES if total[name] == best)
        yield name
        votes = [each for each in votes if not each[name]]


def _summary(name: str, tally: Tally) -> Iterator[str]:
    if tally.hole is not None:
        yield f"{name} is not filled in yet: {tally.hole}"
    if tally.wrong:
        label, lines = tally.wrong[0]
        yield f"{name} is wrong in {len(tally.wrong)} of {tally.cases} cases; the first: {label}"
        yield from (f"  {line}" for line in lines)


def main(number: str, path: str, news: str, limit: str) -> None:
    """Tell which case begins, then the report."""
    faulthandler.dump_traceback_later(float(limit), exit=True)
    file = Path(news)

    def tell(case: str) -> None:
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"case": case}) + "\n")

    torch.manual_seed(0)
    if HERE.type == "cpu":
        torch.set_num_threads(1)
    run_cases(int(number), Path(path), tell).save(file)


if __name__ == "__main__":
    main(*sys.argv[1:])
