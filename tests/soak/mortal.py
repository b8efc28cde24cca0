"""A kernel that kills its own process at a launch: the reference kernel, until then."""

from __future__ import annotations

import os
import signal
from typing import Any

from ring_flash_attn.kernels.base import load_kernel, register_kernel

NAME = "mortal"
left: dict[str, int] = {}  # launches until the end, by pass; none without an entry


def register() -> None:
    """Make it known in this process, whose `auto` it then is."""
    register_kernel(NAME, __name__)


class MortalKernel:
    """Passes calls on."""

    name = NAME

    def __getattr__(self, name: str) -> Any:
        return getattr(load_kernel("reference"), name)

    def forward(self, *args: Any) -> None:
        _live("forward")
        self.__getattr__("forward")(*args)

    def backward(self, *args: Any) -> None:
        _live("backward")
        self.__getattr__("backward")(*args)


def _live(when: str) -> None:
    if when in left:
        if left[when] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[when] -= 1


KERNEL = MortalKernel()
