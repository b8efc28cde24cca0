"""Tuning: times block sizes of the three kernels on a GPU, for `rfa tune`; no launch leads here.

Whatever is faster also has to give the default's results, on the inputs that are timed and on some
that use every feature: block sizes that fit a plain call must not fail in another one later.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from triton.errors import TritonError

from ...plan.layout import Span
from ...plan.tiles import Mask, make_tiles
from ..base import Call, Saved, State
from ..device_cache import on_device
from . import KERNEL, launch_backward, launch_forward, stats_side_by_side
from .config import (
    FORMAT,
    KERNELS,
    Blocks,
    default_blocks,
    entry_name,
    forget_tuned,
    limit_of,
    read_tuned,
    using,
)

GAIN = 0.03  # of the time, at least, for the default to be given up
_HEADS, _HARD_HEADS = (32, 8), (2, 1)  # of queries and keys
_HARD_SEQLEN = 333  # no block divides it
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
_ROUNDS, _FLUSHED = 15, 1 << 28  # bytes, more than any L2 cache

_REGISTERS = 168  # three programs of four warps fit on a processor
_SHAPES = {  # rows that a program owns, rows of its loop, warps → stages
    (32, 32, 4): (1, 2),
    (64, 32, 4): (1, 2, 3),
    (64, 64, 4): (1, 2, 3, 4),
    (128, 32, 4): (2,),
    (128, 64, 8): (2, 3),
    (128, 128, 8): (2,),
}
_DEEP_SHAPES = {  # for head dimensions over 128
    (32, 16, 4): (1, 2),
    (32, 32, 4): (1, 2),
    (64, 32, 4): (1,),
    (64, 32, 8): (1, 2),
    (64, 64, 8): (1, 2),
    (128, 32, 8): (2,),
    (128, 64, 8): (1, 2),
}

Measure = Callable[[Sequence[Callable[[], object]]], list[float]]
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Choice:
    """The default of a kernel and what was chosen, often the same, with their times in ms."""

    default: Blocks
    chosen: Blocks
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Trial:
    """A kernel on given inputs.

    Attributes:
        launch: runs it once.
        into: what it writes.
        start: what is there before; NaN where it has to write every number.
    """

    launch: Callable[[Blocks], None]
    into: tuple[Tensor, ...]
    start: float

    def results(self, blocks: Blocks) -> list[Tensor]:
        """What it writes with these block sizes."""
        for tensor in self.into:
            tensor.fill_(self.start)
        self.launch(blocks)
        return [tensor.clone() for tensor in self.into]


def candidates(kernel: str, limit: int, default: Blocks) -> list[Blocks]:
    """Block sizes to try, the default first."""
    found = [default]
    for (own, loop, warps), stages in (_SHAPES if limit <= 128 else _DEEP_SHAPES).items():
        rows, columns = (loop, own) if kernel == "keys" else (own, loop)
        found += [Blocks(rows, columns, each, warps) for each in stages]
    if kernel != "keys" and limit <= 128 and torch.version.hip is None:
        found += [Blocks(64, 64, stages, 4, _REGISTERS) for stages in (2, 3)]
    return list(dict.fromkeys(found))


def milliseconds(works: Sequence[Callable[[], object]]) -> list[float]:
    """Medians over rounds in which each has its turn, with GPU events and a cold L2 cache."""
    flush = torch.empty(_FLUSHED, dtype=torch.uint8, device="cuda")
    times: list[list[float]] = [[] for _ in works]
    for _ in range(_ROUNDS + 1):  # the first one warms up
        for work, mine in zip(works, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()  # the GPU is busy with it while the host prepares the launch
            start.record()
            work()
            end.record()
            end.synchronize()
            mine.append(start.elapsed_time(end))
    return [statistics.median(mine[1:]) for mine in times]


def tune(
    headdim: int,
    dtype: torch.dtype,
    device: torch.device,
    seqlen: int,
    causal: bool,
    report: Report,
    measure: Measure = milliseconds,
) -> dict[str, Choice]:
    """Find the best block sizes of each kernel for a head dimension and dtype.

    Args:
        headdim: up to 256; the choice is for all that share its limit (64, 128, 256).
        dtype: fp16, bf16 or fp32.
        device: the GPU, with its index.
        seqlen: tokens of the call that is timed.
        causal: its mask.
        report: takes a line for each candidate that is left out, and why.
        measure: returns the time of each of some functions.

    Returns:
        Choices, by the names of their entries in the file.
    """
    limit = limit_of(headdim)
    with on_device(device):
        timed = _trials(_plain_call(headdim, dtype, device, causal), seqlen, fresh=True)
        hard = [  # with TMA, which needs a power of two, and without
            _trials(_hard_call(each, dtype, device), _HARD_SEQLEN, fresh=False)
            for each in (limit, limit - 1)
        ]

        def of(kernel: str) -> Choice:
            return choose(
                candidates(kernel, limit, default_blocks(kernel, limit, dtype, device)),
                timed[kernel],
                [trials[kernel] for trials in hard],
                _TOLERANCE[dtype],
                lambda line: report(f"{kernel}, headdim {headdim}, {line}"),
                measure,
            )

        return {entry_name(kernel, limit, dtype): of(kernel) for kernel in KERNELS}


def choose(
    blocks: Sequence[Blocks],
    timed: Trial,
    hard: Sequence[Trial],
    tolerance: float,
    report: Report,
    measure: Measure,
) -> Choice:
    """The fastest that gives the default's results, if the gain is worth it.

    Args:
        blocks: to choose from, the default first.
        timed: what to be fast at.
        hard: what else has to be right.
        tolerance: relative, of a row of the results.
        report: takes a line for each that is left out, and why.
        measure: returns the time of each of some functions.
    """
    default, *others = blocks
    able = [default, *_agreeing(timed, default, others, tolerance, report)]
    times = measure([partial(timed.launch, each) for each in able])
    for time, each in sorted(zip(times, able, strict=True), key=lambda pair: pair[0]):
        if time > (1 - GAIN) * times[0]:
            break
        if all(_agreeing(trial, default, [each], tolerance, report) for trial in hard):
            return Choice(default, each, times[0], time)
    return Choice(default, default, times[0], times[0])


def save(path: Path, gpu: str, choices: Mapping[str, Choice]) -> None:
    """Put choices for a GPU into the file, at once for whoever reads it; other entries stay.

    A default has no entry, so that better ones of later versions will count. A file that makes no
    sense is kept beside the new one, as NAME.old.
    """
    try:
        gpus = read_tuned(path) if path.exists() else {}
    except ValueError:
        gpus = {}
        os.replace(path, path.with_name(f"{path.name}.old"))
    entries = {name: x for name, x in gpus.get(gpu, {}).items() if name not in choices}
    for name, choice in choices.items():
        if choice.chosen != choice.default:
            times = {"ms": round(choice.after, 4), "ms of the default": round(choice.before, 4)}
            entries[name] = {**asdict(choice.chosen), **times}
    content = {"format": FORMAT, "gpus": {**gpus, gpu: dict(sorted(entries.items()))}}
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    forget_tuned()


def _agreeing(
    trial: Trial, default: Blocks, others: Sequence[Blocks], tolerance: float, report: Report
) -> list[Blocks]:
    """Those of the others that run and give the default's results."""
    expected = trial.results(default)
    found = []
    for blocks in others:
        try:
            results = trial.results(blocks)
        except (TritonError, RuntimeError) as error:  # does not compile, or does not fit
            lines = str(error).strip().splitlines()
            report(f"{blocks}: left out, {lines[-1] if lines else type(error).__name__}")
            continue
        if all(_close(a, b, tolerance) for a, b in zip(results, expected, strict=True)):
            found.append(blocks)
        else:
            report(f"{blocks}: left out, its results are not those of the default")
    return found


def _close(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    """Whether every row (one head of one token) is, for its own size and that of most rows."""
    sizes = theirs.float().norm(dim=-1)
    errors = (ours.float() - theirs.float()).norm(dim=-1)
    return bool((errors <= tolerance * (sizes + sizes.median())).all())  # False for NaN


def _plain_call(headdim: int, dtype: torch.dtype, device: torch.device, causal: bool) -> Call:
    return Call(device, dtype, *_HEADS, headdim, headdim, headdim**-0.5, Mask.of(causal))


def _hard_call(headdim: int, dtype: torch.dtype, device: torch.device) -> Call:
    """With every feature, and a window that no block divides."""
    mask = Mask.of(causal=True, window_size=(_HARD_SEQLEN // 3, 0))
    return replace(
        Call(device, dtype, *_HARD_HEADS, headdim, headdim, headdim**-0.5, mask),
        softcap=15.0,
        alibi_slopes=torch.linspace(0.01, 0.1, _HARD_HEADS[0], device=device),
        dropout_p=0.1,
        seed=torch.tensor(1, device=device),
    )


def _trials(call: Call, seqlen: int, fresh: bool) -> dict[str, Trial]:
    """The three kernels on random inputs; those that are not fresh go on from what is there."""
    device, kind = call.device, call.dtype if fresh else call.state_dtype
    start = math.nan if fresh else 1.0
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, seqlen, nheads, call.headdim, device=device, generator=generator).to(
            call.dtype
        )
        for nheads in (call.nheads, call.nheads_k, call.nheads_k, call.nheads)
    )
    out, dq, dk, dv = (torch.empty_like(x, dtype=kind) for x in (q, q, k, v))
    lse = torch.empty(1, call.nheads, seqlen, 1, device=device)  # rows of one number
    span = Span(start=0, length=seqlen, position=0, stride=1, document=0, index=0)
    (tile,) = make_tiles([span], [span], call.mask)
    tiles = (tile._replace(first=fresh, last=fresh),)

    def forward(blocks: Blocks) -> None:
        with using("forward", call, blocks):
            launch_forward(q, k, v, tiles, State(out, lse[..., 0]), call)

    trials = {"forward": Trial(forward, (out, lse), start)}
    default = default_blocks("forward", limit_of(call.headdim), call.dtype, device)
    result, its_lse = trials["forward"].results(default)
    stats = stats_side_by_side(Saved(its_lse[..., 0], KERNEL.delta(dout, result, call)), call)

    def backward(kernel: str, into: tuple[Tensor, ...], blocks: Blocks) -> None:
        with using(kernel, call, blocks):
            launch_backward(kernel, (q, k, v, dout), (stats, *into), tiles, call, fresh)

    for kernel, into in (("keys", (dk, dv)), ("queries", (dq,))):
        trials[kernel] = Trial(partial(backward, kernel, into), into, start)
    return trials
