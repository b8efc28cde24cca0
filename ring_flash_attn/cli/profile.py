"""`rfa profile`: a folder that says why a call takes as long as it does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..bench.results import ON_CPU, check_output
from ..kernels.base import AUTO
from . import options as o
from .console import print_lines, screen, status, usage_errors, write
from .options import make_workloads, repeats_on, without_gradients


def profile(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the files.")] = Path(
        "profile_results"
    ),
    force: Annotated[
        bool, typer.Option("--force", help="Replace an earlier profile in the folder.")
    ] = False,
    batch: o.Batch = None,
    seqlen: o.Seqlen = None,
    nheads: o.Nheads = None,
    nheads_k: o.NheadsK = None,
    headdim: o.Headdim = None,
    causal: o.Causal = None,
    window: o.Window = None,
    dtype: o.Dtype = None,
    preset: o.Preset = None,
    kernel: o.Kernel = AUTO,
    world_size: Annotated[
        int, typer.Option(min=1, help="More than 1: a rank of so many, replayed on this device.")
    ] = 1,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Which rank; by default the one with most to do.")
    ] = None,
    layout: o.RankLayout = None,
    route: o.RankRoute = None,
    link: o.LinkName = None,
    link_gbps: o.LinkGbps = None,
    latency_us: o.LatencyUs = None,
    network_gbps: o.NetworkGbps = None,
    network_latency_us: o.NetworkLatencyUs = None,
    gpus_per_node: o.GpusPerNode = None,
    repeats: o.Repeats = None,
    no_grad: o.NoGrad = False,
    device: o.Device = None,
    json_file: o.JsonFile = None,
) -> None:
    """Find out what is slow and why; the folder's SUMMARY.md is where to begin.

    Times against measured peaks and verdicts on them, a trace, the memory, all other
    implementations, and what Nsight Systems (nsys) and Nsight Compute (ncu --set full) find where
    they are installed; what is left out is listed with the reason. Ranks are replayed in both
    passes; --no-grad then shows the forward pass alone.

    \b
    rfa profile --preset llama3-8b
    rfa profile --seqlen 16384 --nheads 32 --nheads-k 8 --headdim 128 --causal -o long --force
    rfa profile --preset llama3-8b --world-size 8 --layout zigzag --route ring --link nvlink4
    rfa profile --seqlen 128 --device cpu --no-grad
    """
    from ..bench.machine import find_device
    from ..bench.profile.findings import find, verdicts
    from ..bench.profile.parts import SUMMARY, prepare_folder
    from ..bench.profile.run import profile as run_profile
    from ..bench.profile.run import results
    from ..bench.profile.subject import make_subject

    numbers = {"batch": batch, "seqlen": seqlen, "nheads": nheads}
    numbers |= {"nheads_k": nheads_k, "headdim": headdim}
    spread: Any = {"world_size": world_size, "rank": rank}
    spread |= {"layout": layout, "route": route, "link": link}
    spread |= {
        "gbps": link_gbps,
        "latency_us": latency_us,
        "network_gbps": network_gbps,
        "network_latency_us": network_latency_us,
        "gpus_per_node": gpus_per_node,
    }
    with usage_errors():
        check_output(json_file)
        where = find_device(device, "a profile")
        workload, *more = make_workloads(preset, causal, window, dtype, None, **numbers)
        if more:
            raise ValueError(f"{1 + len(more)} workloads: give one number to --seqlen and the like")
        grad = not without_gradients(preset, no_grad)
        subject = make_subject(workload, where, kernel, grad=grad, **spread)
        prepare_folder(output, force)
    console, rounds = screen(), repeats_on(where, repeats)
    with status(console, f"profiling {subject}") as report:
        facts = run_profile(subject, output, rounds, report)
    findings = (f"{number}. {each}" for number, each in enumerate(find(facts), 1))
    print_lines(console, (f"{subject}: {workload}", *findings, *verdicts(facts)))
    print_lines(console, (f"no {name}: {why}" for name, why in facts.missing.items()))
    print_lines(console, [ON_CPU] if facts.on_cpu else [])
    console.print(f"wrote {output / SUMMARY}: start there", markup=False, soft_wrap=True)
    write(console, results(facts), json_file)
