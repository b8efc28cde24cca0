"""What `rfa verify` says: tables, the precision report, its Markdown, and rows for a file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..bench.functions import function_names
from ..bench.machine import (
    command,
    devices,
    find_device,
    machine,
    make_results,
    variables,
    versions,
)
from ..bench.results import VERIFY, Results, Row, make_table
from ..bench.workload import BOTH, SHORT_DTYPES
from ..plan.build import route_names
from ..plan.layout import layout_names
from .catalogue import VerifyOptions
from .check import Result, Status
from .expected import ACCEPTED_GRADIENT, ACCEPTED_OUTPUT, OUTPUTS, Error, accepted_error

TENSORS = ("out", "lse", "dq", "dk", "dv", "dsink")
ALL, NONE = "all", ""  # ranks
READING = (
    "max, mean, rmse: absolute differences from softmax attention in fp64. relative: max over the "
    "largest value of the tensor; where terms cancel to almost nothing, over 20 times their "
    "rounding. Each is the worst of all cases. accepted: limits of the original documents, for "
    "bf16 and fp16."
)
READING_DIFFERENCES = (
    "Differences between two results of the same inputs: of ranks from one device with the same "
    "kernel, and of one kernel from another. accepted: the same limits; the exit code does not "
    "depend on them."
)
_STYLES = {  # the worst first
    Status.ERROR: "bold red",
    Status.FAIL: "bold red",
    Status.LEFT_OUT: "red",
    Status.PASS: "green",
    Status.CANNOT: "yellow",
}
_POINT = "layout × route × kernel"
_COLUMNS = ("tensor", "rank", "max", "mean", "rmse", "relative", "accepted", "")
_HALF = ("bfloat16", "float16")
_NUMBERS = ("max", "mean", "rmse", "relative")
_ROW = ("batch", "seqlen", "nheads", "nheads_k", "headdim", "causal", "window", "dtype", "lengths")
_PLACEMENT = ("world_size", "function", "layout", "route")


def exit_code(results: Sequence[Result]) -> int:
    """1 if anything failed, or nothing could be run."""
    ran = any(result.status is Status.PASS for result in results)
    return int(any(result.bad for result in results) or not ran)


# Groups and names.


def _groups(results: Iterable[Result]) -> list[list[Result]]:
    """Results of one function, point and dtype."""
    functions, dtypes = function_names(prefixes=True), ("float64", "float32", "bfloat16", "float16")
    layouts, routes = ("", *layout_names()), ("", *route_names())

    def order(result: Result) -> tuple[int, int, int, str, int]:
        call = result.call
        return (
            functions.index(call.function.name),
            layouts.index(call.placement.layout),
            routes.index(call.placement.route),
            _kernel(result),
            dtypes.index(call.workload.dtype),
        )

    return [list(group) for _, group in groupby(sorted(results, key=order), key=order)]


def _kernel(result: Result) -> str:
    return result.kernel or result.call.placement.kernel


def _heads(result: Result) -> tuple[str, str, str]:
    """Function, point and dtype."""
    placement = result.call.placement
    parts = (placement.layout, placement.route, _kernel(result))
    point = " × ".join(part for part in parts if part)
    return result.call.function.name, point, SHORT_DTYPES[result.call.workload.dtype]


def _what(result: Result) -> str:
    return f"{result.call.feature}, {'packed' if result.call.workload.packed else 'batch'}"


def _name(result: Result) -> str:
    return "{} ({}), {}, ".format(*_heads(result)) + _what(result)


def _counts(results: Iterable[Result], order: Iterable[Status] = _STYLES) -> dict[Status, int]:
    """How many of each status, by default the worst first."""
    found = Counter(result.status for result in results)
    return {status: found[status] for status in order if found[status]}


def _statuses(results: Iterable[Result], numbers: bool = True) -> str:
    return ", ".join(
        f"[{_STYLES[status]}]{f'{count} ' if numbers else ''}{status.value}[/]"
        for status, count in _counts(results).items()
    )


# Errors and what is wrong.


def print_report(console: Console, results: Sequence[Result], verbose: int, seconds: float) -> None:
    """The table (verbose 1: a row for each case, 2: for each tensor and rank), and the summary."""
    console.print(_details(results) if verbose > 1 else _overview(results, each=verbose == 1))
    for result in results:
        if result.bad:
            console.print("\n".join(_complaint(result)))
    reasons = Counter(result.reason for result in results if result.status is Status.CANNOT)
    for reason, count in reasons.items():
        console.print(f"[yellow]cannot[/] ({count} cases): {escape(reason)}")
    summary = f"{len(results)} cases: {_statuses(results)}   ({seconds:.1f} s)"
    console.print(summary if results else "[bold red]nothing to check[/]")
    for line in accepted_in_words(results):
        console.print(line)


def _overview(results: Iterable[Result], each: bool) -> Table:
    """A row for each function, point and dtype with its worst errors; or for each single case."""
    names, numbers = ("function", _POINT, "dtype"), (*TENSORS, "worst\nrank")
    texts, right = ((*names, "case"), numbers) if each else (names, ("cases", *numbers))
    table = make_table(texts, right)
    table.add_column("")
    for group in _groups(results):
        for rows in [[result] for result in group] if each else [group]:
            errors = [error for result in rows for error in result.errors]
            table.add_row(
                *_heads(rows[0]),
                _what(rows[0]) if each else str(len(rows)),
                *(_brief(e.relative for e in errors if e.tensor == tensor) for tensor in TENSORS),
                str(max(errors, key=_use).rank) if errors else "",
                _statuses(rows, numbers=len({result.status for result in rows}) > 1),
            )
    return table


def _brief(values: Iterable[float]) -> str:
    """The largest: 2.3e-03 → "2e-3"."""
    largest = max(values, default=None)
    if largest is None:
        return ""
    digits, _, power = f"{largest:.0e}".partition("e")
    return f"{digits}e{int(power)}" if power else digits


def _use(error: Error) -> float:
    """How much of its limit an error uses up."""
    return error.max / error.limit if error.limit else (math.inf if error.max else 0.0)


def _details(results: Iterable[Result]) -> Table:
    """A row for each case, tensor and rank."""
    table = make_table(("case",), ("tensor", "rank", *_NUMBERS, "plain torch", "limit", ""))
    for group in _groups(results):
        for result in group:
            for i, error in enumerate(result.errors):
                numbers = [getattr(error, name) for name in (*_NUMBERS, "plain", "limit")]
                table.add_row(
                    _name(result) if i == 0 else "",
                    error.tensor,
                    str(error.rank),
                    *(f"{x:.1e}" for x in numbers),
                    "[green]pass[/]" if error.passed else "[bold red]fail[/]",
                )
    return table


def _complaint(result: Result) -> Iterator[str]:
    """What went wrong in a case."""
    yield f"[bold red]{result.status.value}[/] {escape(_name(result))}"
    if result.reason:
        yield "  " + escape(result.reason).replace("\n", "\n  ")
    for error in result.errors:
        if not error.passed:
            yield (
                f"  {error.tensor} on rank {error.rank}: largest error {error.max:.2e}, allowed "
                f"{error.limit:.2e} (plain torch {error.plain:.2e}); relative {error.relative:.2e}"
            )


def accepted_in_words(results: Iterable[Result]) -> Iterator[str]:
    """The largest relative errors in half precision, beside what is accepted; nothing without."""
    errors = [e for r in results for e in r.errors if r.call.workload.dtype in _HALF]
    parts = []
    for what, accepted in (("outputs", ACCEPTED_OUTPUT), ("gradients", ACCEPTED_GRADIENT)):
        own = [e.relative for e in errors if (e.tensor in OUTPUTS) == (what == "outputs")]
        if own:
            parts.append(f"{what} {max(own):.1e} (accepted: < {accepted:.0e})")
    if parts:
        yield f"largest relative errors in bf16 and fp16: {', '.join(parts)}"


# Precision.


@dataclass(frozen=True, slots=True)
class Line:
    """Errors of one tensor, each the largest over cases, and over ranks if `rank` says so.

    Attributes:
        function, point, dtype: whose; the point is layout × route × kernel.
        world_size: 1 for a function on one device.
        cases: how many it is about.
        tensor, rank: of what; the rank's number, ALL, or NONE on one device.
        max, mean, rmse, relative: as in `Error`.
        accepted: what the relative error has to be below; None where nothing was ever said.
    """

    function: str
    point: str
    dtype: str
    world_size: int
    cases: int
    tensor: str
    rank: str
    max: float
    mean: float
    rmse: float
    relative: float
    accepted: float | None

    @property
    def verdict(self) -> str:
        """In a word."""
        if self.accepted is None:
            return ""
        return "within" if self.relative < self.accepted else "above"

    def cells(self) -> list[str]:
        """What `_COLUMNS` names."""
        numbers = (f"{getattr(self, name):.2e}" for name in _NUMBERS)
        accepted = "" if self.accepted is None else f"< {self.accepted:.0e}"
        return [self.tensor, self.rank, *numbers, accepted, self.verdict]


Section = tuple[str, list[Line]]  # with a title


def precision_lines(results: Iterable[Result], by_rank: bool) -> list[Line]:
    """Lines of all functions, those on one device first; `by_rank`: also of each rank."""
    found = []
    for group in _groups(results):
        single = not group[0].call.placement.layout
        for tensor in TENSORS:
            own = [e for result in group for e in result.errors if e.tensor == tensor]
            if own:
                found.append(_line(group, own, NONE if single else ALL))
            for rank in sorted({e.rank for e in own}) if by_rank and not single else ():
                of_rank = [error for error in own if error.rank == rank]
                found.append(_line(group, of_rank, str(rank)))
    return sorted(found, key=lambda line: line.rank != NONE)


def _line(group: Sequence[Result], errors: Sequence[Error], rank: str) -> Line:
    call, tensor = group[0].call, errors[0].tensor
    return Line(
        *_heads(group[0]),
        1 if rank == NONE else call.placement.world_size,
        len(group),
        tensor,
        rank,
        **{name: max(getattr(error, name) for error in errors) for name in _NUMBERS},
        accepted=accepted_error(tensor, call.workload.torch_dtype),
    )


def by_place(lines: Sequence[Line], what: str = "Precision") -> Iterator[Section]:
    """Lines on one device, and lines on ranks, each with a title."""
    for single, own in groupby(lines, key=lambda line: line.rank == NONE):
        found = list(own)
        size = found[0].world_size
        ranks = "one device" if single else f"{size} rank{'s' * (size > 1)}"
        yield f"{what} on {ranks}", found


def _precision(
    results: Sequence[Result], versus: str | None, by_rank: bool
) -> Iterator[Section | str]:
    """Errors; differences from one device and from the kernel `versus`; how to read them."""
    yield from by_place(precision_lines(results, by_rank))
    yield READING
    compared = dict.fromkeys(name for result in results for name in result.differences)
    if versus and versus not in compared:
        yield f"--versus {versus}: no other kernel was used"
    for other in compared:
        own = [
            replace(result, errors=result.differences[other])
            for result in results
            if other in result.differences
        ]
        yield from by_place(precision_lines(own, by_rank), f"Difference from {other}")
    if compared:
        yield READING_DIFFERENCES


def print_precision(
    console: Console, results: Sequence[Result], versus: str | None, by_rank: bool
) -> None:
    """The precision report; `versus` is the kernel that the user named."""
    for part in _precision(results, versus, by_rank):
        if isinstance(part, str):
            console.print(part, markup=False)
        else:
            console.print(_precision_table(*part))


def _precision_table(title: str, lines: Iterable[Line]) -> Table:
    table = make_table(("function", _POINT, "dtype"), _COLUMNS, title)
    for heads, own in groupby(lines, key=lambda line: (line.function, line.point, line.dtype)):
        for number, line in enumerate(own):
            style = "bold red" if line.verdict == "above" else None
            table.add_row(*(heads if number == 0 else ("", "", "")), *line.cells(), style=style)
    return table


# Files.


def write_markdown(
    path: Path, results: Sequence[Result], options: VerifyOptions, seconds: float, by_rank: bool
) -> None:
    """The precision report."""
    device = machine(find_device(options.device))["device"]
    counts = ", ".join(f"{n} {status.value}" for status, n in _counts(results, Status).items())
    text = ["# Precision", "", f"`{command()}`", ""]
    text.append(f"- {len(results)} cases: {counts} ({seconds:.1f} s)")
    text.append(f"- device: {device}; " + ", ".join(f"{a} {b}" for a, b in versions().items()))
    text += [f"- {line}" for line in accepted_in_words(results)]
    for part in _precision(results, None, by_rank):
        text += ["", part] if isinstance(part, str) else _markdown_table(*part)
    unmeasured = [
        f"- {_name(result)}: {result.status.value}: {result.reason.splitlines()[-1]}"
        for result in results
        if result.reason
    ]
    if unmeasured:
        text += ["", "## Not measured", "", *unmeasured]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(text) + "\n", encoding="utf-8")


def _markdown_table(title: str, lines: Sequence[Line]) -> Iterator[str]:
    heads = ("function", _POINT, "dtype", "cases", *_COLUMNS)
    yield from ("", f"## {title}", "")
    yield f"| {' | '.join(heads)} |"
    yield f"|{'|'.join(['---'] * 3 + ['---:'] * (len(heads) - 3))}|"
    for line in lines:
        cells = (f"`{line.function}`", line.point, line.dtype, str(line.cases), *line.cells())
        yield f"| {' | '.join(cells)} |"


def verify_results(results: Sequence[Result], options: VerifyOptions, seconds: float) -> Results:
    """Everything: a row for each case and rank, and the cases themselves under "verify"."""
    settings = {"seconds": round(seconds, 3), "seed": options.seed}
    details = {
        "configuration": {**asdict(options), "workload": options.workload.to_dict()},
        "versions": versions(),
        "devices": devices(),
        "variables": variables(),
        "seconds": round(seconds, 3),
        "summary": {s.value: n for s, n in _counts(results, Status).items()},
        "cases": [_case(result) for result in results],
    }
    rows = [row for result in results for row in _rows(result)]
    return make_results(rows, find_device(options.device), settings, details={"verify": details})


def _case(result: Result) -> dict[str, Any]:
    call = result.call
    return {
        "function": call.function.name,
        "form": call.function.form,
        "signature": call.function.signature,
        "feature": call.feature,
        "seed": call.seed,
        "workload": call.workload.to_dict(),
        **call.placement.to_dict(),
        "kernel": call.placement.kernel,
        "status": result.status.value,
        "used_kernel": result.kernel,
        "reason": result.reason,
        "tensors": [_error(each) for each in result.errors],
        "differences": {
            versus: [_error(each) for each in errors]
            for versus, errors in result.differences.items()
        },
    }


def _error(error: Error) -> dict[str, Any]:
    return {**asdict(error), "passed": error.passed}


def _rows(result: Result) -> Iterator[Row]:
    call, kernel = result.call, _kernel(result)
    shape = call.workload.to_dict()
    workload = {name: shape[name] for name in _ROW if name in shape} | {"feature": call.feature}
    spread = call.placement.to_dict() | {"function": call.function.name}
    placement = {name: spread[name] for name in _PLACEMENT if spread[name]}
    if result.reason:
        yield Row(VERIFY, kernel, BOTH, workload, placement, failed=result.reason)
        return
    ranks: dict[int, dict[str, Any]] = {}
    for each in map(_error, result.errors):
        ranks.setdefault(each.pop("rank"), {})[each.pop("tensor")] = each
    for rank, errors in ranks.items():
        yield Row(VERIFY, kernel, BOTH, workload, {**placement, "rank": rank}, errors=errors)
