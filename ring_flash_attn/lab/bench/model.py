"""A whole Transformer: forward, forward + backward, the whole step; profiles and snapshots of it.

As a module it is the process that Nsight Systems looks at, with a case as JSON and a number of
runs; what lies between the calls of cudaProfilerStart and cudaProfilerStop is recorded.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ...bench.measure import Guard, clear
from ...bench.profile.nsight import NSYS, ToolFailed, run_tool
from ...bench.profile.trace import record_memory, record_trace, run_under
from ...bench.results import CANNOT, Row
from ...bench.timing import Samples, Timing, Work, on_device, synchronize
from ...bench.workload import BOTH, FORWARD
from .attention import Report, held_before, peak_in_use
from .config import BF16, STEP, TF32, ModelCase
from .transformer import AdamW, Transformer, forward_flops, named

KIND = "lab model"
_RUNS = 3  # that Nsight Systems sees
_PASSES_FLOPS = {FORWARD: 1, BOTH: 3, STEP: 3}  # of the forward pass
_SEED = 0


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Products of fp32 matrices: exactly, or with factors that are rounded to TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == TF32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def why_not(case: ModelCase, device: torch.device) -> str | None:
    """A reason not to try it."""
    if case.precision == TF32 and device.type != "cuda":
        return "TF32 is a format of NVIDIA's tensor cores"
    return None


def make_works(case: ModelCase, device: torch.device) -> dict[str, Work]:
    """What is timed, by pass. Parameters are fp32; autocast makes bf16 of them where it pays."""
    torch.manual_seed(_SEED)
    with device:
        model = Transformer(case.size, case.vocab, case.context, case.attention)
        tokens = torch.randint(case.vocab, (case.batch, case.context + 1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    optimizer = AdamW(model.parameters(), lr=1e-4)
    if case.compile:  # layer by layer: all are one piece of code, which is compiled once
        torch.compiler.reset()  # after 8 sizes torch would give up, and run it uncompiled
        for layer in model.layers:
            layer.compile(dynamic=False)

    def logits() -> Tensor:
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=case.precision == BF16)
        with named("forward"), products_in(case.precision), autocast:
            found: Tensor = model(inputs)
            return found

    def forward() -> Tensor:
        with torch.no_grad():
            return logits()

    def both() -> None:
        optimizer.zero_grad()
        loss = cross_entropy(logits().float().flatten(0, 1), targets.flatten())
        with named("backward"), products_in(case.precision):
            loss.backward()

    def step() -> None:
        both()
        with named("optimizer"):
            optimizer.step()

    return {FORWARD: forward, BOTH: both, STEP: step}


def measure_model(
    case: ModelCase,
    device: torch.device,
    repeats: int = 10,
    report: Report = lambda line: None,
) -> list[Row]:
    """A row for each pass of a case; one that fails says why, and the others go on."""
    reason = why_not(case, device)
    if reason is not None:
        return [_row(case, way, failed=f"{CANNOT}{reason}") for way in case.passes]
    clear(device)
    with on_device(device):
        rows, building = [], Guard()
        held = held_before(device, torch.bfloat16 if case.precision == BF16 else torch.float32)
        report("building the model")
        works = building.attempt(lambda: make_works(case, device)) or {}
        for way in case.passes:
            guard = Guard(failed=building.failed)
            rows.append(_measure(case, way, works, guard, device, repeats, held, report))
            if guard.failed is not None:
                clear(device)
        works.clear()  # with the model
    if case.compile:
        torch.compiler.reset()  # what is compiled may hold parameters
    clear(device)
    return rows


def _measure(
    case: ModelCase,
    way: str,
    works: dict[str, Work],
    guard: Guard,
    device: torch.device,
    repeats: int,
    held: int,
    report: Report,
) -> Row:
    def run() -> dict[str, Any]:
        work, timings = works[way], []
        work()  # compiles; and AdamW makes its state

        def timed() -> None:
            timings.append(_time(work, device))

        report(f"timing {way}")
        peak = peak_in_use(timed, device, held)
        while len(timings) < repeats:
            timed()
        samples = Samples(*zip(*((each.device, each.host) for each in timings)))
        flops = _PASSES_FLOPS[way] * forward_flops(case.size, case.vocab, case.batch, case.context)
        return {
            "samples_ms": samples.device,
            "tflops": flops / samples.median.device / 1e9,
            "peak_bytes": peak,
            "values": {"host_ms": samples.median.host},
        }

    return _row(case, way, **(guard.attempt(run) or {}), failed=guard.failed)


def _time(work: Work, device: torch.device) -> Timing:
    """One pass as a training loop has it: the GPU is idle before, and done in the end."""
    synchronize(device)
    start = time.perf_counter()
    work()
    queued = time.perf_counter()
    synchronize(device)
    done = time.perf_counter()
    return Timing((done - start) * 1e3, (queued - start) * 1e3)


def _row(case: ModelCase, way: str, **found: Any) -> Row:
    size = case.size
    workload = {
        "model": case.name,
        "d_model": size.d_model,
        "d_ff": size.d_ff,
        "layers": size.layers,
        "nheads": size.heads,
        "vocab": case.vocab,
        "batch": case.batch,
        "seqlen": case.context,
        "causal": True,
        "precision": case.precision,
        "dtype": "bfloat16" if case.precision == BF16 else "float32",
        "compile": case.compile,
    }
    return Row(KIND, case.attention, way, workload, **found)


# Profiles.


def profile(case: ModelCase, device: torch.device, folder: Path) -> Iterator[str]:
    """Record the last of its passes into a folder, and say what came of it.

    Nsight Systems where it is installed, for a GPU; else, and if it fails, torch's profiler, whose
    trace opens in ui.perfetto.dev.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / case.file_name
    if device.type == "cuda" and shutil.which("nsys"):
        report = path.with_name(f"{path.name}.nsys-rep")
        clear(device)  # the other process needs the room
        try:
            run_tool([*NSYS, f"--output={path}", *child_command(case, device)], report)
            yield f"wrote {report}; open it in Nsight Systems, or: nsys stats {report}"
            return
        except ToolFailed as error:
            yield f"Nsight Systems failed, so torch's profiler records instead: {error}"
    file = path.with_name(f"{path.name}.json")
    with on_device(device):
        found = record_trace(make_works(case, device)[case.passes[-1]], device, file)
    runs = found["runs"]
    lines = [f"  {each['ms'] / runs:9.3f} ms  {each['name']}" for each in found["kernels"][:5]]
    ranges = [f"  {each['ms'] / runs:9.3f} ms  {each['name']}" for each in found["ranges"]]
    yield f"wrote {file}; open it in ui.perfetto.dev"
    yield f"longest {'kernels' if found['on_device'] else 'operators'} of one {case.passes[-1]}:"
    yield from lines
    if ranges:
        yield "ranges, in the host's time:"
        yield from ranges


def child_command(case: ModelCase, device: torch.device) -> list[str]:
    """The process that Nsight Systems looks at."""
    values = json.dumps(case.to_dict())
    return [sys.executable, "-m", f"{__package__}.model", values, str(device), str(_RUNS)]


def snapshot_memory(case: ModelCase, device: torch.device, path: Path) -> None:
    """Every piece of memory that one run of the last pass takes and gives back, for a GPU."""
    with on_device(device):
        record_memory(make_works(case, device)[case.passes[-1]], device, path)
    clear(device)


def main(arguments: Sequence[str]) -> None:
    """Run the last pass of a case while a profiler listens."""
    case = ModelCase.from_dict(json.loads(arguments[0]))
    device, runs = torch.device(arguments[1]), int(arguments[2])
    with on_device(device):
        work = make_works(case, device)[case.passes[-1]]
        profiler = torch.cuda.profiler.profile() if device.type == "cuda" else nullcontext()
        run_under(profiler, work, device, runs)
    print(f"{runs} runs of {case}")


if __name__ == "__main__":
    main(sys.argv[1:])
