"""Launching kernels that are written in Triton: arguments that are worked out once and kept.

Triton looks at every argument of every launch to find the compiled kernel: some 60 of them, again
and again the same but for the addresses. So the first launch of a kind goes through Triton, and
later ones take the compiled kernel and its arguments from a cache and exchange the tensors
(`flat_launch.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor

from ..cache import Cache
from .device_cache import on_device, stream_handle
from .flat_launch import FlatLaunch, hooked, record, with_base
from .tables import Table

_KEPT = 512  # launches; each is a list of some 60 numbers


@triton.jit
def _nothing() -> None:
    pass


INTERPRETED: bool = not isinstance(_nothing, triton.JITFunction)  # decided when triton is imported


@dataclass(frozen=True, slots=True)
class _Launch:
    """A launch that was made before.

    Attributes:
        run: launches the compiled kernel with all of its arguments, through Triton.
        arguments: those of the first time, without its tensors.
        descriptors: so many of the tensors, the first ones, are passed as TMA descriptors.
        flat: the same without Triton, where that is known.
        work: the table, if any; kept alive, since the cache goes by its identity.
    """

    run: Callable[..., None]
    arguments: tuple[Any, ...]
    descriptors: int
    flat: FlatLaunch | None
    work: Table | None

    def again(self, tensors: Sequence[Tensor]) -> None:
        """With other tensors of the same shapes and strides."""
        if self.flat is not None and not hooked():
            return self.flat(tensors, stream_handle(tensors[0].device))
        arguments = list(self.arguments)
        arguments[: len(tensors)] = tensors
        for i in range(self.descriptors):
            arguments[i] = with_base(arguments[i], self.arguments[i])
        return self.run(*arguments)


def power_of_2(x: int) -> int:
    """The next one; Triton's own function takes several microseconds."""
    return 1 << (x - 1).bit_length()


_launches: Cache[tuple[object, ...], _Launch] = Cache(_KEPT)


def launch_plain(
    kernel: Any, programs: int, tensors: Sequence[Tensor], numbers: tuple[float, ...]
) -> None:
    """Launch a kernel that takes pointers, and then numbers."""
    if programs == 0:
        return
    kinds = [(x.dtype, x.data_ptr() % 16) for x in tensors]
    key = (id(kernel), programs, tensors[0].device, *kinds, *numbers)
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
    flat = record(compiled, grid, arguments, tensors)
    kept, descriptors = list(arguments), 0
    for i in range(tensors):  # the cache does not keep tensors alive
        is_descriptor = not isinstance(kept[i], Tensor)
        kept[i] = with_base(None, kept[i]) if is_descriptor else None
        descriptors += is_descriptor
    _launches.add(key, _Launch(compiled[grid], tuple(kept), descriptors, flat, work))


def _base(x: Any) -> Tensor:
    base: Tensor = x if isinstance(x, Tensor) else x.base
    return base
