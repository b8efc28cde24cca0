"""On one device: the Triton kernel against cuDNN and FlashAttention-2, interleaved in one run.

    python benchmarks/kernels.py results/kernels_h200.json [commit]

Each round times every contender once, with GPU events and a cold L2 cache; figures are medians. The
device has other work to do until the call is queued, so that its time does not hold the host's,
which is measured on its own.
FLOPs = 4 · batch · nheads · pairs · headdim forward, × 2.5 backward.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

import ring_flash_attn as rfa
from ring_flash_attn.kernels.base import Call, State, load_kernel
from ring_flash_attn.plan.build import make_plan
from ring_flash_attn.plan.layout import get_layout
from ring_flash_attn.plan.problem import Problem
from ring_flash_attn.plan.tiles import Mask

SHAPES = {  # batch, nheads, nheads_k, seqlen, headdim, causal
    "1, 32/8, 8192, 128, causal": (1, 32, 8, 8192, 128, True),
    "1, 16/16, 16384, 128, full": (1, 16, 16, 16384, 128, False),
    "2, 16/16, 8192, 64, causal": (2, 16, 16, 8192, 64, True),
}
ROUNDS = 15
LEAD = 8  # times 1/4 GiB of zeros, about 0.5 ms in all


def sdpa(backend: SDPBackend) -> Callable[..., torch.Tensor]:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return out.transpose(1, 2)

    return run


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return rfa.triton_flash_attn_func(q, k, v, causal=causal)


CONTENDERS = {
    "triton": ours,
    "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
    "fa2": sdpa(SDPBackend.FLASH_ATTENTION),
}


def milliseconds(work: Callable[[], object], flush: torch.Tensor) -> float:
    for _ in range(LEAD):
        flush.zero_()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def interleaved(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Medians over rounds, in ms."""
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    for work in works.values():  # compile, warm up
        for _ in range(3):
            work()
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            times[name].append(milliseconds(work, flush))
    return {name: statistics.median(values) for name, values in times.items()}


def peak_memory(work: Callable[[], object]) -> int:
    """Bytes above what is there before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(
    batch: int, nheads: int, nheads_k: int, seqlen: int, headdim: int, causal: bool
) -> dict:
    torch.manual_seed(0)
    heads = (nheads, nheads_k, nheads_k, nheads)
    q, k, v, dout = (
        torch.randn(batch, seqlen, h, headdim, device="cuda", dtype=torch.bfloat16) for h in heads
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    outs = {name: run(*leaves, causal) for name, run in CONTENDERS.items()}

    def forward(name: str) -> Callable[[], object]:
        def work() -> None:
            with torch.no_grad():
                CONTENDERS[name](*leaves, causal)

        return work

    def backward(name: str) -> Callable[[], object]:
        return lambda: torch.autograd.grad(outs[name], leaves, dout, retain_graph=True)

    def both(name: str) -> Callable[[], object]:
        return lambda: torch.autograd.grad(CONTENDERS[name](*leaves, causal), leaves, dout)

    flops = 4 * batch * nheads * seqlen**2 * headdim * (0.5 if causal else 1)
    row: dict = {}
    for direction, works, factor in (("forward", forward, 1.0), ("backward", backward, 2.5)):
        times = interleaved({name: works(name) for name in CONTENDERS})
        row[direction] = {
            name: {
                "ms": round(t, 4),
                "tflops": round(flops * factor / t / 1e9, 1),
                "times_cudnn": round(times["cudnn"] / t, 3),
                "times_fa2": round(times["fa2"] / t, 3),
            }
            for name, t in times.items()
        }
    row["peak_bytes_forward_and_backward"] = {name: peak_memory(both(name)) for name in CONTENDERS}
    return row


def carrying_state() -> dict[str, float]:
    """ms of a full step of 8192 × 8192, fresh and going on from a state (the kernel alone)."""
    length, nheads, nheads_k, headdim = 8192, 32, 8, 128
    q, k, v = (
        torch.randn(1, length, h, headdim, device="cuda", dtype=torch.bfloat16)
        for h in (nheads, nheads_k, nheads_k)
    )
    problem = Problem(get_layout("contiguous"), (2 * length,), (2 * length,), 2, Mask(), 1, 1)
    steps = make_plan("ring", problem, 0).steps  # step 0 is fresh, step 1 the last one
    call = Call(q.device, q.dtype, nheads, nheads_k, headdim, headdim, headdim**-0.5, Mask())
    out = torch.zeros(1, length, nheads, headdim, device="cuda")
    state = State(out, torch.zeros(1, nheads, length, device="cuda"), torch.empty_like(q))
    kernel = load_kernel("triton")
    alone = make_plan("ring", Problem(get_layout("contiguous"), (length,), (length,), 1, Mask()), 0)
    works = {
        "fresh and final": alone.steps[0].work[0].tiles,
        "fresh, state out": steps[0].work[0].tiles,
        "state in, final": steps[1].work[0].tiles,
    }
    return interleaved(
        {
            name: (lambda tiles=tiles: kernel.forward(q, k, v, tiles, state, call))
            for name, tiles in works.items()
        }
    )


def host_microseconds() -> dict[str, float]:
    """Host time of a forward call on a small input, without waiting for the device."""
    q = torch.randn(1, 64, 4, 64, device="cuda", dtype=torch.bfloat16)
    times = []
    with torch.no_grad():
        for _ in range(40):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(50):
                ours(q, q, q, True)
            times.append((time.perf_counter() - start) / 50 * 1e6)
    return {"median": round(statistics.median(times), 1), "least": round(min(times), 1)}


def first_call_seconds() -> dict[str, float]:
    """Of a forward and a backward call that have to be compiled: nothing is in the cache."""
    q = torch.randn(1, 128, 2, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    start = time.perf_counter()
    out = ours(q, q, q, True)
    torch.cuda.synchronize()
    middle = time.perf_counter()
    out.sum().backward()
    torch.cuda.synchronize()
    return {
        "forward": round(middle - start, 1),
        "backward": round(time.perf_counter() - middle, 1),
    }


def current_commit() -> str:
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    return git.stdout.strip()


def versions(commit: str) -> dict[str, object]:
    """What a report begins with."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "commit": commit,
        "dtype": "bfloat16",
        "rounds": ROUNDS,
    }


def main(path: str, commit: str | None = None) -> None:
    first = first_call_seconds()
    report = {
        **versions(commit or current_commit()),
        "shapes (batch, nheads/nheads_k, seqlen, headdim)": {
            name: measure(*shape) for name, shape in SHAPES.items()
        },
        "carrying the state, 1, 32/8, 8192 x 8192, 128, full, forward kernel, ms": carrying_state(),
        "host time of a forward call, microseconds": host_microseconds(),
        "first call of a kind, head dimension 128, seconds of compiling": first,
    }
    Path(path).write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        main(*sys.argv[1:])
