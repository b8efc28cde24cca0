"""The steps of the lab run, their checks notice mistakes; exercises and solutions are theirs."""

from __future__ import annotations

import ast
import importlib
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor

from ring_flash_attn import lab
from ring_flash_attn.lab.definition import attention, visible
from ring_flash_attn.lab.registry import STEPS, LabStep, find_step

pytestmark = pytest.mark.product(4)  # the others run in `make test-all`

LAB = Path(lab.__file__).parent
FILES = sorted((LAB / "steps").glob("s[0-9]*.py"))
WITH_EXERCISE = [
    step for step in STEPS if step.has_exercise and LAB / "steps" / f"s{step.exercise[1:]}" in FILES
]

# What the checker calls, and with which arguments; of classes, the arguments of `apply`.
CONTRACT: dict[int, dict[str, str]] = {
    1: {"WeightedSum": "x weight"},
    2: {"accumulate": "dtype value_dtype cast_first n value"},
    3: {"standard_attention": "q k v causal"},
    4: {"online_softmax": "blocks", "softmax_dot": "scores values"},
    5: {"tiled_forward": "q k v causal block_q block_k", "TiledAttention": "q k v causal"},
    6: {"tiled_backward": "q k v out lse dout causal"},
    7: {"triton_forward": "q k v causal"},
    8: {"triton_backward": "q k v out lse dout causal"},
    9: {
        "visible_blocks": "rows_q rows_k block_q block_k causal",
        "causal_forward": "q k v block_q block_k",
    },
    10: {
        "grouped_forward": "q k v causal window sinks",
        "grouped_backward": "q k v out lse dout causal window",
    },
    11: {"packed_forward": "q k v cu_seqlens causal"},
    12: {"merge": "out1 lse1 out2 lse2"},
    13: {
        "ring_forward": "rank world_size q k v send recv causal",
        "ring_backward": "rank world_size q k v out lse dout send recv causal",
    },
    14: {"zigzag_shard": "length rank world_size", "zigzag_steps": "rank world_size"},
    15: {
        "predict": "pairs tokens world_size heads heads_k headdim flops_per_second "
        "bytes_per_second latency backward"
    },
}


def sample(number: int, argument: str) -> Any:
    """Something that an exercise with this number could be called with."""
    rows, d = 8, 4
    shapes = {10: (1, rows, 2, d), 11: (rows, 2, d), 13: (rows, d)}
    lse_shapes = {10: (1, 2, rows), 11: (2, rows), 13: (rows,)}
    if argument.rstrip("12") in ("q", "k", "v", "out", "dout"):
        return torch.zeros(shapes.get(number, (1, rows, d)))
    if argument.rstrip("12") == "lse":
        return torch.zeros(lse_shapes.get(number, (1, rows)))
    return {
        "x": torch.zeros(rows, d),
        "weight": torch.zeros(d),
        "dtype": torch.float32,
        "value_dtype": torch.float32,
        "cast_first": False,
        "n": 3,
        "value": 0.01,
        "blocks": [torch.zeros(rows, 3)],
        "scores": [torch.zeros(rows, 3)],
        "values": [torch.zeros(3, d)],
        "window": (-1, -1),
        "sinks": None,
        "cu_seqlens": torch.tensor([0, rows]),
        "rank": 0,
        "world_size": 1,
        "send": lambda to, *tensors: None,
        "recv": lambda source: (),
        **dict.fromkeys(("causal", "backward"), False),
        **dict.fromkeys(("pairs", "tokens", "heads", "heads_k", "headdim"), 4),
        **dict.fromkeys(("flops_per_second", "bytes_per_second", "latency"), 1.0),
        **dict.fromkeys(("block_q", "block_k"), 4),
        **dict.fromkeys(("rows_q", "rows_k", "length"), rows),
    }[argument]


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods by name, `Class.method`."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    yield f"{node.name}.{method.name}", method


def called(found: dict[str, ast.FunctionDef], name: str) -> ast.FunctionDef:
    """The function, or the class's forward, that a call of `name` comes to."""
    return found[f"{name}.forward" if name[0].isupper() else name]


def arguments_of(found: dict[str, ast.FunctionDef], name: str) -> str:
    """As the contract has them: of a class without `ctx`."""
    arguments = called(found, name).args
    names = [each.arg for each in (*arguments.args, *arguments.kwonlyargs)]
    return " ".join(names[name[0].isupper() :])


def signature(function: ast.FunctionDef) -> tuple[str, ...]:
    """Arguments, result and decorators, as written, and the docstring."""
    result = ast.unparse(function.returns) if function.returns else ""
    decorators = [ast.unparse(each) for each in function.decorator_list]
    return (ast.unparse(function.args), result, *decorators, ast.get_docstring(function) or "")


def name_of(value: Any) -> str:
    return f"step {value.number}" if isinstance(value, LabStep) else value.stem


each_file = pytest.mark.parametrize("path", FILES, ids=name_of)
each_exercise = pytest.mark.parametrize("step", WITH_EXERCISE, ids=name_of)


# Steps.


def test_steps_are_found() -> None:
    """Else everything below would pass for nothing."""
    assert len(FILES) >= 5
    assert [find_step(number).number for number in range(1, len(STEPS) + 1)] == [
        step.number for step in STEPS
    ]
    for number in (0, len(STEPS) + 1):
        with pytest.raises(ValueError, match="there are steps"):
            find_step(number)


@each_file
def test_a_step_is_in_the_list_and_has_its_parts(path: Path) -> None:
    step = find_step(int(path.stem[1:3]))
    assert step.module.rpartition(".")[2] == path.stem
    tree = tree_of(path)
    doc = ast.get_docstring(tree)
    assert doc is not None
    assert doc.startswith((f"Step {step.number}.", f"Step {step.number}:"))
    found = dict(functions(tree))
    assert {"check", "show", "main"} <= set(found)
    for name in ("check", "show", "main"):
        assert not found[name].args.args, f"{name} takes no arguments"


def _printed(rank: int, world_size: int, module: str) -> str:
    with redirect_stdout(StringIO()) as printed:
        importlib.import_module(module).main()
    return printed.getvalue()


@each_file
def test_a_step_passes_its_check_and_shows_something(lab_pool: Ranks, path: Path) -> None:
    """In a process of the pool: triton may be compiled in this one."""
    (printed,) = lab_pool.run(_printed, find_step(int(path.stem[1:3])).module)
    assert len(printed.splitlines()) >= 10
    assert max(map(len, printed.splitlines())) <= 100


@pytest.mark.slow
@each_file
def test_a_step_runs_by_itself(path: Path) -> None:
    """As a learner runs it, without setting anything; and it has something to say."""
    own = {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", find_step(int(path.stem[1:3])).module],
        env={**environment, **own},
        capture_output=True,
        encoding="utf-8",
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) >= 3


def test_the_lab_imports_no_triton() -> None:
    code = (
        "import sys, ring_flash_attn.lab.registry, ring_flash_attn.lab.definition\n"
        "import ring_flash_attn.lab.device, ring_flash_attn.lab.steps\n"
        "print('triton' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


# Exercises and solutions.


@each_exercise
def test_exercise_and_solution_are_the_same_file_but_for_the_holes(step: LabStep) -> None:
    exercise = tree_of(LAB / "exercises" / step.exercise)
    solution = tree_of(LAB / "solutions" / step.exercise)
    assert ast.get_docstring(exercise) == ast.get_docstring(solution)
    filled = dict(functions(solution))
    for name, function in functions(exercise):
        assert name in filled, f"the solution has no {name}"
        assert signature(function) == signature(filled[name]), name
    for tree in (exercise, solution):
        modules = {
            node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        outside = {m for m in map(str, modules) if m.split(".")[0] not in sys.stdlib_module_names}
        kernels = {"triton", "triton.language", "ring_flash_attn.lab.device"}
        assert outside == {"torch", *(kernels if step.is_triton else ())} & outside
        assert kernels <= outside or not step.is_triton
    for name in CONTRACT[step.number]:
        assert "NotImplementedError" not in ast.unparse(called(filled, name))


@pytest.mark.slow
@pytest.mark.parametrize("step", [s for s in WITH_EXERCISE if s.is_triton], ids=name_of)
def test_a_kernel_of_ones_own_runs_by_itself(step: LabStep, tmp_path: Path) -> None:
    """`python flash/e07….py`: a hole says so, a solution prints what it should."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    own = {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", "PYTHONPATH": str(LAB.parents[1])}
    for folder, fails in (("exercises", True), ("solutions", False)):
        mine = tmp_path / step.exercise
        mine.write_bytes((LAB / folder / step.exercise).read_bytes())
        run = subprocess.run(
            [sys.executable, str(mine)],
            env={**environment, **own},
            capture_output=True,
            encoding="utf-8",
            timeout=600,
        )
        assert bool(run.returncode) == fails, run.stderr
        assert ("NotImplementedError" in run.stderr) == fails
    for line in run.stdout.splitlines():
        got, want = (
            [float(x) for x in re.findall(r"-?\d+(?:\.\d+)?", part.partition("(")[0])]
            for part in line.split("should be")
        )
        assert got == pytest.approx(want * (len(got) // len(want)), abs=1e-3), line


@each_exercise
def test_an_exercise_has_the_signatures_that_the_checker_calls(step: LabStep) -> None:
    """The step has them as well, perhaps with more arguments, to show more."""
    exercise = dict(functions(tree_of(LAB / "exercises" / step.exercise)))
    own = dict(functions(tree_of(LAB / "steps" / f"s{step.exercise[1:]}")))
    for name, arguments in CONTRACT[step.number].items():
        assert arguments_of(exercise, name) == arguments
        assert f"{arguments_of(own, name)} ".startswith(f"{arguments} ")


@each_exercise
def test_every_hole_says_what_to_do(step: LabStep) -> None:
    tree = tree_of(LAB / "exercises" / step.exercise)
    holes = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    assert holes
    for hole in holes:
        assert isinstance(hole, ast.Call)
        assert ast.unparse(hole.func) == "NotImplementedError"
        assert isinstance(hole.args[0], ast.Constant)
        assert len(str(hole.args[0].value)) > 10


def _why_exercises_fail(rank: int, world_size: int, number: int) -> dict[str, list[str]]:
    """By function of an exercise: the error that it raises, and what caused that."""
    step = find_step(number)
    module = importlib.import_module(f"ring_flash_attn.lab.exercises.{step.exercise[:-3]}")
    found: dict[str, list[str]] = {}
    for name, arguments in CONTRACT[number].items():
        call = getattr(module, name)
        found[name] = []
        try:
            getattr(call, "apply", call)(*(sample(number, each) for each in arguments.split()))
        except Exception as error:  # triton's interpreter wraps what a kernel raises
            at: BaseException | None = error
            while at is not None:
                found[name].append(type(at).__name__)
                at = at.__cause__
    return found


@each_exercise
def test_exercises_raise_not_implemented(lab_pool: Ranks, step: LabStep) -> None:
    (found,) = lab_pool.run(_why_exercises_fail, step.number)
    for name, errors in found.items():
        assert "NotImplementedError" in errors, f"{name}: {errors or 'returned'}"


def replaceable(step: LabStep) -> list[str]:
    """What a step has with the very arguments of its exercise."""
    found = dict(functions(tree_of(LAB / "steps" / f"s{step.exercise[1:]}")))
    wanted = CONTRACT[step.number].items()
    return [name for name, arguments in wanted if arguments_of(found, name) == arguments]


def _check_with_solution(rank: int, world_size: int, number: int, names: list[str]) -> None:
    """Put the solution's functions into the step, and run the step's check with them."""
    step = find_step(number)
    module = importlib.import_module(step.module)
    solution = importlib.import_module(f"ring_flash_attn.lab.solutions.{step.exercise[:-3]}")
    own = {name: getattr(module, name) for name in names}
    try:
        for name in names:
            setattr(module, name, getattr(solution, name))
        module.check()
    finally:
        for name in names:
            setattr(module, name, own[name])


@pytest.mark.parametrize("step", list(filter(replaceable, WITH_EXERCISE)), ids=name_of)
def test_a_solution_passes_the_check_of_its_step(lab_pool: Ranks, step: LabStep) -> None:
    lab_pool.run(_check_with_solution, step.number, replaceable(step))


# Masks, features and rings, of steps and of solutions.


def step_module(number: int) -> ModuleType:
    return importlib.import_module(find_step(number).module)


def other(number: int, folder: str) -> ModuleType:
    """The exercise of a step, or its solution."""
    name = find_step(number).exercise.removesuffix(".py")
    return importlib.import_module(f"ring_flash_attn.lab.{folder}.{name}")


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want, atol=3e-5, rtol=3e-5)


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
