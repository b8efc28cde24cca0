"""Kernels beside a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from ..kernels.base import NATIVE

Versus = Annotated[
    str | None,
    typer.Option(
        help="Kernel that the others are compared with; native if it is one of them, else the first."
    ),
]


def find_versus(kernels: Sequence[str], versus: str | None) -> tuple[tuple[str, ...], str]:
    """All kernels, and the one that the others are compared with; "" if there are no others."""
    found = tuple(dict.fromkeys((*kernels, *([] if versus is None else [versus]))))
    if versus is None and len(found) == 1:
        return found, ""
    return found, versus or (NATIVE if NATIVE in found else found[0])
