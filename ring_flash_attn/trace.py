"""Named ranges for profilers: NVTX for Nsight's tools, and torch.profiler; off unless asked for.

They are on where the environment variable RFA_NVTX is set when the package is imported (to anything
but 0), and inside of `tracing()`. While they are off, no text is made, and nothing is allocated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache

import torch
from torch.profiler import record_function


class _Nothing(AbstractContextManager[object]):
    """No range; faster than a nullcontext."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        return None


_NOTHING = _Nothing()
_users = 0 if os.environ.get("RFA_NVTX", "0") in ("", "0") else 1  # of all threads


def span(name: str | Callable[..., str], *parts: object) -> AbstractContextManager[object]:
    """A range around what is done inside, on this thread.

    Its name, in ASCII, which all profilers show, is a format for `parts` or a function of them; if
    that returns "", there is no range. While ranges are off, nobody looks at `parts`.
    """
    if not _users:
        return _NOTHING
    text = name.format(*parts) if isinstance(name, str) else name(*parts)
    return _range(text) if text else _NOTHING


@contextmanager
def tracing() -> Iterator[None]:
    """Ranges are on inside, on all threads: gradients are computed on threads of their own."""
    global _users
    _users += 1
    try:
        yield
    finally:
        _users -= 1


@contextmanager
def _range(text: str) -> Iterator[None]:
    """One range, for all who may listen."""
    if _has_nvtx():
        torch.cuda.nvtx.range_push(text)
    try:
        with record_function(text):
            yield
    finally:
        if _has_nvtx():
            torch.cuda.nvtx.range_pop()


@cache
def _has_nvtx() -> bool:
    return torch.cuda.is_available()
