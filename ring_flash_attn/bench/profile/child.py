"""The process that Nsight's tools look at: `python -m ring_flash_attn.bench.profile.child …`.

It takes a subject as JSON and a number of runs. The tools record what lies between the calls of
cudaProfilerStart and cudaProfilerStop: those runs, after others that have compiled everything.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ...trace import tracing
from ..timing import WARM_UP
from .subject import Subject


def main(arguments: Sequence[str]) -> None:
    """Run the last of the subject's passes."""
    subject, runs = Subject.from_dict(json.loads(arguments[0])), int(arguments[1])
    if subject.device.type == "cuda":
        torch.cuda.set_device(subject.device)
    work = subject.works()[subject.passes[-1]]
    for _ in range(WARM_UP):
        work()
    with _captured(subject.device), tracing():
        for _ in range(runs):
            work()
    print(f"{runs} runs of {subject}")


@contextmanager
def _captured(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    torch.cuda.profiler.start()
    try:
        yield
        torch.cuda.synchronize(device)
    finally:
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
