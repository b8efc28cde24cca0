"""The process that Nsight's tools look at: `python -m ring_flash_attn.bench.profile.child …`.

It takes a subject as JSON and a number of runs. The tools record what lies between the calls of
cudaProfilerStart and cudaProfilerStop: those runs, after others that have compiled everything.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext

import torch

from ...trace import tracing
from ..timing import WARM_UP, synchronize
from .subject import Subject


def main(arguments: Sequence[str]) -> None:
    """Run the last of the subject's passes."""
    subject, runs = Subject.from_dict(json.loads(arguments[0])), int(arguments[1])
    cuda = subject.device.type == "cuda"
    if cuda:
        torch.cuda.set_device(subject.device)
    work = subject.works()[subject.passes[-1]]
    for _ in range(WARM_UP):
        work()
    synchronize(subject.device)
    with torch.cuda.profiler.profile() if cuda else nullcontext(), tracing():
        for _ in range(runs):
            work()
        synchronize(subject.device)
    print(f"{runs} runs of {subject}")


if __name__ == "__main__":
    main(sys.argv[1:])
