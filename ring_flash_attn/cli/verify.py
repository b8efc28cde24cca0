"""`rfa verify`: every public function on several ranks, both passes, against the oracle."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..bench.functions import function_names
from ..bench.results import VERIFY, Results, Row, check_output, make_table
from ..bench.workload import BOTH, SHORT_DTYPES, Workload
from ..kernels.base import AUTO
from ..verify.catalogue import (
    ACCEPTED,
    BASE,
    CANNOT,
    FEATURES,
    ORACLE,
    PASS,
    STATUSES,
    Case,
    Error,
    VerifyOptions,
    accepted_error,
    make_cases,
)
from .console import running, screen, usage_errors, write
from .options import (
    Backend,
    Device,
    Dtypes,
    JsonFile,
    Kernels,
    Layouts,
    Routes,
    Timeout,
    Versus,
    check_group,
    check_no_group,
    check_world_size,
    find_versus,
    is_first_rank,
    named,
)

_RANKS = 4
_Size = Annotated[int, typer.Option(min=1)]
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
_STYLES = dict(zip(STATUSES, ("bold red", "bold red", "red", "green", "yellow")))
_HEADS = ("function", "layout × route × kernel", "dtype")
_NUMBERS = ("max", "mean", "rmse", "relative")
_COLUMNS = ("tensor", "rank", *_NUMBERS, "accepted", "")
_ROW = ("batch", "seqlen", "nheads", "nheads_k", "headdim", "causal", "window", "dtype", "lengths")


def verify(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Functions: names, patterns such as 'triton_*', or parts of names."),
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks; by default 4, or torchrun's.")
    ] = None,
    layout: Layouts = None,
    route: Routes = None,
    kernel: Kernels = None,
    dtype: Dtypes = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks of a node (mesh, double_ring); 2 if that divides them."),
    ] = None,
    feature: Annotated[
        list[str] | None, named("feature", lambda: FEATURES, "Only these: {}.")
    ] = None,
    versus: Versus = None,
    device: Device = None,
    backend: Backend = None,
    virtual: Annotated[
        bool, typer.Option("--virtual", help="All ranks in this process, without a group.")
    ] = False,
    batch: _Size = BASE.batch,
    seqlen: Annotated[int, typer.Option(min=1, help="Tokens, over all ranks.")] = BASE.seqlen,
    nheads: _Size = BASE.nheads,
    nheads_k: _Size = BASE.nheads_k,
    headdim: _Size = BASE.headdim,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
    timeout: Timeout = None,
    report: Annotated[
        bool,
        typer.Option(
            "--report",
            help="Errors of each function and tensor beside the accepted ones; differences from "
            "one device, and of kernels.",
        ),
    ] = False,
    markdown: Annotated[
        Path | None, typer.Option(help="Write this report to a Markdown file; -v: with each rank.")
    ] = None,
    json_file: JsonFile = None,
    verbose: Annotated[
        int, typer.Option("--verbose", "-v", count=True, help="-v: each case, -vv: each rank.")
    ] = 0,
) -> None:
    """Check every public function, forward and backward, against softmax attention in fp64.

    Shards are cut without the library's help, and the tolerance is measured: at most twice the
    error of plain torch in the same dtype, plus rounding. Functions on one device are checked on
    each rank. Under torchrun the ranks are those that it started. Exit code 1 if anything fails.
    A kernel that can do none of it is refused at once.

    \b
    rfa verify --world-size 4
    rfa verify 'flash_attn_*' --dtype bfloat16 --report
    rfa verify 'zigzag_*' --world-size 8 --report -v --markdown precision.md
    rfa verify ring_attention --layout stripe --feature window -vv
    rfa verify --kernel triton --kernel native --report
    torchrun --nproc_per_node 8 -m ring_flash_attn.cli verify --kernel triton --kernel native
    """
    from ..bench.machine import find_device
    from ..verify.check import check_all, check_kernels

    prints = virtual or is_first_rank()
    compares = report or markdown is not None
    with usage_errors():
        if virtual:
            check_no_group("--virtual has all ranks in this process", backend, timeout)
        ranks = world_size or _RANKS if virtual else check_world_size(world_size, _RANKS)
        if ranks % (ranks_per_node or 1):
            raise ValueError(f"--ranks-per-node {ranks_per_node} must divide {ranks} ranks")
        for path in (json_file, markdown) if prints else ():
            check_output(path)
        if versus is not None and not compares:
            raise ValueError(f"--versus {versus}: only --report and --markdown compare kernels")
        kernels, baseline = find_versus(kernel or [AUTO], versus)
        options = VerifyOptions(
            names=tuple(names or ()),
            layouts=tuple(layout or ()),
            routes=tuple(route or ()),
            kernels=kernels,
            dtypes=tuple(dtype or ()),
            features=tuple(feature or ()),
            world_size=ranks,
            ranks_per_node=ranks_per_node,
            device=find_device(device, "verify").type,
            virtual=virtual,
            seed=seed,
            workload=Workload(batch, seqlen, nheads, nheads_k, headdim, causal=True),
            report=compares,
            versus=baseline if compares else "",
        )
        group, limit = check_group(device, options.device, ranks, backend, timeout)
        cases = make_cases(options)
        used = {case.placement.kernel for case in cases}
        if versus is not None and used == {versus}:
            raise ValueError(f"--versus {versus}: no other --kernel is compared with it")
        if versus is not None and versus not in used:
            raise ValueError(f"--versus {versus}: the functions' own names say their kernel")
        check_kernels(cases, options)
    console = screen(quiet=not prints)
    start = time.perf_counter()
    found = []
    with running(console, "verify", len(cases)) as (_, advance):
        for case in check_all(cases, options, group, limit):
            found.append(case)
            advance()
    seconds = time.perf_counter() - start
    print_report(console, found, verbose, seconds)
    if report:
        print_precision(console, found, versus, verbose > 0)
    if markdown is not None and prints:
        write_markdown(markdown, found, options, seconds, verbose > 0)
        console.print(f"wrote {markdown}", markup=False, soft_wrap=True)
    if json_file is not None and prints:
        write(console, verify_results(found, options, seconds), json_file)
    nothing_ran = all(case.status != PASS for case in found)
    raise typer.Exit(int(nothing_ran or any(case.bad for case in found)))


# Groups and names.


def _groups(cases: Iterable[Case]) -> list[list[Case]]:
    """Cases of one function, point and dtype."""
    functions, dtypes = function_names(prefixes=True), ("float64", "float32", "bfloat16", "float16")

    def order(case: Case) -> tuple[int, str, int]:
        name, point, _ = _heads(case)
        return functions.index(name), point, dtypes.index(case.workload.dtype)

    return [list(group) for _, group in groupby(sorted(cases, key=order), key=order)]


def _kernel(case: Case) -> str:
    return case.used_kernel or case.placement.kernel


def _heads(case: Case) -> tuple[str, str, str]:
    parts = (case.placement.layout, case.placement.route, _kernel(case))
    point = " × ".join(part for part in parts if part)
    return case.function.name, point, SHORT_DTYPES[case.workload.dtype]


def _what(case: Case) -> str:
    return f"{case.feature}, {'packed' if case.workload.packed else 'batch'}"


def _name(case: Case) -> str:
    return "{} ({}), {}, ".format(*_heads(case)) + _what(case)


def _counts(cases: Iterable[Case]) -> dict[str, int]:
    """How many of each status."""
    found = Counter(case.status for case in cases)
    return {status: found[status] for status in STATUSES if found[status]}


def _statuses(cases: Iterable[Case], numbers: bool = True) -> str:
    return ", ".join(
        f"[{_STYLES[status]}]{f'{count} ' if numbers else ''}{status}[/]"
        for status, count in _counts(cases).items()
    )


# Errors and what is wrong.


def print_report(console: Console, cases: Sequence[Case], verbose: int, seconds: float) -> None:
    """The table (verbose 1: a row for each case, 2: for each tensor and rank), and the summary."""
    console.print(_details(cases) if verbose > 1 else _overview(cases, each=verbose == 1))
    for case in cases:
        if case.bad:
            console.print("\n".join(_complaint(case)))
    reasons = Counter(case.reason for case in cases if case.status == CANNOT)
    for reason, count in reasons.items():
        console.print(f"[yellow]cannot[/] ({count} cases): {escape(reason)}")
    summary = f"{len(cases)} cases: {_statuses(cases)}   ({seconds:.1f} s)"
    console.print(summary if cases else "[bold red]nothing to check[/]")
    for line in accepted_in_words(cases):
        console.print(line)


def _overview(cases: Iterable[Case], each: bool) -> Table:
    """A row for each function, point and dtype with its worst errors; or for each single case."""
    numbers = (*ACCEPTED, "worst\nrank")
    texts, right = ((*_HEADS, "case"), numbers) if each else (_HEADS, ("cases", *numbers))
    table = make_table(texts, right)
    table.add_column("")
    for group in _groups(cases):
        for rows in [[case] for case in group] if each else [group]:
            errors = [error for case in rows for error in case.errors]
            table.add_row(
                *_heads(rows[0]),
                _what(rows[0]) if each else str(len(rows)),
                *(_brief(e.relative for e in errors if e.tensor == tensor) for tensor in ACCEPTED),
                str(max(errors, key=_use).rank) if errors else "",
                _statuses(rows, numbers=len(_counts(rows)) > 1),
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


def _details(cases: Iterable[Case]) -> Table:
    """A row for each case, tensor and rank."""
    table = make_table(("case",), ("tensor", "rank", *_NUMBERS, "plain torch", "limit", ""))
    for case in (case for group in _groups(cases) for case in group):
        for i, error in enumerate(case.errors):
            table.add_row(
                "" if i else _name(case),
                error.tensor,
                str(error.rank),
                *(f"{getattr(error, name):.1e}" for name in (*_NUMBERS, "plain", "limit")),
                "[green]pass[/]" if error.passed else "[bold red]fail[/]",
            )
    return table


def _complaint(case: Case) -> Iterator[str]:
    """What went wrong in a case."""
    yield f"[bold red]{case.status}[/] {escape(_name(case))}"
    if case.reason:
        yield "  " + escape(case.reason).replace("\n", "\n  ")
    for error in case.errors:
        if not error.passed:
            yield (
                f"  {error.tensor} on rank {error.rank}: largest error {error.max:.2e}, allowed "
                f"{error.limit:.2e} (plain torch {error.plain:.2e}); relative {error.relative:.2e}"
            )


def accepted_in_words(cases: Iterable[Case]) -> Iterator[str]:
    """The largest relative errors in half precision, beside what is accepted; nothing without."""
    largest: dict[float, float] = {}  # by what is accepted
    for case in cases:
        for error in case.errors:
            accepted = accepted_error(error.tensor, case.workload.dtype)
            if accepted is not None:
                largest[accepted] = max(largest.get(accepted, 0.0), error.relative)
    parts = [
        f"{what} {largest[accepted]:.1e} (accepted: < {accepted:.0e})"
        for what, accepted in (("outputs", ACCEPTED["out"]), ("gradients", ACCEPTED["dq"]))
        if accepted in largest
    ]
    if parts:
        yield f"largest relative errors in bf16 and fp16: {', '.join(parts)}"


# Precision.


Section = tuple[str, list[list[str]]]  # a title, and rows of _HEADS, "cases", _COLUMNS


def precision(cases: Iterable[Case], by_rank: bool, versus: str = ORACLE) -> Iterator[Section]:
    """The worst errors of each tensor over cases and ranks, those on one device first.

    `by_rank`: also of each rank.
    """
    what = "Precision" if versus == ORACLE else f"Difference from {versus}"
    groups = _groups(case for case in cases if case.compared.get(versus))
    for spread in (False, True):
        own = [group for group in groups if group[0].spread is spread]
        if own:
            size = own[0][0].placement.world_size
            where = f"{size} rank{'s' * (size > 1)}" if spread else "one device"
            rows = [row for group in own for row in _precision_rows(group, by_rank, versus)]
            yield f"{what} on {where}", rows


def _precision_rows(group: Sequence[Case], by_rank: bool, versus: str) -> Iterator[list[str]]:
    case = group[0]
    errors = sorted((e for each in group for e in each.compared[versus]), key=lambda e: e.rank)
    for tensor in ACCEPTED:
        own = [e for e in errors if e.tensor == tensor]
        ranks = {"all" if case.spread else "": own} if own else {}
        if by_rank and case.spread:
            ranks |= {str(rank): list(each) for rank, each in groupby(own, key=lambda e: e.rank)}
        accepted = accepted_error(tensor, case.workload.dtype)
        for rank, found in ranks.items():
            worst = [max(getattr(e, name) for e in found) for name in _NUMBERS]
            verdict = ("", "")
            if accepted is not None:
                verdict = (f"< {accepted:.0e}", "within" if worst[-1] < accepted else "above")
            numbers = (f"{x:.2e}" for x in worst)
            yield [*_heads(case), str(len(group)), tensor, rank, *numbers, *verdict]


def _report(cases: Sequence[Case], versus: str | None, by_rank: bool) -> Iterator[Section | str]:
    """Errors; differences from one device and from the kernel `versus`; how to read them."""
    yield from precision(cases, by_rank)
    yield READING
    others = dict.fromkeys(what for case in cases for what in case.compared if what != ORACLE)
    if versus and versus not in others:
        yield f"--versus {versus}: no other kernel was used"
    for other in others:
        yield from precision(cases, by_rank, other)
    if others:
        yield READING_DIFFERENCES


def print_precision(
    console: Console, cases: Sequence[Case], versus: str | None, by_rank: bool
) -> None:
    """The precision report; `versus` is the kernel that the user named."""
    for part in _report(cases, versus, by_rank):
        if isinstance(part, str):
            console.print(part, markup=False)
            continue
        title, rows = part
        table = make_table(_HEADS, _COLUMNS, title)
        for heads, own in groupby(rows, key=lambda row: row[:3]):
            for i, row in enumerate(own):
                style = "bold red" if row[-1] == "above" else None
                table.add_row(*(("", "", "") if i else heads), *row[4:], style=style)
        console.print(table)


# Files.


def write_markdown(
    path: Path, cases: Sequence[Case], options: VerifyOptions, seconds: float, by_rank: bool
) -> None:
    """The precision report."""
    from ..bench.machine import command, find_device, machine, versions

    device = machine(find_device(options.device))["device"]
    counts = ", ".join(f"{count} {status}" for status, count in _counts(cases).items())
    text = ["# Precision", "", f"`{command()}`", ""]
    text.append(f"- {len(cases)} cases: {counts} ({seconds:.1f} s)")
    text.append(f"- device: {device}; " + ", ".join(f"{a} {b}" for a, b in versions().items()))
    text += [f"- {line}" for line in accepted_in_words(cases)]
    columns = (*_HEADS, "cases", *_COLUMNS)
    for part in _report(cases, None, by_rank):
        if isinstance(part, str):
            text += ["", part]
            continue
        text += ["", f"## {part[0]}", "", f"| {' | '.join(columns)} |"]
        text.append(f"|{'|'.join(['---'] * 3 + ['---:'] * (len(columns) - 3))}|")
        text += [f"| `{name}` | {' | '.join(cells)} |" for name, *cells in part[1]]
    unmeasured = [
        f"- {_name(case)}: {case.status}: {case.reason.splitlines()[-1]}"
        for case in cases
        if case.reason
    ]
    if unmeasured:
        text += ["", "## Not measured", "", *unmeasured]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(text) + "\n", encoding="utf-8")


def verify_results(cases: Sequence[Case], options: VerifyOptions, seconds: float) -> Results:
    """Everything: a row for each case and rank, and the cases themselves under "verify"."""
    from ..bench.machine import devices, find_device, make_results, variables, versions

    settings = {"seconds": round(seconds, 3), "seed": options.seed}
    details = {
        "configuration": {**asdict(options), "workload": options.workload.to_dict()},
        "versions": versions(),
        "devices": devices(),
        "variables": variables(),
        "seconds": round(seconds, 3),
        "summary": _counts(cases),
        "cases": [_case(case) for case in cases],
    }
    rows = [row for case in cases for row in _rows(case)]
    return make_results(rows, find_device(options.device), settings, details={"verify": details})


def _case(case: Case) -> dict[str, Any]:
    compared = {what: [*map(_error, errors)] for what, errors in case.compared.items()}
    return {
        "function": case.function.name,
        "form": case.function.form,
        "signature": case.function.signature,
        "feature": case.feature,
        "seed": case.seed,
        "workload": case.workload.to_dict(),
        **case.placement.to_dict(),
        "kernel": case.placement.kernel,
        "status": case.status,
        "used_kernel": case.used_kernel,
        "reason": case.reason,
        "tensors": compared.pop(ORACLE, []),
        "differences": compared,
    }


def _error(error: Error) -> dict[str, Any]:
    return {**asdict(error), "passed": error.passed}


def _rows(case: Case) -> Iterator[Row]:
    shape = case.workload.to_dict()
    workload = {name: shape[name] for name in _ROW if name in shape} | {"feature": case.feature}
    placement: dict[str, Any] = {
        "world_size": case.placement.world_size,
        "function": case.function.name,
    }
    if case.spread:
        placement |= {"layout": case.placement.layout, "route": case.placement.route}
    row = Row(VERIFY, _kernel(case), BOTH, workload, placement, failed=case.reason or None)
    if case.reason:
        yield row
        return
    ranks: dict[int, dict[str, Any]] = {}
    for each in map(_error, case.errors):
        ranks.setdefault(each.pop("rank"), {})[each.pop("tensor")] = each
    for rank, errors in ranks.items():
        yield replace(row, placement={**placement, "rank": rank}, errors=errors)
