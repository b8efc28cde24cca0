"""Usage errors that show when the command line is parsed, before torch is imported."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import typer
from typer.core import TyperCommand

from .. import routes as _routes  # registers them
from ..bench.link import LINKS, NONE
from ..bench.names import DTYPES, PRESETS, implementation_names
from ..kernels.base import AUTO, LIBRARIES, NATIVE, kernel_names
from ..layout import layout_names
from ..plan import route_names
from .groups import BACKENDS
from .verifying.questions import FEATURES

del _routes


def _kernels() -> tuple[str, ...]:
    return (AUTO, NATIVE, *kernel_names())


def _implementations() -> tuple[str, ...]:
    return (AUTO, NATIVE, *implementation_names())


# What options and arguments may be, by the name of the parameter (with its command's before it
# where that one differs); and what a value is called.
_CHOICES: dict[str, tuple[str, Callable[[], Collection[str]]]] = {
    "backend": ("backend", lambda: BACKENDS),
    "bench kernel": ("implementation", _implementations),
    "compare names": ("implementation", _implementations),
    "compare versus": ("implementation", _implementations),
    "dtype": ("dtype", lambda: DTYPES),
    "existing_kernel": ("library", lambda: LIBRARIES),
    "feature": ("feature", lambda: FEATURES),
    "kernel": ("kernel", _kernels),
    "layout": ("layout", layout_names),
    "layouts": ("layout", layout_names),
    "link": ("link", lambda: (NONE, *LINKS)),
    "preset": ("preset", lambda: PRESETS),
    "route": ("route", route_names),
}


class Command(TyperCommand):
    """A command that refuses unknown names by the option that has them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as ever; dtypes get the names that torch has for them."""
        rest = super().parse_args(ctx, args)
        param: Any  # of click, which typer brings along under names of its own
        for param in self.params:
            kind = _CHOICES.get(f"{self.name} {param.name}") or _CHOICES.get(param.name or "")
            if kind is not None and not ctx.resilient_parsing:
                what, choices = kind
                given = ctx.params[param.name]
                for value in given if isinstance(given, (list, tuple)) else (given,):
                    if value is not None and value not in choices():
                        message = f"unknown {what} {value!r}; choose one of {', '.join(choices())}"
                        raise typer.BadParameter(message, ctx, param)
        if ctx.params.get("dtype"):
            given = ctx.params["dtype"]
            long = DTYPES[given] if isinstance(given, str) else [DTYPES[each] for each in given]
            ctx.params["dtype"] = long
        return rest
