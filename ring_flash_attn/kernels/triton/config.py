"""Block sizes for each kernel, head dimension and kind of GPU: defaults, or what `rfa tune` found.

Nothing is tuned during a run. The defaults for Hopper were measured on an H200; the others follow
from the size of shared memory. `rfa tune` writes those that are faster on your GPU to a file, which
is read once, when the first kernel is launched.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton

from ...cache import user_path
from ..base import Call

KERNELS = ("forward", "keys", "queries")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LIMITS = (64, 128, 256)  # head dimensions up to these share block sizes
VARIABLE = "RFA_TUNED"
FORMAT = 1  # of the file; raise it when kernels change so much that tuned blocks no longer fit


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a launch is cut up.

    Attributes:
        rows: queries of a block.
        columns: keys of a block.
        stages: blocks of the inner loop that are loaded ahead.
        warps: of a program.
        registers: of a thread at most, so that more programs fit; 0 for no limit.
    """

    rows: int
    columns: int
    stages: int
    warps: int
    registers: int = 0

    def __str__(self) -> str:
        words = f"{self.rows} × {self.columns}, stages {self.stages}, warps {self.warps}"
        return words + (f", registers {self.registers}" if self.registers else "")


_INTERPRETED = Blocks(32, 32, 1, 4)
_HOPPER = {  # (kernel, head dimension up to) → blocks
    ("forward", 64): Blocks(64, 64, 3, 4, 168),
    ("forward", 128): Blocks(64, 64, 2, 4),
    ("forward", 256): Blocks(64, 64, 2, 8),
    ("keys", 64): Blocks(64, 64, 3, 4),
    ("keys", 128): Blocks(64, 64, 2, 4),
    ("keys", 256): Blocks(32, 64, 1, 8),
    ("queries", 64): Blocks(64, 64, 3, 4, 168),
    ("queries", 128): Blocks(128, 64, 3, 8),
    ("queries", 256): Blocks(64, 32, 1, 8),
}
_SMALL = {  # 64 to 100 KiB of shared memory
    ("forward", 64): Blocks(64, 64, 2, 4),
    ("forward", 128): Blocks(64, 32, 2, 4),
    ("forward", 256): Blocks(32, 32, 1, 4),
    ("keys", 64): Blocks(32, 64, 1, 4),
    ("keys", 128): Blocks(32, 32, 1, 4),
    ("keys", 256): Blocks(16, 32, 1, 4),
    ("queries", 64): Blocks(64, 32, 1, 4),
    ("queries", 128): Blocks(32, 32, 1, 4),
    ("queries", 256): Blocks(32, 16, 1, 4),
}
# fp32 on NVIDIA's multiply-add units. Left alone, ptxas gives these two 32 registers, and the rest
# of their tiles goes to memory: ten times slower on an H200.
_FP32 = {
    **_SMALL,
    ("forward", 128): Blocks(32, 32, 2, 4, 255),
    ("forward", 256): Blocks(32, 32, 1, 8, 255),
}
_decided: dict[tuple[str, int, torch.dtype, torch.device], Blocks] = {}


def blocks_for(kernel: str, call: Call) -> Blocks:
    """The block sizes of `kernel` ("forward", "keys" or "queries") for a call.

    Raises:
        ValueError: there is a file of tuned ones, and it makes no sense.
    """
    key = _key(kernel, call)
    blocks = _decided.get(key)
    if blocks is None:
        blocks = _decided[key] = _decide(*key)
    return blocks


def default_blocks(kernel: str, limit: int, dtype: torch.dtype, device: torch.device) -> Blocks:
    """Those that need no tuning."""
    if device.type == "cpu":
        return _INTERPRETED
    if dtype is torch.float32 and torch.version.hip is None:
        return _FP32[kernel, limit]
    return (_HOPPER if _is_large(limit, dtype, device) else _SMALL)[kernel, limit]


def limit_of(headdim: int) -> int:
    """The smallest of `LIMITS` that a head dimension fits under."""
    return LIMITS[bisect_left(LIMITS, headdim)]


def own_and_loop(kernel: str, blocks: Blocks) -> tuple[int, int]:
    """Rows that a program owns, and rows of the other side that it takes at a time."""
    if kernel == "keys":
        return blocks.columns, blocks.rows
    return blocks.rows, blocks.columns


@contextmanager
def using(kernel: str, call: Call, blocks: Blocks) -> Iterator[None]:
    """Launches inside, for calls of this kind, take these blocks."""
    key = _key(kernel, call)
    before = _decided.get(key)
    _decided[key] = blocks
    try:
        yield
    finally:
        del _decided[key]
        if before is not None:
            _decided[key] = before


def _key(kernel: str, call: Call) -> tuple[str, int, torch.dtype, torch.device]:
    return kernel, limit_of(max(call.headdim, call.headdim_v)), call.dtype, call.device


def _decide(kernel: str, limit: int, dtype: torch.dtype, device: torch.device) -> Blocks:
    tuned = {} if device.type == "cpu" else _tuned(device)
    entry = tuned.get(entry_name(kernel, limit, dtype))
    return default_blocks(kernel, limit, dtype, device) if entry is None else _blocks(entry)


def has_tma(call: Call) -> bool:
    """Whether kernels load blocks through descriptors: where that is a single instruction."""
    if call.device.type == "cpu":
        return True  # the interpreter: as good as any
    return _is_large(limit_of(max(call.headdim, call.headdim_v)), call.dtype, call.device)


@cache
def _is_large(limit: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether large blocks fit: 227 KiB of shared memory, and units that multiply out of it.

    That is so on Hopper and on Blackwell's data centre GPUs. On the latter a head dimension of 256
    needs more tensor memory than there is, and fp32 is not multiplied by these units.
    """
    if torch.version.hip is not None or dtype is torch.float32:
        return False
    generation = _generation(device)
    return generation == 9 or (generation == 10 and limit <= 128)


def _generation(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


# The file: {"format": 1, "gpus": {GPU and Triton: {kernel, limit, dtype: the numbers of Blocks}}}

Entries = dict[str, dict[str, Any]]
_LENGTHS = (16, 32, 64, 128, 256), "a power of two from 16 to 256"
_ALLOWED: dict[str, tuple[Sequence[int], str]] = {
    "rows": _LENGTHS,
    "columns": _LENGTHS,
    "stages": (range(1, 9), "a number from 1 to 8"),
    "warps": ((1, 2, 4, 8, 16, 32), "a power of two from 1 to 32"),
    "registers": (range(256), "a number from 0 to 255"),
}


def tuned_path() -> Path | None:
    """Where tuned block sizes belong; None if the user wants none."""
    return user_path(VARIABLE, "triton.json")


def tuned_file() -> Path | None:
    """The file to read, if any. The default one may be absent, one that the user names may not."""
    path = tuned_path()
    there = path is not None and (VARIABLE in os.environ or os.path.exists(path))
    return path if there else None


def gpu_name(device: torch.device) -> str:
    """Of the GPU, and the version of Triton: what timings depend on."""
    return f"{torch.cuda.get_device_name(device)}, triton {triton.__version__}"


def entry_name(kernel: str, limit: int, dtype: torch.dtype) -> str:
    """Such as "forward, 64, bfloat16"."""
    return f"{kernel}, {limit}, {str(dtype).removeprefix('torch.')}"


_NAMES = {entry_name(*each) for each in product(KERNELS, LIMITS, DTYPES)}


def _tuned(device: torch.device) -> Entries:
    path = tuned_file()
    return {} if path is None else _read_once(path).get(gpu_name(device), {})


def read_tuned(path: Path) -> dict[str, Entries]:
    """Entries for each GPU; ValueError that says what to do if the file makes no sense."""
    try:
        return _checked(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        why = f"it cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or not what we write
        why = str(error)
    raise ValueError(
        f"tuned block sizes in {path}: {why}. Delete this file, run `rfa tune` again, or set "
        f"{VARIABLE} to nothing to do without"
    )


_read_once = cache(read_tuned)


def forget_tuned() -> None:
    """Read the file again at the next launch."""
    _read_once.cache_clear()
    _decided.clear()


def _checked(content: Any) -> dict[str, Entries]:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f'"format" is not {FORMAT}, which this version reads and writes')
    gpus = content.get("gpus")
    if not isinstance(gpus, dict) or not all(isinstance(x, dict) for x in gpus.values()):
        raise ValueError('"gpus" is not an object of objects')
    for gpu, entries in gpus.items():
        for name, entry in entries.items():
            fault = _fault(name, entry)
            if fault:
                raise ValueError(f'entry "{name}" of "{gpu}": {fault}')
    return gpus


def _blocks(entry: dict[str, Any]) -> Blocks:
    return Blocks(*(entry.get(field.name, 0) for field in fields(Blocks)))


def _fault(name: str, entry: Any) -> str:
    """What is wrong with an entry; "" if nothing."""
    if name not in _NAMES:
        return "no kernel, limit and dtype have this name"
    if not isinstance(entry, dict):
        return "it is not an object"
    blocks = _blocks(entry)
    for field, (allowed, words) in _ALLOWED.items():
        number = getattr(blocks, field)
        if type(number) is not int or number not in allowed:
            return f'"{field}" is {number!r}, not {words}'
    return ""
