"""Steps 9 to 16 without 12: they run, their checks notice mistakes, their solutions are right."""

from __future__ import annotations

import importlib
import inspect
import math
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_flash_attn.lab import exercises
from ring_flash_attn.lab.definition import attention, visible
from ring_flash_attn.lab.registry import find_step

pytestmark = pytest.mark.product(4)  # the others run in `make test-all`

NUMBERS = (9, 10, 11, 13, 14, 15, 16)
FUNCTIONS = {
    9: ("visible_blocks", "causal_forward"),
    10: ("grouped_forward", "grouped_backward"),
    11: ("packed_forward",),
    13: ("ring_forward", "ring_backward"),
    14: ("zigzag_shard", "zigzag_steps"),
    15: ("predict",),
}


def step_module(number: int) -> ModuleType:
    return importlib.import_module(find_step(number).module)


def other(number: int, folder: str) -> ModuleType:
    """The exercise of a step, or its solution."""
    name = find_step(number).exercise.removesuffix(".py")
    return importlib.import_module(f"ring_flash_attn.lab.{folder}.{name}")


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_step_runs(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    module = step_module(number)
    assert (module.__doc__ or "").startswith(f"Step {number}: ")
    module.main()
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) > 10
    assert max(map(len, printed.splitlines())) <= 100


@pytest.mark.parametrize("number", FUNCTIONS)
def test_exercises_are_solutions_with_holes(number: int) -> None:
    exercise, solution, step = (
        other(number, "exercises"),
        other(number, "solutions"),
        step_module(number),
    )
    assert exercise.__doc__ == solution.__doc__
    for name in FUNCTIONS[number]:
        hole, filled = getattr(exercise, name), getattr(solution, name)
        assert inspect.signature(hole) == inspect.signature(filled)
        assert hole.__doc__ == filled.__doc__
        names = list(inspect.signature(filled).parameters)
        assert list(inspect.signature(getattr(step, name)).parameters)[: len(names)] == names
        with pytest.raises(NotImplementedError, match=r"\w"):
            hole(*[None] * len(names))


def test_exercises_import_nothing_of_the_lab() -> None:
    for number in FUNCTIONS:
        path = Path(exercises.__file__).parent / find_step(number).exercise
        assert "ring_flash_attn" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("where", ["step", "solution"])
@pytest.mark.parametrize("blocks", [(16, 16), (7, 32), (64, 5)])
@pytest.mark.parametrize("rows", [(50, 50), (1, 70), (33, 64), (64, 33)])
def test_causal(where: str, rows: tuple[int, int], blocks: tuple[int, int]) -> None:
    module = step_module(9) if where == "step" else other(9, "solutions")
    seen = visible(*rows, True)
    want = []
    for i in range(math.ceil(rows[0] / blocks[0])):
        for j in range(math.ceil(rows[1] / blocks[1])):
            block = seen[i * blocks[0] :, j * blocks[1] :][: blocks[0], : blocks[1]]
            if block.any():
                want.append((i, j, not bool(block.all())))
    assert module.visible_blocks(*rows, *blocks, True) == want
    full = module.visible_blocks(*rows, *blocks, False)
    assert len(full) == math.ceil(rows[0] / blocks[0]) * math.ceil(rows[1] / blocks[1])
    assert not any(needs_mask for _, _, needs_mask in full)
    torch.manual_seed(1)
    q, k, v = torch.randn(2, rows[0], 20), *torch.randn(2, 2, rows[1], 20)
    for got, exact in zip(module.causal_forward(q, k, v, *blocks), attention(q, k, v, causal=True)):
        close(got, exact)


@pytest.mark.parametrize("where", ["step", "solution"])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("heads_k", [1, 2, 4])
@pytest.mark.parametrize(
    ("rows", "causal", "window"),
    [((40, 40), False, (-1, -1)), ((30, 71), True, (5, -1)), ((71, 30), True, (-1, -1)),
     ((45, 45), False, (0, 0)), ((45, 60), False, (-1, 3))],
)  # fmt: skip
def test_features(
    where: str, rows: tuple[int, int], causal: bool, window: Any, heads_k: int, with_sinks: bool
) -> None:
    module = step_module(10) if where == "step" else other(10, "solutions")
    torch.manual_seed(2)
    q, dout = torch.randn(2, 2, rows[0], 4, 12)
    k, v = torch.randn(2, 2, rows[1], heads_k, 12)
    sinks = torch.randn(4) if with_sinks else None
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    want = attention(*exact, causal=causal, window=window, sinks=sinks)
    out, lse = module.grouped_forward(q, k, v, causal, window, sinks)
    close(out, want[0].detach())
    close(lse, want[1].detach())
    grads = module.grouped_backward(q, k, v, out, lse, dout, causal, window)
    for got, expected in zip(grads, torch.autograd.grad(want[0], exact, dout.double())):
        close(got, expected)


@pytest.mark.parametrize("where", ["step", "solution"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(33, 1, 0, 64, 31), (5,), (0, 0, 3), (32, 32)])
def test_packed(where: str, lengths: tuple[int, ...], causal: bool) -> None:
    module = step_module(11) if where == "step" else other(11, "solutions")
    torch.manual_seed(3)
    cu_seqlens = [0, *accumulate(lengths)]
    q, k, v = torch.randn(3, cu_seqlens[-1], 2, 20)
    want = attention(q, k, v, causal=causal, cu_seqlens_q=cu_seqlens)
    for offsets in (cu_seqlens, torch.tensor(cu_seqlens, dtype=torch.int32)):
        for got, exact in zip(module.packed_forward(q, k, v, offsets, causal), want):
            close(got, exact)


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
@pytest.mark.parametrize("causal", [False, True])
def test_the_ring_of_the_solution(
    monkeypatch: pytest.MonkeyPatch, world_size: int, causal: bool
) -> None:
    step, solution = step_module(13), other(13, "solutions")
    monkeypatch.setattr(step, "ring_forward", solution.ring_forward)
    monkeypatch.setattr(step, "ring_backward", solution.ring_backward)
    torch.manual_seed(4)
    tensors = torch.randn(4, 7 * world_size, 12).unbind()
    found = step.ring_attention(*tensors, world_size=world_size, causal=causal)
    for got, want in zip(found, step.exact(*tensors, causal=causal)):
        close(got, want)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_zigzag_of_the_solution(world_size: int) -> None:
    step, solution = step_module(14), other(14, "solutions")
    for rank in range(world_size):
        assert step.zigzag_steps(rank, world_size) == solution.zigzag_steps(rank, world_size)
        for length in (2 * world_size, 37, 64):
            mine = solution.zigzag_shard(length, rank, world_size)
            assert mine.dtype is torch.int64
            assert torch.equal(mine, step.zigzag_shard(length, rank, world_size))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_predictions_of_the_solution(world_size: int, backward: bool) -> None:
    step, solution = step_module(15), other(15, "solutions")
    for bandwidth in (450e9, 5e9):
        numbers = (10**9, 65536, world_size, 32, 8, 128, 7e14, bandwidth, 1e-5, backward)
        assert step.predict(*numbers) == pytest.approx(solution.predict(*numbers))
    if world_size == 1:
        assert step.predict(*numbers)["communication"] == 0


def test_without_stored_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An installed package has none."""
    step = step_module(15)
    monkeypatch.setattr(step, "RESULTS", tmp_path)
    step.show()
    assert "source checkout" in capsys.readouterr().out


def test_checks_notice_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One planted in each step."""

    def no_masks(*numbers: Any, causal: bool) -> list[tuple[int, int, bool]]:
        return [(i, j, False) for i, j, _ in visible_blocks(*numbers, causal)]

    def window_off_by_one(*numbers: Any) -> tuple[int, int]:
        begin, end = key_range(*numbers)
        return begin, max(begin, end - 1)

    def no_rescale(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
        return out1 + out2, torch.maximum(lse1, lse2)

    def leaks(cu_seqlens: Any, block_q: int) -> Any:
        return work_items([0, cu_seqlens[-1]], block_q)

    def wrong_half(rank: int, world_size: int) -> Any:
        return [(s, q, "all", c) for s, q, _, c in zigzag_steps(rank, world_size)]

    visible_blocks, key_range = step_module(9).visible_blocks, step_module(10).key_range
    work_items, zigzag_steps = step_module(11).work_items, step_module(14).zigzag_steps
    for number, name, mistake in (
        (9, "visible_blocks", no_masks),
        (10, "key_range", window_off_by_one),
        (11, "work_items", leaks),
        (13, "merge", no_rescale),
        (14, "zigzag_steps", wrong_half),
        (15, "causal_pairs", lambda *lengths: sum(n * n for n in lengths)),
        (16, "places", lambda file: {}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(step_module(number), name, mistake)
            with pytest.raises(AssertionError, match=r"\d"):
                step_module(number).check()
