"""Random calls on one device, as training runs have them; and what each kernel takes for them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from math import exp, inf, log
from pathlib import Path
from typing import TYPE_CHECKING

from ..kernels.costs import Cost, add_costs, gpu_name, read_costs, shape_of
from .measure import Report, measure
from .results import BENCH
from .workload import BACKWARD, FORWARD, Workload, call_of, size_of_workload

if TYPE_CHECKING:
    import torch

_HEADDIMS = (32, 48, 64, 64, 80, 96, 112, 128, 128, 128, 160, 192, 256)
_MLA = (192, 128)  # of keys and of values
_GROUPS = (1, 1, 2, 4, 4, 5, 7, 8, 16)
_MOST_HEADS, _FEWEST_TOKENS, _MOST_TOKENS = 128, 128, 131_072
_MOST_FLOPS, _MOST_NUMBERS = 1.5e13, 1 << 29  # forward; of q
_KINDS = ("causal",) * 5 + ("full",) * 3 + ("window", "softcap")
_PACKED = 0.35  # of causal and full ones


def random_workloads(count: int, seed: int, dtype: str = "bfloat16") -> list[Workload]:
    """Head dimensions 32 to 256, 1 to 128 heads, groups of 1 to 16, 128 to 131,072 tokens.

    Batches and packed documents, causal, full, windows and softcap. The first of more are the same.
    """
    draw = random.Random(seed)
    found: list[Workload] = []
    while len(found) < count:
        workload = _drawn(draw, dtype)
        if workload is not None:
            found.append(workload)
    return found


def _drawn(draw: random.Random, dtype: str) -> Workload | None:
    """None if it is too large."""
    headdim, headdim_v = draw.choice([*((dim, None) for dim in _HEADDIMS), _MLA])
    group = draw.choice(_GROUPS)
    nheads_k = _between(draw, 1, _MOST_HEADS // group)
    tokens = _between(draw, _FEWEST_TOKENS, _MOST_TOKENS)
    kind = draw.choice(_KINDS)
    heads = {"nheads": group * nheads_k, "nheads_k": nheads_k, "headdim": headdim, "dtype": dtype}
    workload = Workload(
        1,
        tokens,
        **heads,  # type: ignore[arg-type]
        headdim_v=headdim_v,
        causal=kind != "full",
        softcap=30.0 if kind == "softcap" else 0.0,
        window=(_between(draw, 64, 4096), 0) if kind == "window" else (-1, -1),
    )
    if kind in ("causal", "full") and draw.random() < _PACKED:
        lengths = _documents(draw, tokens, _between(draw, 2, min(1000, tokens // 16)))
        workload = replace(workload, cu_seqlens=(0, *accumulate(lengths)))
    else:
        batch = _between(draw, 1, min(64, tokens // _FEWEST_TOKENS))
        workload = replace(workload, batch=batch, seqlen=tokens // batch)
    large = tokens * workload.nheads * headdim > _MOST_NUMBERS
    return None if large or workload.flops() > _MOST_FLOPS else workload


def _between(draw: random.Random, low: int, high: int) -> int:
    """A number of which every octave is as likely."""
    return round(exp(draw.uniform(log(low), log(high))))


def _documents(draw: random.Random, tokens: int, count: int) -> list[int]:
    """Log-normal lengths that fill a pack."""
    sizes = [draw.lognormvariate(0, 1) for _ in range(count)]
    ends = [round(tokens * part / sum(sizes)) for part in accumulate(sizes)]
    return [b - a for a, b in zip([0, *ends], ends)]


def measure_costs(
    kernels: Sequence[str],
    workloads: Sequence[Workload],
    device: torch.device,
    path: Path,
    report: Report,
    repeats: int = 10,
) -> Iterator[list[Cost]]:
    """What kernels take for each; written at once, and not measured again if it is there.

    Whatever cannot do a call, or fails, is left out.
    """
    gpu = gpu_name(device)
    known = {row.shape for row in read_costs(path) if row.gpu == gpu} if path.exists() else set()
    for workload in workloads:
        shape = shape_of(call_of(workload, device), size_of_workload(workload))
        if shape is None or shape in known:
            continue
        report(str(workload))
        rows = measure(kernels, workload, device, kind=BENCH, repeats=repeats, report=report)
        times: dict[str, dict[str, float]] = {}
        for row in rows:
            if row.ms is not None:
                times.setdefault(row.implementation, {})[row.passes] = row.ms
        found = [
            Cost(gpu, shape, name, of_one.get(FORWARD, inf), of_one.get(BACKWARD, inf))
            for name, of_one in times.items()
        ]
        add_costs(path, found)
        yield found
