"""`rfa lab`: the course: its steps, its exercises, and what checks a learner's files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import lab as course
from ..bench.results import make_table
from ..lab.check import LIMIT, exercise_path
from ..lab.check import check as check_file
from ..lab.registry import STEPS, LabStep, find_step
from .console import print_lines, screen, status, usage_errors

_PROGRESS = ".rfa-lab.json"
_FOLDER = Path(course.__file__).parent
_RUN = (  # the interpreter has to be turned on before anything imports triton
    "import runpy, sys; from ring_flash_attn.lab.device import device; device(); "
    "runpy.run_module(sys.argv[1], run_name='__main__', alter_sys=True)"
)

_DEFAULT = "else this folder, or the one in it that has any"
Number = Annotated[int, typer.Argument(metavar="N", help=f"Step: 1 … {len(STEPS)}.")]


def lab(
    ctx: typer.Context,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help=f"Folder with your exercises; {_DEFAULT}."),
    ] = None,
) -> None:
    """FlashAttention from one loop to the ring, in steps that run on any machine.

    Without a command: the steps, and which exercises you have passed.

    \b
    rfa lab start my-lab
    rfa lab run 4
    rfa lab check 4 my-lab --hint
    """
    if ctx.invoked_subcommand is not None:
        return
    with usage_errors():
        folder = folder or _find_folder()
        progress = _load(folder)
    console = screen()
    table = make_table(("", "step", "what it teaches", "exercise", ""), ())
    for step in STEPS:
        table.add_row(*_row(step, folder, progress))
    console.print(table)
    passed = sum(_is_passed(step, folder, progress) for step in STEPS)
    total = sum(step.has_exercise for step in STEPS)
    console.print(f"{passed} of {total} exercises passed in {folder.resolve()}", soft_wrap=True)
    if not _is_begun(folder):
        print_lines(console, ["`rfa lab start DIR` writes the exercises; `rfa lab run 1` begins."])


def start(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for your exercises.")],
    missing: Annotated[
        bool, typer.Option("--missing", help="Write only those that are not there.")
    ] = False,
) -> None:
    """Write the exercises: signatures, docstrings, and holes for you to fill in.

    Files that are already there are yours: none is overwritten.

    \b
    rfa lab start my-lab
    """
    found = [step for step in STEPS if _exercise(step).is_file()]
    with usage_errors():
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is not a folder")
        if not found:
            raise ValueError("there are no exercises yet")
        there = [step.exercise for step in found if (folder / step.exercise).exists()]
        if there and not missing:
            raise ValueError(
                f"{folder} has {', '.join(there)}, which are yours; --missing writes the others"
            )
    console = screen()
    new = [step for step in found if step.exercise not in there]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for step in new:
            shutil.copyfile(_exercise(step), folder / step.exercise)
    except OSError as error:
        console.print(f"cannot write {error.filename}: {error.strerror}", markup=False)
        raise typer.Exit(1) from None
    lines = [f"wrote {folder / step.exercise}: {step.title}" for step in new]
    if new:
        first = new[0].number
        lines.append(f"next: rfa lab run {first}, then rfa lab check {first} {folder}")
        lines.append(f"what you have passed: rfa lab --dir {folder}")
    print_lines(console, lines or ["all exercises are there"])


def run(number: Number) -> None:
    """Run a step: its check against the definition, then what it shows.

    Without a GPU, kernels run in Triton's interpreter.

    \b
    rfa lab run 7
    """
    with usage_errors():
        step = find_step(number)
        if not (_FOLDER / "steps" / f"{step.module.rpartition('.')[2]}.py").is_file():
            raise ValueError(f"step {number} ({step.title}) has no file yet")
        _check_triton(step)
    done = subprocess.run([sys.executable, "-c", _RUN, step.module])
    raise typer.Exit(1 if done.returncode else 0)


def check(
    number: Number,
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR", help=f"Folder with your exercises, or the file itself; {_DEFAULT}."
        ),
    ] = None,
    hint: Annotated[bool, typer.Option("--hint", help="Say what may help.")] = False,
    solution: Annotated[
        bool, typer.Option("--solution", help="Print a solution; nothing is checked.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that all cases may take.")] = LIMIT,
) -> None:
    """Check your exercise: which tensor, tile, rank and step is wrong, by how much, and why.

    Exit code 0: passed; 1: something is wrong or missing in your file.

    \b
    rfa lab check 7 my-lab
    rfa lab check 7 my-lab --hint
    """
    console = screen()
    with usage_errors():
        step = find_step(number)
        if not timeout > 0:
            raise ValueError(f"--timeout must be positive, not {timeout:g}")
        if solution:
            print_lines(console, [_solution(step)])
            return
        if folder is None:
            folder = _find_folder()
            print_lines(console, [f"checking {folder / step.exercise}"])
        mine = folder if folder.is_file() else folder / step.exercise
        if step.has_exercise and not _exercise(step).is_file() and not mine.is_file():
            raise ValueError(f"step {number} ({step.title}) has no exercise yet")
        path = exercise_path(step, folder)
        _check_triton(step)
        progress = _load(path.parent)
    with status(console, f"checking {path.name}"):
        report = check_file(number, path, timeout)
    progress[str(number)] = {"passed": report.passed, "file": _digest(path)}
    _save(path.parent, progress)
    if report.printed:
        print_lines(console, ["your file printed:", *(f"  {line}" for line in report.printed)])
    if report.passed:
        console.print(f"[green]passed[/]: step {number}, {step.title}: {report.cases} cases")
        return
    console.print(f"[bold red]not yet[/]: step {number}, {step.title}")
    for line in report.lines:
        console.print(line, markup=False, soft_wrap=True)
    for mistake in report.mistakes:
        console.print(
            f"It looks like: [bold]{mistake['name']}[/]: {mistake['says']}.", soft_wrap=True
        )
    if hint:
        for line in report.hints:
            console.print(f"Hint: {line}", markup=False, soft_wrap=True)
    else:
        console.print("--hint says what may help.", markup=False)
    raise typer.Exit(1)


def _check_triton(step: LabStep) -> None:
    if step.is_triton:
        from ..lab.device import check_interpreter

        check_interpreter()


# Files of the course, and what a learner has passed.


def _find_folder() -> Path:
    """The current folder if it has exercises, else the one folder in it that has.

    Raises:
        ValueError: several folders have exercises.
    """
    here = Path()
    if _is_begun(here):
        return here
    try:
        found = sorted(each for each in here.iterdir() if each.is_dir() and _is_begun(each))
    except OSError:  # a folder that cannot be read
        found = []
    if len(found) > 1:
        raise ValueError(f"there are exercises in {', '.join(map(str, found))}: name the folder")
    return found[0] if found else here


def _is_begun(folder: Path) -> bool:
    """Whether it has exercises; no, if it may not be read."""
    names = (step.exercise for step in STEPS if step.has_exercise)
    return any(os.path.isfile(folder / name) for name in names)


def _exercise(step: LabStep) -> Path:
    return _FOLDER / "exercises" / step.exercise


def _solution(step: LabStep) -> str:
    path = _FOLDER / "solutions" / step.exercise
    if not path.is_file():
        raise ValueError(f"step {step.number} ({step.title}) has no solution yet")
    return path.read_text("utf-8").rstrip()


def _row(step: LabStep, folder: Path, progress: dict[str, Any]) -> tuple[str, ...]:
    name = step.exercise if step.has_exercise else "to be read"
    if step.has_exercise and not _exercise(step).is_file():
        name = "no file yet"
    state = ""
    last = progress.get(str(step.number))
    if _is_passed(step, folder, progress):
        state = "[green]passed[/]"
    elif last is not None:
        changed = last.get("passed")
        state = "[yellow]passed, then changed[/]" if changed else "[red]not yet[/]"
    return str(step.number), step.title, step.teaches, name, state


def _is_passed(step: LabStep, folder: Path, progress: dict[str, Any]) -> bool:
    """Whether the file, as it is now, has passed."""
    last = progress.get(str(step.number), {})
    path = folder / step.exercise
    return bool(last.get("passed")) and path.is_file() and last.get("file") == _digest(path)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _load(folder: Path) -> dict[str, Any]:
    path = folder / _PROGRESS
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
        raise ValueError(f"{path} is not what `rfa lab check` writes; remove it")
    return found


def _save(folder: Path, progress: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # a folder that may only be read: the check counts
        (folder / _PROGRESS).write_text(json.dumps(progress, indent=1) + "\n", "utf-8")
