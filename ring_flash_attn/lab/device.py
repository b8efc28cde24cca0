"""Where the lab runs: on a GPU if there is one, else through Triton's interpreter on the CPU."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

import torch


def device() -> torch.device:
    """The GPU, or the CPU with Triton's interpreter turned on; call it before importing triton."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    os.environ.setdefault("TRITON_INTERPRET", "1")
    return torch.device("cpu")


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, whose `tl.dot` is wrong on bf16 operands."""
    return device().type == "cpu" or os.environ.get("TRITON_INTERPRET") == "1"


def check_interpreter() -> None:
    """Where kernels are interpreted: NotImplementedError if these versions cannot do it.

    Up to 3.6 the interpreter makes an int of an array of one number, which NumPy 2.4 refuses: the
    first `range` of a kernel would fail, with a message that nobody understands.
    """
    if interpreted() and _release("triton") < (3, 7) and _release("numpy") >= (2, 4):
        raise NotImplementedError(
            f"the interpreter of Triton {version('triton')} does not work with NumPy "
            f"{version('numpy')}; without a GPU, the lab needs triton 3.7 or numpy < 2.4: "
            "pip install 'numpy<2.4'"
        )


def _release(package: str) -> tuple[int, ...]:
    """(3, 7) of 3.7.1; what is not installed will say so when it is imported."""
    try:
        found = version(package)
    except PackageNotFoundError:
        return (0,) if package == "numpy" else (99,)
    return tuple(int(part) for part in found.split(".")[:2])
