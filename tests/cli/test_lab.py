"""`rfa lab`: the list, the learner's files, running a step, and what a check prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ring_flash_attn.cli import lab
from ring_flash_attn.cli.app import app
from ring_flash_attn.lab.check import Report
from ring_flash_attn.lab.registry import STEPS

MERGE = STEPS[11]
RIGHT = """
import torch
def merge(out1, lse1, out2, lse2):
    lse = torch.logaddexp(lse1, lse2)
    safe = lse.masked_fill(lse == -float("inf"), 0.0)
    one, two = torch.exp(lse1 - safe)[..., None], torch.exp(lse2 - safe)[..., None]
    return one * out1 + two * out2, lse
"""


def rfa(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "1000"})


def words(result: Result) -> str:
    return " ".join(result.output.replace("│", " ").split())


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A course of two exercises, one of them with a solution, and the step of one."""
    folder = tmp_path / "course"
    for name in ("steps", "exercises", "solutions"):
        (folder / name).mkdir(parents=True)
    (folder / "exercises" / STEPS[3].exercise).write_text("# a hole of 4\n")
    (folder / "exercises" / MERGE.exercise).write_text("# a hole of 12\n")
    (folder / "solutions" / MERGE.exercise).write_text("# [the solution] of 12\n")
    (folder / "steps" / "s12_merge.py").touch()
    monkeypatch.setattr(lab, "_FOLDER", folder)
    return tmp_path / "mine"


# Lists and files.


def test_the_list(course: Path) -> None:
    result = rfa("lab", "--dir", str(course))
    assert result.exit_code == 0
    for step in STEPS:
        assert step.title in result.output
    assert "0 of 15 exercises passed" in result.output
    assert "rfa lab start DIR" in result.output
    (line,) = (line for line in result.output.splitlines() if STEPS[4].title in line)
    assert "no file yet" in line
    assert "to be read" in result.output


def test_without_a_folder(course: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This one, if it has exercises; else the one in it that has; and which one is said."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "other").mkdir()
    monkeypatch.chdir(home)
    assert f"passed in {home}\n" in rfa("lab").output
    assert "rfa lab start DIR" in rfa("lab").output
    rfa("lab", "start", "flash")
    (home / "flash" / MERGE.exercise).write_text(RIGHT)
    result = rfa("lab", "check", "12")
    assert result.exit_code == 0
    assert result.output.startswith(f"checking flash/{MERGE.exercise}\npassed: step 12")
    assert f"1 of 15 exercises passed in {home / 'flash'}\n" in rfa("lab").output
    rfa("lab", "start", "again")
    for arguments in ((), ("check", "12")):
        result = rfa("lab", *arguments)
        assert result.exit_code == 2
        assert "there are exercises in again, flash: name the folder" in words(result)
    assert f"1 of 15 exercises passed in {home / 'flash'}\n" in rfa("lab", "--dir", "flash").output
    rfa("lab", "start", ".")
    assert f"0 of 15 exercises passed in {home}\n" in rfa("lab").output


def test_start_never_overwrites(course: Path) -> None:
    result = rfa("lab", "start", str(course))
    assert result.exit_code == 0
    assert sorted(path.name for path in course.iterdir()) == [STEPS[3].exercise, MERGE.exercise]
    assert f"rfa lab check 4 {course}" in words(result)
    assert f"rfa lab --dir {course}" in words(result)
    (course / MERGE.exercise).write_text("mine")
    (course / STEPS[3].exercise).unlink()
    result = rfa("lab", "start", str(course))
    assert result.exit_code == 2
    assert f"{MERGE.exercise}, which are yours" in words(result)
    assert not (course / STEPS[3].exercise).exists()
    assert rfa("lab", "start", str(course), "--missing").exit_code == 0
    assert (course / MERGE.exercise).read_text() == "mine"
    assert (course / STEPS[3].exercise).is_file()
    assert "all exercises are there" in rfa("lab", "start", str(course), "--missing").output


def test_what_is_not_there_yet(course: Path, tmp_path: Path) -> None:
    for arguments, said in {
        ("run", "5"): "step 5 (Tiled attention) has no file yet",
        ("check", "5", str(course)): "step 5 (Tiled attention) has no exercise yet",
        ("check", "4", "--solution"): "step 4 (Online softmax) has no solution yet",
        ("check", "4", str(course)): f"there is no {course / STEPS[3].exercise}; `rfa lab start",
    }.items():
        result = rfa("lab", *arguments)
        assert result.exit_code == 2
        assert said in words(result)
    (lab._FOLDER / "exercises" / MERGE.exercise).unlink()
    (lab._FOLDER / "exercises" / STEPS[3].exercise).unlink()
    assert "there are no exercises yet" in words(rfa("lab", "start", str(course)))


# Steps.


def test_run_starts_a_process(course: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 7)

    monkeypatch.setattr(subprocess, "run", run)
    assert rfa("lab", "run", "12").exit_code == 1
    assert commands == [[sys.executable, "-c", lab._RUN, MERGE.module]]


def test_a_step_runs_with_the_interpreter(tmp_path: Path) -> None:
    """Unless there is a GPU."""
    code = "import os, torch\nif __name__ == '__main__':\n    "
    code += "print(torch.cuda.is_available() or os.environ['TRITON_INTERPRET'] == '1')\n"
    (tmp_path / "a_step.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-c", lab._RUN, "a_step"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout == "True\n", done.stderr


# Checks.


def test_progress(course: Path) -> None:
    course.mkdir()
    mine = course / MERGE.exercise
    mine.write_text(RIGHT)
    result = rfa("lab", "check", "12", str(course))
    assert (result.exit_code, result.output.strip()) == (
        0,
        "passed: step 12, Merging by lse: 4 cases",
    )
    assert json.loads((course / ".rfa-lab.json").read_text())["12"]["passed"] is True

    def state() -> str:
        lines = rfa("lab", "--dir", str(course)).output.splitlines()
        (line,) = (line for line in lines if MERGE.title in line)
        return line.partition(MERGE.exercise)[2].strip()

    assert state() == "passed"
    mine.write_text(RIGHT.replace("logaddexp", "maximum"))
    assert state() == "passed, then changed"
    result = rfa("lab", "check", "12", str(mine))
    assert result.exit_code == 1
    assert "not yet: step 12" in result.output
    assert "merge is wrong in " in result.output
    assert "lse: " in result.output
    assert "It looks like: lse merged by max: the larger lse stands for both." in result.output
    assert "Hint: " not in result.output
    assert "solution" not in result.output
    assert state() == "not yet"


def test_hints_and_what_was_printed(course: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    course.mkdir()
    (course / MERGE.exercise).touch()
    report = Report(12, "mine", lines=["out: [wrong]"], printed=["[mine]"])
    monkeypatch.setattr(lab, "check_file", lambda *arguments: report)
    result = rfa("lab", "check", "12", str(course), "--hint")
    assert result.exit_code == 1
    assert "your file printed:\n  [mine]" in result.output
    assert "out: [wrong]" in result.output
    assert "Hint: Cut keys with scores (0, 0 | 0) by hand" in result.output
    assert "It looks like" not in result.output


def test_the_solution_only_when_asked(course: Path) -> None:
    result = rfa("lab", "check", "12", "--solution")
    assert (result.exit_code, result.output) == (0, "# [the solution] of 12\n")


def test_a_file_of_progress_that_is_none(course: Path) -> None:
    course.mkdir()
    (course / ".rfa-lab.json").write_text("[]")
    result = rfa("lab", "--dir", str(course))
    assert result.exit_code == 2
    assert "is not what `rfa lab check` writes; remove it" in words(result)
