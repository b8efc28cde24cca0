"""The learner's file: its functions, where they run, and what fails in it in words."""

from __future__ import annotations

import importlib.util
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..device import device
from .compare import Judgement
from .memory import guarded, watched


class InputChanged(RuntimeError):
    """A function has written to a tensor that it was given."""


@dataclass(frozen=True, slots=True)
class CheckCase:
    """One call of one function; `judge` looks at what it returned."""

    function: str
    label: str
    call: Callable[[], Any]
    judge: Callable[[Any], Judgement]


Cases = Iterator[CheckCase]


class Learner:
    """A file that was imported. It runs on the GPU only if it has kernels."""

    def __init__(self, path: Path) -> None:
        here = device()  # turns the interpreter on before the file imports triton
        self.module = load(path)
        kinds = (type(x).__module__ for x in vars(self.module).values())
        self.has_kernels = any(kind.startswith("triton.runtime") for kind in kinds)
        self.device = here if self.has_kernels else torch.device("cpu")
        self.missing: list[str] = []

    def get(self, name: str) -> Any:
        """A function or class; None, and noted, if there is none."""
        if not hasattr(self.module, name) and name not in self.missing:
            self.missing.append(name)
        return getattr(self.module, name, None)

    def put(self, x: Any) -> Any:
        """A copy on the device, for kernels between guards; of lists, a list of copies."""
        if isinstance(x, list):
            return [self.put(each) for each in x]
        if self.has_kernels and isinstance(x, Tensor) and x.is_floating_point():
            return guarded(x, self.device)[0]
        return x.to(self.device, copy=True) if isinstance(x, Tensor) else x

    def watched(self) -> AbstractContextManager[None]:
        """Look for stores beyond what is allocated inside; see `memory`."""
        return watched() if self.has_kernels else nullcontext()

    def case(
        self, name: str, label: str, judge: Callable[[Any], Judgement], *arguments: Any
    ) -> CheckCase:
        """Call a function with copies, and see whether it leaves them alone."""
        function = self.get(name)

        def call() -> Any:
            copies = [self.put(each) for each in arguments]
            with self.watched():
                result = function(*copies)
            for number, (before, after) in enumerate(zip(arguments, copies), 1):
                if not all(
                    torch.allclose(x, y.cpu(), 0, 0, equal_nan=True)
                    for x, y in zip(*map(_tensors, (before, after)))
                ):
                    raise InputChanged(f"{name} changes its argument {number} in place")
            return result

        return CheckCase(name, label, call, judge)


def _tensors(x: Any) -> list[Tensor]:
    return x if isinstance(x, list) else [x] if isinstance(x, Tensor) else []


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
    error = _in_kernel(error, path)
    name, words = type(error).__name__, " ".join(str(error).split()) or "no message"
    said = f"{name}: {words}"
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {name}: {error.msg}"
    line, why = _compiler_says(error)
    if line:
        return f"{name}: {why} (in the kernel: {line})"
    for inner in _causes(error):
        own = _own_lines(inner, path)
        if own:
            line = linecache.getline(str(path), own[-1]).strip()
            return f"{said} (line {own[-1]}: {line})"
    return said


def _own_lines(error: BaseException, path: Path) -> list[int]:
    """Lines of the learner's file on the way to an error, the deepest last."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame.lineno for frame in frames if frame.filename == str(path) and frame.lineno]


def _in_kernel(error: BaseException, path: Path) -> BaseException:
    """What happened in a kernel; Triton's interpreter wraps it, once for each function."""
    inner = error
    while type(inner).__name__ == "InterpreterError" and inner.__cause__ is not None:
        inner = inner.__cause__
        if _own_lines(inner, path):
            error = inner
    return error


def hole_in(error: BaseException) -> str | None:
    """What a NotImplementedError says, whatever wraps it; None if there is none."""
    hole = re.fullmatch(r"raise NotImplementedError\((.*)\)", _compiler_says(error)[0])
    if hole:
        return hole[1].strip("'\"") or "no hint"
    holes = (each for each in _causes(error) if isinstance(each, NotImplementedError))
    return next((str(each) or "no hint" for each in holes), None)


def _compiler_says(error: BaseException) -> tuple[str, str]:
    """Of an error of Triton's compiler the line, above a caret, and the reason, below it."""
    source, caret, why = str(error).rpartition("^")
    if not caret or not type(error).__module__.startswith("triton.compiler"):
        return "", ""
    return source.rstrip().rpartition("\n")[2].strip(), " ".join(why.split())


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Itself, and what led to it."""
    inner: BaseException | None = error
    while inner is not None:
        yield inner
        inner = inner.__cause__ or inner.__context__
