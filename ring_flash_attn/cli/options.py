"""The options of all commands, each spelled once, and what their values mean."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..bench.documents import CAP, SEED, Histogram, find_histogram, histogram_names, pack_of
from ..bench.links import LINKS, NONE, SUFFIX, TOPOLOGIES
from ..bench.results import Limits
from ..bench.workload import FORWARD_ONLY, PRESETS, Workload, dtype_name
from ..kernels.base import AUTO, NATIVE, kernel_names
from ..plan.balanced import find_layout
from ..plan.build import route_names
from ..plan.layout import layout_names

if TYPE_CHECKING:
    import torch

BACKENDS = ("gloo", "nccl")
_MOST = 1000  # workloads of one command
_REPEATS = {"cuda": 30, "cpu": 5}
_TIMEOUT = 300.0  # seconds that a rank may take
_SHARED_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"  # of NCCL: ranks may share a GPU

# Values that are names.


def one_of(what: str, names: Callable[[], Collection[str]]) -> Callable[[str], str]:
    """Parse a name; refuse those that there are not before torch is imported."""

    def parse(value: str) -> str:
        if value not in names():
            message = f"unknown {what} {value!r}; choose one of {', '.join(names())}"
            raise typer.BadParameter(message)
        return value

    return parse


def named(
    what: str, names: Callable[[], Collection[str]], text: str = "One of {}.", *flags: str
) -> Any:
    """An option for names; its help is `text` with all of them."""
    parse, text = one_of(what, names), text.format(", ".join(names()))
    return typer.Option(*flags, parser=parse, metavar="NAME", help=text)


def _parse_dtype(value: str) -> str:
    try:
        return dtype_name(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_layout(value: str) -> str:
    """A layout's name; also that of one that knows nodes."""
    try:
        return find_layout(value).name
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def layouts(text: str, *flags: str) -> Any:
    """An option for layouts; its help is `text` with all of them."""
    text = text.format(", ".join((*layout_names(), "'Balanced(ranks_per_node=8)'")))
    return typer.Option(*flags, parser=parse_layout, metavar="NAME", help=text)


def _link_names() -> tuple[str, ...]:
    return (NONE, *LINKS, *TOPOLOGIES)


def _parse_link(value: str) -> str:
    return value if value.endswith(SUFFIX) else one_of("link", _link_names)(value)


def _parse_documents(value: str) -> Histogram:
    try:
        return find_histogram(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _kernel_choices() -> tuple[str, ...]:
    return (AUTO, NATIVE, *kernel_names())


# What is computed; lists of numbers make a sweep.
Batch = Annotated[str | None, typer.Option(help="Sequences; one number, or several: 1,2,4.")]
Seqlen = Annotated[str | None, typer.Option(help="Tokens of each; or several: 512,1024,2048.")]
Nheads = Annotated[str | None, typer.Option(help="Query heads; or several.")]
NheadsK = Annotated[str | None, typer.Option(help="KV heads; by default as many; or several.")]
Headdim = Annotated[str | None, typer.Option(help="Head dimension; or several.")]
HeaddimV = Annotated[
    str | None, typer.Option(help="Head dimension of v and out, if not --headdim; or several.")
]
Softcap = Annotated[
    float | None, typer.Option(min=0, help="Scores are softcap · tanh(score / softcap); 0: not.")
]
_CAUSAL = typer.Option("--causal/--full", help="Queries see no later keys, or all.")
Causal = Annotated[bool | None, _CAUSAL]
IsCausal = Annotated[bool, _CAUSAL]
Window = Annotated[
    str | None, typer.Option(help="Keys that a query sees to the left and right: 1024,0; -1: all.")
]
_DTYPE = typer.Option(
    parser=_parse_dtype, metavar="NAME", help="Of q, k and v: bf16, fp16, fp32, fp64."
)
Dtype = Annotated[str | None, _DTYPE]
OneDtype = Annotated[str, _DTYPE]
Dtypes = Annotated[
    list[str] | None,
    typer.Option(
        "--dtype",
        parser=_parse_dtype,
        metavar="NAME",
        help="Everything in each of these; by default a mixture.",
    ),
]
Preset = Annotated[
    str | None, named("preset", lambda: PRESETS, "Start from one of {}; other options change it.")
]
CuSeqlens = Annotated[
    str | None,
    typer.Option(help="Packed documents instead: offsets in the whole stream, as 0,3104,65536."),
]
Documents = Annotated[
    Histogram | None,
    typer.Option(
        parser=_parse_documents,
        metavar="NAME|FILE",
        help="Packed documents instead, drawn from a histogram of lengths: "
        f"{', '.join(histogram_names())}, or a CSV file with the columns low,high,weight.",
    ),
]
Seed = Annotated[int | None, typer.Option(help=f"Of --documents; {SEED}.")]
Seeds = Annotated[
    str | None,
    typer.Option("--seed", help=f"Of --documents; or several, a pack each: 42,43,44; {SEED}."),
]
DocumentCap = Annotated[
    float | None,
    typer.Option(
        help=f"No document of --documents is longer than this part of all tokens; {CAP:g}."
    ),
]

# How it is spread.
WorldSize = Annotated[int, typer.Option(min=1, help="Number of ranks.")]
Layout = Annotated[str, layouts("One of {}.")]
Layouts = Annotated[list[str] | None, named("layout", layout_names, "Only these: {}.", "--layout")]
PlacedLayouts = Annotated[list[str] | None, layouts("Only these: {}.", "--layout")]
RankLayout = Annotated[str | None, named("layout", layout_names, "Of ranks: {}; default zigzag.")]
Route = Annotated[str, named("route", route_names)]
Routes = Annotated[list[str] | None, named("route", route_names, "Only these: {}.", "--route")]
RankRoute = Annotated[str | None, named("route", route_names, "Of ranks: {}; default ring.")]
Kernel = Annotated[str, named("kernel", _kernel_choices)]
Kernels = Annotated[
    list[str] | None, named("kernel", _kernel_choices, "Each of these: {}.", "--kernel")
]
HeadsKStride = Annotated[
    int | None,
    typer.Option(min=1, help="KV heads that travel together (all_gather, all_to_all); all."),
]
SourcesPerLaunch = Annotated[
    int | None,
    typer.Option(
        min=1, help="Ranks, or nodes, whose keys a launch takes: ring, mesh, double_ring."
    ),
]
RanksPerNode = Annotated[
    int | None, typer.Option(min=1, help="Ranks of a node (mesh, double_ring); all.")
]
LinkName = Annotated[
    str | None,
    typer.Option(
        parser=_parse_link,
        metavar="NAME|FILE",
        help=f"Emulated: {', '.join(LINKS)}; nodes of 8 GPUs and a network: "
        f"{', '.join(TOPOLOGIES)}; a file of rfa link; {NONE}: communication is removed.",
    ),
]
LinkGbps = Annotated[
    float | None, typer.Option(help="A link in numbers: 10⁹ bytes a second, each way.")
]
LatencyUs = Annotated[
    float | None, typer.Option(help="µs that a post takes at least; each link has its own.")
]
NetworkGbps = Annotated[
    float | None,
    typer.Option(help="Between nodes: 10⁹ bytes a second of each GPU, each way; 400 Gb/s are 50."),
]
NetworkLatencyUs = Annotated[
    float | None, typer.Option(help="µs that a post to other nodes takes at least.")
]
GpusPerNode = Annotated[
    int | None, typer.Option(min=1, help="GPUs of a node of the link; by default the link's own.")
]
Backend = Annotated[
    str | None,
    named("backend", lambda: BACKENDS, "gloo or nccl; by default nccl where each rank has a GPU."),
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
Host = Annotated[
    bool, typer.Option("--host", help="The host's time of each pass beside the device's.")
]
NoGrad = Annotated[bool, typer.Option("--no-grad", help="Forward only.")]
Device = Annotated[
    str | None, typer.Option(help="cpu or cuda; by default cuda where there is a GPU.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")]

# Several kernels.
Versus = Annotated[
    str | None,
    named(
        "kernel",
        _kernel_choices,
        "Kernel to compare others with; native if it is one of them, or the first.",
    ),
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


# From values to workloads.


def make_workloads(
    preset: str | None,
    causal: bool | None,
    window: str | None,
    dtype: str | None,
    softcap: float | None = None,
    **numbers: str | None,
) -> list[Workload]:
    """Every combination of what the user wrote, else of the preset, else the default.

    `numbers` are one or several, such as `seqlen="512,1024"`; ValueError for a wrong one.
    """
    sides = None if window is None else parse_window(window)
    single: dict[str, Any] = {"causal": causal, "window": sides, "dtype": dtype}
    single["softcap"] = softcap
    changes = {name: each for name, each in single.items() if each is not None}
    start = replace(Workload() if preset is None else PRESETS[preset], **changes)
    lists: dict[str, Any] = {}
    for name, text in numbers.items():
        if text is not None:
            message = f"{name} must be a number or several, as 512,1024; not {text!r}"
            lists[name] = dict.fromkeys(_integers(text, message))
    chosen = [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]
    if len(chosen) > _MOST:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in lists)
        raise ValueError(f"{options}: {len(chosen)} combinations; at most {_MOST} at a time")
    if "nheads" in lists and "nheads_k" not in lists:  # as many KV heads
        chosen = [{**each, "nheads_k": each["nheads"]} for each in chosen]
    return [replace(start, **each) for each in chosen]


def make_packs(
    workloads: Sequence[Workload],
    batch: str | None,
    seqlen: str | None,
    cu_seqlens: str | None,
    documents: Histogram | None,
    seed: str | None,
    document_cap: float | None,
) -> list[Workload]:
    """The same with packed documents, if the user wrote some: for every seed one.

    Documents that are drawn fill `seqlen` tokens.
    """
    if cu_seqlens is not None and seqlen is not None:
        raise ValueError(f"--seqlen {seqlen} and --cu-seqlens {cu_seqlens}: give one of them")
    offsets = None if cu_seqlens is None else parse_offsets(cu_seqlens)
    found = []
    for each in workloads:
        for number in parse_seeds(seed):
            pack = pack_of(each.seqlen, offsets, documents, number, document_cap)
            if pack and batch is None:
                pack["batch"] = 1
            found.append(replace(each, **pack))
    return found


def parse_window(text: str) -> tuple[int, int]:
    """Of --window."""
    try:
        left, right = map(int, text.split(","))
    except ValueError:
        raise ValueError(f"--window must be two numbers, as 1024,0; not {text!r}") from None
    return left, right


def parse_offsets(text: str) -> tuple[int, ...]:
    """Of --cu-seqlens."""
    return _integers(text, f"--cu-seqlens must be whole numbers and commas, not {text!r}")


def parse_seeds(text: str | None) -> tuple[int | None, ...]:
    """Of --seed: each once; None alone where the user says nothing."""
    if text is None:
        return (None,)
    message = f"--seed must be a whole number or several, as 42,43; not {text!r}"
    seeds = tuple(dict.fromkeys(_integers(text, message)))
    if min(seeds) < 0:  # now, not after the packs before it
        raise ValueError(f"--seed {min(seeds)} must not be negative")
    return seeds


def parse_sizes(text: str) -> tuple[int, ...]:
    """Of --sizes: bytes, ascending."""
    message = f"--sizes must be two numbers of bytes or more, as 4096,1048576; not {text!r}"
    sizes = tuple(sorted(set(_integers(text, message))))
    if len(sizes) < 2 or sizes[0] < 1:
        raise ValueError(message)
    return sizes


def _integers(text: str, message: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise ValueError(message) from None


def without_gradients(preset: str | None, no_grad: bool) -> bool:
    """Whether only forward passes are wanted."""
    return no_grad or preset in FORWARD_ONLY


def repeats_on(device: torch.device, repeats: int | None) -> int:
    """What the user said, or the default."""
    return _REPEATS[device.type] if repeats is None else repeats


# From values to a comparison and its gate.


def find_versus(kernels: Sequence[str], versus: str | None) -> tuple[tuple[str, ...], str]:
    """All kernels, the one that the others are compared with first, and it; "" without others."""
    found = dict.fromkeys(kernels)
    if versus is None and len(found) == 1:
        return tuple(found), ""
    baseline = versus or (NATIVE if NATIVE in found else kernels[0])
    return tuple(dict.fromkeys((baseline, *found))), baseline


def find_limits(
    gate: bool,
    min_speed: float | None,
    max_memory: float | None,
    versus: str,
    device: torch.device,
) -> Limits | None:
    """What the options say; None without a gate. ValueError where there is nothing to judge."""
    options = {"--min-speed": min_speed, "--max-memory": max_memory}
    used = [f"{name} {value:g}" for name, value in options.items() if value is not None]
    if not gate and not used:
        return None
    if not versus:
        raise ValueError(f"{used[0] if used else '--gate'}: say against what with --versus")
    if device.type == "cpu" and max_memory is not None:
        raise ValueError(f"{used[-1]}: memory is not measured on the CPU")
    usual = Limits()
    memory = None if device.type == "cpu" else usual.max_memory
    return Limits(
        usual.min_speed if min_speed is None else min_speed,
        memory if max_memory is None else max_memory,
    )


def compared(versus: str | None, limits: Limits | None) -> dict[str, Any]:
    """The same as settings in a file of results."""
    return {**({"versus": versus} if versus else {}), **(asdict(limits) if limits else {})}


# Ranks: torchrun's, new ones, or none.


def is_first_rank() -> bool:
    """Whether this process prints and writes: of torchrun's ranks the first does."""
    from ..comm import launch

    joined = launch.torchrun_rank()
    return joined is None or joined[0] == 0


def check_world_size(world_size: int | None, default: int) -> int:
    """torchrun's, or the user's, or the default; ValueError if the first two differ."""
    from ..comm import launch

    joined = launch.torchrun_rank()
    if joined is None:
        return default if world_size is None else world_size
    if world_size not in (None, joined[1]):
        raise ValueError(f"--world-size {world_size}: torchrun has started {joined[1]} ranks")
    return joined[1]


def check_group(
    device: str | None, kind: str, world_size: int, backend: str | None, timeout: float | None
) -> tuple[str, float]:
    """The backend of the group and seconds that a rank may take; ValueError for wrong options."""
    import torch

    from ..comm import launch

    if device is not None and ":" in device:
        raise ValueError(f"--device {device}: ranks take GPUs in turn; say cuda")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"--timeout must be positive, not {timeout:g}")
    if timeout is not None and launch.torchrun_rank() is not None:
        raise ValueError(f"--timeout {timeout:g}: torchrun itself watches the ranks it started")
    if backend not in (None, *BACKENDS):
        raise ValueError(f"unknown backend {backend!r}; choose one of {', '.join(BACKENDS)}")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    few = torch.cuda.device_count() < here and os.environ.get(_SHARED_GPUS) != "1"
    if backend == "nccl" and (kind == "cpu" or few):
        raise ValueError(
            f"--backend nccl needs a GPU for each of {here} ranks; or, to share one, NCCL 2.30 and "
            f"{_SHARED_GPUS}=1"
        )
    return (
        backend or launch.default_backend(kind, world_size),
        _TIMEOUT if timeout is None else timeout,
    )


def check_no_group(why: str, backend: str | None, timeout: float | None) -> None:
    """ValueError for options of a group where there is none."""
    for name, value in (("--backend", backend), ("--timeout", timeout)):
        if value is not None:
            raise ValueError(f"{name} {value}: {why}, without a group")
