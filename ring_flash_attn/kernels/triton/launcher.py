"""Launching: tensors as matrices, and arguments that are worked out once and kept.

Triton looks at every argument of every launch to find the compiled kernel: some 60 of them, again
and again the same but for the addresses. So the first launch of a kind goes through Triton, and
later ones take the compiled kernel and its arguments from a cache and exchange the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...cache import Cache
from ..base import Call
from ..dropout import threshold
from .config import Blocks, has_tma
from .forward import forward_kernel
from .tables import Table

INTERPRETED = not isinstance(forward_kernel, triton.JITFunction)  # decided when triton is imported
_KEPT = 512  # launches; each is a list of some 60 numbers
_PROGRAMS = 8  # for each processor in a section: four times what runs at once


class Matrix:
    """A (batch, row, head, d) tensor as a matrix: at which row and column a batch and head starts.

    Whatever the strides are, a step in a dimension is a number of whole rows or of columns.

    Args:
        x: the tensor; must `fit`.
        rows: that a program loads at a time.
    """

    __slots__ = ("numbers", "rows", "stride", "tensor")

    def __init__(self, x: Tensor, rows: int) -> None:
        self.tensor, self.rows = x, rows
        batch, self.stride, head, _ = x.stride()
        self.numbers = self.stride, *self._steps(batch), *self._steps(head)

    def _steps(self, stride: int) -> tuple[int, int]:
        """Rows and columns."""
        row = self.stride
        return (stride // row, 0) if row and stride % row == 0 else (0, stride)

    @property
    def aligned(self) -> bool:
        """Whether TMA can read it."""
        size = self.tensor.element_size()
        return self.tensor.data_ptr() % 16 == 0 and self.stride * size % 16 == 0 and self.stride > 0

    def descriptor(self) -> TensorDescriptor:
        """For TMA of `rows` rows of one head."""
        batch, length, heads, d = self.tensor.shape
        _, brow, bcol, hrow, hcol = self.numbers
        height = (batch - 1) * brow + (heads - 1) * hrow + length
        width = (batch - 1) * bcol + (heads - 1) * hcol + d
        return TensorDescriptor(self.tensor, [height, width], [self.stride, 1], [self.rows, d])


def fit(x: Tensor) -> Tensor:
    """The tensor, or a copy if its strides are not those of a matrix."""
    batch, row, head, last = x.stride()
    fits = row == 0 or ((batch % row == 0 or batch < row) and (head % row == 0 or head < row))
    return x if fits and last == 1 else x.contiguous()


@dataclass(frozen=True, slots=True)
class _Launch:
    """A launch that was made before.

    Attributes:
        run: launches the compiled kernel with all of its arguments.
        arguments: those of the first time, without its tensors.
        descriptors: so many of the tensors, the first ones, are passed as TMA descriptors.
        work: the table, if any; kept alive, since the cache goes by its identity.
    """

    run: Callable[..., None]
    arguments: tuple[Any, ...]
    descriptors: int
    work: Table | None

    def again(self, tensors: Sequence[Tensor]) -> None:
        """With other tensors of the same shapes and strides."""
        arguments = list(self.arguments)
        arguments[: len(tensors)] = tensors
        for i in range(self.descriptors):
            arguments[i] = _with_base(arguments[i], self.arguments[i])
        self.run(*arguments)


def _with_base(x: Tensor | None, other: Any) -> Any:
    """The other's descriptor for x, unchecked."""
    descriptor = object.__new__(type(other))
    descriptor.__dict__.update(other.__dict__, base=x)
    return descriptor


def power_of_2(x: int) -> int:
    """The next one; Triton's own function takes several microseconds."""
    return 1 << (x - 1).bit_length()


_HERE: AbstractContextManager[None] = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes it the current device, on which Triton launches; free if it is."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return _HERE
    return torch.cuda.device(device)


_launches: Cache[tuple[object, ...], _Launch] = Cache(_KEPT)


def launch(
    kernel: Any,
    loaded: Sequence[tuple[Tensor, int]],
    others: Sequence[Tensor],
    work: Table,
    call: Call,
    nheads: int,
    blocks: Blocks,
    **flags: bool,
) -> None:
    """Launch one of the three kernels.

    Args:
        kernel: which.
        loaded: tensors that it reads in blocks, and the number of rows of a block.
        others: tensors that it reads and writes through pointers.
        work: what each program does.
        call: the call.
        nheads: heads that have programs of their own.
        blocks: sizes.
        flags: the kernel's own compile-time flags.
    """
    slopes, seed = call.alibi_slopes, call.seed
    tensors = [
        *(tensor for tensor, _ in loaded),
        *others,
        work.blocks if slopes is None else slopes.float().contiguous(),  # never read where it
        work.blocks if seed is None else seed,  # stands in for what is not there
    ]
    key = (
        kernel,
        id(work),
        blocks,
        call.key,
        loaded[0][0].shape[0],
        *flags.values(),
        *[(x.stride(), x.dtype, x.data_ptr() % 16) for x in tensors],
    )
    if again(key, tensors):
        return
    matrices = [Matrix(tensor, rows) for tensor, rows in loaded]
    arguments, options = _arguments(kernel, matrices, tensors, work, call, nheads, blocks, flags)
    pairs = tensors[0].shape[0] * nheads
    grid = (len(work.blocks) * pairs, 1, 1)  # one axis: the others end at 65535
    first(key, kernel, grid, arguments, len(tensors), options, work)


def launch_plain(
    kernel: Any, programs: int, tensors: Sequence[Tensor], numbers: tuple[int, ...]
) -> None:
    """Launch a kernel that takes pointers, and then numbers."""
    if programs == 0:
        return
    kinds = [(x.dtype, x.data_ptr() % 16) for x in tensors]
    key = (kernel, programs, tensors[0].device, *kinds, *numbers)
    if not again(key, tensors):
        first(key, kernel, (programs, 1, 1), [*tensors, *numbers], len(tensors), {}, None)


def again(key: tuple[object, ...], tensors: Sequence[Tensor]) -> bool:
    """Launch what was launched before; False if it was not."""
    found = _launches.get(key)
    if found is None:
        return False
    with on_device(tensors[0].device):
        found.again(tensors)
    return True


def first(
    key: tuple[object, ...],
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: list[Any],
    tensors: int,
    options: dict[str, Any],
    work: Table | None,
) -> None:
    """Launch through Triton, and remember; the first `tensors` arguments are tensors."""
    with on_device(_base(arguments[0]).device):
        compiled = kernel[grid](*arguments, **options)
    if INTERPRETED:
        return
    kept, descriptors = list(arguments), 0
    for i in range(tensors):  # the cache does not keep tensors alive
        is_descriptor = not isinstance(kept[i], Tensor)
        kept[i] = _with_base(None, kept[i]) if is_descriptor else None
        descriptors += is_descriptor
    _launches.add(key, _Launch(compiled[grid], tuple(kept), descriptors, work))


def _base(x: Any) -> Tensor:
    base: Tensor = x if isinstance(x, Tensor) else x.base
    return base


def _arguments(
    kernel: Any,
    matrices: Sequence[Matrix],
    tensors: Sequence[Tensor],
    work: Table,
    call: Call,
    nheads: int,
    blocks: Blocks,
    flags: dict[str, bool],
) -> tuple[list[Any], dict[str, Any]]:
    """All arguments of a kernel in order, and Triton's own options."""
    depth, depth_v = (max(16, power_of_2(x)) for x in (call.headdim, call.headdim_v))
    even = depth == call.headdim and depth_v == call.headdim_v
    tma = even and has_tma(call) and all(x.aligned for x in matrices)
    others = tensors[len(matrices) : -2]
    slopes = call.alibi_slopes
    pairs = tensors[0].shape[0] * nheads
    given = {
        "scale": call.softmax_scale,
        "softcap": call.softcap or 1.0,
        "threshold": threshold(call.dropout_p),
        "keep_scale": 1 / (1 - call.dropout_p),
        "head_start": call.head_start,
        "d": call.headdim,
        "dv": call.headdim_v,
        "nheads": nheads,
        "group": call.nheads // call.nheads_k,
        "count": len(work.blocks),
        "section": section(pairs, nheads, work, call),
    }
    strides = [number for x in matrices for number in x.numbers]
    strides += [number for x in others for number in x.stride()[:3]]
    constants: dict[str, Any] = {
        "D": depth,
        "DV": depth_v,
        "EVEN": even,
        "TMA": tma,
        "BLOCK_M": blocks.rows,
        "BLOCK_N": blocks.columns,
        "SOFTCAP": call.softcap > 0,
        "ALIBI": slopes is not None,
        "DROPOUT": call.seed is not None,
        "UPCAST": INTERPRETED and call.dtype is torch.bfloat16,
        "STAGES": blocks.stages,
        **flags,
    }
    arguments = [
        *(x.descriptor() if tma else x.tensor for x in matrices),
        *tensors[len(matrices) :],
        work.blocks,
        work.tiles,
        *given.values(),
        *strides,
        0 if slopes is None or slopes.dim() == 1 else call.nheads,
    ]
    names = kernel.arg_names[len(arguments) :]
    assert set(names) == set(constants), set(names) ^ set(constants)
    options: dict[str, Any] = {"num_warps": blocks.warps}
    if blocks.registers and not INTERPRETED:
        options["maxnreg"] = blocks.registers
    return arguments + [constants[name] for name in names], options


def section(pairs: int, nheads: int, work: Table, call: Call) -> int:
    """How many pairs of batch and head are under way together; see `place` in `scores.py`."""
    sharing = nheads // call.nheads_k  # those with the same keys and values
    if work.level:  # whatever comes last takes as long: there is nothing to win but the cache
        return sharing
    wanted = -(-_PROGRAMS * processors(call.device) // len(work.blocks))
    return min(pairs, -(-wanted // sharing) * sharing)


@cache
def processors(device: torch.device) -> int:
    """How many SMs it has."""
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
