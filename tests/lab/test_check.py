"""The checker: right answers pass, planted mistakes are named, and every failure is in words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from answers import BASE_2, FUNCTION, PLANTED, RIGHT, TILED, Planted, answer, planted, solution
from ranks import Ranks

from ring_flash_attn import lab
from ring_flash_attn.lab.check import HINTS, Report, check
from ring_flash_attn.lab.checker.backward import gradients
from ring_flash_attn.lab.checker.forward import forward
from ring_flash_attn.lab.checker.masks import seen
from ring_flash_attn.lab.checker.run import MISTAKES
from ring_flash_attn.lab.checker.setting import INF, Setting, expand, scores_of
from ring_flash_attn.lab.checker.softmax import online
from ring_flash_attn.lab.definition import attention
from ring_flash_attn.lab.registry import STEPS

pytestmark = pytest.mark.product(4)  # the others run in `make test-all`


def _check(rank: int, world_size: int, number: int, path: Path) -> Report:
    """In a process that interprets kernels."""
    from ring_flash_attn.lab.checker.run import run_cases

    return run_cases(number, path, lambda case: None)


def needs_the_interpreter(request: pytest.FixtureRequest, number: int, tile: int) -> None:
    if request.node.callspec.params["lab_pool"] != "compiled":
        return
    if number == 7 and tile < 16:
        pytest.skip("on a GPU, tl.dot takes tiles of 16 and more")
    if number == 8 and tile > 64:
        pytest.skip("five fp32 tiles of 128 × 128 in registers: ptxas takes minutes")


def report_on(lab_pool: Ranks, number: int, source: str, folder: Path) -> Report:
    path = folder / f"e{number:02}_of_test.py"
    path.write_text(source)
    (found,) = lab_pool.run(_check, number, path)
    assert isinstance(found, Report)
    return found


# Right answers.


@pytest.mark.parametrize("number", RIGHT)
def test_right_answers_pass(number: int, lab_pool: Ranks, tmp_path: Path) -> None:
    report = report_on(lab_pool, number, answer(RIGHT[number]), tmp_path)
    assert report.lines == []
    assert report.passed
    assert report.cases >= 4


@pytest.mark.parametrize(("number", "tile"), [(6, 5), (6, 64), (7, 8), (7, 64)])
def test_other_tiles_pass(
    number: int, tile: int, lab_pool: Ranks, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    needs_the_interpreter(request, number, tile)
    assert report_on(lab_pool, number, answer(RIGHT[number], tile), tmp_path).lines == []


def test_base_2_inside_passes(lab_pool: Ranks, tmp_path: Path) -> None:
    """And tiles of one's own, from the last to the first."""
    assert report_on(lab_pool, 5, answer(BASE_2 + FUNCTION), tmp_path).lines == []
    natural = RIGHT[7]
    two = natural.replace("tl.exp(", "tl.exp2(").replace("d**-0.5", "d**-0.5 * math.log2(math.e)")
    two = two.replace("m + tl.log(total)", "(m + tl.log2(total)) * 0.6931471805599453")
    assert two.count("exp2") == 2
    assert report_on(lab_pool, 7, answer(two), tmp_path).lines == []
    two = RIGHT[6].replace(
        "torch.exp(s - lse[:, r, None])", "torch.exp2((s - lse[:, r, None]) * U)"
    )
    assert report_on(lab_pool, 6, answer(two) + "\nU = math.log2(math.e)\n", tmp_path).lines == []


FILES = Path(lab.__file__).parent


@pytest.mark.parametrize("name", [path.name for path in (FILES / "solutions").glob("e*.py")])
def test_our_solutions_pass_and_exercises_are_holes(name: str, lab_pool: Ranks) -> None:
    number = int(name[1:3])
    (report,) = lab_pool.run(_check, number, FILES / "solutions" / name)
    assert report.lines == []
    (report,) = lab_pool.run(_check, number, FILES / "exercises" / name)
    assert report.lines
    assert all(" is not filled in yet: " in line for line in report.lines)


# Wrong ones.


@pytest.mark.product(8)
@pytest.mark.parametrize("each", PLANTED, ids=lambda each: f"{each.step}-{each.mistake}")
def test_mistakes_are_named(
    each: Planted, lab_pool: Ranks, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    needs_the_interpreter(request, each.step, each.tile)
    report = report_on(lab_pool, each.step, planted(each), tmp_path)
    assert not report.passed
    assert report.names == [MISTAKES[each.mistake].name], "\n".join(report.lines)


def test_two_mistakes(lab_pool: Ranks, tmp_path: Path) -> None:
    """In two functions of one file."""
    plants = [each for each in PLANTED if each.step == 10 and each.mistake in ("sinks", "scale_dk")]
    source = answer(RIGHT[10])
    for each in plants:
        source = source.replace(each.old, each.new)
    names = report_on(lab_pool, 10, source, tmp_path).names
    assert names == [MISTAKES["sinks"].name, MISTAKES["scale_dk"].name]


def test_every_mistake_of_the_list_is_planted() -> None:
    named = {
        "rescale", "edge", "base2", "scale_dk", "scale_twice", "dq_twice", "maximum", "inf_rows",
        "unrounded", "group", "offset", "window", "tail", "documents", "lse_max", "source",
        "zigzag", "home",
    }  # fmt: skip
    assert named <= {each.mistake for each in PLANTED} <= set(MISTAKES)


def test_where_it_is_wrong(lab_pool: Ranks, tmp_path: Path) -> None:
    """A mistake in one tile: rows 16–31 × keys 0–15 of the first case, 32 × 32."""
    old = "s = qi @ kj.mT * scale\n"
    new = old + "            if i == 16 and j == 0: s = s + 3.0\n"
    report = report_on(lab_pool, 5, answer(TILED.replace(old, new) + FUNCTION), tmp_path)
    text = "\n".join(report.lines)
    assert "tiled_forward is wrong in " in report.lines[0]
    assert "full, 32 queries × 32 keys, d 32, tiles 16 × 16" in report.lines[0]
    assert "out: 1024 of 2048 numbers are wrong, by up to " in text
    assert "rows 16–31 of 32, batch 0–1" in text
    assert "2 of 4 tiles; the worst: rows 16–31 × keys " in text
    assert "lse: 32 of 64 numbers are wrong" in text
    assert report.mistakes == []  # not a usual one
    assert report.hints == [HINTS[5]]


def test_a_pair_that_must_not_be_seen(lab_pool: Ranks, tmp_path: Path) -> None:
    wrong = answer(RIGHT[5].replace("key[None, :] > at[:, None]", "key > at[:, None] + 1"))
    text = "\n".join(report_on(lab_pool, 5, wrong, tmp_path).lines)
    assert "query 0 sees key 1, which is hidden from it" in text
    strict = answer(RIGHT[11].replace("place[None, :] > place", "place[None, :] >= place"))
    report = report_on(lab_pool, 11, strict, tmp_path)
    assert "does not see key" in "\n".join(report.lines)
    assert report.names == [MISTAKES["edge"].name]


def test_which_rank_and_step(lab_pool: Ranks, tmp_path: Path) -> None:
    """Rank 2 takes the keys of rank 1, which come in step 1, twice as seriously."""
    source = RIGHT[13].replace(
        "block(q, k, v, causal and source == rank)",
        "block(q * (2 if (rank, source) == (2, 1) else 1), k, v, causal and source == rank)",
    )
    text = "\n".join(report_on(lab_pool, 13, answer(source), tmp_path).lines)
    assert "4 ranks, 6 rows each, d 24, full" in text
    assert "ranks 2, rows 12–17 of 24" in text
    assert "rank 2, ring step 1 (keys of rank 1)" in text


def test_blocks_in_words(lab_pool: Ranks, tmp_path: Path) -> None:
    wrong = RIGHT[9].replace("if not causal or start <= last", "if True")
    text = "\n".join(report_on(lab_pool, 9, answer(wrong), tmp_path).lines)
    assert "block (0, 1): rows 0–7 × keys 8–15 is visited, though all of it is hidden" in text


# What is no number.


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("return out, lse\n", "return out\n", "1 values returned; expected out, lse"),
        ("return out, lse\n", "return out[0], lse\n", "shape (32, 32), expected (2, 32, 32)"),
        ("return out, lse\n", "return out.half(), lse\n", "out is torch.float16, expected torch.f"),
        ("return out, lse\n", "return None, lse\n", "out is a NoneType, not a tensor"),
        ("return out, lse\n", "return out / 0 * 0, lse\n", "2048 of them NaN"),
        ("s = qi @ kj.mT", "s = qi @ kj", "RuntimeError: "),
        ("def tiled_forward", "def tiled_fwd", "has no tiled_forward"),
        ("    rows, keys", "    raise NotImplementedError('loop')\n    rows, keys",
         "tiled_forward is not filled in yet: loop"),
        ("import math", "import maths", "does not import: ModuleNotFoundError: No module named"),
        ("import math", "import math as", "does not import: line 2: SyntaxError"),
    ],
)  # fmt: skip
def test_failures_in_words(old: str, new: str, words: str, lab_pool: Ranks, tmp_path: Path) -> None:
    source = answer(RIGHT[5])
    assert old in source
    report = report_on(lab_pool, 5, source.replace(old, new), tmp_path)
    assert not report.passed
    assert words in "\n".join(report.lines)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"p": p}', '"p": p, "s": s}', "saved holds more than backward needs: s"),
        ('"p": p}', '"P": p}', "saved lacks p, the probabilities, (2, 32, 32)"),
        ('"p": p}', '"p": s}', "saved['p'] is not p, the probabilities, (2, 32, 32)"),
        ('"q": q', '"q": q * 2', "saved['q'] is not q, (2, 32, 32)"),
        ('"v": v, ', "", "saved lacks v, (2, 32, 32)"),
        ("p @ v, {", "{", "expected (out, saved), with saved a dict of tensors"),
    ],
)
def test_what_is_saved(old: str, new: str, words: str, lab_pool: Ranks, tmp_path: Path) -> None:
    """By its names, and no more."""
    source = answer(RIGHT[3])
    assert old in source
    assert report_on(lab_pool, 3, source.replace(old, new), tmp_path).lines[1] == f"  {words}"


def test_an_input_that_is_changed(lab_pool: Ranks, tmp_path: Path) -> None:
    source = answer(RIGHT[5]).replace("    scale = d**-0.5", "    q *= d**-0.5\n    scale = 1.0")
    lines = report_on(lab_pool, 5, source, tmp_path).lines
    assert lines[1] == "  tiled_forward changes its argument 1 in place"


@pytest.mark.parametrize(
    ("number", "old", "new"),
    [
        (7, "alpha = tl.exp(m - ", "alpha = tl.exp(nothing - "),
        (8, "matrix + rows", "matrix + nothing"),
    ],
)
def test_the_line_in_a_kernel(number: int, old: str, new: str, tmp_path: Path) -> None:
    """Also in a function that a kernel calls."""
    source = solution(number).replace(old, new)
    path = tmp_path / STEPS[number - 1].exercise
    path.write_text(source)
    line = next(i for i, text in enumerate(source.splitlines(), 1) if "nothing" in text)
    pool = Ranks(1, environment={"TRITON_INTERPRET": "1"})
    (report,) = pool.run(_check, number, path)
    pool.stop()
    said = f"  NameError: name 'nothing' is not defined (line {line}: "
    assert report.lines[1].startswith(said), report.lines


def test_a_hole_in_a_kernel(lab_pool: Ranks, tmp_path: Path) -> None:
    source = answer(RIGHT[7]).replace(
        "    i, b = tl", "    raise NotImplementedError('tile')\n    i, b = tl"
    )
    assert report_on(lab_pool, 7, source, tmp_path).lines == [
        "triton_forward is not filled in yet: tile"
    ]


@pytest.mark.gpu
def test_a_kernel_that_does_not_compile(tmp_path: Path) -> None:
    path = tmp_path / STEPS[6].exercise
    path.write_text(answer(RIGHT[7], 8))
    lines = check(7, path).lines
    assert lines[1].startswith("  CompilationError: Input shapes should have ")
    assert lines[1].endswith("+ tl.dot(p, v))"), lines[1]


def test_torch_is_not_triton(lab_pool: Ranks, tmp_path: Path) -> None:
    source = answer(TILED).replace("tiled_forward", "triton_forward")
    assert "has no Triton kernel" in report_on(lab_pool, 7, source, tmp_path).lines[0]


def test_ranks_that_wait_for_each_other(lab_pool: Ranks, tmp_path: Path) -> None:
    source = answer(RIGHT[13]).replace("k, v = recv((rank - 1)", "k, v = recv((rank + 1)")
    text = "\n".join(report_on(lab_pool, 13, source, tmp_path).lines)
    assert "everybody waits, nobody sends: " in text
    source = answer(RIGHT[13]).replace("D = (dout", "D = nothing(dout")
    text = "\n".join(report_on(lab_pool, 13, source, tmp_path).lines)
    assert "NameError: rank 0: name 'nothing' is not defined (line " in text


# A process of its own.


def test_a_fresh_process(tmp_path: Path) -> None:
    path = tmp_path / STEPS[11].exercise
    path.write_text("print('hello')\n" + answer(RIGHT[12]))
    report = check(12, tmp_path)
    assert (report.passed, report.cases, report.printed) == (True, 4, ["hello"])


def test_an_endless_loop(tmp_path: Path) -> None:
    path = tmp_path / STEPS[11].exercise
    path.write_text("def merge(*a):\n    n = 0\n    while True:\n        n += 1\n")
    report = check(12, path, limit=8)
    assert report.lines[0] == "no result after 8 s: a loop that does not end? (merge: two halves)"
    assert report.lines[1].startswith("  it was in line ")
    assert report.lines[1].endswith(", in merge")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "died of SIGSEGV"),
        ("import os; os._exit(3)", "ended with exit code 3 (while the file is imported)"),
    ],
)
def test_a_crash(body: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / STEPS[11].exercise
    path.write_text(body)
    assert words in check(12, path).lines[0]


def test_what_cannot_be_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"step 16 .* has no exercise"):
        check(16, tmp_path)
    with pytest.raises(ValueError, match="steps 1 to 16"):
        check(17, tmp_path)
    with pytest.raises(ValueError, match=r"there is no .*e12_merge.py; `rfa lab start"):
        check(12, tmp_path)


# Suspects without a mistake are right.


@pytest.mark.parametrize(("rows", "keys"), [(7, 7), (5, 9), (9, 5)])
@pytest.mark.parametrize("window", [(-1, -1), (2, 0), (2, 1)])
def test_suspects_without_a_mistake(rows: int, keys: int, window: tuple[int, int]) -> None:
    torch.manual_seed(0)
    shapes = ((2, rows, 4, 8), (2, keys, 2, 8), (2, keys, 2, 8))
    q, k, v = (torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in shapes)
    causal = window[1] < 1
    out, lse = attention(q, k, v, causal=causal, window=window)
    dout = torch.randn_like(out)
    true = torch.autograd.grad(out, (q, k, v), dout)
    wide = [x.detach().transpose(1, 2) for x in (q, k, v, out, dout)]
    setting = Setting(
        *wide[:3], causal=causal, window=window, out=wide[3], dout=wide[4], lse=lse.detach()
    )
    counts = seen(setting)
    found = forward(setting, counts)
    empty = lse.detach() == -INF
    assert torch.equal(found["lse"].isnan(), empty)
    torch.testing.assert_close(found["out"].nan_to_num(), wide[3])
    for tile in (1, 3, 16):
        scores = scores_of(setting, counts)
        torch.testing.assert_close(online(scores, expand(wide[2], 2), tile)[0], wide[3])
    backward = gradients(setting, counts)
    for name, gradient in zip(("dq", "dk", "dv"), true):
        torch.testing.assert_close(backward[name].transpose(1, 2), gradient)
