"""Steps 1, 7 and 8: Triton kernels, and tensors that are not contiguous."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from .backward import backward_cases, gradients, judge_backward
from .compare import Compare
from .forward import LARGE, SIZES, forward, forward_cases, judge_forward, plain_inputs
from .learner import Cases, CheckCase, Learner
from .masks import seen
from .setting import PLAIN, Form, Mistake, Setting, Suspect, random, same

MISTAKES = {
    "strides": Mistake("strides ignored",
        "a tensor that is not contiguous is read or written as if it were",
        "Pass the strides to the kernel, or call .contiguous() before the launch."),
}  # fmt: skip


def weighted_sum(learner: Learner) -> Cases:
    """Step 1: a weighted sum and its gradients."""
    for rows, d in ((32, 16), (33, 20), (1, 7), (70, 5)):
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
        y = function.apply(own_x, own_w)
        if not isinstance(y, Tensor) or y.shape != g.shape:
            return y, own_x, own_w
        own_g = learner.put(g)
        y.backward(own_g[:1].expand(rows) if expanded else own_g)
        return y, own_x.grad, own_w.grad

    def sums(x: Tensor, g: Tensor) -> dict[str, Tensor]:
        x, g, wide = x.double(), g.double(), w.double()
        dx, dw = g[:, None] * wide, g @ x
        return {"y": x @ wide, "the gradient of x": dx, "the gradient of weight": dw}

    def suspects() -> Iterator[Suspect]:
        yield "strides", sums(x.as_strided((rows, d), (d, 1)), g)
        dx = truth["the gradient of x"]
        yield "strides", {"the gradient of x": dx.reshape(d, rows).T}  # written as contiguous

    truth = sums(x, g[:1].expand(rows) if expanded else g)
    judge = Compare(truth, _MATRICES, None, suspects if more else tuple)
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
    yield from forward_cases(learner, name, (*SIZES, LARGE), tolerance=tolerance)
    tensors, setting = plain_inputs(*SIZES[1])
    judge = judge_forward(PLAIN, setting, _wrong_forward, tolerance)
    given = map(_strided, tensors)
    yield learner.case(name, setting.describe("not contiguous"), judge, *given, False)


def triton_backward(learner: Learner) -> Cases:
    """Step 8."""
    name, tolerance = "triton_backward", 2 * _tolerance(learner)
    yield from backward_cases(learner, name, tolerance)
    tensors, setting = plain_inputs(*SIZES[1])
    judge, given = judge_backward(PLAIN, tensors, setting, _wrong_backward, tolerance)
    given[:3] = map(_strided, tensors)
    yield learner.case(name, setting.describe("not contiguous"), judge, *given, False)


def _strided(x: Tensor) -> Tensor:
    """The same numbers, the other way round in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _read_as_contiguous(setting: Setting) -> Setting:
    """What a kernel gets that takes q, k and v for contiguous."""
    q, k, v = (x.transpose(2, 3).reshape(x.shape) for x in (setting.q, setting.k, setting.v))
    return replace(setting, q=q, k=k, v=v)


def _wrong_forward(setting: Setting) -> Iterator[Suspect]:
    yield "strides", forward(_read_as_contiguous(setting), seen(setting))


def _wrong_backward(setting: Setting) -> Iterator[Suspect]:
    yield "strides", gradients(_read_as_contiguous(setting), seen(setting))
