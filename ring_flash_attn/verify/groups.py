"""Results that belong together, and their names."""

from __future__ import annotations

from collections.abc import Iterable

from ..plan.build import route_names
from ..plan.layout import layout_names
from .cases import function_names
from .checker import Result

TENSORS = ("out", "lse", "dq", "dk", "dv", "dsink")
SHORT_DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def groups(results: Iterable[Result]) -> list[list[Result]]:
    """Results of one function, point and dtype."""
    groups: dict[tuple[int, int, int, str, int], list[Result]] = {}
    functions, layouts, routes = function_names(prefixes=True), layout_names(), route_names()
    for result in results:
        case = result.case
        place = (
            functions.index(case.function),
            layouts.index(case.layout) if case.layout else -1,
            routes.index(case.route) if case.route else -1,
            result.kernel or case.kernel,
            list(SHORT_DTYPES).index(case.question.dtype),
        )
        groups.setdefault(place, []).append(result)
    return [groups[place] for place in sorted(groups)]


def point(result: Result) -> str:
    """Layout, route and kernel."""
    parts = (result.case.layout, result.case.route, result.kernel or result.case.kernel)
    return " × ".join(part for part in parts if part)


def what(result: Result) -> str:
    """The feature, and whether it is a batch or packed documents."""
    packed = result.case.question.batch is None
    return f"{result.case.feature}, {'packed' if packed else 'batch'}"


def name_of(result: Result) -> str:
    """Function, point, dtype and feature."""
    dtype = SHORT_DTYPES[result.case.question.dtype]
    return f"{result.case.function} ({point(result)}), {dtype}, {what(result)}"
