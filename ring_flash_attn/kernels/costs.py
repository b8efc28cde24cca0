"""What kernels took on calls that were measured here: by it, `auto` chooses a kernel for each pass.

`rfa tune --kernels` measures random calls on this GPU, and writes the file that is read here: a row
for each call and kernel. For another call those of the nearest calls count, nearer ones more: by
the mean logarithm of a kernel's time over that of the fastest. Calls are eager, one after the
other, so that short ones take what the host takes.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from math import exp, inf, isfinite, log, log2
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..cache import user_path

if TYPE_CHECKING:
    import torch

    from .base import Call

VARIABLE = "RFA_COSTS"
PASSES = ("forward", "backward")
_NEAREST = 4  # calls that count
_FAR = 3.0  # none counts that is further away
_STEPS = 4  # of an octave: sizes in between are alike
# What a difference counts: sizes that are twice as large, and other kinds of calls.
_OCTAVES = {"headdim": 4.0, "headdim_v": 4.0, "group": 0.5, "heads": 0.3, "tokens": 0.3}
_LENGTH, _LONG = 0.7, 8192.0  # documents of so many tokens, or more, are alike
_MASK, _SOFTCAP, _PACKED = 1.5, 2.5, 0.5


class Size(NamedTuple):
    """How large a call is; all ranks derive the same."""

    batch: int
    tokens: int  # of a rank, in each sequence
    length: float  # of the document that a token is in, on average


def size_of(
    batch: int, lengths_q: Sequence[int], lengths_k: Sequence[int], world_size: int
) -> Size:
    """Of documents of these lengths, over all ranks."""
    keys = sum(lengths_k)
    length = sum(n * n for n in lengths_k) / keys if keys else 0.0
    return Size(batch, -(-sum(lengths_q) // world_size), length)


class Shape(NamedTuple):
    """What the times of kernels depend on, for calls in bf16 or fp16."""

    headdim: float
    headdim_v: float
    group: float  # query heads of a KV head
    heads: float  # query heads, over the batch
    tokens: float
    length: float
    mask: str  # "causal", "full" or "window"
    softcap: bool
    packed: bool


class Cost(NamedTuple):
    """A row of the file: milliseconds of a kernel; inf if it cannot do that pass."""

    gpu: str
    shape: Shape
    kernel: str
    forward: float
    backward: float


_NAMES = ("gpu", *Shape._fields, "kernel", *PASSES)
Slower = Mapping[str, float]  # of each kernel, its time over that of the fastest


def shape_of(call: Call, size: Size) -> Shape | None:
    """None for calls that are not measured."""
    import torch

    features = call.alibi_slopes is not None or call.dropout_p or call.deterministic or call.sink
    if features or call.dtype not in (torch.bfloat16, torch.float16):
        return None
    mask = "full" if call.mask.right is None else "causal"
    if call.mask.left is not None or (call.mask.right or 0) > 0:
        mask = "window"
    return Shape(
        call.headdim,
        call.headdim_v,
        call.nheads / call.nheads_k,
        call.nheads * size.batch,
        size.tokens,
        size.length,
        mask,
        call.softcap > 0,
        call.packed,
    )


def gpu_name(device: torch.device) -> str:
    """As in the file."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device.type)


def estimate(call: Call, size: Size) -> tuple[Slower, Slower] | None:
    """How much slower than the fastest kernels are, forward and backward; None: nobody knows."""
    path = costs_file()
    if path is None:
        return None
    shape = shape_of(call, size)
    if shape is None:
        return None
    tokens, length = _rounded(shape.tokens), _rounded(shape.length)  # new packs are like old ones
    shape = shape._replace(tokens=tokens, length=length)
    return _estimated(path, gpu_name(call.device), shape)


def _rounded(size: float) -> float:
    return 2 ** (round(_STEPS * log2(max(1.0, size))) / _STEPS)


@lru_cache(maxsize=1024)
def _estimated(path: Path, gpu: str, shape: Shape) -> tuple[Slower, Slower] | None:
    return from_rows([row for row in _read_once(path) if row.gpu == gpu], shape)


def from_rows(rows: Sequence[Cost], shape: Shape) -> tuple[Slower, Slower] | None:
    """From the nearest calls; None where there is none."""
    calls: dict[Shape, list[Cost]] = {}
    for row in rows:
        calls.setdefault(row.shape, []).append(row)
    near = sorted(((distance(shape, other), mine) for other, mine in calls.items()), key=_first)
    counted = [(far, mine) for far, mine in near[:_NEAREST] if far <= _FAR]
    if not counted:
        return None
    return _mean(counted, "forward"), _mean(counted, "backward")


def _first(pair: tuple[float, object]) -> float:
    return pair[0]


def _mean(counted: Iterable[tuple[float, Sequence[Cost]]], passes: str) -> Slower:
    sums: dict[str, tuple[float, float]] = {}
    for far, rows in counted:
        times = {row.kernel: getattr(row, passes) for row in rows}
        fastest, weight = min(times.values()), 1 / (0.05 + far * far)
        for kernel, time in times.items():
            if isfinite(time):
                total, weights = sums.get(kernel, (0.0, 0.0))
                sums[kernel] = total + weight * log(time / fastest), weights + weight
    return {kernel: exp(total / weights) for kernel, (total, weights) in sums.items()}


def distance(one: Shape, other: Shape) -> float:
    """How little the times of one call say of those of another."""
    found = sum(
        weight * abs(log2(getattr(one, name) / getattr(other, name)))
        for name, weight in _OCTAVES.items()
    )
    found += _LENGTH * abs(log2(min(one.length, _LONG) / min(other.length, _LONG)))
    found += _MASK * (one.mask != other.mask)
    found += _SOFTCAP * (one.softcap is not other.softcap)
    return found + _PACKED * (one.packed is not other.packed)


# The file.


def costs_path() -> Path | None:
    """Where it belongs; None if the user wants none."""
    return user_path(VARIABLE, "costs.csv")


@cache
def costs_file() -> Path | None:
    """The file to read, if any. The default one may be absent, one that the user names may not."""
    path = costs_path()
    there = path is not None and (VARIABLE in os.environ or path.exists())
    return path if there else None


def read_costs(path: Path) -> tuple[Cost, ...]:
    """All rows; ValueError that says what to do if the file makes no sense."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            if tuple(rows.fieldnames or ()) != _NAMES:
                raise ValueError(f"its columns are not {', '.join(_NAMES)}")
            return tuple(map(_read, rows))
    except OSError as error:
        why = f"it cannot be read: {error.strerror}"
    except (ValueError, TypeError, csv.Error) as error:
        why = str(error)
    raise ValueError(
        f"times of kernels in {path}: {why}. Delete this file, run `rfa tune --kernels` again, or "
        f"set {VARIABLE} to nothing to do without"
    )


def _read(row: Mapping[str, str]) -> Cost:
    headdim, headdim_v, group, heads, tokens, length = sizes = [
        float(row[name]) for name in Shape._fields[:6]
    ]
    forward, backward = (float(row[name] or inf) for name in PASSES)
    if min(*sizes, forward, backward) <= 0:
        raise ValueError("sizes and times must be positive")
    flags = row["softcap"] == "True", row["packed"] == "True"
    shape = Shape(headdim, headdim_v, group, heads, tokens, length, row["mask"], *flags)
    return Cost(row["gpu"], shape, row["kernel"], forward, backward)


def add_costs(path: Path, rows: Sequence[Cost]) -> None:
    """Write rows of one call at the end of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(_NAMES)
        for row in rows:
            times = (f"{x:.5g}" if isfinite(x) else "" for x in (row.forward, row.backward))
            writer.writerow([row.gpu, *row.shape, row.kernel, *times])


_read_once = cache(read_costs)


def forget_costs() -> None:
    """Read the file again at the next call."""
    for each in (costs_file, _read_once, _estimated):
        each.cache_clear()
