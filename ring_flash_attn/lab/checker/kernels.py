"""Steps 1, 7 and 8: Triton kernels, and tensors that are not contiguous."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from .backward import backward_cases, backward_suspects, gradients, judge_backward
from .compare import Compare
from .forward import (
    HUGE,
    LARGE,
    LONG,
    SIZES,
    forward,
    forward_cases,
    forward_suspects,
    judge_forward,
    plain_inputs,
)
from .learner import Cases, CheckCase, Learner
from .masks import seen
from .setting import PLAIN, TILES, Form, Mistake, Setting, Suspect, random, same

MISTAKES = {
    "batch": Mistake(
        "no batch offset",
        "one batch element is computed with the tensors of another",
        "Element b of a contiguous (batch, rows, d) begins at b · rows · d, of (batch, rows) at "
        "b · rows: for every load and every store, with the tensor's own number of rows.",
    ),
    "columns": Mistake(
        "overwritten, not summed",
        "only one block of columns is in the sum",
        "Begin with zeros before the loop over blocks of columns, and add in it: +=, not =.",
    ),
    "strides": Mistake(
        "strides ignored",
        "a tensor that is not contiguous is read or written as if it were",
        "Pass the strides to the kernel, or call .contiguous() before the launch.",
    ),
}


def weighted_sum(learner: Learner) -> Cases:
    """Step 1: a weighted sum and its gradients."""
    for rows, d in ((32, 16), (33, 20), (1, 7), (70, 5), (19, 300)):
        yield _sum_case(learner, random(rows, d))
    yield _sum_case(learner, random(20, 33).T, ", transposed")
    yield _sum_case(learner, random(33, 20), ", the gradient expanded", expanded=True)


def _sum_case(learner: Learner, x: Tensor, more: str = "", expanded: bool = False) -> CheckCase:
    """`expanded`: the gradient is the first of its numbers, once for each row."""
    rows, d = x.shape
    w, g = random(d, seed=1), random(rows, seed=2)
    function = learner.get("WeightedSum")

    def call() -> Any:
        own_x, own_w = (learner.put(each).requires_grad_() for each in (x, w))
        own_g = learner.put(g[:1].expand(rows) if expanded else g)
        with learner.watched():
            y = function.apply(own_x, own_w)
            if not isinstance(y, Tensor) or y.shape != g.shape:
                return y, own_x, own_w
            y.backward(own_g)
        return y, own_x.grad, own_w.grad

    def suspects() -> Iterator[Suspect]:
        for tile in (n for n in TILES if n < d):
            for part in (slice((d - 1) // tile * tile, None), slice(0, tile)):
                yield "columns", {"y": wide_x[:, part] @ wide_w[part]}
        if not more:
            return
        memory = wide_x.T.reshape(rows, d)
        yield "strides", sums(wide_x if expanded else memory, wide_g)
        written = truth["the gradient of x"].reshape(d, rows).T
        yield "strides", {"the gradient of x": written}

    def sums(x: Tensor, g: Tensor) -> dict[str, Tensor]:
        dx, dw = g[:, None] * wide_w, g @ x
        return {"y": x @ wide_w, "the gradient of x": dx, "the gradient of weight": dw}

    wide_x, wide_w, wide_g = (each.double() for each in (x, w, g))
    truth = sums(wide_x, wide_g[:1].expand(rows) if expanded else wide_g)
    lost = "strides" if expanded else "outside"
    judge = Compare(truth, _MATRICES, None, suspects, lost=lost)
    return CheckCase("WeightedSum", f"x ({rows}, {d}){more}", call, judge)


def _matrix(x: Tensor) -> Tensor:
    return x[None, None] if x.dim() == 2 else x[None, None, :, None]


_MATRICES = Form(same, same, _matrix, _matrix)  # as (1, 1, rows, columns) in words alone


def _tolerance(learner: Learner) -> float:
    """Tensor cores round fp32 to TF32 unless told otherwise."""
    return 1e-2 if learner.device.type == "cuda" else 1e-4


def triton_forward(learner: Learner) -> Cases:
    """Step 7."""
    name, tolerance = "triton_forward", _tolerance(learner)
    sizes = (*SIZES, LARGE, HUGE, *LONG)
    yield from forward_cases(learner, name, sizes, tolerance=tolerance, suspects=_wrong_forward)
    tensors, setting = plain_inputs(*SIZES[1])
    judge = judge_forward(PLAIN, setting, _unlike_contiguous, tolerance, lost="outside")
    given = map(_strided, tensors)
    yield learner.case(name, setting.describe("not contiguous"), judge, *given, False)


def triton_backward(learner: Learner) -> Cases:
    """Step 8."""
    name, tolerance = "triton_backward", 2 * _tolerance(learner)
    yield from backward_cases(learner, name, (*SIZES, *LONG), tolerance, _wrong_backward)
    tensors, setting = plain_inputs(*SIZES[1])
    for which, expanded in (("q, k and v", False), ("out and dout", False), ("dout", True)):
        judge, given = judge_backward(
            PLAIN, tensors, setting, _unlike_contiguous_gradients, tolerance, expanded=expanded
        )
        if not expanded:
            given = [_strided(x) if n in which.split() else x for n, x in zip(_GIVEN, given)]
        judge = replace(judge, lost="strides" if expanded else "outside")
        words = f"{which} {'expanded' if expanded else 'not contiguous'}"
        yield learner.case(name, setting.describe(words), judge, *given, False)


_GIVEN = ("q,", "k", "v", "out", "lse", "dout")


def _strided(x: Tensor) -> Tensor:
    """The same numbers, the other way round in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _reread(x: Tensor) -> Tensor:
    """What a kernel gets that takes such a tensor for a contiguous one."""
    return x.transpose(2, 3).reshape(x.shape)


def _unlike_contiguous(setting: Setting) -> Iterator[Suspect]:
    q, k, v = (_reread(x) for x in (setting.q, setting.k, setting.v))
    yield "strides", forward(replace(setting, q=q, k=k, v=v), seen(setting))


def _unlike_contiguous_gradients(setting: Setting) -> Iterator[Suspect]:
    counts = seen(setting)
    q, k, v = (_reread(x) for x in (setting.q, setting.k, setting.v))
    yield "strides", gradients(replace(setting, q=q, k=k, v=v), counts)
    assert setting.dout is not None
    assert setting.out is not None
    dout, out = _reread(setting.dout), _reread(setting.out)
    d = (setting.dout * setting.out).sum(-1, keepdim=True)
    for total in (d, (dout * setting.out).sum(-1, keepdim=True), (dout * out).sum(-1, True)):
        yield "strides", gradients(replace(setting, dout=dout), counts, total=total)


def _wrong_forward(setting: Setting) -> Iterator[Suspect]:
    """With what one has without the batch's offset: the first element, or only the last written."""
    yield from forward_suspects(setting)
    counts = seen(setting)
    for names in ("qkv", "kv", "q", "k", "v"):
        yield "batch", forward(_first(setting, names), counts)
    written = {name: x.roll(1, 0) for name, x in forward(setting, counts).items()}
    for x in written.values():
        x[1:] = float("nan")
    yield "batch", written


def _wrong_backward(setting: Setting) -> Iterator[Suspect]:
    yield from backward_suspects(setting)
    counts = seen(setting)
    assert setting.dout is not None
    assert setting.out is not None
    d = (setting.dout * setting.out).sum(-1, keepdim=True)
    for names in (
        ["q", "k", "v", "dout", "lse", "d"],
        ["q", "k", "v", "dout"],
        ["k", "v"],
        ["q", "dout"],
        ["lse", "d"],
        *([name] for name in ("q", "k", "v", "dout", "lse", "d")),
    ):
        total = d[:1].expand_as(d) if "d" in names else d
        yield "batch", gradients(_first(setting, names), counts, total=total)


def _first(setting: Setting, names: Iterable[str]) -> Setting:
    """All batch elements have these tensors of the first."""
    found = {name: getattr(setting, name) for name in names if name != "d"}
    return replace(setting, **{name: x[:1].expand_as(x) for name, x in found.items()})
