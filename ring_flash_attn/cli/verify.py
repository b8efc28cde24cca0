"""`rfa verify`: every public function on several ranks, both passes, against the oracle."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from ..bench.results import check_output
from ..bench.workload import Workload
from ..kernels.base import AUTO
from ..verify.catalogue import BASE, FEATURES, VerifyOptions, make_calls
from .console import running, screen, usage_errors, write
from .groups import check_group, check_no_group, check_world_size, is_first_rank
from .options import Backend, Device, JsonFile, Kernels, Layouts, Routes, Timeout, Versus
from .versus import find_versus

_RANKS = 4
_Size = Annotated[int, typer.Option(min=1)]


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
    dtype: Annotated[
        list[str] | None, typer.Option(help="Everything in each of these; by default a mixture.")
    ] = None,
    feature: Annotated[
        list[str] | None, typer.Option(help=f"Only these: {', '.join(FEATURES)}.")
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
    from ..verify import report as reports
    from ..verify.check import check_all, check_kernels

    prints = virtual or is_first_rank()
    compares = report or markdown is not None
    with usage_errors():
        if virtual:
            check_no_group("--virtual has all ranks in this process", backend, timeout)
        ranks = world_size or _RANKS if virtual else check_world_size(world_size, _RANKS)
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
            device=find_device(device, "verify").type,
            virtual=virtual,
            seed=seed,
            workload=Workload(batch, seqlen, nheads, nheads_k, headdim, causal=True),
            report=compares,
            versus=baseline if compares else "",
        )
        group, limit = check_group(device, options.device, ranks, backend, timeout)
        calls = make_calls(options)
        used = {call.placement.kernel for call in calls}
        if versus is not None and used == {versus}:
            raise ValueError(f"--versus {versus}: no other --kernel is compared with it")
        if versus is not None and versus not in used:
            raise ValueError(f"--versus {versus}: the functions' own names say their kernel")
        check_kernels(calls, options)
    console = screen(quiet=not prints)
    start = time.perf_counter()
    results = []
    with running(console, "verify", len(calls)) as (_, advance):
        for result in check_all(calls, options, group, limit):
            results.append(result)
            advance()
    seconds = time.perf_counter() - start
    reports.print_report(console, results, verbose, seconds)
    if report:
        reports.print_precision(console, results, versus, verbose > 0)
    if markdown is not None and prints:
        reports.write_markdown(markdown, results, options, seconds, verbose > 0)
        console.print(f"wrote {markdown}", markup=False, soft_wrap=True)
    if json_file is not None and prints:
        write(console, reports.verify_results(results, options, seconds), json_file)
    raise typer.Exit(reports.exit_code(results))
