"""`rfa verify`: every public function on several ranks, both passes, against the oracle."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..bench.results import check_output
from ..kernels.base import AUTO, NATIVE, kernel_names
from ..plan import routes as _routes  # registers them
from ..plan.build import route_names
from ..plan.layout import layout_names
from ..verify.cut import cut_names
from ..verify.questions import FEATURES, Size
from .groups import check_backend, check_no_group, check_timeout, check_world_size
from .measuring import Device
from .screen import screen
from .versus import Versus, find_versus

if TYPE_CHECKING:
    from ..verify.cases import Case, Choice
    from ..verify.checker import Result

del _routes

_SIZE = Size()
_RANKS, _TIMEOUT = 4, 300.0

Names = Annotated[
    list[str] | None,
    typer.Argument(help="Functions: names, patterns such as 'triton_*', or parts of names."),
]


def verify(
    names: Names = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks; by default 4, or torchrun's.")
    ] = None,
    layout: Annotated[
        list[str] | None, typer.Option(help=f"Only these: {', '.join(layout_names())}.")
    ] = None,
    route: Annotated[
        list[str] | None, typer.Option(help=f"Only these: {', '.join(route_names())}.")
    ] = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option(help=f"Each of these: {', '.join((AUTO, NATIVE, *kernel_names()))}."),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Everything in each of these; by default a mixture.")
    ] = None,
    feature: Annotated[
        list[str] | None, typer.Option(help=f"Only these: {', '.join(FEATURES)}.")
    ] = None,
    versus: Versus = None,
    device: Device = None,
    backend: Annotated[
        str | None, typer.Option(help="gloo or nccl; by default nccl where each rank has a GPU.")
    ] = None,
    virtual: Annotated[
        bool, typer.Option("--virtual", help="All ranks in this process, without a group.")
    ] = False,
    batch: Annotated[int, typer.Option(min=1)] = _SIZE.batch,
    seqlen: Annotated[int, typer.Option(min=1, help="Tokens, over all ranks.")] = _SIZE.seqlen,
    nheads: Annotated[int, typer.Option(min=1)] = _SIZE.nheads,
    nheads_k: Annotated[int, typer.Option(min=1)] = _SIZE.nheads_k,
    headdim: Annotated[int, typer.Option(min=1)] = _SIZE.headdim,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds that a rank may take for a case; 300.")
    ] = None,
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
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write every case, tensor and rank to this file.")
    ] = None,
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
    from ..comm import launch
    from ..verify.cases import Choice, make_cases
    from ..verify.checker import check_kernels
    from ..verify.files import make_results, write_markdown
    from ..verify.precision import (
        READING,
        READING_DIFFERENCES,
        by_place,
        difference_lines,
        precision_lines,
        precision_table,
    )
    from ..verify.report import exit_code, print_report

    ranks = None if virtual else launch.torchrun_rank()
    try:
        size, patience = _ranks(virtual, world_size, backend, timeout)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    speaks = ranks is None or ranks[0] == 0
    try:
        for path in (json_file, markdown) if speaks else ():
            check_output(path)
        compares = report or markdown is not None
        if versus is not None and not compares:
            raise ValueError(f"--versus {versus}: only --report and --markdown compare kernels")
        kernels, baseline = find_versus(kernel or [AUTO], versus)
        choice = Choice(
            names=tuple(names or ()),
            layouts=tuple(layout or ()),
            routes=tuple(route or ()),
            kernels=kernels,
            dtypes=tuple(dtype or ()),
            features=tuple(feature or ()),
            world_size=size,
            device=_device(device),
            virtual=virtual,
            seed=seed,
            size=Size(batch, seqlen, nheads, nheads_k, headdim),
            report=compares,
            versus=baseline if compares else "",
        )
        _check(choice)
        group = "" if virtual else check_backend(backend, choice.device, size)
        cases = make_cases(choice)
        if not cases:
            raise ValueError("no function goes with these of --layout, --route and --feature")
        _check_versus(cases, versus)
        check_kernels(cases, choice)
    except (ValueError, NotImplementedError) as error:
        raise typer.BadParameter(str(error)) from None
    console = screen(quiet=not speaks)
    start = time.perf_counter()
    results = _run(cases, choice, group, patience, console)
    seconds = time.perf_counter() - start
    print_report(console, results, verbose, seconds)
    if report:
        for title, lines in by_place(precision_lines(results, choice.world_size, verbose > 0)):
            console.print(precision_table(title, lines))
        console.print(READING, markup=False)
        differences = list(difference_lines(results, choice.world_size, verbose > 0))
        if versus and not any(versus in result.differences for result in results):
            console.print(f"--versus {versus}: no other kernel was used", markup=False)
        for title, lines in differences:
            console.print(precision_table(title, lines))
        if differences:
            console.print(READING_DIFFERENCES, markup=False)
    if markdown is not None and speaks:
        write_markdown(markdown, results, choice, seconds, verbose > 0)
    if json_file is not None and speaks:
        make_results(results, choice, seconds).save(json_file)
    for path in (markdown, json_file):
        if path is not None:
            console.print(f"wrote {path}", markup=False, soft_wrap=True)
    raise typer.Exit(exit_code(results))


def _ranks(
    virtual: bool, world_size: int | None, backend: str | None, timeout: float | None
) -> tuple[int, float]:
    """How many, and how long they may take; ValueError for what does not go together."""
    if virtual:
        check_no_group("--virtual has all ranks in this process", backend, timeout)
        return _RANKS if world_size is None else world_size, _TIMEOUT
    return check_world_size(world_size, _RANKS), check_timeout(timeout, _TIMEOUT)


def _device(given: str | None) -> str:
    """cpu or cuda; ValueError for what there is not."""
    if given is not None and ":" in given:
        raise ValueError(f"--device {given}: ranks take GPUs in turn; say cuda")
    from ..bench.machine import find_device

    return find_device(given, "verify").type


def _check_versus(cases: Sequence[Case], versus: str | None) -> None:
    """ValueError if no function can be compared with the kernel that the user named."""
    if versus is None or not cases:
        return
    if all(case.kernel == versus for case in cases):
        raise ValueError(f"--versus {versus}: no other --kernel is compared with it")
    if all(case.kernel != versus for case in cases):
        raise ValueError(f"--versus {versus}: the functions' own names say their kernel")


def _check(choice: Choice) -> None:
    """ValueError for what there is not."""
    for layout in choice.layouts or layout_names():
        if layout not in cut_names():
            raise ValueError(f"verify cannot cut layout {layout!r} yet: teach verify/cut.py")
    if choice.size.nheads % choice.size.nheads_k:
        raise ValueError(f"--nheads must be a multiple of --nheads-k, {choice.size.nheads_k}")


def _run(
    cases: Sequence[Case], choice: Choice, backend: str, timeout: float, console: Console
) -> list[Result]:
    """All results, with a progress bar on a terminal."""
    from ..verify.checker import check_all

    columns = (TextColumn("verify"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results = []
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as progress:
        task = progress.add_task("verify", total=len(cases))
        for result in check_all(cases, choice, backend, timeout):
            results.append(result)
            progress.advance(task)
    return results
