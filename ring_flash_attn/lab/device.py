"""Where the lab runs: on a GPU if there is one, else through Triton's interpreter on the CPU."""

from __future__ import annotations

import os

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
