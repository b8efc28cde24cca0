"""`rfa diff`: which rows of two files of results moved, and whether their spread allows to tell."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from ..bench.results import Results, Row, cell, check_output, load, make_table
from . import options as o
from .console import screen, usage_errors, write

_SURE = 3.0  # standard errors on either side of a change: 99.7 % of intervals hold the true one
_LARGEST = 700.0  # of which exp is finite
_MUCH = 1 << 20  # bytes; less is no growth
_WORSE = 4.0  # times as large an error is wrong
_SIGMA = 1.349  # of a normal distribution: distance of its quartiles
_MEDIAN = 1.2533  # standard error of a median, against that of a mean
_NOISY_CODE = 3


class Outcome(Enum):
    """What became of a row, the worst first."""

    FAILED = "fails now"
    WRONG = "wrong now"
    SLOWER = "slower"
    FATTER = "more memory"
    MISSING = "missing"
    NOISY = "too noisy to tell"
    NEW = "new"
    WORKS = "works now"
    FASTER = "faster"
    SAME = "same"


_BAD = (Outcome.FAILED, Outcome.WRONG, Outcome.SLOWER, Outcome.FATTER)
_STYLES = {
    **dict.fromkeys(Outcome, "yellow"),
    **dict.fromkeys(_BAD, "bold red"),
    Outcome.FASTER: "green",
    Outcome.WORKS: "green",
    Outcome.SAME: "",
}


@dataclass(frozen=True, slots=True)
class Change:
    """One row, before and after; docs/benchmarks.md describes the fields.

    What is not known is None: of a row that only one file has, or with fewer than 4 rounds.
    """

    row: Row
    verdict: Outcome
    before: float | None = None
    after: float | None = None
    percent: float | None = None
    spread: float | None = None
    interval: tuple[float, float] | None = None
    memory_percent: float | None = None


def diff(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="Results to start from.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="Results of today.")],
    fail_above: Annotated[
        str, typer.Option(help="Exit code 1 if a row is slower, or needs more memory, by more.")
    ] = "5%",
    require_all: Annotated[
        bool, typer.Option("--require-all", help="A row that is missing in B is a failure.")
    ] = False,
    fail_on_noisy: Annotated[
        bool,
        typer.Option(
            "--fail-on-noisy",
            help=f"Exit code {_NOISY_CODE} if nothing is worse, but a row is too noisy to tell.",
        ),
    ] = False,
    show_same: Annotated[
        bool, typer.Option("--all", help="Show rows that did not move as well.")
    ] = False,
    json_file: o.JsonFile = None,
) -> None:
    """Compare two files of results, row by row.

    The interval of a change is after / before, times and divided by exp(3 standard errors), from
    the spread of the rounds. A row is slower or faster if its median changed by more than
    --fail-above and the interval excludes 0; it is the same if the interval lies within
    --fail-above. Any other is too noisy to tell, as is one with fewer than 4 rounds: measure again
    with more --repeats.

    Exit code 1: something is slower, needs more memory, fails, or is wrong: beyond its limit, or
    four times as far from fp64 as before. 3: only with --fail-on-noisy. 2: wrong arguments.

    \b
    rfa bench --preset llama3-8b --json before.json
    rfa bench --preset llama3-8b --json after.json
    rfa diff before.json after.json --fail-above 3% --fail-on-noisy
    """
    with usage_errors():
        check_output(json_file)
        limit = _percentage(fail_above)
        old, new = load(before), load(after)
        changes = compare(old, new, limit)
    console = screen()
    for line in _differences(old, new):
        console.print(line, style="yellow", markup=False)
    shown = [each for each in changes if show_same or each.verdict is not Outcome.SAME]
    if shown:
        console.print(_table(shown))
    found = Counter(each.verdict for each in changes)
    counts = (_styled(verdict, f"{found[verdict]} ") for verdict in Outcome if found[verdict])
    console.print(f"{len(changes)} rows: {', '.join(counts)}")
    write(console, [_plain(each) for each in changes], json_file)
    noisy = Outcome.NOISY in found
    if noisy:
        console.print("too noisy to tell: measure again with more --repeats", markup=False)
    bad = any(found[each] for each in _BAD) or (require_all and Outcome.MISSING in found)
    raise typer.Exit(1 if bad else _NOISY_CODE if fail_on_noisy and noisy else 0)


def _percentage(text: str) -> float:
    try:
        found = float(text.strip().removesuffix("%"))
    except ValueError:
        raise ValueError(f"--fail-above must be a percentage, as 5%; not {text!r}") from None
    if not 0 <= found < math.inf:
        raise ValueError(f"--fail-above must be 0 % or more, not {text!r}")
    return found


# What moved.


def compare(before: Results, after: Results, limit: float) -> list[Change]:
    """Every row of both, the worst first, with a tolerance of `limit` %.

    Raises:
        ValueError: they have no row in common.
    """
    old, new = ({row.key: row for row in each.rows} for each in (before, after))
    if not set(old) & set(new):
        raise ValueError("the two files have no row in common: nothing to compare")
    repeats = (each.settings.get("repeats") for each in (before, after))
    rounds = [each if isinstance(each, int) else 0 for each in repeats]
    changes = [_change(old.get(key), new.get(key), rounds, limit) for key in {**old, **new}]
    order = list(Outcome)
    return sorted(changes, key=lambda each: (order.index(each.verdict), -(each.percent or 0.0)))


def _change(old: Row | None, new: Row | None, rounds: Sequence[int], limit: float) -> Change:
    if new is None:
        assert old is not None
        return Change(old, Outcome.MISSING, before=old.ms)
    if old is None:
        return Change(new, Outcome.NEW, after=new.ms)
    percent = _percent(old.ms, new.ms)
    memory = _percent(old.peak_bytes, new.peak_bytes)
    one, other = map(_relative_error, (old.samples_ms, new.samples_ms), rounds)
    spread = None if one is None or other is None else 100 * math.hypot(one, other)  # but no drift
    interval = None
    if percent is not None and spread is not None:  # of factors: further up than down
        ratio, factor = 1 + percent / 100, math.exp(min(_SURE * spread / 100, _LARGEST))
        interval = 100 * (ratio / factor - 1), 100 * (ratio * factor - 1)
    verdict = _verdict(old, new, percent, interval or (-math.inf, math.inf), limit)
    return Change(new, verdict, old.ms, new.ms, percent, spread, interval, memory)


def _verdict(
    old: Row, new: Row, percent: float | None, interval: tuple[float, float], limit: float
) -> Outcome:
    """The worst that can be said; SAME where nothing was timed."""
    low, high = interval
    if new.failed is not None:
        return Outcome.FAILED if old.failed is None else Outcome.SAME
    if old.failed is not None:
        return Outcome.WORKS
    if any(_is_worse(old.errors.get(name, {}), new.errors[name]) for name in new.errors):
        return Outcome.WRONG
    if percent is not None and percent > limit and low > 0:
        return Outcome.SLOWER
    growth = (new.peak_bytes or 0) - (old.peak_bytes or 0)
    if old.peak_bytes is not None and growth > max(_MUCH, limit / 100 * old.peak_bytes):
        return Outcome.FATTER
    if percent is None or (-limit <= low and high <= limit):
        return Outcome.SAME
    return Outcome.FASTER if percent < -limit and high < 0 else Outcome.NOISY


def _is_worse(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Beyond its limit now; or, where there is none, much larger, or no number any more."""
    if "passed" in new:
        return new["passed"] is False and old.get("passed", True) is not False
    if old.get("relative") is None or new.get("relative") is None:
        return False
    before, after = float(old["relative"]), float(new["relative"])  # files have words for NaN
    return math.isfinite(before) and not after <= _WORSE * before


def _percent(old: float | None, new: float | None) -> float | None:
    return 100 * (new / old - 1) if old and new is not None else None


def _relative_error(samples: Sequence[float], rounds: int) -> float | None:
    """Of a median, from the quartiles of the rounds' medians: runs of one round are alike."""
    if 0 < rounds < len(samples) and len(samples) % rounds == 0:
        each = len(samples) // rounds
        starts = range(0, len(samples), each)
        samples = [statistics.median(samples[start : start + each]) for start in starts]
    if len(samples) < 4:
        return None
    low, middle, high = statistics.quantiles(samples, n=4)
    return _MEDIAN * (high - low) / _SIGMA / math.sqrt(len(samples)) / middle


# In words.


def _differences(old: Results, new: Results) -> Iterator[str]:
    """What makes the comparison doubtful."""
    both: dict[str, tuple[Any, Any]] = {"device": (old.device, new.device)}
    both |= {name: (old.versions[name], new.versions.get(name)) for name in old.versions}
    for name, (before, after) in both.items():
        if after is not None and before != after:
            yield f"not the same {name}: {before}, {after}"


def _table(changes: Sequence[Change]) -> Table:
    """Empty cells where there is no number."""
    table = make_table(("what",), ("A ms", "B ms", "change", "interval", "memory"))
    table.add_column("", no_wrap=True)
    for each in changes:
        interval = "" if each.percent is None else "unknown"
        if each.interval is not None:
            interval = "{:+.1f} to {:+.1f} %".format(*each.interval)
        table.add_row(
            escape(_describe(each.row)),
            cell(each.before, missing=""),
            cell(each.after, missing=""),
            cell(each.percent, "+.1f", "", " %"),
            interval,
            cell(each.memory_percent, "+.1f", "", " %"),
            _styled(each.verdict),
        )
    return table


def _styled(verdict: Outcome, count: str = "") -> str:
    text, style = f"{count}{verdict.value}", _STYLES[verdict]
    return f"[{style}]{text}[/]" if style else text


def _describe(row: Row) -> str:
    """Its key in words."""
    work = row.workload
    heads = f"{work.get('nheads')}/{work.get('nheads_k')}"
    seen = "causal" if work.get("causal") else "full"
    if tuple(work.get("window", (-1, -1))) != (-1, -1):
        seen += f", window {work['window']}"
    if "lengths" in work:
        seen += f", {len(work['lengths'])} documents"
    if "documents" in work:
        seen += f" of {work['documents']}, seed {work.get('seed')}"
    if "softcap" in work:
        seen += f", softcap {work['softcap']:g}"
    dims = (
        work.get("headdim") if "headdim_v" not in work else f"{work['headdim']}/{work['headdim_v']}"
    )
    what = f"{work.get('batch')} × {work.get('seqlen')}, {heads} × {dims}, {seen}"
    place = ", ".join(f"{name} {value}" for name, value in row.placement.items())
    parts = (f"{row.kind} {row.implementation} {row.passes}", f"{what}, {work.get('dtype')}", place)
    return "; ".join(part for part in parts if part)


def _plain(change: Change) -> dict[str, Any]:
    values = {name: getattr(change, name) for name in Change.__slots__}
    return {**values, "row": change.row.to_dict(), "verdict": change.verdict.value}
