"""`rfa tune`: times block sizes of the Triton kernel, or kernels, on this GPU, for later runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..bench.results import check_output, make_table
from ..bench.workload import Workload, call_of, find_dtype
from ..kernels.base import kernel_names, why_not
from . import options as o
from .console import screen, usage_errors, write

if TYPE_CHECKING:
    from ..kernels.triton.tuning import Choice


def tune(
    headdim: Annotated[
        list[int] | None, typer.Option(min=1, help="Each of these; by default 64 and 128.")
    ] = None,
    dtype: o.OneDtype = "bfloat16",
    seqlen: Annotated[int, typer.Option(min=1, help="Tokens of the calls.")] = 8192,
    causal: o.IsCausal = True,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Time kernels on random calls instead.")
    ] = False,
    calls: Annotated[int, typer.Option(min=1, help="Of --kernels: how many.")] = 60,
    seed: Annotated[int, typer.Option(min=0, help="Of --kernels: other ones.")] = 0,
    output: Annotated[
        Path | None, typer.Option(help="The file; by default the one that the library reads.")
    ] = None,
    json_file: o.JsonFile = None,
) -> None:
    """Time block sizes of the Triton kernel on this GPU, once; later runs use the best ones.

    Takes a few minutes. Without it, and wherever it finds nothing that is 3 % faster, the library
    uses its defaults. Removing the file undoes it. Entries of other GPUs, head dimensions and
    dtypes stay; a file that makes no sense is kept as NAME.old.

    With --kernels, every kernel that is installed is timed on random calls. Later runs with kernel
    "auto" take, for each pass, the one that was fastest on calls like theirs. Calls that are in the
    file are not timed again: a run that was stopped goes on, and more calls make it better.

    \b
    rfa tune
    rfa tune --kernels --calls 120
    rfa tune --headdim 96 --dtype float16 --output tuned.json
    """
    import torch

    from ..bench.machine import commit, versions

    if kernels:
        _tune_kernels(headdim, calls, seed, output, json_file)
        return
    headdims = headdim or [64, 128]
    with usage_errors():
        _check(headdims, dtype)
        from ..kernels.triton import config, tuning

        path = _file(output or config.tuned_path(), config.VARIABLE, json_file)
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = config.gpu_name(device)
    console = screen()
    found: dict[str, Choice] = {}
    for each in headdims:
        with console.status(f"headdim {each}"):
            choices = tuning.tune(
                each,
                find_dtype(dtype),
                device,
                seqlen,
                causal,
                report=lambda line: console.print(line, style="dim", markup=False),
            )
        tuning.save(path, gpu, choices)  # what is done stays if the next one is interrupted
        found |= choices
    console.print(f"{gpu}, {seqlen} tokens, {'causal' if causal else 'full'}", markup=False)
    texts = ("kernel, headdim up to, dtype", "default", "chosen")
    table, plain = make_table(texts, ("ms before", "ms after")), {}
    for name, choice in found.items():
        default, chosen = str(choice.default), str(choice.chosen)
        times = {"ms_before": choice.before, "ms_after": choice.after}
        plain[name] = {"default": default, "chosen": chosen, **times}
        shown = "the default" if choice.chosen == choice.default else f"[green]{chosen}[/]"
        table.add_row(name, default, shown, *(f"{ms:.4f}" for ms in times.values()))
    console.print(table)
    read = config.tuned_path()
    use = f"to use it, set {config.VARIABLE}={path.absolute()}"
    if read is not None and path.absolute() == read.absolute():
        use = "from now on it is used"
    console.print(f"wrote {path}: {use}", markup=False, soft_wrap=True)
    if json_file is not None:
        facts = {"gpu": gpu, "versions": versions(), "commit": commit(), "seqlen": seqlen}
        write(console, {**facts, "causal": causal, "choices": plain}, json_file)


def _tune_kernels(
    headdims: list[int] | None, calls: int, seed: int, output: Path | None, json_file: Path | None
) -> None:
    """Time every kernel on random calls; print how often each was the fastest."""
    import torch

    from ..bench.grid import measure_costs, random_workloads
    from ..kernels import costs

    with usage_errors():
        _check_gpu()
        if headdims:
            raise ValueError(f"--headdim {headdims[0]}: --kernels draws head dimensions")
        path = _file(output or costs.costs_path(), costs.VARIABLE, json_file)
        if path.exists():
            costs.read_costs(path)
    console, device = screen(), torch.device("cuda", torch.cuda.current_device())
    names = [name for name in kernel_names() if name != "reference"]
    won = {name: dict.fromkeys(costs.PASSES, 0) for name in names}
    measured = 0
    with console.status("") as status:
        workloads = random_workloads(calls, seed)
        for rows in measure_costs(names, workloads, device, path, status.update):
            measured += 1
            for passes in costs.PASSES:
                fastest = min(rows, key=lambda row: getattr(row, passes), default=None)
                if fastest is not None:
                    won[fastest.kernel][passes] += 1
    ran = {name: counts for name, counts in won.items() if any(counts.values())}
    table = make_table(("kernel",), [f"fastest {passes}" for passes in costs.PASSES])
    for name, counts in ran.items():
        table.add_row(name, *map(str, counts.values()))
    console.print(table)
    read = costs.costs_path()
    use = f"to use it, set {costs.VARIABLE}={path.absolute()}"
    if read is not None and path.absolute() == read.absolute():
        use = "from now on kernel auto chooses by it"
    console.print(f"{measured} calls more in {path}: {use}", markup=False, soft_wrap=True)
    if json_file is not None:
        write(console, {"gpu": costs.gpu_name(device), "calls": measured, "won": ran}, json_file)


def _file(path: Path | None, variable: str, json_file: Path | None) -> Path:
    """What is written; ValueError if it cannot be."""
    if path is None:
        raise ValueError(f"{variable} is empty, so that no file is read: unset it or pass --output")
    for file in (path, json_file):
        check_output(file)
    return path


def _check_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ValueError("rfa tune times kernels on a GPU, and there is none that torch can use")


def _check(headdims: list[int], dtype: str) -> None:
    """ValueError where there is nothing to time."""
    import torch

    _check_gpu()
    for each in headdims:
        workload = Workload(headdim=each, causal=True, dtype=dtype)
        reasons = why_not("triton", call_of(workload, torch.device("cuda")))
        if reasons:
            raise ValueError(f"headdim {each}: {'; '.join(reasons)}")
    from ..kernels.launches import INTERPRETED
    from ..kernels.triton.config import limit_of

    if INTERPRETED:
        raise ValueError("TRITON_INTERPRET is set: kernels would run on the CPU; unset it")
    entries: dict[int, int] = {}
    for each in headdims:
        limit = limit_of(each)
        if limit in entries:
            both = f"--headdim {entries[limit]} and {each}"
            raise ValueError(f"{both} share one entry (up to {limit}): choose one")
        entries[limit] = each
