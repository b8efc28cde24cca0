"""Usage errors that show when the command line is parsed, before torch is imported."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from ..bench.workload import DTYPES, LINKS, NONE, PRESETS
from ..kernels.base import LIBRARIES
from ..plan.build import route_names
from ..plan.layout import layout_names
from ..verify.catalogue import FEATURES
from .groups import BACKENDS
from .options import implementation_choices, kernel_choices

# What options and arguments may be, by the name of the parameter (with its command's before it
# where that one differs); and what a value is called.
_CHOICES: dict[str, tuple[str, Callable[[], Collection[str]]]] = {
    "backend": ("backend", lambda: BACKENDS),
    "baseline_kernel": ("library", lambda: LIBRARIES),
    "bench kernel": ("implementation", implementation_choices),
    "compare names": ("implementation", implementation_choices),
    "compare versus": ("implementation", implementation_choices),
    "dtype": ("dtype", lambda: DTYPES),
    "feature": ("feature", lambda: FEATURES),
    "kernel": ("kernel", kernel_choices),
    "layout": ("layout", layout_names),
    "layouts": ("layout", layout_names),
    "link": ("link", lambda: (NONE, *LINKS)),
    "preset": ("preset", lambda: PRESETS),
    "route": ("route", route_names),
    "versus": ("kernel", kernel_choices),
}

# What the library says where the command line has an option.
_PHRASES = {
    "the number of query heads": "--nheads (query heads)",
    "the number of KV heads": "--nheads-k (KV heads)",
    "CUDA graphs need": "--graphs: CUDA graphs need",
    "the baseline:": "--baseline:",
    "a bandwidth of": "--link-gbps",
    "the link's bandwidth": "--link-gbps",
    "a latency of": "--latency-us",
    "the link's latency": "--latency-us",
}


def as_options(message: str, options: Mapping[str, str], files: Mapping[str, str]) -> str:
    """Write the arguments that a message of the library names as the options that set them.

    Args:
        message: such as "heads_k_stride = 3 must divide the 2 KV heads".
        options: by the name of the parameter, such as {"heads_k_stride": "--heads-k-stride"}.
        files: options by the file that the user gave to them.
    """
    for name, option in options.items():
        if "_" in name:
            message = re.sub(rf"(?<![\w-]){name}(?!\w)", option, message)
        else:  # a word, such as device: where the message begins, with a value
            message = re.sub(rf"^{name}(?= ['\"(\d-]| must )", option, message)
    for phrase, words in _PHRASES.items():
        if re.split("[ :]", words)[0] in options.values():
            message = message.replace(phrase, words)
    for file, option in files.items():
        if message.startswith((f"{file} ", f"cannot write {file}")):
            message = f"{option}: {message}"
    return message


class Command(TyperCommand):
    """A command whose errors name the option that has to be set."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as ever; refuse names that do not exist; give dtypes the names torch has."""
        rest = super().parse_args(ctx, args)
        param: Any  # of click, which typer brings along under names of its own
        for param in self.params:
            kind = _CHOICES.get(f"{self.name} {param.name}") or _CHOICES.get(param.name or "")
            if kind is not None and not ctx.resilient_parsing:
                what, choices = kind
                values = ctx.params[param.name]
                for value in values if isinstance(values, (list, tuple)) else (values,):
                    if value is not None and value not in choices():
                        message = f"unknown {what} {value!r}; choose one of {', '.join(choices())}"
                        raise typer.BadParameter(message, ctx, param)
        dtype = ctx.params.get("dtype")
        if isinstance(dtype, str):
            ctx.params["dtype"] = DTYPES[dtype]
        elif dtype:
            ctx.params["dtype"] = [DTYPES[each] for each in dtype]
        return rest

    def invoke(self, ctx: Any) -> Any:
        """Run it; what it refuses, it refuses by the names of options."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            options = {p.name or "": p.opts[0] for p in self.params if p.opts[0].startswith("--")}
            values = ((option, ctx.params.get(name)) for name, option in options.items())
            files = {str(value): option for option, value in values if isinstance(value, Path)}
            error.message = as_options(error.message, options, files)
            raise
