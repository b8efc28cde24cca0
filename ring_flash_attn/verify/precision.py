"""The precision report of `rfa verify`: errors of each tensor beside what is accepted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rich import box
from rich.table import Table

from .answers import torch_dtype
from .checker import Result
from .groups import SHORT_DTYPES, TENSORS, groups, point
from .measure import ACCEPTED_GRADIENT, ACCEPTED_OUTPUT, Error, accepted_relative, is_output

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
COLUMNS = ("tensor", "rank", "max", "mean", "rmse", "relative", "accepted", "")


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
        """What `COLUMNS` names."""
        numbers = (self.max, self.mean, self.rmse, self.relative)
        accepted = "" if self.accepted is None else f"< {self.accepted:.0e}"
        return [self.tensor, self.rank, *(f"{x:.2e}" for x in numbers), accepted, self.verdict]


def precision_lines(results: Iterable[Result], world_size: int, by_rank: bool) -> list[Line]:
    """Lines of all functions, those on one device first.

    Args:
        results: what was found.
        world_size: number of ranks.
        by_rank: lines of each rank as well; a function on one device has none.
    """
    found = [line for group in groups(results) for line in _of_group(group, world_size, by_rank)]
    return sorted(found, key=lambda line: not _is_single(line))


def _is_single(line: Line) -> bool:
    return line.rank == NONE


def _of_group(group: Sequence[Result], world_size: int, by_rank: bool) -> Iterator[Line]:
    errors = [error for result in group for error in result.errors]
    single = not group[0].case.layout
    for tensor in TENSORS:
        own = [error for error in errors if error.tensor == tensor]
        if not own:
            continue
        yield _line(group, own, NONE if single else ALL, 1 if single else world_size)
        if by_rank and not single:
            for rank in sorted({error.rank for error in own}):
                mine = [error for error in own if error.rank == rank]
                yield _line(group, mine, str(rank), world_size)


def _line(group: Sequence[Result], errors: Sequence[Error], rank: str, world_size: int) -> Line:
    case, tensor = group[0].case, errors[0].tensor
    worst = {
        name: max(getattr(error, name) for error in errors)
        for name in ("max", "mean", "rmse", "relative")
    }
    return Line(
        case.function,
        point(group[0]),
        SHORT_DTYPES[case.question.dtype],
        world_size,
        len(group),
        tensor,
        rank,
        **worst,
        accepted=accepted_relative(tensor, torch_dtype(case.question.dtype)),
    )


def by_place(lines: Sequence[Line], what: str = "Precision") -> Iterator[tuple[str, list[Line]]]:
    """Lines on one device, and lines on ranks, each with a title."""
    for single, own in groupby(lines, key=_is_single):
        found = list(own)
        size = found[0].world_size
        ranks = "one device" if single else f"{size} rank{'s' * (size > 1)}"
        yield f"{what} on {ranks}", found


def difference_lines(
    results: Sequence[Result], world_size: int, by_rank: bool
) -> Iterator[tuple[str, list[Line]]]:
    """Titles and lines: differences from one device, and from the kernel of --versus."""
    for versus in dict.fromkeys(name for result in results for name in result.differences):
        own = [
            replace(result, errors=result.differences[versus])
            for result in results
            if versus in result.differences
        ]
        lines = precision_lines(own, world_size, by_rank)
        yield from by_place(lines, f"Difference from {versus}")


def precision_table(title: str, lines: Iterable[Line]) -> Table:
    """For a terminal."""
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title, title_justify="left"
    )
    for name in ("function", "layout × route × kernel", "dtype"):
        table.add_column(name, overflow="fold")
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for head, own in groupby(lines, key=lambda line: (line.function, line.point, line.dtype)):
        for number, line in enumerate(own):
            style = "bold red" if line.verdict == "above" else None
            table.add_row(*(head if number == 0 else ("", "", "")), *line.cells(), style=style)
    return table


def accepted_in_words(results: Iterable[Result]) -> Iterator[str]:
    """The largest relative errors in half precision, beside what is accepted; nothing without."""
    half = [
        error
        for result in results
        if accepted_relative("out", torch_dtype(result.case.question.dtype)) is not None
        for error in result.errors
    ]
    parts = []
    for what, accepted, outputs in (
        ("outputs", ACCEPTED_OUTPUT, True),
        ("gradients", ACCEPTED_GRADIENT, False),
    ):
        own = [error.relative for error in half if is_output(error.tensor) == outputs]
        if own:
            parts.append(f"{what} {max(own):.1e} (accepted: < {accepted:.0e})")
    if parts:
        yield f"largest relative errors in bf16 and fp16: {', '.join(parts)}"
