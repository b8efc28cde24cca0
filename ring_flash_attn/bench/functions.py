"""The public functions: which there are, which a user means, and where each can be called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING

from ..plan.build import route_names
from ..plan.layout import layout_names

if TYPE_CHECKING:
    from ..api.families import Family


@dataclass(frozen=True, slots=True)
class PublicFunction:
    """A function of the API.

    Attributes:
        family: functions that differ in form and kernel only.
        form: how q, k and v come; the end of the name.
        prefix: kernel that the name fixes; "" if it is an argument.
    """

    family: Family
    form: str
    prefix: str = ""

    @property
    def name(self) -> str:
        """As in the API."""
        return "_".join(part for part in (self.prefix, self.family.name, self.form) if part)

    @property
    def signature(self) -> str:
        """Name of its list of arguments in `signatures.py`."""
        return self.family.signature.name

    @property
    def is_distributed(self) -> bool:
        """Whether it needs a group."""
        return bool(self.family.layout) or self.signature == "anything"

    def points(self, layouts: Sequence[str], routes: Sequence[str]) -> list[tuple[str, str]]:
        """Every (layout, route) of these at which it can be called; of all if there are none."""
        if self.signature == "anything":
            layouts, routes = layouts or layout_names(), routes or route_names()
            return [(layout, route) for layout in layouts for route in routes]
        layout, route = self.family.layout, self.family.route
        wanted = (not layouts or layout in layouts) and (not routes or route in routes)
        return [(layout, route)] if wanted else []


def function_names(prefixes: bool = False) -> list[str]:
    """Public functions; with `prefixes`, also those that fix their kernel."""
    return [each.name for each in all_functions() if prefixes or not each.prefix]


def find_functions(names: Sequence[str]) -> list[PublicFunction]:
    """The functions that exact names, patterns or parts of names mean; ValueError if there is none.

    Without names, all that do not fix their kernel.
    """
    everything = function_names(prefixes=True)
    wanted: set[str] = set() if names else set(function_names())
    for name in names:
        if name in everything:
            found = [name]
        elif any(sign in name for sign in "*?["):
            found = [each for each in everything if fnmatch(each, name)]
        else:
            found = [each for each in function_names() if name in each]
        if not found:
            raise ValueError(f"no function {name!r}; choose from {', '.join(function_names())}")
        wanted.update(found)
    return [each for each in all_functions() if each.name in wanted]


def all_functions() -> Iterator[PublicFunction]:
    """Every public function; those that fix their kernel last."""
    from ..api.families import FAMILIES, PREFIXES  # which import torch

    for prefix in ("", *PREFIXES):
        for family in FAMILIES:
            for form in family.forms:
                yield PublicFunction(family, form, prefix)
