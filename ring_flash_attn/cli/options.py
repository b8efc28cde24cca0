"""The options of all commands, each spelled once; a command lists those that it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..bench.results import implementation_names
from ..bench.workload import LINKS, NONE, PRESETS
from ..kernels.base import AUTO, NATIVE, kernel_names
from ..plan.build import route_names
from ..plan.layout import layout_names


def kernel_choices() -> tuple[str, ...]:
    """Of --kernel."""
    return (AUTO, NATIVE, *kernel_names())


def implementation_choices() -> tuple[str, ...]:
    """Likewise, with other libraries."""
    return (AUTO, NATIVE, *implementation_names())


_KERNELS, _IMPLEMENTATIONS = ", ".join(kernel_choices()), ", ".join(implementation_choices())
_DTYPE = "Of q, k and v: bf16, fp16, fp32, fp64."
_LAYOUTS, _ROUTES = ", ".join(layout_names()), ", ".join(route_names())

# What is computed; lists of numbers make a sweep.
Batch = Annotated[str | None, typer.Option(help="Sequences; one number, or several: 1,2,4.")]
Seqlen = Annotated[str | None, typer.Option(help="Tokens of each; or several: 512,1024,2048.")]
Nheads = Annotated[str | None, typer.Option(help="Query heads; or several.")]
NheadsK = Annotated[str | None, typer.Option(help="KV heads; by default as many; or several.")]
Headdim = Annotated[str | None, typer.Option(help="Head dimension; or several.")]
_CAUSAL = typer.Option("--causal/--full", help="Queries see no later keys, or all.")
Causal = Annotated[bool | None, _CAUSAL]
IsCausal = Annotated[bool, _CAUSAL]
Window = Annotated[
    str | None, typer.Option(help="Keys that a query sees to the left and right: 1024,0; -1: all.")
]
Dtype = Annotated[str | None, typer.Option(help=_DTYPE)]
OneDtype = Annotated[str, typer.Option(help=_DTYPE)]
Preset = Annotated[
    str | None,
    typer.Option(help=f"Start from one of {', '.join(PRESETS)}; other options change it."),
]
CuSeqlens = Annotated[
    str | None,
    typer.Option(help="Packed documents instead: offsets in the whole stream, as 0,3104,65536."),
]

# How it is spread.
WorldSize = Annotated[int, typer.Option(min=1, help="Number of ranks.")]
Layout = Annotated[str, typer.Option(help=f"One of {_LAYOUTS}.")]
Layouts = Annotated[list[str] | None, typer.Option("--layout", help=f"Only these: {_LAYOUTS}.")]
RankLayout = Annotated[str | None, typer.Option(help=f"Of ranks: {_LAYOUTS}; default zigzag.")]
RankRoute = Annotated[str | None, typer.Option(help=f"Of ranks: {_ROUTES}; default ring.")]
Route = Annotated[str, typer.Option(help=f"One of {_ROUTES}.")]
Routes = Annotated[list[str] | None, typer.Option("--route", help=f"Only these: {_ROUTES}.")]
Kernel = Annotated[str, typer.Option(help=f"One of {_KERNELS}.")]
Implementation = Annotated[str, typer.Option("--kernel", help=f"One of {_IMPLEMENTATIONS}.")]
Kernels = Annotated[list[str] | None, typer.Option("--kernel", help=f"Each of these: {_KERNELS}.")]
HeadsKStride = Annotated[
    int | None, typer.Option(min=1, help="KV heads that travel together (all_gather); all.")
]
SourcesPerLaunch = Annotated[
    int | None, typer.Option(min=1, help="Ranks whose keys one launch takes (ring).")
]
LinkName = Annotated[
    str | None,
    typer.Option(help=f"Emulated: {', '.join(LINKS)}; {NONE}: communication is removed."),
]
Backend = Annotated[
    str | None, typer.Option(help="gloo or nccl; by default nccl where each rank has a GPU.")
]
Timeout = Annotated[float | None, typer.Option(help="Seconds that a rank may take; 300.")]

# How it is measured.
Repeats = Annotated[
    int | None, typer.Option(min=1, help="Rounds; by default 30 on a GPU, 5 on the CPU.")
]
Rounds = Annotated[int, typer.Option("--repeats", min=1, help="Rounds of the medians.")]
Graphs = Annotated[
    bool, typer.Option("--graphs", help="Time CUDA graphs: the GPU alone, whatever the host does.")
]
NoGrad = Annotated[bool, typer.Option("--no-grad", help="Forward only.")]
Device = Annotated[
    str | None, typer.Option(help="cpu or cuda; by default cuda where there is a GPU.")
]

# Several kernels.
Versus = Annotated[
    str | None,
    typer.Option(help="Kernel to compare others with; native if it is one of them, or the first."),
]
Gate = Annotated[
    bool,
    typer.Option(
        "--gate",
        help="Exit code 1 unless every kernel is above --min-speed and below --max-memory.",
    ),
]
MinSpeed = Annotated[
    float | None,
    typer.Option(min=0, help="Gate: more than this part of the baseline's speed; 0.6."),
]
MaxMemory = Annotated[
    float | None,
    typer.Option(min=0, help="Gate: less than so many times the baseline's memory; 1.2."),
]

# Files.
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")]
